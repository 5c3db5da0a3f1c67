"""Tiny twins of every published packaging: config.json and tensor names as their publishers write them.

Shapes are small and weights random. What each twin has to be read as stands beside it, written out by hand.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dspark_tui.engine.drafters.config import BackboneConfig, HeadConfig, LayerAttention, Rope, Yarn

HIDDEN, INNER, LAYERS, HEADS, KV, HEAD, VOCAB, TARGET = 64, 96, 2, 4, 2, 24, 80, 12
BLOCK, MASK, RANK, SELECTOR, TOP_K, DRAFT_VOCAB = 5, 7, 16, 16, 6, 30
TAPS = [1, 4, 9]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Twin:
    """`config`: config.json. `shapes`: stored tensors by stored name. `reads`: what it has to be read as."""

    config: dict[str, Any]
    shapes: Shapes
    method: str
    packaging: str
    backbone: BackboneConfig
    head: HeadConfig
    target_layers: int | None = TARGET
    scaled_by_target: bool = False
    integers: dict[str, list[int]] = field(default_factory=dict)


# ---------------------------------------------------------------------------- tensors, as published


def qwen3_layers(prefix: str = "", layers: int = LAYERS, conv: bool = False) -> Shapes:
    shapes: Shapes = {}
    for i in range(layers):
        at = f"{prefix}layers.{i}."
        shapes |= {
            f"{at}input_layernorm.weight": (HIDDEN,),
            f"{at}post_attention_layernorm.weight": (HIDDEN,),
            f"{at}self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"{at}self_attn.k_proj.weight": (KV * HEAD, HIDDEN),
            f"{at}self_attn.v_proj.weight": (KV * HEAD, HIDDEN),
            f"{at}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            f"{at}self_attn.q_norm.weight": (HEAD,),
            f"{at}self_attn.k_norm.weight": (HEAD,),
            f"{at}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{at}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{at}mlp.down_proj.weight": (HIDDEN, INNER),
        }
        if conv:
            for name in ("attention_conv", "mlp_conv"):
                shapes[f"{at}{name}.base_kernel"] = (2, 2, HIDDEN)
                shapes[f"{at}{name}.kernel_projection.weight"] = (2 * 2 * HIDDEN // 16, HIDDEN)
    return shapes


def gemma4_layers(keys_are_values: bool) -> Shapes:
    """`global_head_dim` is 32 here, and one key head is shared where keys are values."""
    shapes: Shapes = {}
    keys = 32 if keys_are_values else 2 * 32
    for i in range(LAYERS):
        at = f"layers.{i}."
        shapes |= {
            f"{at}{name}.weight": (HIDDEN,)
            for name in (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            )
        }
        shapes |= {
            f"{at}self_attn.q_proj.weight": (HEADS * 32, HIDDEN),
            f"{at}self_attn.k_proj.weight": (keys, HIDDEN),
            f"{at}self_attn.o_proj.weight": (HIDDEN, HEADS * 32),
            f"{at}self_attn.q_norm.weight": (32,),
            f"{at}self_attn.k_norm.weight": (32,),
            f"{at}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{at}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{at}mlp.down_proj.weight": (HIDDEN, INNER),
            f"{at}layer_scalar": (1,),
        }
        if not keys_are_values:
            shapes[f"{at}self_attn.v_proj.weight"] = (keys, HIDDEN)
    return shapes


def globals_(prefix: str = "", taps: int = len(TAPS)) -> Shapes:
    return {
        f"{prefix}fc.weight": (HIDDEN, taps * HIDDEN),
        f"{prefix}hidden_norm.weight": (HIDDEN,),
        f"{prefix}norm.weight": (HIDDEN,),
    }


def tables(head: int = VOCAB) -> Shapes:
    return {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (head, HIDDEN)}


def markov(prefix: str = "", head: int = VOCAB, kind: str = "vanilla") -> Shapes:
    shapes: Shapes = {
        f"{prefix}markov_head.markov_w1.weight": (VOCAB, RANK),
        f"{prefix}markov_head.markov_w2.weight": (head, RANK),
    }
    if kind == "gated":
        shapes |= {
            f"{prefix}markov_head.gate_proj.weight": (RANK, HIDDEN + RANK),
            f"{prefix}markov_head.gate_proj.bias": (RANK,),
        }
    if kind == "rnn":
        shapes |= {
            f"{prefix}markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + HIDDEN),
            f"{prefix}markov_head.joint_proj.bias": (3 * RANK,),
        }
    return shapes


def confidence(width: int = HIDDEN + RANK) -> Shapes:
    return {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}


def selector() -> Shapes:
    return {
        "candidate_selector.predecessor_codebook": (VOCAB, SELECTOR),
        "candidate_selector.successor_codebook": (VOCAB, SELECTOR),
        "candidate_selector.hidden_projection.weight": (SELECTOR, HIDDEN),
    }


# ---------------------------------------------------------------------------- configurations

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
DEEPSPEC: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    **QWEN3,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "layer_types": ["full_attention"] * LAYERS,
    "use_sliding_window": False,
    "sliding_window": None,
    "num_target_layers": TARGET,
    "target_layer_ids": TAPS,
    "mask_token_id": MASK,
    "block_size": BLOCK,
    "num_anchors": 512,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
}
ZLAB: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    **QWEN3,
    "rope_theta": 10000000,
    "layer_types": ["full_attention"] * LAYERS,
    "block_size": BLOCK,
    "num_target_layers": TARGET,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": TAPS},
}
ZLAB2: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    **QWEN3,
    "rope_parameters": {"rope_theta": 10000000.0, "rope_type": "default"},
    "layer_types": ["sliding_attention"] * LAYERS,
    "use_sliding_window": True,
    "sliding_window": 20,
    "is_causal": False,
    "num_target_layers": TARGET,
    "dflash_config": {
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "target_layer_ids": TAPS,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": SELECTOR,
        "selector_top_k": TOP_K,
    },
}
_LAYER_CONFIG = {key: value for key, value in QWEN3.items() if key not in ("rms_norm_eps", "hidden_act")}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    "speculators_version": "0.7.0",
    "speculators_config": {
        "algorithm": "dspark",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "some/target"},
    },
    "transformer_layer_config": _LAYER_CONFIG
    | {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
    "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "draft_vocab_size": DRAFT_VOCAB,
    "sample_from_anchor": True,
    "sliding_window_non_causal": False,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
}
SPECFORGE: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    **QWEN3,
    "rope_theta": 10000000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8192},
    "layer_types": ["full_attention"] * LAYERS,
    "block_size": BLOCK,
    "num_target_layers": TARGET,
    "dflash_config": {
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "mask_token_id": MASK,
        "target_layer_ids": TAPS,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "confidence_head_alpha": 1.0,
    },
}
GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "target_model_type": "gemma4",
    "target_text_model_type": "gemma4_text",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "sliding_window": 1024,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {
            "rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25
        },
    },
    "enable_moe_block": False,
    **{key: DEEPSPEC[key] for key in (
        "layer_types", "num_target_layers", "target_layer_ids", "mask_token_id", "block_size",
        "enable_confidence_head", "confidence_head_with_markov", "markov_rank", "markov_head_type",
    )},
}  # fmt: skip

# ---------------------------------------------------------------------------- what they are

FULL = LayerAttention()
BACKBONE = BackboneConfig(
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    layers=LAYERS,
    heads=HEADS,
    kv_heads=KV,
    head_dim=HEAD,
    vocabulary=VOCAB,
    eps=1e-6,
    rope=Rope(1e6),
    block_size=BLOCK,
    mask_token=MASK,
    taps=tuple(TAPS),
    tap_width=HIDDEN,
    attention=(FULL,) * LAYERS,
    context_limit=4096,
)
DSPARK_HEAD = HeadConfig(
    first_row=0,
    own_embedding=True,
    own_head=True,
    markov="vanilla",
    markov_rank=RANK,
    confidence="hidden and markov",
)
DFLASH_HEAD = HeadConfig(first_row=1)
ZLAB_BACKBONE = replace(BACKBONE, rope=Rope(1e7))
GEMMA4_BACKBONE = replace(
    BACKBONE,
    style="gemma4",
    kv_heads=1,
    head_dim=32,
    keys_are_values=True,
    embedding_scale=8.0,
    rope=Rope(1e6, pairs=4),
)
OFFSETS = [*range(DRAFT_VOCAB - 1), VOCAB - DRAFT_VOCAB]
"""d2t: draft id j is target id 2 j, the last one the last target id."""


def _deepspec(config: dict[str, Any], shapes: Shapes, **head: Any) -> Twin:
    return Twin(
        DEEPSPEC | config,
        globals_() | qwen3_layers() | tables() | shapes,
        "dspark",
        "DeepSpec",
        BACKBONE,
        replace(DSPARK_HEAD, **head),
    )


def _nested(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return config | {"dflash_config": config["dflash_config"] | changes}


def _twins() -> dict[str, Twin]:
    twins: dict[str, Twin] = {
        "deepspec vanilla": _deepspec({}, markov() | confidence()),
        "deepspec gated": _deepspec(
            {"markov_head_type": "gated"}, markov(kind="gated") | confidence(), markov="gated"
        ),
        "deepspec rnn": _deepspec(
            {"markov_head_type": "rnn"}, markov(kind="rnn") | confidence(), markov="rnn"
        ),
        "deepspec without confidence": _deepspec(
            {"enable_confidence_head": False}, markov(), confidence=None
        ),
        "deepspec confidence of hidden states": _deepspec(
            {"confidence_head_with_markov": False}, markov() | confidence(HIDDEN), confidence="hidden"
        ),
    }
    plain = _deepspec({}, markov() | confidence())
    # Copied from a Qwen3.5 target: none of it is about the drafter.
    noise = {
        "model_type": "qwen3_5_text",
        "partial_rotary_factor": 0.25,
        "attn_output_gate": True,
        "linear_num_value_heads": 32,
        "num_experts": 8,
        "rope_theta": None,
        "rope_parameters": {
            "rope_theta": 1000000.0,
            "rope_type": "default",
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    }
    twins["deepspec of a qwen3.5 target"] = replace(plain, config=DEEPSPEC | noise)
    twins["deepspec dflash look-alike"] = Twin(
        DEEPSPEC | {"markov_rank": 0, "enable_confidence_head": False},
        globals_() | qwen3_layers() | tables(),
        "dflash",
        "DeepSpec",
        BACKBONE,
        replace(DSPARK_HEAD, markov=None, markov_rank=0, confidence=None),
    )
    gemma = Twin(
        GEMMA4,
        globals_() | gemma4_layers(True) | tables() | markov() | confidence(),
        "dspark",
        "DeepSpec",
        GEMMA4_BACKBONE,
        replace(DSPARK_HEAD, softcap=30.0),
    )
    twins["deepspec gemma4"] = gemma
    twins["deepspec gemma4 with values"] = replace(
        gemma,
        config=GEMMA4 | {"attention_k_eq_v": False, "model_type": "gemma4_unified_text"},
        shapes=globals_() | gemma4_layers(False) | tables() | markov() | confidence(),
        backbone=replace(GEMMA4_BACKBONE, kv_heads=2, keys_are_values=False),
    )
    twins["deepspec embedding tapped"] = replace(
        plain, config=DEEPSPEC | {"target_layer_ids": [-1, 4, 9]}, backbone=replace(BACKBONE, taps=(-1, 4, 9))
    )
    return twins | _zlab() | _speculators() | _others()


def _zlab() -> dict[str, Twin]:
    plain = Twin(
        ZLAB, globals_() | qwen3_layers(), "dflash", "z-lab", ZLAB_BACKBONE, DFLASH_HEAD,
        scaled_by_target=True,
    )  # fmt: skip
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}

    def attending(*layers: LayerAttention) -> BackboneConfig:
        return replace(ZLAB_BACKBONE, attention=layers)

    muse_names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    muse = {muse_names.get(name, name): shape for name, shape in plain.shapes.items()}
    one = {
        name.replace("layers.0.", "midlayer."): shape
        for name, shape in (globals_() | qwen3_layers(layers=1)).items()
    }
    second = Twin(
        ZLAB2,
        globals_() | qwen3_layers(conv=True) | selector(),
        "dflash2",
        "z-lab",
        replace(ZLAB_BACKBONE, attention=(LayerAttention(20, False),) * LAYERS, conv_taps=2, conv_group=16),
        replace(DFLASH_HEAD, selector_rank=SELECTOR, selector_top_k=TOP_K),
    )
    return {
        "dflash": plain,
        "dflash sliding": replace(
            plain, config=ZLAB | sliding, backbone=attending(LayerAttention(20, True), FULL)
        ),
        "dflash sliding, not causal": replace(
            plain,
            config=ZLAB | sliding | {"is_causal": False},
            backbone=attending(LayerAttention(20, False), FULL),
        ),
        "dflash causal": replace(
            plain,
            config=_nested(ZLAB, causal=True) | {"is_causal": None},
            backbone=attending(LayerAttention(causal=True), LayerAttention(causal=True)),
        ),
        "dflash is_causal before causal": replace(
            plain, config=_nested(ZLAB, causal=True) | {"is_causal": False}, backbone=attending(FULL, FULL)
        ),
        "dflash use_swa": replace(
            plain,
            config=_nested(ZLAB, use_swa=True, swa_window_size=9) | {"sliding_window": 20},
            backbone=attending(LayerAttention(9, False), LayerAttention(9, False)),
        ),
        "dflash use_swa beside sliding layers": replace(
            plain,
            config=_nested(ZLAB, use_swa=True) | sliding,
            backbone=attending(LayerAttention(20, True), FULL),
        ),
        "dflash default taps": replace(
            plain,
            config=ZLAB | {"dflash_config": {"mask_token_id": MASK}, "num_target_layers": 36},
            shapes=globals_(taps=2) | qwen3_layers(),
            backbone=replace(ZLAB_BACKBONE, taps=(1, 33)),
            target_layers=36,
        ),
        "dflash muse": replace(
            plain,
            config=_nested(
                ZLAB, input_embedding_scale=2.5, output_multiplier=0.25, final_logit_softcapping=20.0
            )
            | {"is_causal": False, "final_logit_softcapping": 99.0},
            shapes=muse,
            backbone=replace(ZLAB_BACKBONE, embedding_scale=2.5),
            head=replace(DFLASH_HEAD, multiplier=0.25, softcap=20.0),
            scaled_by_target=False,
        ),
        "dflash one midlayer": replace(
            plain,
            config=ZLAB | {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
            shapes=one,
            backbone=replace(ZLAB_BACKBONE, layers=1, attention=(FULL,)),
        ),
        "dflash prefixed": replace(plain, shapes=globals_("model.") | qwen3_layers("model.")),
        "dflash reduced": replace(
            plain,
            config=ZLAB | {"draft_vocab_size": DRAFT_VOCAB},
            shapes=globals_() | qwen3_layers() | {"lm_head.weight": (DRAFT_VOCAB, HIDDEN)},
            head=replace(DFLASH_HEAD, draft_vocabulary=DRAFT_VOCAB, own_head=True),
            integers={"d2t": OFFSETS},
        ),
        "dflash2": second,
        "dflash2 muse": replace(
            second,
            config=_nested(
                ZLAB2, input_embedding_scale=2.0, output_multiplier=0.5, final_logit_softcapping=20.0
            ),
            backbone=replace(second.backbone, embedding_scale=2.0),
            head=replace(second.head, multiplier=0.5, softcap=20.0),
        ),
    }


def _speculators() -> dict[str, Twin]:
    shared: Shapes = {"verifier_lm_head.weight": (DRAFT_VOCAB, HIDDEN), "verifier_norm.weight": (HIDDEN,)}
    backbone = replace(BACKBONE, rope=Rope(5e5))
    dspark = Twin(
        SPECULATORS,
        globals_() | qwen3_layers() | tables(DRAFT_VOCAB) | markov(head=DRAFT_VOCAB) | confidence() | shared,
        "dspark",
        "speculators",
        backbone,
        replace(DSPARK_HEAD, draft_vocabulary=DRAFT_VOCAB),
        target_layers=None,
        integers={"d2t": OFFSETS, "t2d": [1] * VOCAB},
    )
    legacy = {key: value for key, value in SPECULATORS.items() if key != "sample_from_anchor"}
    methods = [{"proposal_type": "greedy", "speculative_tokens": BLOCK - 1}]
    legacy["speculators_config"] = SPECULATORS["speculators_config"] | {"proposal_methods": methods}
    dflash_config = {
        key: value for key, value in SPECULATORS.items() if "markov" not in key and "anchor" not in key
    } | {"speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"], "draft_vocab_size": VOCAB}
    dflash = Twin(
        dflash_config, globals_() | qwen3_layers() | tables(), "dflash", "speculators", backbone,
        replace(DFLASH_HEAD, own_embedding=True, own_head=True), target_layers=None,
    )  # fmt: skip
    sliding = SPECULATORS["transformer_layer_config"] | {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 20,
    }
    second_config = dflash_config | {
        "speculators_model_type": "dflash2",
        "sample_from_anchor": False,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": SELECTOR,
        "selector_top_k": TOP_K,
    }
    return {
        "speculators dspark": dspark,
        "speculators dspark infill": replace(
            dspark,
            config=SPECULATORS | {"sample_from_anchor": False},
            head=replace(dspark.head, first_row=1),
        ),
        "speculators dspark, one row more": replace(
            dspark, config=legacy, head=replace(dspark.head, first_row=1)
        ),
        "speculators dspark sliding": replace(
            dspark,
            config=SPECULATORS | {"transformer_layer_config": sliding},
            backbone=replace(backbone, attention=(LayerAttention(20, True), FULL)),
        ),
        "speculators dspark sliding, not causal": replace(
            dspark,
            config=SPECULATORS | {"transformer_layer_config": sliding, "sliding_window_non_causal": True},
            backbone=replace(backbone, attention=(LayerAttention(20, False), FULL)),
        ),
        "speculators dflash": dflash,
        "speculators dflash2": replace(
            dflash,
            config=second_config,
            shapes=globals_() | qwen3_layers(conv=True) | tables() | selector(),
            method="dflash2",
            backbone=replace(backbone, conv_taps=2, conv_group=16),
            head=replace(dflash.head, selector_rank=SELECTOR, selector_top_k=TOP_K),
        ),
    }


def _others() -> dict[str, Twin]:
    borrowing = replace(DSPARK_HEAD, own_embedding=False, own_head=False)
    yarn = Yarn(32.0, 8192, attention_factor=1.3465735902799727)
    legacy = {
        name.replace("markov_head.", "logit_head.markov_head."): shape for name, shape in markov().items()
    }
    specforge = Twin(
        SPECFORGE,
        globals_() | qwen3_layers() | markov() | confidence(),
        "dspark",
        "SpecForge",
        replace(BACKBONE, rope=Rope(1e7, yarn=yarn), context_limit=None),
        borrowing,
    )
    liquid_config = SPECFORGE | {
        "architectures": ["Lfm2DSparkDraftModel"],
        "model_type": "lfm2",
        "rope_scaling": None,
        "rope_is_neox_style": False,
        "dflash_config": {k: v for k, v in SPECFORGE["dflash_config"].items() if k != "projector_type"},
    }
    return {
        "specforge": specforge,
        "specforge with older names": replace(
            specforge, shapes=globals_() | qwen3_layers() | legacy | confidence()
        ),
        "liquid": replace(
            specforge,
            config=liquid_config,
            packaging="LiquidAI",
            backbone=replace(BACKBONE, rope=Rope(1e7, interleaved=True)),
        ),
    }


TWINS = _twins()


def write_twin(folder: Path, twin: Twin, seed: int = 0, **config: Any) -> dict[str, Any]:
    """Write the checkpoint; returns its weights by stored name. `config` overrides config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    weights: dict[str, Any] = {}
    for name, shape in twin.shapes.items():
        draw = random.standard_normal(shape, dtype=np.float32)
        if "norm" in name or name.endswith("layer_scalar"):
            draw = 1 + 0.3 * draw
        elif "base_kernel" in name:
            draw = 0.5 * draw
        elif "codebook" in name or "markov_w" in name:
            draw = 0.6 * draw
        elif "embed_tokens" not in name:
            draw = draw * np.float32(1.5 / shape[-1] ** 0.5)
        weights[name] = draw.astype(np.float32)
    for name, values in twin.integers.items():
        weights[name] = np.array(values, dtype=np.int64 if name == "d2t" else np.bool_)
    mx.save_safetensors(
        str(folder / "model.safetensors"), {name: mx.array(value) for name, value in weights.items()}
    )
    (folder / "config.json").write_text(json.dumps(twin.config | config))
    return weights


def engine_names(weights: dict[str, Any]) -> dict[str, Any]:
    """The weights by the names that published drafters without a prefix use."""
    older = {
        "model.": "",
        "logit_head.": "",
        "encoder.fc": "fc",
        "encoder.output_norm_enc": "hidden_norm",
        "midlayer.": "layers.0.",
    }
    named = {}
    for name, value in weights.items():
        start = next((start for start in older if name.startswith(start)), "")
        fresh = older.get(start, "") + name[len(start) :]
        named[f"{fresh}.weight" if fresh.endswith("codebook") else fresh] = value
    return named
