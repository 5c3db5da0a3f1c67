"""Folders that the engine keeps things in.

`DSPARK_TUI_HOME`, where set, holds all of them; otherwise they are the platform's own places.
"""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

APP = "dspark-tui"
HOME_VARIABLE = "DSPARK_TUI_HOME"


def _home() -> Path | None:
    value = os.environ.get(HOME_VARIABLE)
    return Path(value).expanduser().absolute() if value else None


def cache_dir() -> Path:
    """What can be fetched or made again: models, the renamed BLAS. Not created here."""
    home = _home()
    return home / "cache" if home else Path(platformdirs.user_cache_dir(APP))


def log_dir() -> Path:
    """Log files of the engine. Not created here."""
    home = _home()
    return home / "log" if home else Path(platformdirs.user_log_dir(APP))


def runtime_dir() -> Path:
    """Sockets and process ids, for this user only (the maker creates it with mode 0700)."""
    home = _home()
    return home / "run" if home else Path(platformdirs.user_runtime_dir(APP))
