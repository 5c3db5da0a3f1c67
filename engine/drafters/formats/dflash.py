"""DFlash (z-lab) and DFlash 2 (Inco AI): a Qwen3 configuration with `dflash_config` inside.

What `dflash_config` says counts before the top level. Backbone and tensor names are those of Qwen3 whatever
the target is; embedding and head are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark_tui.engine.drafters.config import BackboneConfig, HeadConfig
from dspark_tui.engine.drafters.formats import fields
from dspark_tui.engine.drafters.formats.description import Description
from dspark_tui.engine.drafters.formats.settings import Settings
from dspark_tui.engine.drafters.formats.stored import Tensor


def read(name: str, config: dict[str, Any], tensors: Mapping[str, Tensor], second: bool) -> Description:
    """A DFlash drafter, of the second kind when `second`. Raises `CheckpointError`."""
    top = Settings(name, config)
    nested = top.inside("dflash_config")
    settings = Settings(name, nested.first, config)
    shape = fields.dimensions(settings.over(fields.QWEN3_DEFAULTS))
    target_layers = fields.target_layers(settings)
    if settings.get("target_layer_ids") is None and target_layers is not None:
        taps = default_taps(shape["layers"], target_layers)
    else:
        taps = settings.layers("target_layer_ids")
    given_scale = settings.get("input_embedding_scale") is not None
    backbone = BackboneConfig(
        **shape,
        **(convolutions(settings, shape["hidden_size"], fields.block_size(settings, 1)) if second else {}),
        block_size=fields.block_size(settings, 1),
        mask_token=settings.whole("mask_token_id", least=0, below=shape["vocabulary"]),
        taps=taps,
        tap_width=fields.tap_width(settings, shape["hidden_size"]),
        attention=fields.attention(top, nested, shape["layers"]),
        embedding_scale=fields.scale(settings, "input_embedding_scale"),
    )
    reduced = fields.draft_vocabulary(settings, shape["vocabulary"])
    if second and reduced is not None:
        raise settings.refusal("it is a DFlash 2 drafter with a reduced vocabulary (draft_vocab_size)")
    head = HeadConfig(
        first_row=1,
        multiplier=fields.scale(settings, "output_multiplier") * fields.scale(settings, "logit_scale"),
        softcap=fields.softcap(settings),
        draft_vocabulary=reduced,
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
        **(selector(settings, shape["vocabulary"]) if second else {}),
    )
    return Description(
        method="dflash2" if second else "dflash",
        packaging="z-lab",
        config=backbone,
        head=head,
        target_layers=target_layers,
        scaled_by_target=not second and not given_scale,
    )


def default_taps(layers: int, target_layers: int) -> tuple[int, ...]:
    """The taps of `layers` draft layers over `target_layers` when the checkpoint names none: from the
    second to the third-to-last layer, evenly (arXiv 2602.06036, section 5)."""
    if layers == 1:
        return (target_layers // 2,)
    span = max(0, target_layers - 4)
    return tuple(round(1 + i * span / (layers - 1)) for i in range(layers))


def convolutions(settings: Settings, hidden: int, block: int) -> dict[str, Any]:
    """DFlash 2's fields of `BackboneConfig`."""
    group = settings.whole("conv_group_size")
    if hidden % group:
        raise settings.wrong("conv_group_size", f"a divisor of the hidden size {hidden}")
    return {"conv_taps": settings.whole("conv_kernel_size", below=block + 1), "conv_group": group}


def selector(settings: Settings, vocabulary: int) -> dict[str, Any]:
    """DFlash 2's fields of `HeadConfig`."""
    return {
        "selector_rank": settings.whole("selector_rank"),
        "selector_top_k": settings.whole("selector_top_k", below=vocabulary + 1),
    }
