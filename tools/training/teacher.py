"""The target as a teacher: many sequences at once, its taps, and its logits where they are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from dspark_tui.engine.precision import on_cpu, to_float32
from dspark_tui.engine.taps import hook
from dspark_tui.engine.target import Target


class _ChosenRows:
    """Lets the head compute chosen rows only: all rows of a batch, times the vocabulary, are gigabytes. Works
    on the module that the head is, whatever the model does around it."""

    def __init__(self, module: nn.Module, method: str) -> None:
        self.rows: mx.array | None = None
        base = type(module)
        original, gate = getattr(base, method), self

        def call(this: Any, x: mx.array) -> Any:
            if gate.rows is not None and x.ndim == 3:
                x = mx.take_along_axis(x, gate.rows[:, :, None], axis=1)
            return original(this, x)

        module.__class__ = type(base.__name__, (base,), {method: call, "__module__": base.__module__})


class Teacher:
    """A target that answers for whole batches. Its matrices are unpacked: bf16, float32 on the CPU."""

    def __init__(self, target: Target, taps: Sequence[int]) -> None:
        self.target, self.model = target, target.model
        to_float32(self.model)
        self.dtype = mx.float32 if on_cpu() else mx.bfloat16
        self.model.set_dtype(self.dtype)
        mx.eval(self.model.parameters())
        self._outputs: dict[int, mx.array] = {}
        self._taps = tuple(taps)
        for layer in self._taps:
            hook(target.layers[layer], self._sink(layer))
        heads = [m for path, m in self.model.named_modules() if path.split(".")[-1] == "lm_head"]
        tables = [m for path, m in self.model.named_modules() if path.split(".")[-1] == "embed_tokens"]
        self._gate = _ChosenRows(heads[0], "__call__") if heads else _ChosenRows(tables[0], "as_linear")

    def _sink(self, layer: int) -> Any:
        def sink(out: Any) -> None:
            self._outputs[layer] = out[0] if isinstance(out, tuple) else out

        return sink

    def read(self, ids: mx.array, at: mx.array) -> tuple[mx.array, mx.array]:
        """Tap rows `[sequences, length, taps * hidden]` of the sequences `ids` `[sequences, length]`, and the
        logits `[sequences, n, vocabulary]` that follow the positions `at` `[sequences, n]`."""
        self._gate.rows = at
        try:
            logits = self.model(ids)
        finally:
            self._gate.rows = None
        rows = mx.concatenate([self._outputs[i] for i in self._taps], axis=-1)
        self._outputs.clear()
        return rows, logits

    def cache(self) -> list[Any]:
        """An empty cache for sequences of one length."""
        cache: list[Any] = make_prompt_cache(self.model)
        return cache

    def step(self, ids: mx.array, cache: list[Any]) -> mx.array:
        """Logits `[sequences, vocabulary]` after one more token `[sequences, 1]` each."""
        logits: mx.array = self.model(ids, cache=cache)[:, -1]
        self._outputs.clear()
        return logits

    def embed(self, ids: mx.array) -> mx.array:
        """Raw rows of the embedding table: `[..., hidden]`."""
        return self.target.embed(ids).astype(self.dtype)

    def head(self, hidden: mx.array) -> mx.array:
        """Logits `[n, vocabulary]` of `hidden` `[n, hidden]`."""
        return self.target.head(hidden)
