"""Where the engine keeps things on this machine.

`DSPARK_TUI_HOME` moves everything below one folder: tests and portable installs use it.
"""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

APP = "dspark-tui"
HOME_VARIABLE = "DSPARK_TUI_HOME"


def _below(kind: str, default: str) -> Path:
    home = os.environ.get(HOME_VARIABLE)
    return Path(home).expanduser().absolute() / kind if home else Path(default)


def cache_dir() -> Path:
    """Fetched and converted models, calibration results. Not created here."""
    return _below("cache", platformdirs.user_cache_dir(APP, appauthor=False))


def log_dir() -> Path:
    """The engine's log. Not created here."""
    return _below("log", platformdirs.user_log_dir(APP, appauthor=False))


def runtime_dir() -> Path:
    """Sockets of running engines. Not created here."""
    return _below("run", platformdirs.user_runtime_dir(APP, appauthor=False))
