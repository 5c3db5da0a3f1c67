"""The parts of a prompt cache and what each of them can do: which strategy serves which cache kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from dspark_tui.engine.rollback.rows import ChunkRows, JoinedRows, Rows
from dspark_tui.engine.rollback.state import Fields, State
from dspark_tui.engine.rollback.window import Window


class Part(Protocol):
    """One cache object with its strategy. Positions are counted from the start of the sequence."""

    leaf: Any
    cuts: bool
    """Whether rows can be taken off its end; else it goes back to marks only."""

    def can_cut(self, drop: int) -> bool:
        """Whether the state before the last `drop` rows can be had exactly."""
        ...

    def cut(self, drop: int) -> None:
        """Take the last `drop` rows off, which `can_cut` allows."""
        ...

    def mark(self, rows: int) -> Any:
        """What is needed to come back to this moment after a forward of `rows` rows; None: not to be had."""
        ...

    def back(self, mark: Any) -> None:
        """Come back to a mark, any number of times."""
        ...

    def adopted(self) -> None:
        """The object comes from elsewhere, with nothing but its state."""
        ...

    def save(self) -> Any:
        """Arrays (a tree of them, with plain values) for `load`; safe from whatever happens to the cache."""
        ...

    def load(self, saved: Any, drop: int) -> None:
        """Come back to what `save` gave, which is `drop` rows ago for a part that only grows."""
        ...


_STRATEGIES: dict[type, Any] = {
    KVCache: Rows,
    QuantizedKVCache: Rows,
    ChunkedKVCache: ChunkRows,
    ConcatenateKVCache: JoinedRows,
    RotatingKVCache: Window,
    ArraysCache: State,
}


def leaves(cache: Sequence[Any]) -> Iterator[Any]:
    """The cache objects of a prompt cache, lists of them unfolded, in order."""
    for layer in cache:
        if isinstance(layer, CacheList):
            yield from leaves(layer.caches)
        elif layer is not None:
            yield layer


def parts(cache: Sequence[Any]) -> list[Part]:
    """Every cache object with its strategy. Kinds are matched exactly: a subclass may do something else."""
    return [_STRATEGIES.get(type(leaf), Fields)(leaf) for leaf in leaves(cache)]


def problem(cache: Sequence[Any]) -> str | None:
    """Why this prompt cache cannot be rolled back, in words, or None when it can."""
    kinds = sorted({type(leaf).__name__ for leaf in leaves(cache) if not _understood(leaf)})
    return f"its cache ({', '.join(kinds)}) cannot give up rejected tokens" if kinds else None


def _understood(leaf: Any) -> bool:
    if isinstance(leaf, RotatingKVCache):
        # With rows kept at the front, mlx-lm's own forward of several rows differs from single steps.
        return bool(leaf.keep == 0)
    return type(leaf) in _STRATEGIES or hasattr(leaf, "__dict__")


def arrays_of(cache: Sequence[Any]) -> list[mx.array]:
    """Every array of a prompt cache."""
    found: list[mx.array] = []
    for leaf in leaves(cache):
        _collect(vars(leaf) if hasattr(leaf, "__dict__") else leaf.state, found)
    return found


def _collect(value: Any, found: list[mx.array]) -> None:
    if isinstance(value, mx.array):
        found.append(value)
    elif isinstance(value, dict):
        _collect(list(value.values()), found)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, found)
