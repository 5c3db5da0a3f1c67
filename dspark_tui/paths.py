"""Where the terminal program keeps things on this machine.

`DSPARK_TUI_HOME` moves everything below one folder: tests and portable installs use it.
"""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

APP = "dspark-tui"
HOME_VARIABLE = "DSPARK_TUI_HOME"


def expanded(text: str) -> Path:
    """`text` as a path, with `~` expanded; `~name` of an unknown user stays (pathlib would raise)."""
    return Path(os.path.expanduser(text))  # noqa: PTH111


def config_dir() -> Path:
    """The user's settings, keymap and themes. Not created here."""
    if home := os.environ.get(HOME_VARIABLE):
        return expanded(home).absolute() / "config"
    return Path(platformdirs.user_config_dir(APP, appauthor=False))


def data_dir() -> Path:
    """Chats. Not created here."""
    if home := os.environ.get(HOME_VARIABLE):
        return expanded(home).absolute() / "data"
    return Path(platformdirs.user_data_dir(APP, appauthor=False))


def log_dir() -> Path:
    """The terminal program's own log. Not created here."""
    if home := os.environ.get(HOME_VARIABLE):
        return expanded(home).absolute() / "log"
    return Path(platformdirs.user_log_dir(APP, appauthor=False))
