"""DFlash 2 (Inco AI): DFlash's block with convolutions, and a selector that walks the best candidates.

Each slot offers the `top_k` tokens of the target's head. The walk goes from slot to slot; candidate c
after token p scores `logit(c) + sum over r of A[p]_r w_r B[c]_r`, with w projected from the slot's hidden
state and A, B the predecessor and successor codebooks.
"""

from __future__ import annotations

import mlx.core as mx

from dspark_tui.engine.drafters.base import Proposal
from dspark_tui.engine.drafters.block import BlockDrafter
from dspark_tui.engine.drafters.candidates import top_candidates
from dspark_tui.engine.sampling import Sampler
from dspark_tui.engine.verify import SparseQ


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
