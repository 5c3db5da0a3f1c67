"""Forwards that may be taken back, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dspark_tui.engine.rollback.mixers import Mixer, Tape
from dspark_tui.engine.rollback.parts import Part, arrays_of, leaves, parts

Run = Callable[[Sequence[int]], None]
"""Runs committed tokens through the model once more, over the present cache; nobody reads the logits."""

TOLERANCE, TOLERANCE_NARROW = 1e-3, 0.1
"""How far a replayed state may lie from a recomputed one, of its largest number: products of other widths
round differently, and 16-bit ones a lot."""


@dataclass
class _Forward:
    start: int
    rows: int
    marks: list[Any]
    tapes: dict[int, Tape | None] | None

    @property
    def end(self) -> int:
        return self.start + self.rows


class Undo:
    """Takes rows back out of a cache.

    Rows are cut where the cache kind allows it. Else the part goes back to its state before the forward, and
    the kept rows are gone through again: by its mixer alone (see `mixers`), or, when it has none or its
    replay has been found wrong, by the whole model.
    """

    def __init__(self, mixers: dict[int, nn.Module] | None, run: Run) -> None:
        """`mixers`: the module of each recurrent part, by its place; None: replay is not possible."""
        self._run = run
        self._mixers: dict[int, Mixer] | None = None
        self._pending: list[_Forward] = []
        self.replays: bool | None = None
        """Whether replay is used; None until the first time has shown it to be right."""
        if mixers:
            try:
                self._mixers = {at: Mixer(module) for at, module in mixers.items()}
            except RuntimeError:
                self.replays = False
        else:
            self.replays = False

    def clear(self) -> None:
        """Forget every forward."""
        self._pending = []
        for mixer in (self._mixers or {}).values():
            mixer.take()

    def adopt(self, cache: Sequence[Any]) -> None:
        """Go on with another cache, of which nothing is known but its state."""
        self.clear()
        for part in parts(cache):
            part.adopted()

    def before(self, cache: Sequence[Any], start: int, rows: int, whole: bool) -> None:
        """A forward of `rows` rows from position `start` is about to be built. `whole`: it is kept or taken
        back as a whole."""
        found = parts(cache)
        if all(part.cuts for part in found):
            return
        marks = [None if part.cuts else part.mark(rows) for part in found]
        tapes: dict[int, Tape | None] | None = None
        if rows > 1 and not whole and self.replays is not False and self._mixers is not None:
            tapes = {}
            for mixer in self._mixers.values():
                mixer.recording = True
        self._pending.append(_Forward(start, rows, marks, tapes))

    def after(self) -> None:
        """The forward has been built."""
        if self._pending and (tapes := self._pending[-1].tapes) is not None and self._mixers is not None:
            tapes.update({at: mixer.take() for at, mixer in self._mixers.items()})

    def settle(self, length: int) -> None:
        """The first `length` positions stay: what belongs to them is let go."""
        self._pending = [forward for forward in self._pending if forward.end > length]

    def cut(self, cache: Sequence[Any], tokens: Sequence[int], held: int, length: int) -> bool:
        """Leave the first `length` of `held` positions in the cache; `tokens` are at least those. Lazy.

        False, with nothing changed, when that state is not to be had.
        """
        drop, found = held - length, parts(cache)
        if all(part.can_cut(drop) for part in found):
            for part in found:
                part.cut(drop)
            self._forget(length)
            return True
        forward = next((f for f in self._pending if f.start <= length < f.end), None)
        if forward is None or any(
            mark is None for part, mark in zip(found, forward.marks, strict=True) if not part.cuts
        ):
            return False
        kept = tokens[forward.start : length]
        replayable = self._replayable(forward, found)
        again = bool(kept) and not (replayable and self.replays)
        cutting = [part for part in found if part.cuts]
        if not all(part.can_cut(drop + (len(kept) if again else 0)) for part in cutting):
            return False
        self._go_back(found, forward)
        if again:
            proof = self._replayed(cache, found, forward, len(kept)) if replayable else None
            for part in cutting:
                part.cut(drop + len(kept))
            self._run(kept)
            if proof is not None:
                self.replays = _same(proof, _states(found))
        else:
            if kept:
                self._replay(cache, forward, len(kept))
            for part in cutting:
                part.cut(drop)
        self._forget(length)
        return True

    def _forget(self, length: int) -> None:
        self._pending = [forward for forward in self._pending if forward.end <= length]

    @staticmethod
    def _go_back(found: Sequence[Part], forward: _Forward) -> None:
        for part, mark in zip(found, forward.marks, strict=True):
            if not part.cuts:
                part.back(mark)

    def _replayable(self, forward: _Forward, found: Sequence[Part]) -> bool:
        tapes = forward.tapes
        return (
            self.replays is not False
            and tapes is not None
            and all(part.cuts or tapes.get(at) is not None for at, part in enumerate(found))
        )

    def _replay(self, cache: Sequence[Any], forward: _Forward, rows: int) -> None:
        held = list(leaves(cache))
        assert self._mixers is not None
        assert forward.tapes is not None
        for at, tape in forward.tapes.items():
            assert tape is not None
            self._mixers[at].replay(tape, held[at], rows)

    def _replayed(
        self, cache: Sequence[Any], found: Sequence[Part], forward: _Forward, rows: int
    ) -> list[mx.array] | None:
        """What replay would leave, with the parts put back again; None, and never tried again, when it does
        not even run."""
        try:
            self._replay(cache, forward, rows)
            states = _states(found)
            mx.eval(states)
        except Exception:  # the model's own code, run in a way that it was not written for
            self.replays, states = False, []
        self._go_back(found, forward)
        return states or None


def _states(found: Sequence[Part]) -> list[mx.array]:
    return [array for part in found if not part.cuts for array in arrays_of([part.leaf])]


def _same(one: Sequence[mx.array], other: Sequence[mx.array]) -> bool:
    """Whether two lists of states are equal but for rounding."""
    if len(one) != len(other) or any(a.shape != b.shape for a, b in zip(one, other, strict=True)):
        return False
    narrow = any(array.dtype != mx.float32 for array in (*one, *other))
    for a, b in zip(one, other, strict=True):
        a, b = a.astype(mx.float32), b.astype(mx.float32)
        allowed = (TOLERANCE_NARROW if narrow else TOLERANCE) * mx.maximum(mx.abs(b).max(), 1e-6)
        # Not-a-number is never within.
        if not (mx.abs(a - b).max() <= allowed).item():
            return False
    return True
