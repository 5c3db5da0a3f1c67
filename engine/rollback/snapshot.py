"""A target's state at one moment, to come back to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from dspark_tui.engine.rollback.parts import parts


@dataclass(frozen=True)
class Snapshot:
    """The state after `length` positions. It holds what cannot be cut back: sliding windows and recurrent
    state. Rows of layers that keep every position stay in the cache.

    So it can be restored as long as the sequence still begins with its `tokens`, whatever came after them
    and was taken back again; nothing that happens to the cache changes it.
    """

    tokens: tuple[int, ...]
    saved: tuple[Any, ...]
    bytes: int
    """Memory of the arrays that it holds."""

    @property
    def length(self) -> int:
        """Number of positions."""
        return len(self.tokens)

    def begins(self, tokens: Sequence[int]) -> bool:
        """Whether `tokens` start with those of the snapshot."""
        return len(tokens) >= self.length and tuple(tokens[: self.length]) == self.tokens


def take(cache: Sequence[Any], tokens: Sequence[int]) -> Snapshot:
    """The state of a cache that holds exactly `tokens`. Its arrays are computed."""
    saved = tuple(part.save() for part in parts(cache))
    arrays = [a for tree in saved for a in _arrays(tree)]
    mx.eval(arrays)
    return Snapshot(tuple(tokens), saved, sum(array.nbytes for array in arrays))


def restore(cache: Sequence[Any], snapshot: Snapshot, held: int) -> None:
    """Bring a cache of `held` positions, which begin with the snapshot's, back to it."""
    for part, saved in zip(parts(cache), snapshot.saved, strict=True):
        part.load(saved, held - snapshot.length)


def _arrays(tree: Any) -> list[mx.array]:
    if isinstance(tree, mx.array):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, list | tuple):
        return [a for item in tree for a in _arrays(item)]
    return []
