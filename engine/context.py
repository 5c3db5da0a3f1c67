"""Context rows: what the taps saw at committed positions, kept so that any drafter can start warm."""

from __future__ import annotations

import mlx.core as mx

WINDOW = 4096
"""Newest positions that are kept. Published heads are trained on contexts of 4,096 tokens."""

LIMIT = 512 * 1024 * 1024
"""Bytes that the rows may take: 4,096 positions of five taps of width 5,120 are 200 MiB in bf16."""

_COMPACT_AT = 64


class ContextRows:
    """Tap rows of the positions `base` to `length - 1`, `[*, taps * hidden]`: the newest `window` of them,
    and as many before as came with those in one piece."""

    def __init__(self, window: int = WINDOW, limit: int = LIMIT) -> None:
        """`limit`: bytes; where wide rows would take more, fewer positions are kept."""
        self.window, self._limit = window, limit
        self.base = 0
        self.length = 0
        self._chunks: list[mx.array] = []

    def append(self, rows: mx.array) -> None:
        """Add the rows `[n, width]` of the next `n` committed positions."""
        self._chunks.append(rows)
        self.length += rows.shape[0]
        window = min(self.window, max(1, self._limit // max(1, rows[:1].nbytes)))
        while self._chunks and self.length - self.base - self._chunks[0].shape[0] >= window:
            self.base += self._chunks.pop(0).shape[0]
        if len(self._chunks) > _COMPACT_AT:
            start, merged = self.since(self.length - window)
            assert merged is not None
            mx.eval(merged)
            self._chunks, self.base = [merged], start

    @property
    def bytes(self) -> int:
        """Memory of the kept rows."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def since(self, position: int) -> tuple[int, mx.array | None]:
        """`(start, rows)`: the kept rows from `position` on. `start` is above `position` when older rows
        are gone; `rows` is None when there is none."""
        start = max(position, self.base)
        if start >= self.length:
            return start, None
        skip = start - self.base
        wanted: list[mx.array] = []
        for chunk in self._chunks:
            if skip >= chunk.shape[0]:
                skip -= chunk.shape[0]
                continue
            wanted.append(chunk[skip:] if skip else chunk)
            skip = 0
        return start, wanted[0] if len(wanted) == 1 else mx.concatenate(wanted)

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on."""
        if length >= self.length:
            return
        while self._chunks and self.length > length:
            last = self._chunks.pop()
            self.length -= last.shape[0]
            keep = length - self.length
            if keep > 0:
                self._chunks.append(last[:keep])
                self.length = length
        if self.length > length or not self._chunks:
            self.reset(length)

    def reset(self, position: int = 0) -> None:
        """Forget everything; the next row belongs to `position`."""
        self._chunks, self.base, self.length = [], position, position
