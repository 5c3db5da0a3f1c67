"""stdout of commands that print data."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import msgspec

from dspark_tui.text.sanitize import Sanitizer


class OutputGone(Exception):
    """Nobody reads stdout any more (`| head`)."""


class Output:
    """Writes text at once: as UTF-8 bytes into a pipe or file, made safe on a terminal.

    Every method raises OutputGone when the reader has left and OSError when the disk is full.
    """

    def __init__(self) -> None:
        self._safe = Sanitizer(keep_tabs=True) if sys.stdout is not None and sys.stdout.isatty() else None
        self._ends_line = True

    @property
    def on_terminal(self) -> bool:
        """Whether a person is looking."""
        return self._safe is not None

    def text(self, piece: str) -> None:
        """A piece of text, as it is (control characters become visible on a terminal)."""
        shown = self._safe.feed(piece) if self._safe else piece
        if shown:
            self._ends_line = shown.endswith("\n")
            self._write(shown)

    def end_line(self) -> None:
        """A newline, unless the last text ended with one."""
        if not self._ends_line:
            self.text("\n")

    def json(self, value: Any) -> None:
        """One JSON value on one line."""
        self._write(msgspec.json.encode(value).decode() + "\n")

    def _write(self, text: str) -> None:
        if sys.stdout is None:
            raise OSError("stdout is closed")
        encoding = sys.stdout.encoding if self._safe else "utf-8"
        try:
            sys.stdout.buffer.write(text.encode(encoding, "replace"))
            sys.stdout.buffer.flush()
        except BrokenPipeError as error:
            self._silence()
            raise OutputGone from error

    def _silence(self) -> None:
        """Python flushes stdout once more at its end; let that go nowhere instead of complaining."""
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
