"""DSpark as DeepSeek's DeepSpec writes it, and as SpecForge and LiquidAI nest the same facts.

DeepSpec copies the target's text configuration and adds its own fields, so much of what stands there is
about the target and means nothing to the drafter.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Literal

from dspark_tui.engine.drafters.config import BackboneConfig, HeadConfig, LayerAttention, MarkovKind, Rope
from dspark_tui.engine.drafters.formats import fields
from dspark_tui.engine.drafters.formats.description import Description, Packaging
from dspark_tui.engine.drafters.formats.settings import Settings
from dspark_tui.engine.drafters.formats.stored import Tensor

_GEMMA4_ROPE: dict[str, Any] = {"rope_theta": 1e6, "partial_rotary_factor": 0.25, "rope_type": "proportional"}


def read(
    name: str, config: dict[str, Any], tensors: Mapping[str, Tensor], packaging: Packaging
) -> Description:
    """A DSpark drafter, or DeepSpec's DFlash look-alike (no Markov head, no confidence; every row proposes).

    Raises `CheckpointError`.
    """
    top = Settings(name, config)
    nested = top.inside("dflash_config")
    if packaging == "SpecForge" and nested.get("attention_mode", "gqa") not in ("gqa", "mha"):
        raise nested.refusal(
            f"its attention is of the kind {str(nested.get('attention_mode'))[:40]}, only gqa is supported"
        )
    settings = top.under(nested.first) if packaging != "DeepSpec" else top
    first_row: Literal[0, 1] = 0 if settings.flag("sample_from_anchor", True) else 1
    markov, rank = markov_head(settings)
    confidence = confidence_head(settings, tensors, rank)
    head = HeadConfig(
        first_row=first_row,
        softcap=fields.softcap(settings),
        draft_vocabulary=fields.draft_vocabulary(settings, settings.whole("vocab_size")),
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
        markov=markov,
        markov_rank=rank,
        confidence=confidence,
    )
    look_alike = markov is None and confidence is None
    backbone = (
        _gemma4(settings, nested, first_row) if _is_gemma4(top) else _qwen3(settings, top, nested, first_row)
    )
    return Description(
        method="dflash" if look_alike else "dspark",
        packaging=packaging,
        config=backbone,
        head=head,
        target_layers=fields.target_layers(settings),
    )


def markov_head(settings: Settings) -> tuple[MarkovKind | None, int]:
    """The kind of Markov head and its rank; None and 0 when there is none."""
    rank = settings.whole("markov_rank", least=0, default=0)
    if rank == 0:
        return None, 0
    kind = settings.get("markov_head_type", "vanilla")
    if kind not in ("vanilla", "gated", "rnn"):
        raise settings.refusal(f"its Markov head is {str(kind)[:40]}; vanilla, gated and rnn are supported")
    known: MarkovKind = kind
    return known, rank


def confidence_head(
    settings: Settings, tensors: Mapping[str, Tensor], rank: int
) -> Literal["hidden", "hidden and markov"] | None:
    """What the confidence head reads, None without one."""
    if not settings.flag("enable_confidence_head", "confidence_head.proj.weight" in tensors):
        return None
    with_markov = settings.flag("confidence_head_with_markov", rank > 0)
    if with_markov and rank == 0:
        raise settings.refusal("its confidence head reads a Markov head, which it does not have")
    return "hidden and markov" if with_markov else "hidden"


def _is_gemma4(top: Settings) -> bool:
    names = top.get("architectures")
    return "gemma4" in top.text("model_type") or (isinstance(names, list) and "Gemma4DSparkModel" in names)


def _qwen3(settings: Settings, top: Settings, nested: Settings, first_row: int) -> BackboneConfig:
    model_type = top.text("model_type")
    if not any(known in model_type for known in ("qwen3", "lfm2")):
        raise top.refusal(
            f"its backbone is {model_type[:40] or 'of no model_type'}; qwen3, lfm2 and gemma4 are supported"
        )
    shape = fields.dimensions(settings.over(fields.QWEN3_DEFAULTS))
    return BackboneConfig(
        **shape,
        block_size=fields.block_size(settings, first_row),
        mask_token=settings.whole("mask_token_id", least=0, below=shape["vocabulary"]),
        taps=settings.layers("target_layer_ids", least=-1),
        tap_width=fields.tap_width(settings, shape["hidden_size"]),
        attention=fields.attention(top, nested, shape["layers"]),
        embedding_scale=fields.scale(settings, "input_embedding_scale"),
    )


def _gemma4(settings: Settings, nested: Settings, first_row: int) -> BackboneConfig:
    """DeepSpec's Gemma 4 backbone: the target's global-attention layer throughout."""
    activation = settings.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise settings.refusal(
            f"its activation is {str(activation)[:40]}, only gelu_pytorch_tanh is supported"
        )
    hidden, layers = settings.whole("hidden_size"), settings.whole("num_hidden_layers")
    shared = settings.flag("attention_k_eq_v", False)
    heads = settings.whole("num_attention_heads")
    kv_key = "num_global_key_value_heads" if shared and settings.get("num_global_key_value_heads") else None
    kv_heads = settings.whole(kv_key or "num_key_value_heads")
    head_dim = settings.whole("global_head_dim", default=512)
    fields.check_heads(settings, heads, kv_heads, head_dim)
    vocabulary = settings.whole("vocab_size")
    return BackboneConfig(
        hidden_size=hidden,
        intermediate_size=settings.whole("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        eps=settings.positive("rms_norm_eps", 1e-6),
        rope=_gemma4_rope(settings, head_dim),
        block_size=fields.block_size(settings, first_row),
        mask_token=settings.whole("mask_token_id", least=0, below=vocabulary),
        taps=settings.layers("target_layer_ids", least=-1),
        tap_width=fields.tap_width(settings, hidden),
        attention=(LayerAttention(),) * layers
        if settings.get("layer_types") is None
        else fields.attention(settings, nested, layers),
        style="gemma4",
        # The table's own precision: Gemma multiplies by the root rounded to bf16 (62.0 for 3840).
        embedding_scale=_bf16(hidden**0.5),
        keys_are_values=shared,
    )


def _gemma4_rope(settings: Settings, head_dim: int) -> Rope:
    """The proportional kind: the lowest `partial_rotary_factor` of all pairs rotate."""
    full = settings.inside("rope_parameters").over({"full_attention": {}}).inside("full_attention")
    full = full.over(_GEMMA4_ROPE)
    if full.get("rope_type") not in ("proportional", "default"):
        raise full.wrong("rope_type", "proportional")
    part = full.positive("partial_rotary_factor")
    if part > 1:
        raise full.wrong("partial_rotary_factor", "a number up to 1")
    return Rope(full.positive("rope_theta"), pairs=int(part * head_dim) // 2)


def _bf16(value: float) -> float:
    """`value` rounded to bf16 (to nearest, ties to even)."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits += 0x7FFF + (bits >> 16 & 1)
    rounded: float = struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0]
    return rounded
