"""What a command without a screen says on stderr: sentences, and one line of progress on a terminal."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time

from dspark_tui.engine.protocol import Progress
from dspark_tui.text.format import size
from dspark_tui.text.sanitize import one_line

REDRAW_SECONDS = 0.1
BAR_CELLS = 24
CLEAR_LINE = "\r\x1b[K"


class Narrator:
    """Writes to stderr. A stderr that is gone silences it."""

    def __init__(self) -> None:
        self.on_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._status = ""
        self._drawn = 0.0
        self._began: dict[str, tuple[float, int]] = {}

    def say(self, sentence: str) -> None:
        """A line that stays."""
        self.clear()
        self._write(f"dspark-tui: {one_line(sentence)}\n")

    def lines(self, text: str) -> None:
        """Lines of our own making, such as a table."""
        self.clear()
        self._write(text)

    def status(self, words: str) -> None:
        """What goes on, on a terminal only, in a line that is overwritten; redrawn at most ten times a
        second."""
        if not self.on_terminal:
            return
        now = time.monotonic()
        if words == self._status or (self._status and now - self._drawn < REDRAW_SECONDS):
            return
        self._status, self._drawn = words, now
        self._write(CLEAR_LINE + one_line(words, shutil.get_terminal_size().columns - 1))

    def clear(self) -> None:
        """Remove the status line, before anything else is written to the terminal."""
        if self._status:
            self._status = ""
            self._write(CLEAR_LINE)

    def progress(self, what: str, event: Progress) -> None:
        """A bar for a load or a fetch; bytes with their rate."""
        now = time.monotonic()
        began, first = self._began.setdefault(event.stage, (now, event.done))
        words = f"{what}: {event.stage} "
        if event.total:
            filled = BAR_CELLS * event.done // event.total
            words += f"[{'#' * filled}{'.' * (BAR_CELLS - filled)}] {100 * event.done // event.total} %"
        if event.unit == "bytes":
            words += f"  {size(event.done)}" + (f" of {size(event.total)}" if event.total else "")
            if event.stage == "fetch" and now > began and event.done > first:
                words += f"  {size(int((event.done - first) / (now - began)))}/s"
        self.status(words)

    def _write(self, text: str) -> None:
        if sys.stderr is None:
            return
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()
