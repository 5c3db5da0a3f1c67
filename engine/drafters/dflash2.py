"""DFlash 2 (Inco AI): DFlash's block with convolutions, and a selector that walks the best candidates.

Each slot offers the `top_k` tokens of the target's head. The walk goes from slot to slot; candidate c
after token p scores `logit(c) + sum over r of A[p]_r w_r B[c]_r`, with w projected from the slot's hidden
state and A, B the predecessor and successor codebooks.
"""

from __future__ import annotations

import mlx.core as mx

from dspark_tui.engine.drafters.base import Proposal
from dspark_tui.engine.drafters.block import BlockDrafter
from dspark_tui.engine.sampling import Sampler
from dspark_tui.engine.verify import SparseQ

_CHUNK = 256
"""Vocabulary entries a first-stage group holds: a full partition of a vocabulary row costs six times this."""


def top_candidates(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` largest of each row of `logits` `[n, vocabulary]`: ids `[n, count]` (uint32) and values.

    Exact, in two stages: the largest `count` all lie in the `count` groups with the largest maxima.
    `count` is at most the vocabulary.
    """
    rows, vocabulary = logits.shape
    padding = -vocabulary % _CHUNK
    if padding:
        logits = mx.pad(logits, [(0, 0), (0, padding)], constant_values=-mx.inf)
    groups = logits.reshape(rows, -1, _CHUNK)
    if groups.shape[1] > count:
        best = mx.argpartition(-groups.max(axis=-1), count - 1, axis=-1)[:, :count]
    else:
        best = mx.broadcast_to(mx.arange(groups.shape[1], dtype=mx.uint32), (rows, groups.shape[1]))
    pool = mx.take_along_axis(groups, best[:, :, None], axis=1).reshape(rows, -1)
    inside = mx.argpartition(-pool, count - 1, axis=-1)[:, :count]
    group = mx.take_along_axis(best, inside // _CHUNK, axis=-1)
    # Padding is never among the best of real logits; an id outside the vocabulary would be a wild write.
    ids = mx.minimum(group * _CHUNK + inside % _CHUNK, vocabulary - 1)
    return ids.astype(mx.uint32), mx.take_along_axis(pool, inside, axis=-1)


class DFlash2(BlockDrafter):
    """Rows 1 to B - 1 propose, as in DFlash; the selector makes them cohere."""

    def _draft(self, hidden: mx.array, logits: mx.array, anchor: int, sampler: Sampler) -> Proposal:
        k, first = logits.shape[0], self.head.first_row
        ids, values = top_candidates(sampler.rows(logits), self.head.selector_top_k)
        if sampler.adjusts:
            values = mx.take_along_axis(logits, ids, axis=-1)
        selector = self.model.candidate_selector
        projected = selector.hidden_projection(hidden[first : first + k])
        weights = projected[:, None, :] * selector.successor_codebook(ids)
        previous = mx.array([anchor], dtype=mx.uint32)
        tokens: list[mx.array] = []
        q: list[mx.array] = []
        for j in range(k):
            entry = selector.predecessor_codebook(previous)[0]
            scores = values[j] + (weights[j] @ entry).astype(mx.float32)
            scores = sampler.some(scores, ids[j], mx.concatenate(tokens) if tokens else None)
            if sampler.greedy:
                slot = mx.argmax(scores, keepdims=True)
            else:
                q.append(mx.softmax(scores / sampler.sampling.temperature, axis=-1)[None])
                slot = sampler.draws.choose(q[-1])
            previous = ids[j][slot]
            tokens.append(previous)
        drafted = mx.concatenate(tokens)
        return Proposal(drafted, SparseQ(ids, mx.concatenate(q)) if q else None)
