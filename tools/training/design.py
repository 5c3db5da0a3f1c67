"""The shape of a new drafter: taken from its target, changed where asked, written in the published schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from dspark_tui.engine.drafters.config import BackboneConfig, HeadConfig, LayerAttention, Rope
from training.errors import TrainingError

Method: TypeAlias = Literal["dspark", "dflash", "dflash2"]
METHODS: tuple[Method, ...] = ("dspark", "dflash", "dflash2")
ARCHITECTURES = {"dspark": "Qwen3DSparkModel", "dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
CONV_TAPS, CONV_GROUP = 2, 16


@dataclass(frozen=True)
class Wishes:
    """What may be chosen. `drafts` tokens are proposed a round; None takes the target's number."""

    method: Method
    drafts: int = 7
    layers: int = 3
    taps: tuple[int, ...] | None = None
    rank: int = 64
    top_k: int = 16
    intermediate: int | None = None
    mask_token: int | None = None


@dataclass(frozen=True)
class Design:
    """A drafter to train: what its modules need, and the config.json that says the same."""

    method: Method
    backbone: BackboneConfig
    head: HeadConfig
    config: dict[str, Any] = field(repr=False)

    @property
    def drafts(self) -> int:
        """Tokens proposed a round."""
        return self.backbone.block_size - self.head.first_row


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """`count` layers spread from the second to the third-to-last, as z-lab's DFlash does when a
    configuration names none: `round(1 + i * (layers - 4) / (count - 1))`. Small targets get fewer."""
    count = max(1, min(count, layers - 1))
    if count == 1:
        return (layers // 2,)
    if layers - 4 >= count - 1:
        return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))
    return tuple(sorted({round(i * (layers - 2) / (count - 1)) for i in range(count)}))


def _number(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if default is None:
        raise TrainingError(f"The target's config.json gives no {key}, which the drafter's shape needs.")
    return default


def _theta(config: Mapping[str, Any]) -> float:
    parameters = config.get("rope_parameters")
    nested = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    return float(nested or config.get("rope_theta") or 1e6)


def _group(hidden: int) -> int:
    for group in (CONV_GROUP, 8, 4, 2):
        if hidden % group == 0:
            return group
    return 1


def design(
    wishes: Wishes, config: dict[str, Any], *, hidden: int, vocabulary: int, embedding_scale: float = 1.0
) -> Design:
    """The drafter for the target that `config` (its config.json) describes.

    `hidden` and `vocabulary` are those of the loaded target's embedding table, `embedding_scale` what the
    target multiplies its rows by. Raises `TrainingError` when the wishes do not fit the target.
    """
    text = config.get("text_config") or config
    target_layers = _number(text, "num_hidden_layers")
    heads = _number(text, "num_attention_heads")
    kv_heads = _number(text, "num_key_value_heads", heads)
    taps = default_taps(target_layers, 5) if wishes.taps is None else wishes.taps
    # The last layer's output is no tap: other programs read it after the final norm.
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > target_layers - 2:
        raise TrainingError(
            f"The taps {','.join(map(str, taps))} do not fit the target; give rising layer numbers from 0 to "
            f"{target_layers - 2}.",
            usage=True,
        )
    if wishes.mask_token is None or not 0 <= wishes.mask_token < vocabulary:
        raise TrainingError(
            f"The mask token {wishes.mask_token} is not in the target's table; "
            f"give an id below {vocabulary}.",
            usage=True,
        )
    first_row: Literal[0, 1] = 0 if wishes.method == "dspark" else 1
    convolved = wishes.method == "dflash2"
    backbone = BackboneConfig(
        hidden_size=hidden,
        intermediate_size=wishes.intermediate or _number(text, "intermediate_size", 3 * hidden),
        layers=wishes.layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_number(text, "head_dim", hidden // heads),
        vocabulary=vocabulary,
        eps=float(text.get("rms_norm_eps") or 1e-6),
        rope=Rope(_theta(text)),
        block_size=wishes.drafts + first_row,
        mask_token=wishes.mask_token,
        taps=taps,
        tap_width=hidden,
        attention=tuple(LayerAttention() for _ in range(wishes.layers)),
        embedding_scale=embedding_scale,
        conv_taps=CONV_TAPS if convolved else 0,
        conv_group=_group(hidden),
    )
    head = HeadConfig(
        first_row=first_row,
        markov="vanilla" if wishes.method == "dspark" else None,
        markov_rank=wishes.rank if wishes.method == "dspark" else 0,
        confidence="hidden and markov" if wishes.method == "dspark" else None,
        selector_rank=wishes.rank if convolved else 0,
        selector_top_k=min(wishes.top_k, vocabulary) if convolved else 0,
    )
    written = _written(wishes.method, backbone, head, target_layers, text)
    return Design(wishes.method, backbone, head, written)


def _written(
    method: Method, backbone: BackboneConfig, head: HeadConfig, target_layers: int, text: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json as the method's publishers write it."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[method]],
        "model_type": "qwen3",
        "hidden_size": backbone.hidden_size,
        "intermediate_size": backbone.intermediate_size,
        "num_hidden_layers": backbone.layers,
        "num_attention_heads": backbone.heads,
        "num_key_value_heads": backbone.kv_heads,
        "head_dim": backbone.head_dim,
        "vocab_size": backbone.vocabulary,
        "rms_norm_eps": backbone.eps,
        "rope_theta": backbone.rope.theta,
        "max_position_embeddings": _number(text, "max_position_embeddings", 4096),
        "attention_bias": False,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * backbone.layers,
        "num_target_layers": target_layers,
        "tie_word_embeddings": bool(text.get("tie_word_embeddings", True)),
        "dtype": "bfloat16",
    }
    pair: dict[str, Any] = {"mask_token_id": backbone.mask_token, "target_layer_ids": list(backbone.taps)}
    if backbone.embedding_scale != 1.0:
        pair["input_embedding_scale"] = backbone.embedding_scale
    if method == "dspark":
        heads = {
            "block_size": backbone.block_size,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "markov_rank": head.markov_rank,
            "markov_head_type": "vanilla",
        }
        return config | pair | heads
    if method == "dflash":
        return config | {"block_size": backbone.block_size, "is_causal": False, "dflash_config": pair}
    pair |= {
        "block_size": backbone.block_size,
        "conv_kernel_size": backbone.conv_taps,
        "conv_group_size": backbone.conv_group,
        "selector_rank": head.selector_rank,
        "selector_top_k": head.selector_top_k,
    }
    return config | {"is_causal": False, "dflash_config": pair}
