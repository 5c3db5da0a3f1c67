"""How many prompt tokens a prefill step takes: few enough that a command is heard soon."""

from __future__ import annotations

SECONDS = 0.35
"""What a chunk should take: a stop is heard within half a second, and little is lost to small chunks."""
SECONDS_WAITING = 0.08
"""The same while a command waits."""
SMALLEST, LARGEST = 16, 2048
"""Tokens; beyond the largest a chunk gains nothing, and its activations need memory."""
_STEP = 2
"""A chunk is at most so many times larger or smaller than the one before: one measurement may be a hiccup."""
_APART = 1.5
"""Two chunks tell a chunk's own cost from its tokens' when their sizes differ so much."""


class PrefillChunks:
    """Sizes chunks by measured times. Lives as long as its target; knows no clock.

    A chunk costs `fixed + tokens * each` seconds (its weights are read once). Chunks are never made so small
    that the fixed part takes more than half: on a machine where one forward alone takes longer than wanted,
    ever smaller chunks would only multiply it.
    """

    def __init__(self, first: int) -> None:
        """`first`: tokens of the first chunk, before anything is measured."""
        self._size = min(max(first, SMALLEST), LARGEST)
        self._last: tuple[int, float] | None = None
        self._other: tuple[int, float] | None = None
        """The newest chunk of another size than the last one's."""

    def size(self, waiting: bool = False) -> int:
        """Tokens of the next chunk, from `SMALLEST` to `LARGEST`. `waiting`: whether a command is to be
        looked at."""
        if not waiting:
            return self._size
        if self._last is None:
            return max(SMALLEST, self._size // 4)
        return max(SMALLEST, min(self._size, self._within(SECONDS_WAITING)))

    def took(self, tokens: int, seconds: float) -> None:
        """Learn from a chunk that is done. The newest times count: a token costs more the longer the context
        is."""
        if tokens <= 0 or seconds <= 0:
            return
        if self._last is not None and _apart(self._last[0], tokens):
            self._other = self._last
        self._last = (tokens, seconds)
        # The few tokens at a prompt's end tell the fixed part, but nothing by themselves.
        if tokens >= self._size or seconds >= SECONDS or self._other is not None:
            wanted = min(max(self._within(SECONDS), self._size // _STEP), self._size * _STEP)
            self._size = min(max(wanted, SMALLEST), LARGEST)

    def _within(self, seconds: float) -> int:
        """Tokens of a chunk that takes `seconds`, or whose fixed part takes half."""
        fixed, each = self._costs()
        if each <= 0:
            return LARGEST
        return int(min(max((seconds - fixed) / each, fixed / each), LARGEST))

    def _costs(self) -> tuple[float, float]:
        """Seconds a chunk and seconds a token; `each` 0 when more tokens took no longer."""
        assert self._last is not None
        tokens, seconds = self._last
        if self._other is None or not _apart(self._other[0], tokens):
            return 0.0, seconds / tokens
        each = max(0.0, (seconds - self._other[1]) / (tokens - self._other[0]))
        each = min(each, seconds / tokens)
        return max(0.0, seconds - each * tokens), each


def _apart(one: int, other: int) -> bool:
    return max(one, other) >= _APART * min(one, other)
