"""What the loop asks of a drafter, and what a drafter may ask of the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from dspark_tui.engine.protocol import Method
from dspark_tui.engine.sampling import Sampler
from dspark_tui.engine.verify import Q


class Tables(Protocol):
    """The target's embedding and head, which most drafters borrow."""

    hidden_size: int
    vocabulary: int
    embedding_scale: float
    """What the target multiplies its embedding rows by (Gemma: the root of the hidden size), else 1."""

    def embed(self, ids: mx.array) -> mx.array:
        """Raw rows of the embedding table: `[n]` ids to `[n, hidden]`."""
        ...

    def head(self, hidden: mx.array) -> mx.array:
        """Logits `[n, vocabulary]` of final hidden states `[n, hidden]`."""
        ...


@dataclass(frozen=True)
class Proposal:
    """`tokens` `[k]` drafted after the anchor. `q` are the distributions they were drawn from, each given
    the drafts before it (None when greedy). `confidence` `[k]`: DSpark's estimate that a draft is accepted
    if those before it are. `finite` (scalar): false when the drafter's numbers overflowed."""

    tokens: mx.array
    q: Q | None = None
    confidence: mx.array | None = None
    finite: mx.array | None = None

    @property
    def k(self) -> int:
        """Number of drafted tokens."""
        return int(self.tokens.shape[0])

    def head(self, k: int) -> Proposal:
        """The first `k` drafts."""
        if k >= self.k:
            return self
        return Proposal(
            tokens=self.tokens[:k],
            q=None if self.q is None else self.q.head(k),
            confidence=None if self.confidence is None else self.confidence[:k],
            finite=self.finite,
        )


NOTHING = Proposal(tokens=mx.zeros((0,), dtype=mx.uint32))
"""The proposal of plain decoding."""


class Drafter(Protocol):
    """A drafter with its context."""

    name: str
    method: Method
    drafts: int
    taps: tuple[int, ...]

    @property
    def length(self) -> int:
        """The position after the last context row."""
        ...

    def extend(self, rows: mx.array, position: int) -> None:
        """Take in tap rows `[n, taps * hidden]` of committed tokens at `position`, `position + 1`, ..."""
        ...

    def propose(self, anchor: int, k: int, sampler: Sampler) -> Proposal:
        """Draft up to `k` tokens after `anchor`, which stands at position `length`. Lazy."""
        ...

    def truncate(self, length: int) -> None:
        """Forget the context from position `length` on. Where that cannot be done, since rows that would be
        seen again have been dropped, all of it is forgotten: `length` is 0 then."""
        ...

    def reset(self, position: int = 0) -> None:
        """Forget the whole context; the next row belongs to `position`."""
        ...

    def state(self) -> list[mx.array]:
        """The context's arrays, to evaluate."""
        ...


class NoDrafter:
    """Plain decoding: the drafter that drafts nothing."""

    name = "none"
    method: Method = "none"
    drafts = 0
    taps: tuple[int, ...] = ()
    length = 0

    def extend(self, rows: mx.array, position: int) -> None:
        """Nothing to remember."""

    def propose(self, anchor: int, k: int, sampler: Sampler) -> Proposal:
        """No drafts."""
        return NOTHING

    def truncate(self, length: int) -> None:
        """Nothing to forget."""

    def reset(self, position: int = 0) -> None:
        """Nothing to forget."""

    def state(self) -> list[mx.array]:
        """No arrays."""
        return []
