"""Redoing only the recurrence of a block's kept rows, from what its products gave.

A mixer with recurrent state multiplies its rows by weights first, all at once, and then goes through them one
by one. For a block that may be cut, the outputs of those products are kept. To go back, the mixer itself runs
again over the first rows, with its state of before and with its products played back: its own code does the
convolution and the recurrence, and what it computes beyond the state is lazy and never done.

This knows no architecture: a mixer is the innermost module that is handed the cache object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from dspark_tui.engine.intercept import intercept, is_intercepted
from dspark_tui.engine.rollback.parts import leaves

_PRODUCTS = (nn.Linear, nn.QuantizedLinear, nn.Conv1d)


@dataclass
class Tape:
    """One call of a mixer over `rows` rows: its arguments, and what its products gave, in order."""

    rows: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    products: list[tuple[int, mx.array]] = field(default_factory=list)


class Mixer:
    """A module with recurrent state whose calls can be recorded and done again for fewer rows."""

    def __init__(self, module: nn.Module) -> None:
        """Stand in front of the module and its products. Raises `RuntimeError` when others do."""
        self._tape: Tape | None = None
        self._playing: tuple[Tape, int] | None = None
        self._at = 0
        self.recording = False
        self._run: Callable[..., Any] = type(module).__call__.__get__(module)
        self._undo = [intercept(module, self._call)]
        products = [m for _, m in module.named_modules() if isinstance(m, _PRODUCTS) and m is not module]
        try:
            for number, product in enumerate(products):
                self._undo.append(intercept(product, self._product(number)))
        except RuntimeError:
            self.remove()
            raise

    def _call(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        if self.recording:
            passed = next((v for v in (*args, *kwargs.values()) if isinstance(v, mx.array)), None)
            self._tape = None if passed is None else Tape(int(passed.shape[1]), args, kwargs)
        try:
            return call(*args, **kwargs)
        finally:
            self.recording = False

    def _product(self, number: int) -> Callable[..., Any]:
        def around(call: Any, *args: Any, **kwargs: Any) -> Any:
            if self._playing is not None:
                return self._played(number, call, *args, **kwargs)
            out = call(*args, **kwargs)
            if self.recording and self._tape is not None:
                self._tape.products.append((number, out))
            return out

        return around

    def _played(self, number: int, call: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._playing is not None
        tape, rows = self._playing
        kept, self._at = tape.products[self._at], self._at + 1
        if kept[0] != number:
            raise RuntimeError("a mixer took another way through its products")
        whole = kept[1]
        if whole.ndim == 3 and whole.shape[1] == tape.rows:
            return whole[:, :rows]
        return call(*args, **kwargs)

    def take(self) -> Tape | None:
        """What was recorded since the last `take`."""
        tape, self._tape, self.recording = self._tape, None, False
        return tape

    def replay(self, tape: Tape, cache: Any, rows: int) -> None:
        """Run over the first `rows` of the tape's rows; `cache` holds the state of before and gets the new
        one. Lazy. Raises whatever the module raises."""

        def cut(value: Any) -> Any:
            if isinstance(value, ArraysCache):
                return cache
            if isinstance(value, mx.array) and value.ndim > 1 and value.shape[1] == tape.rows:
                return value[:, :rows]
            return value

        self._playing, self._at = (tape, rows), 0
        try:
            self._run(*(cut(a) for a in tape.args), **{name: cut(a) for name, a in tape.kwargs.items()})
        finally:
            self._playing = None

    def remove(self) -> None:
        """Leave the module as it was."""
        while self._undo:
            self._undo.pop()()


def find_mixers(
    layers: Sequence[nn.Module], cache: Sequence[Any], run: Callable[[], Any]
) -> dict[int, nn.Module] | None:
    """The module that each `ArraysCache` of `cache` (by its place among the leaves) is handed to in `run`, a
    forward over that cache; None when some of them have none of their own."""
    wanted = {id(leaf): i for i, leaf in enumerate(leaves(cache)) if type(leaf) is ArraysCache}
    found: dict[int, nn.Module] = {}
    undo: list[Callable[[], None]] = []

    def watch(module: nn.Module) -> Callable[..., Any]:
        def around(call: Any, *args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                if id(value) in wanted:
                    found[wanted[id(value)]] = module
            return call(*args, **kwargs)

        return around

    try:
        for layer in layers:
            for _, module in layer.named_modules():
                if not is_intercepted(module) and not isinstance(module, _PRODUCTS):
                    undo.append(intercept(module, watch(module)))
        run()
    finally:
        for restore in undo:
            restore()
    # A mixer that serves two caches in turn cannot be told which of its calls a tape is of.
    alone = len({id(module) for module in found.values()}) == len(found)
    return found if alone and len(found) == len(wanted) else None
