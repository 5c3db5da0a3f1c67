"""Keys and values of the target in 8 or 4 bits: which layers take it, and which models refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

BITS = (8, 4)
Run = Callable[[list[Any]], mx.array]
_GROUPS = (64, 32)
"""Group sizes of MLX, the larger first: fewer scales."""


def problem(bits: int | None) -> str | None:
    """One sentence when `bits` is no choice, else None."""
    if bits is None or bits in BITS:
        return None
    return f"kv-bits is {bits}; give 8 or 4, or leave it out to keep keys and values whole."


class KvBits:
    """Makes the caches of one model with plain keys and values quantised; sliding windows stay whole."""

    def __init__(
        self, bits: int, make_cache: Callable[[], list[Any]], run: Callable[[list[Any]], Any]
    ) -> None:
        """`run(cache)` is a forward of a token or two over `cache`, returning what to evaluate.

        Raises `ValueError` with a reason, without a full stop, when the model cannot do it.
        """
        self.bits, self._make = bits, make_cache
        whole = make_cache()
        mx.eval(run(whole))
        self._groups = [_group(layer) for layer in whole]
        if not any(self._groups):
            raise ValueError(
                f"it has no layer whose keys and values could be kept in {bits} bits; load it without kv-bits"
            )
        try:
            mx.eval(run(self.cache()))
        except (ValueError, TypeError, AttributeError, RuntimeError, IndexError) as error:
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise ValueError(
                f"its attention takes no keys and values in {bits} bits ({reason}); load it without kv-bits"
            ) from error

    def cache(self) -> list[Any]:
        """A fresh cache of the model."""
        layers: Sequence[Any] = self._make()
        return [
            layer if group is None else QuantizedKVCache(group_size=group, bits=self.bits)
            for layer, group in zip(layers, self._groups, strict=True)
        ]


def _group(layer: Any) -> int | None:
    """The group size for a layer's cache, which holds a row or two; None when it stays whole.

    Raises `ValueError` when its rows do not divide.
    """
    if type(layer) is not KVCache or layer.keys is None or layer.values is None:
        return None
    widths = (layer.keys.shape[-1], layer.values.shape[-1])
    for group in _GROUPS:
        if not any(width % group for width in widths):
            return group
    raise ValueError(
        f"its keys and values are {' and '.join(str(w) for w in sorted({*widths}))} wide, which groups of "
        f"{_GROUPS[-1]} do not divide; load it without kv-bits"
    )
