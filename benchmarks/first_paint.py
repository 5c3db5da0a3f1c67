"""Time from process start to the first painted frame of the terminal program, under a pty.

    python benchmarks/first_paint.py [--runs 7] [--size 120x36] [-- arguments of dspark-tui]

A frame counts as painted when the word of the prompt's placeholder is on its way to the terminal. Without
arguments the program starts as a user starts it: the engine process is started behind the first frame.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import signal
import statistics
import struct
import sys
import termios
import time

MARK = b"sk something"
"""The cursor is on the first letter."""
LIMIT_SECONDS = 20.0


def first_paint(arguments: list[str], columns: int, rows: int) -> float:
    """Seconds from fork to the first frame. Raises RuntimeError when none comes."""
    start = time.perf_counter()
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
        os.execv(sys.executable, [sys.executable, "-m", "dspark_tui", *arguments])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    seen = b""
    try:
        while time.perf_counter() - start < LIMIT_SECONDS:
            if not select.select([terminal], [], [], 0.05)[0]:
                continue
            seen += os.read(terminal, 65536)
            if MARK in seen:
                return time.perf_counter() - start
    except OSError:
        pass
    finally:
        os.kill(pid, signal.SIGTERM)
        os.close(terminal)
        os.waitpid(pid, 0)
    raise RuntimeError(f"no frame came; the program wrote {seen[-500:]!r}")


def main() -> None:
    """Measure and print one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--size", default="120x36")
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    columns, rows = map(int, options.size.split("x"))
    times = [1000 * first_paint(options.arguments, columns, rows) for _ in range(options.runs)]
    each = " ".join(f"{value:.0f}" for value in times)
    print(f"first paint at {options.size}: median {statistics.median(times):.0f} ms of {len(times)} ({each})")


if __name__ == "__main__":
    main()
