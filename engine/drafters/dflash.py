"""DFlash (z-lab, arXiv 2602.06036): one parallel pass, every slot on its own.

Row j of the block predicts the token at its own position (infill), so the proposals are rows 1 to B - 1
and row 0's output is not used. DeepSpec's ablations of the name predict the next token from row 0 on.
"""

from __future__ import annotations

import mlx.core as mx

from dspark_tui.engine.drafters.base import Proposal
from dspark_tui.engine.drafters.block import BlockDrafter
from dspark_tui.engine.sampling import Sampler
from dspark_tui.engine.verify import DenseQ


class DFlash(BlockDrafter):
    """Proposals are independent given the context, so q is a product of the rows' distributions."""

    def _draft(self, hidden: mx.array, logits: mx.array, anchor: int, sampler: Sampler) -> Proposal:
        if sampler.greedy and not sampler.adjusts:
            return Proposal(self._vocabulary.best(logits))
        # The target's own truncation on q wastes no mass on tokens that p forbids.
        tokens, q = sampler.draft(self._vocabulary.spread(logits))
        return Proposal(tokens, None if q is None else DenseQ(q))
