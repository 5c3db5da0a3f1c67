"""Where a target keeps its embedding, its layers and its head, whatever its modules are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dspark_tui.engine.intercept import intercept
from dspark_tui.engine.rollback.mixers import find_mixers
from dspark_tui.engine.taps import residual

_TABLES = (nn.Embedding, nn.QuantizedEmbedding)
_PROBE = (1, 2, 3)
"""Token ids of the forward that is looked at; every vocabulary has them."""


@dataclass(frozen=True)
class Anatomy:
    """`head` is None when the embedding is the head as well. `scale`: what the model multiplies embedding
    rows by before layer 0. `mixers`: see `find_mixers`."""

    layers: Sequence[nn.Module]
    embedding: nn.Module
    head: nn.Module | None
    hidden_size: int
    scale: float
    mixers: dict[int, nn.Module] | None


def examine(model: nn.Module, cache: list[Any]) -> Anatomy:
    """Look at one forward of three tokens over a fresh `cache`, which is used up by it. Of the numbers only
    the embedding is computed.

    Raises `ValueError` with words when something is not found.
    """
    layers: Sequence[nn.Module] = getattr(model, "layers", None) or ()
    if not layers:
        raise ValueError("it has no list of decoder layers")
    inside = {id(module) for layer in layers for _, module in layer.named_modules()}
    outside = [(path, module) for path, module in model.named_modules() if id(module) not in inside]
    looked_up: list[tuple[nn.Module, mx.array]] = []
    received: list[mx.array] = []

    def embed(table: nn.Module) -> Callable[..., Any]:
        def around(call: Any, *args: Any, **kwargs: Any) -> Any:
            rows = call(*args, **kwargs)
            looked_up.append((table, mx.stop_gradient(rows)))
            return rows

        return around

    def first(call: Any, *args: Any, **kwargs: Any) -> Any:
        received.append(residual(args or tuple(kwargs.values())))
        return call(*args, **kwargs)

    undo = [intercept(table, embed(table)) for _, table in outside if isinstance(table, _TABLES)]
    undo.append(intercept(layers[0], first))
    try:
        mixers = find_mixers(layers, cache, lambda: model(mx.array([_PROBE], dtype=mx.uint32), cache=cache))
    finally:
        for restore in undo:
            restore()
    if not received:
        raise ValueError("its first decoder layer takes no part in its forward")
    hidden = received[0]
    fitting = [(table, rows) for table, rows in looked_up if rows.shape == hidden.shape]
    if not fitting:
        raise ValueError("it has no token embedding as wide as its layers")
    table, rows = fitting[0]
    return Anatomy(
        layers=layers,
        embedding=table,
        head=_head(outside, int(table.weight.shape[0])),
        hidden_size=int(hidden.shape[-1]),
        scale=_scale(hidden, rows),
        mixers=mixers,
    )


def _head(outside: list[tuple[str, nn.Module]], vocabulary: int) -> nn.Module | None:
    named = [module for path, module in outside if path.split(".")[-1] == "lm_head"]
    if named:
        return named[0]
    wide = [
        module
        for _, module in outside
        if isinstance(module, nn.Linear | nn.QuantizedLinear) and module.weight.shape[0] == vocabulary
    ]
    return wide[-1] if wide else None


def _scale(hidden: mx.array, rows: mx.array) -> float:
    """The factor between two `[1, n, hidden]` arrays, 1 when it is no factor.

    Least squares, which rounding of 16-bit numbers hardly moves; a value next to one that models use is
    that value.
    """
    root = hidden.shape[-1] ** 0.5
    rounded = _number(mx.array(root, dtype=mx.bfloat16))
    hidden, rows = hidden.astype(mx.float32), rows.astype(mx.float32)
    factor = (hidden * rows).sum() / mx.maximum((rows * rows).sum(), 1e-30)
    off = mx.abs(hidden - factor * rows).max() / mx.maximum(mx.abs(hidden).max(), 1e-30)
    measured = _number(factor)
    if not _number(off) < 0.02:
        return 1.0
    nearest = min((1.0, root, rounded), key=lambda value: abs(value - measured))
    return nearest if abs(nearest - measured) < 5e-4 * nearest else measured


def _number(array: mx.array) -> float:
    return float(array.item())  # type: ignore[arg-type]
