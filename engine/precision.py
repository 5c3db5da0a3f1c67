"""Numerics per device: quantised on a GPU, float32 on the CPU.

MLX's CPU backend multiplies quantised, bf16 and fp16 matrices one row at a time and imprecisely; float32
goes through BLAS, where eight rows cost little more than one.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten


def on_cpu() -> bool:
    """Whether this thread computes on the CPU (no Metal, no CUDA)."""
    return bool(mx.default_device() == mx.Device(mx.cpu))


def drafter_dtype() -> mx.Dtype:
    """Float32 on the CPU, else bf16: DFlash 2's residual stream overflows fp16."""
    return mx.float32 if on_cpu() else mx.bfloat16


def dequantised(module: nn.QuantizedLinear | nn.QuantizedEmbedding) -> nn.Module:
    """A float32 linear or embedding with the numbers of a quantised one (scale x q + bias in float32).
    Lazy."""
    biases = module.get("biases")
    weight = mx.dequantize(
        module.weight,
        module.scales if biases is None else module.scales.astype(mx.float32),
        None if biases is None else biases.astype(mx.float32),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    ).astype(mx.float32)
    wide: nn.Module
    if isinstance(module, nn.QuantizedLinear):
        wide = nn.Linear(1, 1, bias="bias" in module)
        if "bias" in module:
            wide.bias = module.bias
    else:
        wide = nn.Embedding(1, 1)
    wide.weight = weight
    return wide


def to_float32(module: nn.Module) -> None:
    """Turn every quantised linear and embedding of `module` into a float32 one, and every other floating
    parameter into float32, in place and evaluated."""
    replaced = [
        (path, dequantised(child))
        for path, child in module.named_modules()
        if isinstance(child, nn.QuantizedLinear | nn.QuantizedEmbedding)
    ]
    if replaced:
        module.update_modules(tree_unflatten(replaced))
    module.set_dtype(mx.float32)
    mx.eval(module.parameters())


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all parameters of `module` as they stand in memory."""
    parameters: Any = tree_flatten(module.parameters())
    return sum(value.nbytes for _, value in parameters)
