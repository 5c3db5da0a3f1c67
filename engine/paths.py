"""Where the engine keeps things on this machine.

`DSPARK_TUI_HOME` moves everything below one folder: tests and portable installs use it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import platformdirs

APP = "dspark-tui"
HOME_VARIABLE = "DSPARK_TUI_HOME"


def expanded(text: str) -> Path:
    """`text` as a path, with `~` expanded; `~name` of an unknown user stays (pathlib would raise)."""
    return Path(os.path.expanduser(text))  # noqa: PTH111


def _below(kind: str, default: Callable[..., str]) -> Path:
    if home := os.environ.get(HOME_VARIABLE):
        return expanded(home).absolute() / kind
    with warnings.catch_warnings():
        # Without XDG_RUNTIME_DIR platformdirs warns on stderr and takes a folder in /tmp: fine for us.
        warnings.simplefilter("ignore")
        return Path(default(APP, appauthor=False))


def cache_dir() -> Path:
    """What can be fetched or made again: models, the renamed BLAS. Not created here."""
    return _below("cache", platformdirs.user_cache_dir)


def log_dir() -> Path:
    """The engine's log. Not created here."""
    return _below("log", platformdirs.user_log_dir)


def runtime_dir() -> Path:
    """Sockets, for this user only (the maker creates it with mode 0700). Not created here."""
    return _below("run", platformdirs.user_runtime_dir)
