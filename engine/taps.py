"""Recording what chosen decoder layers put out, without a copy of any model's forward.

The class of one layer *instance* is swapped for a subclass whose `__call__` also hands its output on.
Parameter paths, `isinstance` and attributes stay as they are, other instances of the class are not
touched, and the swap can be undone. It must be the class: `__call__` is looked up on the type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Sink = Callable[[Any], None]
_recording: dict[type, type] = {}


def _recording_class(base: type) -> type:
    if base not in _recording:

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = base.__call__(self, *args, **kwargs)
            self._tap_sink(out)
            return out

        attributes = {"__call__": call, "__module__": base.__module__, "_tapped_class": base}
        _recording[base] = type(base.__name__, (base,), attributes)
    return _recording[base]


def hook(module: nn.Module, sink: Sink) -> Callable[[], None]:
    """Let `sink(output)` see every output of this one module. Returns the function that undoes it.

    Raises `RuntimeError` when the module is hooked already.
    """
    base = type(module)
    if hasattr(base, "_tapped_class"):
        raise RuntimeError(f"{base.__name__} is tapped already")
    object.__setattr__(module, "_tap_sink", sink)
    module.__class__ = _recording_class(base)

    def undo() -> None:
        module.__class__ = base
        object.__delattr__(module, "_tap_sink")

    return undo


class Taps:
    """Taps on the layers `ids` of `layers`. Id `i` is the residual stream after decoder layer `i`, before
    the next layer's norm (Hugging Face's `hidden_states[i + 1]`)."""

    def __init__(self, layers: Sequence[nn.Module], ids: Sequence[int]) -> None:
        """Hook the layers. Raises `IndexError` for an id outside `layers`."""
        self.ids = tuple(ids)
        if not all(0 <= i < len(layers) for i in self.ids):
            raise IndexError(f"taps {list(self.ids)} do not fit a model of {len(layers)} layers")
        self._outputs: dict[int, mx.array] = {}
        self._undo = [hook(layers[i], self._sink(i)) for i in self.ids]

    def _sink(self, layer: int) -> Sink:
        def sink(out: Any) -> None:
            self._outputs[layer] = out[0] if isinstance(out, tuple) else out

        return sink

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
