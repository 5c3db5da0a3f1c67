"""Acceptance rules: how many drafted tokens stand, and the bonus token after them.

Greedy: the longest prefix that equals the target's own choices (exact). Sampled: accept `d_j` with
probability min(1, p_j(d_j) / q_j(d_j)); at the first rejection draw from max(p - q, 0), normalised; when
all stand, draw from the last p. The output then has exactly the target's distribution (Leviathan et al.
2023, Chen et al. 2023). Everything stays lazy, so a round needs one synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from dspark_tui.engine.sampling import Draws

NO_MASS = 1e-8
"""Residual mass below this is rounding (p equals q): draw from p instead. Nothing is ever added to p or to
the residual, since that leaks mass to forbidden tokens."""


@dataclass(frozen=True)
class DenseQ:
    """Draft distributions over the whole vocabulary: `probs` `[k, vocabulary]` float32."""

    probs: mx.array

    def of(self, tokens: mx.array) -> mx.array:
        """q_j of each drafted token, `[k]`."""
        return mx.take_along_axis(self.probs, tokens[:, None].astype(mx.uint32), axis=-1)[:, 0]

    def row(self, j: mx.array, vocabulary: int) -> mx.array:
        """q_j over the vocabulary, `[vocabulary]`."""
        return self.probs[j]

    def head(self, k: int) -> DenseQ:
        """The first `k` positions."""
        return DenseQ(self.probs[:k])


@dataclass(frozen=True)
class SparseQ:
    """Draft distributions over a few candidates: `ids` `[k, c]` and `probs` `[k, c]` float32."""

    ids: mx.array
    probs: mx.array

    def of(self, tokens: mx.array) -> mx.array:
        """q_j of each drafted token, `[k]`."""
        return mx.where(self.ids == tokens[:, None], self.probs, 0.0).sum(axis=-1)

    def row(self, j: mx.array, vocabulary: int) -> mx.array:
        """q_j over the vocabulary, `[vocabulary]`, zero outside the candidates."""
        return mx.put_along_axis(mx.zeros((vocabulary,)), self.ids[j], self.probs[j], axis=-1)

    def head(self, k: int) -> SparseQ:
        """The first `k` positions."""
        return SparseQ(self.ids[:k], self.probs[:k])


@dataclass(frozen=True)
class PointQ:
    """Drafts that were not drawn: `tokens` `[k]`, each with all the mass."""

    tokens: mx.array

    def of(self, tokens: mx.array) -> mx.array:
        """q_j of each drafted token, `[k]`."""
        return (self.tokens == tokens).astype(mx.float32)

    def row(self, j: mx.array, vocabulary: int) -> mx.array:
        """q_j over the vocabulary, `[vocabulary]`."""
        return (mx.arange(vocabulary) == self.tokens[j]).astype(mx.float32)

    def head(self, k: int) -> PointQ:
        """The first `k` positions."""
        return PointQ(self.tokens[:k])


Q = DenseQ | SparseQ | PointQ


class Outcome(NamedTuple):
    """`accepted`: number of drafted tokens that stand (scalar array); `bonus`: the token after them
    (`[1]`), the next anchor."""

    accepted: mx.array
    bonus: mx.array


def leading(flags: mx.array) -> mx.array:
    """How many leading entries of `flags` `[k]` are true."""
    return mx.cumprod(flags.astype(mx.int32)).sum()


def greedy(logits: mx.array, drafts: mx.array) -> Outcome:
    """`logits` `[k + 1, vocabulary]` of the target after the anchor and each draft; `drafts` `[k]`."""
    choices = mx.argmax(logits, axis=-1)
    k = drafts.shape[0]
    if k == 0:
        return Outcome(mx.array(0), choices)
    accepted = leading(choices[:k] == drafts)
    return Outcome(accepted, choices[accepted][None])


def residual(p: mx.array, q: mx.array) -> mx.array:
    """max(p - q, 0), or p where that has no mass. `[vocabulary]`, not normalised."""
    rest = mx.maximum(p - q, 0.0)
    return mx.where(rest.sum() > NO_MASS, rest, p)


def sampled(p: mx.array, drafts: mx.array, q: Q | None, draws: Draws) -> Outcome:
    """`p` `[k + 1, vocabulary]` target distributions; `q` those the `drafts` `[k]` were drawn from, each
    given the drafts before it."""
    k, vocabulary = drafts.shape[0], p.shape[-1]
    if k == 0 or q is None:
        return Outcome(mx.array(0), draws.choose(p[:1]))
    p_of = mx.take_along_axis(p[:k], drafts[:, None].astype(mx.uint32), axis=-1)[:, 0]
    accepted = leading(draws.uniform(k) * q.of(drafts) < p_of)
    rejected_at = mx.minimum(accepted, k - 1)
    after_rejection = residual(p[rejected_at], q.row(rejected_at, vocabulary))
    last = mx.where(accepted == k, p[k], after_rejection)
    return Outcome(accepted, draws.choose(last[None]))
