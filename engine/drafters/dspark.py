"""DSpark (DeepSeek DeepSpec, arXiv 2607.05147): a parallel pass, then a small sequential correction.

Row j of the block, the anchor's included, predicts the next token (position j + 1); in infill heads row j
predicts its own position, from row 1 on. A Markov head adds a bias that depends on the token before; a
confidence head estimates, without looking at a draft, whether it will be accepted.
"""

from __future__ import annotations

import mlx.core as mx

from dspark_tui.engine.drafters.base import Proposal
from dspark_tui.engine.drafters.block import BlockDrafter
from dspark_tui.engine.sampling import Sampler
from dspark_tui.engine.verify import DenseQ


class DSpark(BlockDrafter):
    """Drafts one after the other from the corrected logits."""

    def _draft(self, hidden: mx.array, logits: mx.array, anchor: int, sampler: Sampler) -> Proposal:
        previous = mx.array([anchor], dtype=mx.uint32)
        state: mx.array | None = None
        tokens: list[mx.array] = []
        q: list[mx.array] = []
        confidences: list[mx.array] = []
        if self.head.first_row == 1 and self.head.markov == "rnn":
            # Such heads are trained with a state that has seen the anchor's row.
            _, state, _ = self._correct(hidden[:1], previous, None)
        for j in range(logits.shape[0]):
            at = j + self.head.first_row
            row = hidden[at : at + 1]
            bias, state, entry = self._correct(row, previous, state)
            if self.head.confidence is not None:
                confidences.append(self._confidence(row, entry))
            previous, p = self._choose(
                logits[j : j + 1] if bias is None else logits[j : j + 1] + bias, tokens, sampler
            )
            tokens.append(previous)
            if p is not None:
                q.append(p)
        return Proposal(
            mx.concatenate(tokens),
            DenseQ(mx.concatenate(q)) if q else None,
            mx.concatenate(confidences) if confidences else None,
        )

    def _correct(
        self, row: mx.array, previous: mx.array, state: mx.array | None
    ) -> tuple[mx.array | None, mx.array | None, mx.array | None]:
        """The bias `[1, draft vocabulary]` on a row's logits, the head's next state, and its entry of the
        token before; nothing without a Markov head. A bias that is not used is not computed."""
        if self.head.markov is None:
            return None, None, None
        head = self.model.markov_head
        entry = head.markov_w1(previous)
        turned, state = head.step(entry, row, head.start(entry) if state is None else state)
        return head.markov_w2(turned), state, entry

    def _confidence(self, row: mx.array, entry: mx.array | None) -> mx.array:
        """The estimate `[1]` that the draft of this row is accepted if those before it are."""
        seen = row
        if self.head.confidence == "hidden and markov" and entry is not None:
            seen = mx.concatenate([row, entry], axis=-1)
        return mx.sigmoid(self.model.confidence_head.proj(seen))[0]

    def _choose(
        self, logits: mx.array, before: list[mx.array], sampler: Sampler
    ) -> tuple[mx.array, mx.array | None]:
        """The token `[1]` of one row after the drafts `before`, and the distribution `[1, vocabulary]` it
        was drawn from, None when greedy."""
        if sampler.greedy and not sampler.adjusts:
            return self._vocabulary.best(logits), None
        logits = sampler.rows(self._vocabulary.spread(logits), mx.concatenate(before) if before else None)
        if sampler.greedy:
            return mx.argmax(logits, axis=-1), None
        p = sampler.probabilities(logits)
        return sampler.draws.choose(p), p
