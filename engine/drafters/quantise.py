"""Drafters quantised as they are loaded.

Only the large products of the layers become narrow (and tables of the drafter's own, at 8 bits). Norms, `fc`,
convolutions, selector, Markov and confidence stay wide: they cost little, and acceptance hangs on them.
"""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from dspark_tui.engine.precision import dequantised

CHOICES = (8, 4, 0)
"""Bits that can be asked for; 0 keeps a drafter as it is stored."""
_NARROW = re.compile(r"layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj")
_TABLES = ("embed_tokens", "lm_head")


def narrow(path: str) -> bool:
    """Whether the module at `path` is one of the layers' large products."""
    return _NARROW.fullmatch(path) is not None


def requantise(model: nn.Module, bits: int) -> None:
    """Store the layers' products in `bits` bits, whatever they were stored in, and the drafter's own tables
    in 8. Lazy. Groups of 64, of 32 where 64 does not divide; what neither divides stays as it is.

    Rounding starts from bf16, the precision of published weights, so that every device gets the same
    numbers.
    """
    wide: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        if narrow(path) or path in _TABLES:
            if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
                module = dequantised(module)
                wide.append((path, module))
            module.weight = module.weight.astype(mx.bfloat16)
    if wide:
        model.update_modules(tree_unflatten(wide))

    def how(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not (narrow(path) or path in _TABLES):
            return False
        columns = module.weight.shape[-1]
        group = next((size for size in (64, 32) if columns % size == 0), None)
        return group is not None and {
            "group_size": group,
            "bits": bits if narrow(path) else 8,
            "mode": "affine",
        }

    nn.quantize(model, class_predicate=how)
