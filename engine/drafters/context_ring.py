"""The committed context of one drafter layer: keys and values at absolute positions.

A layer with a window keeps the newest `window - 1` rows, since a row of the block sees itself too. What
was kept and what was dropped is known, so a context that is cut back is never silently too short.
"""

from __future__ import annotations

import mlx.core as mx

from dspark_tui.engine.drafters.config import LayerAttention

_STEP = 256
"""Rows that a buffer grows by."""


class ContextRing:
    """Keys and values `[1, kv_heads, n, head_dim]` of the positions `base` to `length - 1`."""

    def __init__(self, layer: LayerAttention, limit: int | None = None) -> None:
        """`limit`: newest rows to keep, besides what the layer's window asks for."""
        bounds = [limit] if limit is not None else []
        if layer.window is not None:
            bounds.append(layer.window - 1)
        self.layer = layer
        self.limit = min(bounds, default=None)
        self._mask: tuple[tuple[int, int], mx.array] | None = None
        self.reset()

    def reset(self, position: int = 0) -> None:
        """Forget everything; the next row belongs to `position`."""
        self.first = self.base = self.length = position
        self._start = 0
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    # ------------------------------------------------------------------ rows

    def skip(self, coming: int) -> int:
        """Of `coming` rows, how many would be dropped at once. They count as seen from here on."""
        surplus = 0 if self.limit is None else max(0, coming - self.limit)
        if surplus:
            self.skip_to(self.length + surplus)
        return surplus

    def skip_to(self, position: int) -> None:
        """Drop what is held and go on at `position`; the rows before it count as seen."""
        self.base = self.length = position
        self._start = 0

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add the rows of the next positions, and drop those that no block can see any more."""
        self._write(keys, values)
        self.length += keys.shape[2]
        if self.limit is not None and (surplus := self.length - self.base - self.limit) > 0:
            self.base += surplus
            self._start += surplus

    def with_block(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The context's rows and behind them those of a block, which are not kept."""
        return self._write(keys, values)

    def _write(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Put rows behind the context's own; returns both."""
        held, count = self.length - self.base, keys.shape[2]
        if self._keys is None or self._values is None:
            self._keys, self._values = _room(keys, held + count), _room(values, held + count)
        elif self._start + held + count > self._keys.shape[2]:
            kept = slice(self._start, self._start + held)
            self._keys, self._values = (
                mx.concatenate([buffer[:, :, kept], _room(buffer, count)], axis=2)
                for buffer in (self._keys, self._values)
            )
            self._start = 0
        end = self._start + held
        self._keys[:, :, end : end + count] = keys
        self._values[:, :, end : end + count] = values
        seen = slice(self._start, end + count)
        return self._keys[:, :, seen], self._values[:, :, seen]

    def rows(self) -> list[mx.array]:
        """Keys and values of the positions that are held, none before the first."""
        seen = slice(self._start, self._start + self.length - self.base)
        return [array[:, :, seen] for array in self.state()]

    def truncate(self, length: int) -> bool:
        """Forget the positions from `length` on; false, and nothing done, when rows that a context of this
        length would hold have been dropped already."""
        if length >= self.length:
            return True
        wanted = self.first if self.limit is None else max(self.first, length - self.limit)
        if length < self.first or self.base > wanted:
            return False
        self.length = length
        return True

    def state(self) -> list[mx.array]:
        """The arrays, to evaluate."""
        return [array for array in (self._keys, self._values) if array is not None]

    # ------------------------------------------------------------------ who sees what

    def mask(self, rows: int) -> mx.array | str | None:
        """For a block of `rows` behind the context: None when every row sees everything, "causal", or a
        boolean `[rows, held + rows]`."""
        held, window = self.length - self.base, self.layer.window
        if window is None or held + rows <= window:
            return "causal" if self.layer.causal else None
        if self._mask is None or self._mask[0] != (held, rows):
            distance = mx.arange(held, held + rows)[:, None] - mx.arange(held + rows)
            # A row behind counts as far as one before: without causality the window reaches both ways.
            seen = mx.logical_and(distance < window, distance > (-1 if self.layer.causal else -window))
            self._mask = (held, rows), seen
        return self._mask[1]


def _room(like: mx.array, rows: int) -> mx.array:
    """Zeros for at least `rows` rows."""
    _, heads, _, width = like.shape
    return mx.zeros((1, heads, -(-rows // _STEP) * _STEP, width), dtype=like.dtype)
