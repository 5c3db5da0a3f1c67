"""How many prompt tokens a prefill step takes: few enough that a command is heard soon."""

from __future__ import annotations

SECONDS = 0.35
"""What a chunk should take: a stop is heard within half a second, and little is lost to small chunks."""
SECONDS_WAITING = 0.08
"""The same while a command waits."""
SMALLEST, LARGEST = 16, 2048
"""Tokens; beyond the largest a chunk gains nothing, and its activations need memory."""
_GROWTH = 2
"""A chunk may be so many times the one before: one fast chunk is no proof of many."""


class PrefillChunks:
    """Sizes chunks by the measured seconds a token. Lives as long as its target; knows no clock."""

    def __init__(self, first: int) -> None:
        """`first`: tokens of the first chunk, before anything is measured."""
        self._size = min(max(first, SMALLEST), LARGEST)
        self._seconds_a_token: float | None = None

    def size(self, waiting: bool = False) -> int:
        """Tokens of the next chunk, from `SMALLEST` to `LARGEST`. `waiting`: whether a command is to be
        looked at."""
        if not waiting:
            return self._size
        if self._seconds_a_token is None:
            return max(SMALLEST, self._size // 4)
        return max(SMALLEST, min(self._size, int(SECONDS_WAITING / self._seconds_a_token)))

    def took(self, tokens: int, seconds: float) -> None:
        """Learn from a chunk that is done. A token costs more the longer the context is, so the newest
        measurement counts; chunks too short to tell (a prompt's last tokens) only make the next smaller."""
        if tokens <= 0 or seconds <= 0:
            return
        rate = seconds / tokens
        full = tokens >= self._size
        if not full and seconds < SECONDS:
            return
        self._seconds_a_token = rate
        wanted = int(SECONDS / rate)
        self._size = max(SMALLEST, min(wanted, self._size * _GROWTH, LARGEST))
