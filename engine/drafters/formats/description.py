"""What a reader makes of a packaging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from dspark_tui.engine.drafters.config import BackboneConfig, HeadConfig
from dspark_tui.engine.protocol import Method

Packaging: TypeAlias = Literal["DeepSpec", "z-lab", "speculators", "SpecForge", "LiquidAI"]


@dataclass(frozen=True)
class Description:
    """A drafter, whatever its packaging. `target_layers`: how many the target has, None when unsaid.

    `scaled_by_target`: the target's own embedding scale takes the place of `config.embedding_scale` (DFlash,
    which borrows the embedding as the target uses it). `own_embedding` and `own_head` of `head` are set when
    the tables are stored; whether they serve is decided with the target at hand.
    """

    method: Method
    packaging: Packaging
    config: BackboneConfig
    head: HeadConfig
    target_layers: int | None
    scaled_by_target: bool = False
