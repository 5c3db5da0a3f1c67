"""A program under a pseudo-terminal: real bytes in, real bytes out."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Self

POINTER = re.compile(rb"\x1b\]22;[a-z-]*\x07")
"""Textual sets the shape of the mouse pointer with it."""
CSI = re.compile(rb"\x1b\[[0-9;:?<=>]*[ -/]*[@-~]")


class Terminal:
    """`python -m dspark_tui ARGUMENTS` in a terminal of a size. Use as a context manager."""

    def __init__(self, *arguments: str, columns: int = 80, rows: int = 24, **environment: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update({"TERM": "xterm-256color", "COLORTERM": "truecolor", **environment})
            os.execv(sys.executable, [sys.executable, "-m", "dspark_tui", *arguments])
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.raw = b""
        self.status: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)

    def read(self, seconds: float) -> bytes:
        """What comes within this time; less when the program ends."""
        got = b""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not select.select([self.fd], [], [], left)[0]:
                break
            try:
                piece = os.read(self.fd, 1 << 16)
            except OSError:
                break
            if not piece:
                break
            got += piece
        self.raw += got
        return got

    def until(self, words: str, seconds: float = 20.0) -> None:
        """Read until `words` were written (in one row, whatever their colours)."""
        end = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < end, f"{words!r} did not come: {self.text[-2000:]}"
            self.read(0.05)

    def until_quiet(self, quiet: float = 0.7, seconds: float = 20.0) -> None:
        """Read until nothing comes for a while."""
        end = time.monotonic() + seconds
        while self.read(quiet):
            assert time.monotonic() < end, "it never became quiet"

    def send(self, keys: bytes) -> None:
        """Type."""
        os.write(self.fd, keys)

    @property
    def text(self) -> str:
        """Everything written, without control sequences."""
        return CSI.sub(b"", self.raw).decode("utf-8", errors="replace")

    def children(self) -> list[int]:
        """Processes that the program started."""
        table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
        pairs = [line.split() for line in table.stdout.splitlines()]
        return [int(pid) for pid, parent in pairs if int(parent) == self.pid]

    def wait(self, seconds: float = 10.0) -> int:
        """The exit code (128 + number for a signal), reading on meanwhile so that nothing blocks."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.read(0.05)
                code = os.waitstatus_to_exitcode(status)
                self.status = code if code >= 0 else 128 - code
                return self.status
            self.read(0.05)
        raise AssertionError("the program did not end")


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(state.stdout.strip()) and not state.stdout.strip().startswith("Z")


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    """Whether all of them end within the time."""
    end = time.monotonic() + seconds
    while any(map(alive, pids)):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def write_script(folder: Path, text: str) -> str:
    """A script for the fake engine; gives its path."""
    path = folder / "script.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)
