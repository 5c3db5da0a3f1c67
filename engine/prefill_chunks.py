"""How many prompt tokens a prefill step takes: few enough that a command is heard soon."""

from __future__ import annotations

SECONDS = 0.35
"""What a chunk should take: a stop is heard within half a second, and little is lost to small chunks."""
SECONDS_WAITING = 0.08
"""The same while a command waits."""
SECONDS_MOST = 1.0
"""What a chunk may take where a shorter one would lose more than a quarter to its fixed cost."""
SMALLEST, LARGEST = 16, 2048
"""Tokens; beyond the largest a chunk gains nothing, and its activations need memory."""
_STEP = 2
"""A chunk is at most so many times larger or smaller than the one before: one measurement may be a hiccup."""
_FADE = 0.7
"""What a measurement counts for after the next one: a token costs more the longer the context is."""
_SPREAD = 0.25
"""Sizes have to differ by this part of their mean before they tell a chunk's own cost from its tokens'."""


class PrefillChunks:
    """Sizes chunks by measured times. Lives as long as its target; knows no clock.

    A chunk costs `fixed + tokens * each` seconds (its weights are read once); both are fitted to the newest
    chunks. Where one forward alone takes longer than wanted, ever smaller chunks would only multiply it: a
    chunk never is so small that the fixed part takes more than half of it.
    """

    def __init__(self, first: int) -> None:
        """`first`: tokens of the first chunk, before anything is measured."""
        self.first = self._size = min(max(first, SMALLEST), LARGEST)
        self._fixed = 0.0
        # Faded sums of 1, tokens, seconds, tokens^2 and tokens x seconds.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def size(self, waiting: bool = False) -> int:
        """Tokens of the next chunk, from `SMALLEST` to `LARGEST`. `waiting`: whether a command is to be
        looked at."""
        if not waiting:
            return self._size
        if not self._sums[0]:
            return max(SMALLEST, self._size // 4)
        return max(SMALLEST, min(self._size, self._within(SECONDS_WAITING, SECONDS_WAITING)))

    def took(self, tokens: int, seconds: float) -> None:
        """Learn from a chunk that is done."""
        if tokens <= 0 or seconds <= 0:
            return
        alone = not self._sums[0]
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = tuple(_FADE * a + b for a, b in zip(self._sums, new, strict=True))  # type: ignore[assignment]
        # The few tokens at a prompt's end tell the fixed part, but nothing by themselves.
        if tokens >= self._size or seconds >= SECONDS or not alone:
            wanted = min(max(self._within(SECONDS, SECONDS_MOST), self._size // _STEP), self._size * _STEP)
            self._size = min(max(wanted, SMALLEST), LARGEST)

    def _within(self, seconds: float, most: float) -> int:
        """Tokens of a chunk that takes `seconds`; `most` where the fixed part would take over a quarter of
        that, and more where it would take over half."""
        fixed, each = self._costs()
        if each <= 0:
            return LARGEST
        worth = min(3 * fixed, most - fixed)
        return int(min(max(seconds - fixed, worth, fixed) / each, LARGEST))

    def _costs(self) -> tuple[float, float]:
        """Seconds a chunk and seconds a token (0 when more tokens took no longer), by least squares."""
        weight, n, t, nn, nt = self._sums
        n, t, nn, nt = n / weight, t / weight, nn / weight, nt / weight
        if (variance := nn - n * n) >= (_SPREAD * n) ** 2:
            each = min(max((nt - n * t) / variance, 0.0), t / n)
            self._fixed = t - each * n
        self._fixed = min(self._fixed, t)
        return self._fixed, (t - self._fixed) / n
