"""Recurrent state, which cannot be cut: it goes back to what it was before a forward."""

from __future__ import annotations

from typing import Any

from dspark_tui.engine.rollback.arrays import frozen


class _Marked:
    cuts = False

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf

    def can_cut(self, drop: int) -> bool:
        """Only by nothing."""
        return drop == 0

    def cut(self, drop: int) -> None:
        """Nothing: `can_cut` allows no more."""

    def adopted(self) -> None:
        """Nothing to find out."""

    def save(self) -> Any:
        """As `mark`."""
        return frozen(vars(self.leaf))

    def load(self, saved: Any, drop: int) -> None:
        """As `back`."""
        vars(self.leaf).update(frozen(saved))


class State(_Marked):
    """`ArraysCache`: its arrays are put anew by every forward and never written in place, so that keeping
    them costs nothing."""

    def mark(self, rows: int) -> Any:
        """The arrays themselves."""
        leaf = self.leaf
        return list(leaf.cache), leaf.left_padding, leaf.lengths

    def back(self, mark: Any) -> None:
        """Put them back."""
        arrays, self.leaf.left_padding, self.leaf.lengths = mark
        self.leaf.cache = list(arrays)


class Fields(_Marked):
    """A cache of a kind that is not known: all of its fields are kept before a forward of several rows.

    Before one row they are not: such a step is never rejected, and a kept array that is then written in
    place would be copied for every token.
    """

    def mark(self, rows: int) -> Any:
        """The fields, or None before a single row."""
        return frozen(vars(self.leaf)) if rows > 1 else None

    def back(self, mark: Any) -> None:
        """Put them back."""
        vars(self.leaf).clear()
        vars(self.leaf).update(frozen(mark))
