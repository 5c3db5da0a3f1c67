"""Random checkpoints of DSpark, DFlash and DFlash 2 as their publishers write them, and their references."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from numpy_reference import Reference

from dspark_tui.engine.drafters.config import BackboneConfig, HeadConfig, LayerAttention, Rope

Array = NDArray[Any]
ARCHITECTURES = {"dspark": "Qwen3DSparkModel", "dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
UNSUFFIXED = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
QUANTISED = ("fc", "_proj", "markov_w1", "markov_w2", "codebook")


@dataclass(frozen=True)
class Shape:
    """Dimensions of a random drafter. `head_dim` is not hidden / heads, to catch who takes it for that."""

    hidden: int = 64
    intermediate: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 24
    vocabulary: int = 80
    block: int = 5
    mask: int = 7
    taps: tuple[int, ...] = (0, 1, 3)
    target_layers: int = 5
    eps: float = 1e-5
    theta: float = 50000.0
    markov_rank: int = 32
    confidence_with_markov: bool = True
    conv_taps: int = 2
    conv_group: int = 16
    selector_rank: int = 32
    selector_top_k: int = 12


def settings(method: str, shape: Shape) -> dict[str, Any]:
    """config.json as the method's publishers write it."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[method]],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * shape.layers,
        "num_target_layers": shape.target_layers,
        "dtype": "bfloat16",
    }
    pair = {"mask_token_id": shape.mask, "target_layer_ids": list(shape.taps)}
    if method == "dspark":
        return (
            config
            | pair
            | {
                "block_size": shape.block,
                "num_anchors": 512,
                "enable_confidence_head": True,
                "confidence_head_with_markov": shape.confidence_with_markov,
                "markov_rank": shape.markov_rank,
                "markov_head_type": "vanilla",
            }
        )
    if method == "dflash":
        return config | {"block_size": shape.block, "dflash_config": pair}
    # DFlash 2 keeps its block size inside, its rotary base in rope_parameters, and is explicitly not causal.
    del config["rope_theta"]
    return config | {
        "is_causal": False,
        "rope_parameters": {"rope_theta": shape.theta, "rope_type": "default"},
        "dflash_config": pair
        | {
            "block_size": shape.block,
            "conv_kernel_size": shape.conv_taps,
            "conv_group_size": shape.conv_group,
            "selector_rank": shape.selector_rank,
            "selector_top_k": shape.selector_top_k,
        },
    }


def tensor_shapes(method: str, shape: Shape) -> dict[str, tuple[int, ...]]:
    """Published tensor names and their shapes."""
    h, d = shape.hidden, shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(shape.taps) * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for i in range(shape.layers):
        layer = f"layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (h,),
            f"{layer}.post_attention_layernorm.weight": (h,),
            f"{layer}.self_attn.q_proj.weight": (shape.heads * d, h),
            f"{layer}.self_attn.k_proj.weight": (shape.kv_heads * d, h),
            f"{layer}.self_attn.v_proj.weight": (shape.kv_heads * d, h),
            f"{layer}.self_attn.o_proj.weight": (h, shape.heads * d),
            f"{layer}.self_attn.q_norm.weight": (d,),
            f"{layer}.self_attn.k_norm.weight": (d,),
            f"{layer}.mlp.gate_proj.weight": (shape.intermediate, h),
            f"{layer}.mlp.up_proj.weight": (shape.intermediate, h),
            f"{layer}.mlp.down_proj.weight": (h, shape.intermediate),
        }
        if method == "dflash2":
            for conv in ("attention_conv", "mlp_conv"):
                groups = h // shape.conv_group
                shapes[f"{layer}.{conv}.base_kernel"] = (2, shape.conv_taps, h)
                shapes[f"{layer}.{conv}.kernel_projection.weight"] = (2 * shape.conv_taps * groups, h)
    if method == "dspark":
        width = h + (shape.markov_rank if shape.confidence_with_markov else 0)
        shapes |= {
            "markov_head.markov_w1.weight": (shape.vocabulary, shape.markov_rank),
            "markov_head.markov_w2.weight": (shape.vocabulary, shape.markov_rank),
            "confidence_head.proj.weight": (1, width),
            "confidence_head.proj.bias": (1,),
        }
    if method == "dflash2":
        shapes |= dict.fromkeys(UNSUFFIXED, (shape.vocabulary, shape.selector_rank))
        shapes["candidate_selector.hidden_projection.weight"] = (shape.selector_rank, h)
    return shapes


def random_weights(method: str, shape: Shape, seed: int = 0) -> dict[str, Array]:
    """Float32 tensors whose heads and convolutions matter: nothing is near zero or near the identity."""
    random = np.random.default_rng(seed)
    weights: dict[str, Array] = {}
    for name, dims in tensor_shapes(method, shape).items():
        draw = random.standard_normal(dims, dtype=np.float32)
        if "norm" in name:
            draw = 1 + 0.3 * draw
        elif "base_kernel" in name:
            draw = 0.5 * draw
        elif name in UNSUFFIXED or "markov" in name:
            draw = 0.6 * draw
        else:
            draw = draw * (1.5 / dims[-1] ** 0.5)
        weights[name] = draw.astype(np.float32)
    return weights


def write_drafter(
    folder: Path,
    method: str,
    shape: Shape = Shape(),
    *,
    bits: int | None = None,
    seed: int = 0,
    **config: Any,
) -> dict[str, Array]:
    """Write a random checkpoint; returns its weights as the drafter has to see them.

    With `bits` the matrices are stored in MLX's affine quantisation, groups of 32, and codebooks get the
    suffix `.weight`. `config` adds to config.json or overrides it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = random_weights(method, shape, seed)
    written = settings(method, shape)
    stored = {name: mx.array(value) for name, value in weights.items()}
    if bits is not None:
        written["quantization"] = {"group_size": 32, "bits": bits, "mode": "affine"}
        for name in weights:
            base = name.removesuffix(".weight")
            if base.endswith(QUANTISED) and "confidence" not in name:
                packed, scales, biases = mx.quantize(stored.pop(name), group_size=32, bits=bits)
                parts = {"weight": packed, "scales": scales.astype(mx.bfloat16)}
                parts["biases"] = biases.astype(mx.bfloat16)
                stored |= {f"{base}.{part}": value for part, value in parts.items()}
                weights[name] = unpack(*parts.values(), bits=bits)
    mx.save_safetensors(str(folder / "model.safetensors"), stored, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(written | config))
    return weights


def unpack(packed: mx.array, scales: mx.array, biases: mx.array, bits: int) -> Array:
    """MLX's affine format: each row is one stream of `bits`-bit numbers, lowest bit first."""
    stream = np.unpackbits(np.array(packed).view(np.uint8), axis=-1, bitorder="little")
    digits = stream.reshape(len(stream), -1, bits).astype(np.int64) @ (1 << np.arange(bits))
    scale, bias = (np.array(part.astype(mx.float32)) for part in (scales, biases))
    grouped = digits.reshape(len(digits), scale.shape[-1], -1).astype(np.float32)
    return (grouped * scale[..., None] + bias[..., None]).reshape(digits.shape)


@dataclass
class NumpyTables:
    """A random embedding and head, for the engine (MLX arrays) and for the reference (NumPy).

    Remembers the last hidden states that it was asked for.
    """

    vocabulary: int
    hidden_size: int
    seed: int = 5
    embedding_scale: float = 1.0

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        dims = (self.vocabulary, self.hidden_size)
        self.embedding: Array = random.standard_normal(dims, dtype=np.float32)
        self.head_weight: Array = random.standard_normal(dims, dtype=np.float32) * np.float32(0.4)
        self.seen: mx.array | None = None

    def embed(self, ids: mx.array) -> mx.array:
        return mx.array(self.embedding)[ids]

    def head(self, hidden: mx.array) -> mx.array:
        self.seen = hidden
        return hidden @ mx.array(self.head_weight).T


def configuration(method: str, shape: Shape) -> tuple[BackboneConfig, HeadConfig]:
    """What config.json of a random checkpoint means."""
    config = BackboneConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocabulary=shape.vocabulary,
        eps=shape.eps,
        rope=Rope(shape.theta),
        block_size=shape.block,
        mask_token=shape.mask,
        taps=shape.taps,
        tap_width=shape.hidden,
        attention=(LayerAttention(),) * shape.layers,
        conv_taps=shape.conv_taps if method == "dflash2" else 0,
        conv_group=shape.conv_group,
    )
    if method == "dspark":
        reads: Literal["hidden", "hidden and markov"] = "hidden"
        if shape.confidence_with_markov:
            reads = "hidden and markov"
        return config, HeadConfig(0, markov="vanilla", markov_rank=shape.markov_rank, confidence=reads)
    if method == "dflash2":
        return config, HeadConfig(1, selector_rank=shape.selector_rank, selector_top_k=shape.selector_top_k)
    return config, HeadConfig(1)


def reference(method: str, shape: Shape, weights: dict[str, Array], tables: NumpyTables) -> Reference:
    """The NumPy drafter with the weights of a random checkpoint."""
    named = {f"{name}.weight" if name in UNSUFFIXED else name: value for name, value in weights.items()}
    return Reference(*configuration(method, shape), named, tables)
