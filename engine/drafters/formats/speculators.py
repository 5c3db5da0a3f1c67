"""Drafters that vLLM's speculators library exports: DSpark, DFlash and DFlash 2 in one schema.

The backbone's dimensions stand in `transformer_layer_config`, everything else at the top. Taps count hidden
states, of which the embedding is the first: one more than the layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from dspark_tui.engine.drafters.config import BackboneConfig, HeadConfig, LayerAttention
from dspark_tui.engine.drafters.formats import dflash, dspark, fields
from dspark_tui.engine.drafters.formats.description import Description
from dspark_tui.engine.drafters.formats.settings import Settings
from dspark_tui.engine.drafters.formats.stored import Tensor
from dspark_tui.engine.protocol import Method


def read(name: str, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> Description:
    """A speculators drafter. Raises `CheckpointError`."""
    top = Settings(name, config)
    layer = top.inside("transformer_layer_config").over(fields.QWEN3_DEFAULTS)
    method: Method = top.get("speculators_model_type") or top.inside("speculators_config").get("algorithm")
    model_type = layer.text("model_type", "qwen3")
    if "qwen3" not in model_type:
        raise top.refusal(
            f"its backbone is {model_type[:40]}, only qwen3 is supported in a speculators model"
        )
    shape = fields.dimensions(layer)
    hidden, vocabulary = shape["hidden_size"], shape["vocabulary"]
    first_row = _first_row(top, method)
    second = method == "dflash2"
    reduced = fields.draft_vocabulary(top, vocabulary)
    if second and reduced is not None:
        raise top.refusal("it is a DFlash 2 drafter with a reduced vocabulary (draft_vocab_size)")
    if second and first_row == 0:
        raise top.refusal("it is a DFlash 2 drafter whose anchor row proposes (sample_from_anchor)")
    block = fields.block_size(top, first_row)
    backbone = BackboneConfig(
        **shape,
        **(dflash.convolutions(top, hidden, block) if second else {}),
        block_size=block,
        mask_token=top.whole("mask_token_id", least=0, below=vocabulary),
        taps=tuple(tap - 1 for tap in top.layers("aux_hidden_state_layer_ids")),
        tap_width=fields.tap_width(top, hidden),
        attention=_attention(top, layer, shape["layers"]),
        embedding_scale=fields.scale(top, "input_embedding_scale"),
    )
    markov, rank = dspark.markov_head(top) if method == "dspark" else (None, 0)
    head = HeadConfig(
        first_row=first_row,
        # A DSpark bias was trained beside the head's raw logits.
        multiplier=1.0 if method == "dspark" else fields.scale(top, "output_multiplier"),
        softcap=fields.softcap(top),
        draft_vocabulary=reduced,
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
        markov=markov,
        markov_rank=rank,
        confidence=dspark.confidence_head(top, tensors, rank) if method == "dspark" else None,
        **(dflash.selector(top, vocabulary) if second else {}),
    )
    return Description(method, "speculators", backbone, head, fields.target_layers(top))


def _first_row(top: Settings, method: Method) -> Literal[0, 1]:
    """Whether the anchor's row proposes. Where a DSpark export does not say, the block is compared with the
    number of proposals it declares: early exports had one row more."""
    if top.get("sample_from_anchor") is not None:
        return 0 if top.flag("sample_from_anchor", True) else 1
    if method != "dspark":
        return 1
    methods = top.inside("speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    proposals = first.get("speculative_tokens") if isinstance(first, dict) else None
    return 1 if type(proposals) is int and top.get("block_size") == proposals + 1 else 0


def _attention(top: Settings, layer: Settings, layers: int) -> tuple[LayerAttention, ...]:
    """Full layers see both ways; sliding ones are causal unless `sliding_window_non_causal`."""
    kinds = fields.layer_types(layer, layers)
    if layer.get("layer_types") is None and layer.flag("use_sliding_window", False):
        # Qwen3Config's own rule for configurations that list no kinds.
        full = layer.whole("max_window_layers", least=0, default=28)
        kinds = ["sliding_attention" if i >= full else "full_attention" for i in range(layers)]
    if "sliding_attention" not in kinds:
        return (LayerAttention(),) * layers
    window = layer.over({"sliding_window": top.get("sliding_window")}).whole("sliding_window")
    causal = not top.flag("sliding_window_non_causal", False)
    sliding = LayerAttention(window, causal)
    return tuple(sliding if kind == "sliding_attention" else LayerAttention() for kind in kinds)
