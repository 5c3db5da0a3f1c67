"""What the packagings have in common: dimensions, rotary positions and attention out of a configuration."""

from __future__ import annotations

import math
from typing import Any

from dspark_tui.engine.drafters.config import LayerAttention, Rope, Yarn
from dspark_tui.engine.drafters.formats.settings import Settings

BLOCK_LIMIT = 256
"""Longest block that is taken; published ones have up to 32 tokens. Attention is quadratic in it, and MLX
crashes where that does not fit."""
SCALE_LIMIT = 1e4
"""Largest multiplier of embeddings or logits that is taken for meant."""

QWEN3_DEFAULTS: dict[str, Any] = {
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "hidden_act": "silu",
}
"""What transformers' Qwen3Config takes where a configuration leaves these out."""


def rope(settings: Settings, head_dim: int) -> Rope:
    """Rotary positions. `rope_parameters` count before `rope_theta` and `rope_scaling`.

    Partial rotation, sections for images and the like are left over from a target's configuration in a Qwen3
    drafter: the published ones rotate the whole head.
    """
    places = settings.object("rope_parameters")
    if isinstance(places.get("full_attention"), dict):  # one set for each kind of layer
        places = places["full_attention"]
    theta = Settings(settings.name, places, {"rope_theta": settings.get("rope_theta")}).positive("rope_theta")
    neox = settings.flag("rope_is_neox_style", settings.flag("is_neox_style", True))
    return Rope(theta, interleaved=not neox, yarn=_yarn(settings, places))


def _yarn(settings: Settings, parameters: dict[str, Any]) -> Yarn | None:
    """YaRN's numbers (Peng et al. 2023, section 3.4 for the attention factor), None for plain positions."""
    for place in (parameters, settings.object("rope_scaling")):
        kind = place.get("rope_type") or place.get("type") or "default"
        if kind in ("default", "mrope"):
            continue
        if kind != "yarn":
            raise settings.refusal(
                f"its rotary positions are of the kind {str(kind)[:40]}, only yarn is supported"
            )
        scaling = Settings(settings.name, place)
        if scaling.get("truncate") is False:
            raise settings.refusal("its yarn scaling is not truncated, which is not supported")
        factor = scaling.positive("factor")
        if factor < 1:
            raise scaling.wrong("factor", "a number from 1")
        original = scaling.over({"original_max_position_embeddings": settings.get("max_position_embeddings")})
        return Yarn(
            factor=factor,
            original_context=original.whole("original_max_position_embeddings"),
            beta_fast=scaling.positive("beta_fast", 32.0),
            beta_slow=scaling.positive("beta_slow", 1.0),
            attention_factor=_attention_factor(scaling, factor),
        )
    return None


def _attention_factor(scaling: Settings, factor: float) -> float:
    """0.1 ln(factor) + 1, unless the configuration says it or says how to weigh the logarithm."""
    if scaling.get("attention_factor") is not None:
        return scaling.positive("attention_factor")

    def scale(key: str) -> float:
        return 0.1 * scaling.positive(key, 1.0) * math.log(factor) + 1.0

    if scaling.get("mscale") is not None and scaling.get("mscale_all_dim") is not None:
        return scale("mscale") / scale("mscale_all_dim")
    return scale("")


def attention(settings: Settings, nested: Settings, layers: int) -> tuple[LayerAttention, ...]:
    """How each layer sees, as z-lab's and vLLM's code resolve it.

    Causal: top-level `is_causal` for every layer, else `dflash_config.causal` for every layer, else the
    sliding layers. Sliding: what `layer_types` says; `use_swa` makes every layer slide (both ways) when
    it names none. `settings` is the top level, `nested` what stands in `dflash_config`.
    """
    kinds = layer_types(settings, layers)
    sliding = [kind == "sliding_attention" for kind in kinds]
    forced = nested.flag("use_swa", False) and not any(sliding)
    window = None
    if forced or any(sliding):
        window = (
            nested.under({"sliding_window": nested.get("swa_window_size")})
            .over({"sliding_window": settings.get("sliding_window")})
            .whole("sliding_window")
        )
    causal = settings.get("is_causal")
    if causal is not None:
        causal = settings.flag("is_causal", False)
    elif nested.get("causal") is not None:
        causal = nested.flag("causal", False)
    return tuple(
        LayerAttention(
            window=window if slides or forced else None, causal=slides if causal is None else causal
        )
        for slides in sliding
    )


def layer_types(settings: Settings, layers: int) -> list[str]:
    """The kind of every layer, `full_attention` where nothing is said."""
    kinds = settings.get("layer_types")
    if kinds is None:
        return ["full_attention"] * layers
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise settings.wrong("layer_types", f"{layers} of full_attention or sliding_attention")
    return [str(kind) for kind in kinds]


def dimensions(settings: Settings) -> dict[str, Any]:
    """Those fields of `BackboneConfig` that every qwen3-like packaging says in the same words."""
    activation = settings.get("hidden_act")
    if activation != "silu":
        raise settings.refusal(f"its activation is {str(activation)[:40]}, only silu is supported")
    heads, kv_heads, head_dim = (
        settings.whole("num_attention_heads"),
        settings.whole("num_key_value_heads"),
        settings.whole("head_dim"),
    )
    check_heads(settings, heads, kv_heads, head_dim)
    return {
        "hidden_size": settings.whole("hidden_size"),
        "intermediate_size": settings.whole("intermediate_size"),
        "layers": settings.whole("num_hidden_layers"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocabulary": settings.whole("vocab_size"),
        "eps": settings.positive("rms_norm_eps"),
        "rope": rope(settings, head_dim),
        "attention_bias": settings.flag("attention_bias", False),
    }


def check_heads(settings: Settings, heads: int, kv_heads: int, head_dim: int) -> None:
    """Heads share keys evenly, and pairs of a head rotate. Raises `CheckpointError`."""
    if heads % kv_heads:
        raise settings.wrong("num_key_value_heads", f"a divisor of {heads} heads")
    if head_dim % 2:
        raise settings.wrong("head_dim", "an even number")


def block_size(settings: Settings, first_row: int) -> int:
    """Rows of a block. A block that is all anchor proposes nothing, unless the anchor's row does."""
    return settings.whole("block_size", least=1 + first_row, below=BLOCK_LIMIT + 1)


def target_layers(settings: Settings) -> int | None:
    """How many layers the target has, None when unsaid."""
    return settings.whole("num_target_layers") if settings.get("num_target_layers") is not None else None


def tap_width(settings: Settings, hidden: int) -> int:
    """Width of one target tap."""
    return settings.whole("target_hidden_size", default=hidden)


def scale(settings: Settings, key: str, default: float = 1.0) -> float:
    """A multiplier, within reason: beyond it numbers overflow."""
    value = settings.positive(key, default)
    if not 1 / SCALE_LIMIT <= value <= SCALE_LIMIT:
        raise settings.wrong(key, f"a number from {1 / SCALE_LIMIT:g} to {SCALE_LIMIT:g}")
    return value


def softcap(settings: Settings) -> float | None:
    """`final_logit_softcapping`, None when absent or 0."""
    return scale(settings, "final_logit_softcapping") if settings.get("final_logit_softcapping") else None


def draft_vocabulary(settings: Settings, vocabulary: int) -> int | None:
    """Rows of a reduced head, None when the head is the target's size."""
    if settings.get("draft_vocab_size") is None:
        return None
    reduced = settings.whole("draft_vocab_size", below=vocabulary + 1)
    return None if reduced == vocabulary else reduced
