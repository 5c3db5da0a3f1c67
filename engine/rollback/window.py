"""Sliding windows: rejected rows are physically dropped, also after the window has wrapped."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from dspark_tui.engine.rollback.arrays import alias


class Window:
    """`RotatingKVCache` with `keep` 0.

    A forward of several rows puts the buffer in order of time, `max_size - 1` rows of before and the new
    ones; a forward of one row writes in place over the oldest. The next token sees `max_size - 1` rows of
    before, so the state before a forward is there as long as so many remain. mlx-lm needs `max_size` rows
    in a window that has wrapped: a row that stands for the one already overwritten fills up the front, and
    is itself the next to go. `stale_at` is the count at which such a row is there.
    """

    cuts = True

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf

    def _wrapped(self) -> bool:
        """Whether the oldest row stands in the middle of the buffer."""
        leaf = self.leaf
        return bool(leaf.keys is not None and leaf._idx < leaf.keys.shape[2] and leaf._idx < leaf.offset)

    def _stale(self) -> bool:
        """Whether the oldest row is one that fills up."""
        return bool(getattr(self.leaf, "stale_at", None) == self.leaf.offset)

    def _held(self) -> int:
        """Rows with numbers of the sequence."""
        leaf = self.leaf
        if leaf.keys is None:
            return 0
        rows = leaf.keys.shape[2] if self._wrapped() else leaf._idx
        return int(rows) - int(self._stale())

    def can_cut(self, drop: int) -> bool:
        """As long as what is left fills the window of the next token."""
        left = self.leaf.offset - drop
        return bool(left >= 0 and self._held() - drop >= min(left, self.leaf.max_size - 1))

    def cut(self, drop: int) -> None:
        """Drop rows off the end, or off the writing position of a ring."""
        leaf = self.leaf
        if drop == 0:
            return
        left = leaf.offset - drop
        if left == 0:
            leaf.keys, leaf.values, leaf.offset, leaf._idx = None, None, 0, 0
        elif self._wrapped():
            # One row, whose place is the next to be written again.
            leaf._idx -= drop
            leaf.stale_at = left
        else:
            rows = leaf._idx - drop
            missing = min(left, leaf.max_size) - rows
            leaf.keys, leaf.values = (_cut(part, rows, missing) for part in (leaf.keys, leaf.values))
            leaf._idx = rows + max(missing, 0)
            if missing > 0:
                leaf.stale_at = left
        leaf.offset = left

    def mark(self, rows: int) -> None:
        """Not needed: rows are cut."""

    def back(self, mark: Any) -> None:
        """Never asked for, since there are no marks."""

    def adopted(self) -> None:
        """Trust every row but the oldest."""
        if self.leaf.keys is not None and self.leaf.offset >= self.leaf.max_size:
            self.leaf.stale_at = self.leaf.offset

    def save(self) -> Any:
        """The window's rows in order of time, copied."""
        leaf = self.leaf
        if leaf.keys is None:
            return None
        at, wrapped = leaf._idx, self._wrapped()
        saved = []
        for part in (leaf.keys, leaf.values):
            rows = mx.concatenate([part[..., at:, :], part[..., :at, :]], 2) if wrapped else part[..., :at, :]
            saved.append(mx.contiguous(rows[..., -leaf.max_size :, :]))
        stale = self._stale() and saved[0].shape[2] >= leaf.max_size
        return (*saved, leaf.offset, stale)

    def load(self, saved: Any, drop: int) -> None:
        """Put the rows back."""
        leaf = self.leaf
        if saved is None:
            leaf.keys, leaf.values, leaf.offset, leaf._idx = None, None, 0, 0
            return
        keys, values, leaf.offset, stale = saved
        leaf.keys, leaf.values, leaf._idx = alias(keys), alias(values), int(keys.shape[2])
        leaf.stale_at = leaf.offset if stale else None


def _cut(part: mx.array, rows: int, missing: int) -> mx.array:
    kept = part[..., :rows, :]
    if missing <= 0:
        return kept
    return mx.concatenate(
        [mx.broadcast_to(part[..., :1, :], (*part.shape[:2], missing, part.shape[3])), kept], 2
    )
