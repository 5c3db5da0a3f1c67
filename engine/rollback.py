"""Taking rejected rows out of a target's cache, one strategy per cache kind.

After `truncate` the cache is what step-by-step decoding of the kept tokens would have left. A kind that
has no such strategy is refused by name: a cache that only pretends to be trimmed gives wrong text
(mlx-lm's `RotatingKVCache` keeps rejected rows once its window has wrapped).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import KVCache


def problem(cache: Sequence[Any]) -> str | None:
    """Why this prompt cache cannot be rolled back, in words, or None when it can."""
    kinds = sorted({type(layer).__name__ for layer in cache if type(layer) is not KVCache})
    if kinds:
        return f"its cache ({', '.join(kinds)}) cannot give up rejected tokens"
    return None


def truncate(cache: Sequence[Any], length: int) -> None:
    """Leave the first `length` positions in every layer's cache.

    Raises `ValueError` when a layer holds fewer, or is of a kind that `problem` refuses.
    """
    if reason := problem(cache):
        raise ValueError(reason)
    for layer in cache:
        surplus = layer.offset - length
        if surplus < 0:
            raise ValueError(f"cannot keep {length} positions: the cache holds {layer.offset}")
        layer.trim(surplus)
