"""The tensors that a drafter must have, and whether a checkpoint's headers agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark_tui.engine.drafters.config import BackboneConfig, HeadConfig
from dspark_tui.engine.drafters.formats.errors import CheckpointError
from dspark_tui.engine.drafters.formats.stored import Tensor

Shape = tuple[int, ...]
_FLOATS = ("F32", "F16", "BF16")
_INTEGERS = ("I64", "I32")
_HARMLESS = ("verifier_", "t2d", "d2t", "embed_tokens.", "lm_head.")
"""Beginnings of names of tensors that a drafter may carry and does not need."""
_COMPUTING = ("layers.", "markov_head.", "candidate_selector.")
"""Beginnings of names of tensors that would change what the network computes."""


def layout(config: BackboneConfig, head: HeadConfig) -> dict[str, Shape]:
    """Every parameter's shape by name, as published (codebooks with the suffix `.weight`)."""
    hidden, rank = config.hidden_size, head.markov_rank
    drafted = head.draft_vocabulary or config.vocabulary
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, len(config.taps) * config.tap_width),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    one = _layer(config)
    for i in range(config.layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in one.items()}
    if head.own_embedding:
        shapes["embed_tokens.weight"] = (config.vocabulary, hidden)
    if head.own_head:
        shapes["lm_head.weight"] = (drafted, hidden)
    if head.markov is not None:
        shapes["markov_head.markov_w1.weight"] = (config.vocabulary, rank)
        shapes["markov_head.markov_w2.weight"] = (drafted, rank)
    if head.markov == "gated":
        shapes |= {
            "markov_head.gate_proj.weight": (rank, hidden + rank),
            "markov_head.gate_proj.bias": (rank,),
        }
    if head.markov == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if head.confidence is not None:
        width = hidden + (rank if head.confidence == "hidden and markov" else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    if head.selector_rank:
        shapes["candidate_selector.predecessor_codebook.weight"] = (config.vocabulary, head.selector_rank)
        shapes["candidate_selector.successor_codebook.weight"] = (config.vocabulary, head.selector_rank)
        shapes["candidate_selector.hidden_projection.weight"] = (head.selector_rank, hidden)
    return shapes


def _layer(config: BackboneConfig) -> dict[str, Shape]:
    """One layer's parameters."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.heads * head, config.kv_heads * head
    linears = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    if config.keys_are_values:
        del linears["self_attn.v_proj"]
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.style == "gemma4":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes: dict[str, Shape] = {f"{name}.weight": (hidden,) for name in norms}
    shapes |= {f"self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
    shapes |= {f"{name}.weight": shape for name, shape in linears.items()}
    if config.attention_bias:
        shapes |= {f"{n}.bias": shape[:1] for n, shape in linears.items() if n.startswith("self_attn.")}
    if config.style == "gemma4":
        shapes["layer_scalar"] = (1,)
    if config.conv_taps:
        coefficients = 2 * config.conv_taps * (hidden // config.conv_group)
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"{name}.base_kernel"] = (2, config.conv_taps, hidden)
            shapes[f"{name}.kernel_projection.weight"] = (coefficients, hidden)
    return shapes


def quantization_of(path: str, quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    """How the module at `path` is stored: its own entry, else the one for all."""
    own = quantization.get(path)
    return own if isinstance(own, Mapping) else quantization


def check(
    name: str,
    config: BackboneConfig,
    head: HeadConfig,
    tensors: Mapping[str, Tensor],
    quantization: Mapping[str, Any] | None,
) -> list[str]:
    """Compare the headers with the configuration; returns the names of tensors that nobody expects and that
    change nothing. Raises `CheckpointError` for whatever is missing, misshapen or unexpected in the network.
    """
    gated = (2 * config.heads * config.head_dim, config.hidden_size)
    if (query := tensors.get("layers.0.self_attn.q_proj.weight")) is not None and query.shape == gated:
        raise CheckpointError(f"{name} cannot be used: its attention is gated (q_proj has twice its rows).")
    if config.layers > len(tensors):
        raise _contradiction(name, f"{config.layers} layers, but {len(tensors)} tensors")
    wanted = layout(config, head)
    if head.draft_vocabulary is not None:
        if not head.own_head:
            raise _contradiction(name, "a reduced vocabulary, but no lm_head.weight")
        wanted["d2t"] = (head.draft_vocabulary,)
    known = set(wanted)
    for path, shape in wanted.items():
        base = path.removesuffix(".weight")
        if f"{base}.scales" in tensors and path.endswith(".weight"):
            known |= {f"{base}.scales", f"{base}.biases"}
            _check_quantised(name, base, shape, tensors, quantization)
            continue
        found = tensors.get(path)
        if found is None:
            raise _contradiction(name, f"{path} is missing")
        if found.shape != shape:
            raise _contradiction(name, f"{path} is {_times(found.shape)}, {_times(shape)} was expected")
        allowed = _INTEGERS if path == "d2t" else _FLOATS
        if found.dtype not in allowed:
            raise CheckpointError(
                f"{name} cannot be used: it stores {path} as {found.dtype[:20]}, "
                f"{' or '.join(allowed)} was expected."
            )
    extras = [path for path in tensors if path not in known and not path.startswith(_HARMLESS)]
    extras = [path for path in extras if not path.endswith("rotary_emb.inv_freq")]
    if computing := [path for path in extras if path.startswith(_COMPUTING)]:
        raise _contradiction(name, f"{computing[0][:80]} is not part of such a drafter")
    return sorted(extras)


def _check_quantised(
    name: str, base: str, shape: Shape, tensors: Mapping[str, Tensor], quantization: Mapping[str, Any] | None
) -> None:
    """MLX's format: `bits`-bit numbers packed in 32-bit words, scales and biases for every group."""
    if quantization is None:
        raise _contradiction(name, f"{base} is quantised, but config.json gives no quantization")
    how = quantization_of(base, quantization)
    bits, group = how.get("bits"), how.get("group_size")
    if type(bits) is not int or type(group) is not int or not 0 < bits <= 8 or group < 1:
        raise _contradiction(name, f"{base} is quantised without a group_size and bits")
    rows, columns = shape if len(shape) == 2 else (0, 0)
    parts = {"weight": (rows, columns * bits // 32), "scales": (rows, columns // group)}
    if how.get("mode", "affine") == "affine" or f"{base}.biases" in tensors:
        parts["biases"] = parts["scales"]
    for part, expected in parts.items():
        found = tensors.get(f"{base}.{part}")
        if found is None or found.shape != expected or columns % group:
            there = "missing" if found is None else _times(found.shape)
            raise _contradiction(
                name,
                f"{base}.{part} is {there}, {_times(expected)} was expected for {bits} bits in groups of "
                f"{group}",
            )


def _contradiction(name: str, detail: str) -> CheckpointError:
    return CheckpointError(f"{name} does not hold what its config.json says ({detail}).")


def _times(shape: Shape) -> str:
    return " x ".join(map(str, shape))[:60] or "a single number"
