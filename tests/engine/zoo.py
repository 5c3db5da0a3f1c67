"""Published drafters whose dimensions are known: configurations, tensors and sizes as published.

Checkpoints are written at full size on paper: real headers over a file with nothing in it. Heads of which no
intermediate size, taps or mask token were published are not in the list.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Published:
    """`parameters`: exact where published so, else rounded to `digits` decimals of a billion. `backbone`:
    billions without embedding, head and Markov tables. `tensors`: how many are stored."""

    config: dict[str, Any]
    shapes: Shapes
    method: str
    drafts: int
    tensors: int
    parameters: int | float | None = None
    digits: int = 2
    backbone: float | None = None


def _qwen3(config: dict[str, Any], taps: int, conv: bool = False) -> Shapes:
    h, i = config["hidden_size"], config["intermediate_size"]
    d = config["head_dim"]
    q, k = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes: Shapes = {"fc.weight": (h, taps * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    for n in range(config["num_hidden_layers"]):
        at = f"layers.{n}"
        shapes |= {
            f"{at}.input_layernorm.weight": (h,),
            f"{at}.post_attention_layernorm.weight": (h,),
            f"{at}.self_attn.q_proj.weight": (q, h),
            f"{at}.self_attn.k_proj.weight": (k, h),
            f"{at}.self_attn.v_proj.weight": (k, h),
            f"{at}.self_attn.o_proj.weight": (h, q),
            f"{at}.self_attn.q_norm.weight": (d,),
            f"{at}.self_attn.k_norm.weight": (d,),
            f"{at}.mlp.gate_proj.weight": (i, h),
            f"{at}.mlp.up_proj.weight": (i, h),
            f"{at}.mlp.down_proj.weight": (h, i),
        }
        if conv:
            for name in ("attention_conv", "mlp_conv"):
                shapes[f"{at}.{name}.base_kernel"] = (2, 2, h)
                shapes[f"{at}.{name}.kernel_projection.weight"] = (2 * 2 * (h // 16), h)
    return shapes


def _gemma4(config: dict[str, Any], taps: int) -> Shapes:
    h, i = config["hidden_size"], config["intermediate_size"]
    shapes: Shapes = {"fc.weight": (h, taps * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    for n in range(config["num_hidden_layers"]):
        at = f"layers.{n}"
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{at}.{norm}_layernorm.weight"] = (h,)
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (16 * 512, h),
            f"{at}.self_attn.k_proj.weight": (512, h),
            f"{at}.self_attn.o_proj.weight": (h, 8192),
            f"{at}.self_attn.q_norm.weight": (512,),
            f"{at}.self_attn.k_norm.weight": (512,),
            f"{at}.mlp.gate_proj.weight": (i, h),
            f"{at}.mlp.up_proj.weight": (i, h),
            f"{at}.mlp.down_proj.weight": (h, i),
            f"{at}.layer_scalar": (1,),
        }
    return shapes


def _dspark_heads(config: dict[str, Any]) -> Shapes:
    h, v, r = config["hidden_size"], config["vocab_size"], 256
    return {
        "markov_head.markov_w1.weight": (v, r),
        "markov_head.markov_w2.weight": (v, r),
        "confidence_head.proj.weight": (1, h + r),
        "confidence_head.proj.bias": (1,),
    }


def _tables(config: dict[str, Any]) -> Shapes:
    shape = (config["vocab_size"], config["hidden_size"])
    return {"embed_tokens.weight": shape, "lm_head.weight": shape}


def _sizes(
    hidden: int, inner: int, heads: int, kv: int, head: int, vocabulary: int, layers: int
) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head,
        "vocab_size": vocabulary,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


_DSPARK = {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "mask_token_id": 151669,
    "num_anchors": 512,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
}
_LOOK_ALIKE = {"markov_rank": 0, "enable_confidence_head": False}
_Q3_TAPS = {"target_layer_ids": [1, 9, 17, 25, 33], "num_target_layers": 36}
_GEMMA = {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "target_model_type": "gemma4",
    "target_text_model_type": "gemma4_text",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "target_layer_ids": [5, 17, 29, 41, 46],
    "num_target_layers": 48,
    "mask_token_id": 4,
}


def _dspark(sizes: dict[str, Any], taps: dict[str, Any], parameters: int, backbone: float) -> Published:
    config = sizes | _DSPARK | taps
    shapes = _qwen3(config, 5) | _tables(config) | _dspark_heads(config)
    return Published(config, shapes, "dspark", 7, 64, parameters, backbone=backbone)


def _look_alike(full: Published) -> Published:
    """DeepSpec's own DFlash: what is left of a DSpark without its heads."""
    shapes = {n: s for n, s in full.shapes.items() if not n.startswith(("markov_head", "confidence_head"))}
    return Published(full.config | _LOOK_ALIKE, shapes, "dflash", 7, full.tensors - 4, backbone=full.backbone)


def _dflash(
    sizes: dict[str, Any],
    taps: list[int],
    target: int,
    mask: int,
    parameters: float,
    digits: int,
    **config: Any,
) -> Published:
    whole = sizes | {
        "architectures": ["DFlashDraftModel"],
        "block_size": 16,
        "num_target_layers": target,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": taps},
        **config,
    }
    layers = sizes["num_hidden_layers"]
    return Published(whole, _qwen3(whole, len(taps)), "dflash", 15, 11 * layers + 3, parameters, digits)


def _mixed(sliding: int, window: int) -> dict[str, Any]:
    kinds = ["sliding_attention"] * sliding + ["full_attention"]
    return {"layer_types": kinds, "sliding_window": window, "use_sliding_window": True}


def _zoo() -> dict[str, Published]:
    q4, q8 = _sizes(2560, 9728, 32, 8, 128, 151936, 5), _sizes(4096, 12288, 32, 8, 128, 151936, 5)
    q14 = _sizes(5120, 17408, 40, 8, 128, 151936, 5)
    q14_taps = {"target_layer_ids": [1, 10, 19, 28, 37], "num_target_layers": 40}
    gemma_config = _sizes(3840, 15360, 16, 8, 256, 262144, 5) | _DSPARK | _GEMMA
    del gemma_config["rope_theta"]
    gemma = Published(
        gemma_config,
        _gemma4(gemma_config, 5) | _tables(gemma_config) | _dspark_heads(gemma_config),
        "dspark",
        7,
        74,
        3_430_444_550,
        backbone=1.283,
    )
    q27 = _sizes(5120, 17408, 32, 8, 128, 248320, 5)
    second = {
        **{key: value for key, value in q27.items() if key != "rope_theta"},
        "architectures": ["DFlash2DraftModel"],
        "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
        "layer_types": ["sliding_attention"] * 5,
        "use_sliding_window": True,
        "sliding_window": 2048,
        "is_causal": False,
        "num_target_layers": 64,
        "dflash_config": {
            "block_size": 8,
            "mask_token_id": 248070,
            "target_layer_ids": [5, 19, 33, 47, 61],
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 256,
            "selector_top_k": 16,
        },
    }
    codebooks: Shapes = {
        "candidate_selector.predecessor_codebook": (248320, 256),
        "candidate_selector.successor_codebook": (248320, 256),
        "candidate_selector.hidden_projection.weight": (256, 5120),
    }
    dsparks = {
        "qwen3_4b": _dspark(q4, _Q3_TAPS, 1_393_133_569, 0.537),
        "qwen3_8b": _dspark(q8, _Q3_TAPS, 2_371_081_729, 1.049),
        "qwen3_14b": _dspark(q14, q14_taps, 3_416_263_169, 1.783),
        "gemma4_12b": gemma,
    }
    q36_taps = [1, 16, 31, 46, 61]
    return {
        **{f"deepseek-ai/dspark_{name}_block7": one for name, one in dsparks.items()},
        **{f"deepseek-ai/dflash_{name}_block7": _look_alike(one) for name, one in dsparks.items()},
        "z-lab/Qwen3-4B-DFlash-b16": _dflash(q4, [1, 9, 17, 25, 33], 36, 151669, 0.537, 3),
        "z-lab/Qwen3-8B-DFlash-b16": _dflash(q8, [1, 9, 17, 25, 33], 36, 151669, 1.049, 3),
        "z-lab/Qwen3.6-27B-DFlash": _dflash(
            q27, q36_taps, 64, 248070, 1.73, 2, **_mixed(4, 2048), rope_theta=1e7
        ),
        "z-lab/gemma-4-31B-it-DFlash": _dflash(
            _sizes(5376, 10752, 64, 8, 128, 262144, 5), [1, 12, 23, 35, 46, 57], 60, 4, 1.54, 2,
            **_mixed(4, 2048),
        ),
        "asf0/Qwen3.8-27B-DFlash": _dflash(
            _sizes(5120, 17408, 20, 4, 256, 248320, 5), q36_taps, 64, 248070, 1.78, 2
        ),
        "incoai/Qwen3.8-27B-DFlash2": Published(
            second, _qwen3(second, 5, conv=True) | codebooks, "dflash2", 7, 81, 1_924_404_480
        ),
    }  # fmt: skip


ZOO = _zoo()


def write_on_paper(folder: Path, published: Published) -> None:
    """A checkpoint with true headers in bf16, over a sparse file of the right length."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in published.shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(file, 8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(published.config))
