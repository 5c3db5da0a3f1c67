"""Caches that keep every position: rows are taken off the end."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


class Rows:
    """`KVCache` and `QuantizedKVCache`: rows past `offset` are reserve, and written over by the next step."""

    cuts = True

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf

    def can_cut(self, drop: int) -> bool:
        """Any row that is there."""
        return bool(drop <= self.leaf.offset)

    def cut(self, drop: int) -> None:
        """Lower the count."""
        self.leaf.offset -= drop

    def mark(self, rows: int) -> None:
        """Not needed: rows are cut."""

    def back(self, mark: Any) -> None:
        """Never asked for, since there are no marks."""

    def adopted(self) -> None:
        """Nothing to find out."""

    def save(self) -> Any:
        """Nothing: the rows stay where they are as long as the sequence begins with the same tokens."""
        return None

    def load(self, saved: Any, drop: int) -> None:
        """Cut to what was there then."""
        self.cut(drop)


class JoinedRows(Rows):
    """`ConcatenateKVCache`: its own `trim` lowers the count, and the rows come back with the next one."""

    def cut(self, drop: int) -> None:
        """Slice the rows off."""
        leaf, left = self.leaf, self.leaf.offset - drop
        if left == 0:
            leaf.keys = leaf.values = None
        elif drop:
            leaf.keys, leaf.values = leaf.keys[..., :left, :], leaf.values[..., :left, :]
        leaf.offset = left


class ChunkRows(Rows):
    """`ChunkedKVCache`: rows of earlier chunks are dropped at the front before a forward."""

    def can_cut(self, drop: int) -> bool:
        """As long as what is left still reaches back a whole chunk."""
        left = self.leaf.offset - drop
        return bool(left >= 0 and left - self.leaf.start_position >= min(left, self.leaf.chunk_size))

    def save(self) -> Any:
        """The rows from the front on, since the front moves."""
        leaf = self.leaf
        if leaf.keys is None:
            return None
        held = leaf.offset - leaf.start_position
        rows = [mx.contiguous(part[..., :held, :]) for part in (leaf.keys, leaf.values)]
        return (*rows, leaf.offset, leaf.start_position)

    def load(self, saved: Any, drop: int) -> None:
        """Put the rows back."""
        leaf = self.leaf
        if saved is None:
            leaf.keys, leaf.values, leaf.offset, leaf.start_position = None, None, 0, 0
            return
        keys, values, leaf.offset, leaf.start_position = saved
        leaf.keys, leaf.values = mx.stop_gradient(keys), mx.stop_gradient(values)
