"""DFlash (z-lab, arXiv 2602.06036): one parallel pass, every slot on its own.

Row j of the block predicts the token at its own position (infill), so the proposals are rows 1 to B - 1
and row 0's output is not used.
"""

from __future__ import annotations

import mlx.core as mx

from dspark_tui.engine.drafters.backbone import BlockDrafter
from dspark_tui.engine.drafters.base import Proposal
from dspark_tui.engine.protocol import Method
from dspark_tui.engine.sampling import Sampler
from dspark_tui.engine.verify import DenseQ


class DFlash(BlockDrafter):
    """Proposals are independent given the context, so q is a product of the rows' distributions."""

    method: Method = "dflash"

    def _draft(self, hidden: mx.array, anchor: int, k: int, sampler: Sampler) -> Proposal:
        # The target's own truncation on q wastes no mass on tokens that p forbids.
        tokens, q = sampler.draft(self.tables.head(hidden[1 : k + 1]))
        return Proposal(tokens, None if q is None else DenseQ(q))
