"""Recording the residual stream at chosen decoder layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dspark_tui.engine.intercept import intercept

Sink = Callable[[Any], None]
EMBEDDING = -1
"""The tap on what layer 0 receives: embedding rows, scaled where the model scales them."""


def hook(module: nn.Module, sink: Sink) -> Callable[[], None]:
    """Let `sink(output)` see every output of this one module. Returns the function that undoes it.

    Raises `RuntimeError` when the module is hooked already.
    """

    def around(call: Any, *args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        sink(out)
        return out

    return intercept(module, around)


class Taps:
    """Taps on the layers `ids` of `layers`. Id `i` is the residual stream after decoder layer `i`, before
    the next layer's norm (Hugging Face's `hidden_states[i + 1]`); `EMBEDDING` the one before layer 0."""

    def __init__(self, layers: Sequence[nn.Module], ids: Sequence[int]) -> None:
        """Hook the layers. Raises `IndexError` for an id outside `layers`."""
        self.ids = tuple(ids)
        if not all(EMBEDDING <= i < len(layers) for i in self.ids):
            raise IndexError(f"taps {list(self.ids)} do not fit a model of {len(layers)} layers")
        self._outputs: dict[int, mx.array] = {}
        tapped = sorted({max(i, 0) for i in self.ids})
        self._undo = [intercept(layers[i], self._around(i)) for i in tapped]

    def _around(self, layer: int) -> Callable[..., Any]:
        before = layer == 0 and EMBEDDING in self.ids

        def around(call: Any, *args: Any, **kwargs: Any) -> Any:
            if before:
                self._outputs[EMBEDDING] = residual(args or tuple(kwargs.values()))
            out = call(*args, **kwargs)
            self._outputs[layer] = residual(out)
            return out

        return around

    def take(self) -> mx.array | None:
        """The rows of the last forward, `[n, len(ids) * hidden]` in the order of `ids`, and forget them.

        None without taps. The forward was one of a single sequence, `[1, n]` token ids.
        """
        outputs, self._outputs = self._outputs, {}
        if not self.ids:
            return None
        return mx.concatenate([outputs[i][0] for i in self.ids], axis=-1)

    def remove(self) -> None:
        """Undo every hook."""
        while self._undo:
            self._undo.pop()()


def residual(passed: Any) -> mx.array:
    """The residual stream `[1, n, hidden]` in what goes from layer to layer.

    It is the first of several values; hyper-connected layers pass `[1, n, streams, hidden]` with the mixture
    `[1, n, streams]` that the next layer reads them by. The array is an object of its own: models may change
    theirs in place afterwards.
    """
    first = passed[0] if isinstance(passed, tuple) else passed
    if first.ndim == 4 and isinstance(passed, tuple) and len(passed) > 1:
        mixed = (passed[1][..., None] * first.astype(mx.float32)).sum(axis=2)
        first = mixed.astype(first.dtype)
    out: mx.array = mx.stop_gradient(first)
    return out
