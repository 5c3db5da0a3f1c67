"""Lookup: what followed the last few tokens when they stood in the context before (prompt lookup).

The n-gram method of Saxena (2023) and LLMA (Yang et al. 2023): no weights, no cost, and right wherever a
text repeats itself: code that is edited, quotations, names. A draft is a certainty, not a draw: q is one at
the drafted token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from dspark_tui.engine.drafters.base import NOTHING, Proposal
from dspark_tui.engine.protocol import Method
from dspark_tui.engine.sampling import Sampler
from dspark_tui.engine.verify import PointQ

DRAFTS = 10
SHORT, LONG = 3, 6
"""Tokens that must match: alone, and to take a round from a trained drafter."""

_FARTHEST = 32
"""A match longer than this is as good as any."""

_PLACES = 16
"""Newest places of an n-gram that are compared."""


class NGrams:
    """Where each n-gram of a growing sequence ended, the newest places first to be compared."""

    def __init__(self, n: int = SHORT) -> None:
        self._n = n
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self.tokens.append(token)
            if len(self.tokens) >= self._n:
                self._ends.setdefault(tuple(self.tokens[-self._n :]), []).append(len(self.tokens))

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        while len(self.tokens) > length:
            if len(self.tokens) >= self._n:
                gram = tuple(self.tokens[-self._n :])
                ends = self._ends[gram]
                ends.pop()
                if not ends:
                    del self._ends[gram]
            self.tokens.pop()

    def match(self) -> tuple[int, int]:
        """`(length, end)` of the longest earlier occurrence of the sequence's own end: `length` tokens
        before `end` are those before the sequence's end. The newest one of equals; length 0 when none."""
        tokens, size = self.tokens, len(self.tokens)
        best = (0, 0)
        for end in reversed(self._ends.get(tuple(tokens[-self._n :]), [])[-_PLACES - 1 : -1]):
            length = self._n
            while length < min(end, _FARTHEST) and tokens[end - length - 1] == tokens[size - length - 1]:
                length += 1
            if length > best[0]:
                best = (length, end)
        return best


class Lookup:
    """Drafts from the context. `history` gives the committed tokens before the anchor."""

    name = "lookup"
    method: Method = "lookup"
    drafts = DRAFTS
    taps: tuple[int, ...] = ()

    def __init__(self, history: Callable[[], Sequence[int]]) -> None:
        self._history = history
        self._grams = NGrams()

    @property
    def length(self) -> int:
        """Tokens that were taken in."""
        return len(self._grams.tokens)

    def match(self, anchor: int) -> int:
        """How many tokens up to the anchor stand in the context already, followed by something."""
        self._catch_up(anchor)
        return self._grams.match()[0]

    def extend(self, rows: mx.array, position: int) -> None:
        """Tap rows tell it nothing."""

    def propose(self, anchor: int, k: int, sampler: Sampler) -> Proposal:
        """Up to `k` tokens that followed the longest match; nothing without one."""
        self._catch_up(anchor)
        length, end = self._grams.match()
        following = self._grams.tokens[end : end + min(k, self.drafts)] if length else []
        if not following:
            return NOTHING
        tokens = mx.array(following, dtype=mx.uint32)
        return Proposal(tokens, None if sampler.greedy else PointQ(tokens))

    def truncate(self, length: int) -> None:
        """See `Drafter.truncate`."""
        self._grams.truncate(length)

    def reset(self, position: int = 0) -> None:
        """See `Drafter.reset`."""
        self._grams = NGrams()

    def state(self) -> list[mx.array]:
        """No arrays."""
        return []

    def _catch_up(self, anchor: int) -> None:
        history = self._history()
        known = len(self._grams.tokens)
        if known > len(history) + 1 or (known == len(history) + 1 and self._grams.tokens[-1] != anchor):
            self._grams.truncate(len(history))
            known = len(self._grams.tokens)
        self._grams.extend(history[known:])
        if len(self._grams.tokens) == len(history):
            self._grams.extend([anchor])
