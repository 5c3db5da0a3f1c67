"""DSpark (DeepSeek DeepSpec, arXiv 2607.05147): a parallel pass, then a small sequential correction.

Row j of the block, the anchor's included, predicts the next token (position j + 1); in infill heads row j
predicts its own position, from row 1 on. A Markov head adds a bias that depends on the token before; a
confidence head estimates, without looking at a draft, whether it will be accepted.
"""

from __future__ import annotations

import mlx.core as mx

from dspark_tui.engine.drafters.base import Proposal
from dspark_tui.engine.drafters.block import BlockDrafter
from dspark_tui.engine.drafters.candidates import top_candidates
from dspark_tui.engine.sampling import Sampler
from dspark_tui.engine.verify import DenseQ


class DSpark(BlockDrafter):
    """Drafts one after the other from the corrected logits."""

    def _draft(self, hidden: mx.array, logits: mx.array, anchor: int, sampler: Sampler) -> Proposal:
        k, first = logits.shape[0], self.head.first_row
        rows = _Rows(self, logits)
        previous = mx.array([anchor], dtype=mx.uint32)
        state: mx.array | None = None
        tokens: list[mx.array] = []
        q: list[mx.array] = []
        confidences: list[mx.array] = []
        if first == 1 and self.head.markov == "rnn":
            # Such heads are trained with a state that has seen the anchor's row.
            _, state, _ = self._step(hidden[:1], previous, None)
        for j in range(k):
            row = hidden[j + first : j + first + 1]
            turned, state, entry = self._step(row, previous, state)
            if self.head.confidence is not None:
                confidences.append(self._confidence(row, entry))
            if sampler.greedy and not sampler.adjusts:
                previous = rows.best(j, turned)
            else:
                before = mx.concatenate(tokens) if tokens else None
                scores = sampler.rows(rows.scores(j, turned), before)
                if sampler.greedy:
                    previous = mx.argmax(scores, axis=-1)
                else:
                    q.append(sampler.probabilities(scores))
                    previous = sampler.draws.choose(q[-1])
            tokens.append(previous)
        return Proposal(
            mx.concatenate(tokens),
            DenseQ(mx.concatenate(q)) if q else None,
            mx.concatenate(confidences) if confidences else None,
        )

    def _step(
        self, row: mx.array, previous: mx.array, state: mx.array | None
    ) -> tuple[mx.array | None, mx.array | None, mx.array | None]:
        """The Markov head's step after the token `previous` `[1]`: what W2 makes the bias of, the next state
        and the token's entry, each `[1, rank]`; nothing without such a head."""
        if self.head.markov is None:
            return None, None, None
        head = self.model.markov_head
        entry = head.markov_w1(previous)
        turned, state = head.step(entry, row, head.start(entry) if state is None else state)
        return turned, state, entry

    def _confidence(self, row: mx.array, entry: mx.array | None) -> mx.array:
        """The estimate `[1]` that the draft of this row is accepted if those before it are."""
        seen = row
        if self.head.confidence == "hidden and markov" and entry is not None:
            seen = mx.concatenate([row, entry], axis=-1)
        return mx.sigmoid(self.model.confidence_head.proj(seen))[0]


class _Rows:
    """The head's logits `[k, draft vocabulary]` and their correction, over all tokens or over each row's best
    candidates: then nothing else can be drafted, and the scores say so."""

    def __init__(self, drafter: DSpark, logits: mx.array) -> None:
        self._logits, self._vocabulary = logits, drafter._vocabulary
        self._markov = drafter.model.markov_head if drafter.head.markov is not None else None
        count = drafter.head.markov_candidates
        self._ids: mx.array | None = None
        if self._markov is not None and count is not None and count < logits.shape[-1]:
            self._ids, self._values = top_candidates(logits, count)
            self._rows_of_w2 = self._markov.restricted(self._ids)

    def _candidates(self, j: int, turned: mx.array) -> mx.array:
        """Corrected logits `[c]` of the row's candidates."""
        return self._values[j] + (self._rows_of_w2[j] @ turned[0]).astype(mx.float32)

    def _corrected(self, j: int, turned: mx.array | None) -> mx.array:
        """Corrected logits `[1, draft vocabulary]`."""
        row = self._logits[j : j + 1]
        return row if self._markov is None or turned is None else row + self._markov.markov_w2(turned)

    def best(self, j: int, turned: mx.array | None) -> mx.array:
        """The most likely token `[1]` of row `j`, in the target's ids."""
        if self._ids is None or turned is None:
            return self._vocabulary.best(self._corrected(j, turned))
        slot = mx.argmax(self._candidates(j, turned), keepdims=True)
        return self._vocabulary.targets(self._ids[j][slot])

    def scores(self, j: int, turned: mx.array | None) -> mx.array:
        """Row `j`, `[1, vocabulary]` float32 in the target's ids."""
        if self._ids is None or turned is None:
            return self._vocabulary.spread(self._corrected(j, turned))
        nothing = mx.full((1, self._logits.shape[-1]), -mx.inf)
        some = mx.put_along_axis(nothing, self._ids[j][None], self._candidates(j, turned)[None], axis=-1)
        return self._vocabulary.spread(some)
