"""Keeping arrays safe from writes in place."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def alias(array: mx.array) -> mx.array:
    """The same numbers as an object of their own, without a copy.

    `a[...] = b` changes the object `a`, so a kept reference is no snapshot; MLX copies the numbers when a
    write would reach somebody else's object.
    """
    return mx.stop_gradient(array)


def frozen(value: Any) -> Any:
    """`value` with every array aliased and every container copied."""
    if isinstance(value, mx.array):
        return alias(value)
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, list):
        return [frozen(item) for item in value]
    if isinstance(value, tuple):
        return tuple(frozen(item) for item in value)
    return value
