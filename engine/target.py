"""A loaded target: forward with taps, rollback, and the tables that drafters borrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from dspark_tui.engine.anatomy import examine
from dspark_tui.engine.kv_bits import KvBits
from dspark_tui.engine.protocol import ModelInfo
from dspark_tui.engine.rollback import Snapshot, Undo, problem, snapshot
from dspark_tui.engine.rollback.parts import arrays_of
from dspark_tui.engine.taps import Taps


@dataclass(frozen=True)
class Forward:
    """`logits` `[n or 1, vocabulary]`, `rows` `[n, taps * hidden]` of the layers `taps` (None without).
    Lazy."""

    logits: mx.array
    rows: mx.array | None
    taps: tuple[int, ...]


class _LastRow:
    """Lets the head compute the last row only, for prompts: the head of a 2,000-token chunk costs more
    than a layer. Works on the module that the head is, whatever the model does around it."""

    def __init__(self, module: nn.Module, method: str) -> None:
        self.active = False
        base = type(module)
        original = getattr(base, method)
        gate = self

        def call(this: Any, x: mx.array) -> Any:
            return original(this, x[:, -1:] if gate.active and x.ndim == 3 else x)

        module.__class__ = type(base.__name__, (base,), {method: call, "__module__": base.__module__})


class Target:
    """A target with the cache of one sequence. All calls from the thread that made it."""

    def __init__(self, model: nn.Module, tokenizer: Any, info: ModelInfo, kv_bits: int | None = None) -> None:
        """Wrap an mlx-lm model; `kv_bits` 8 or 4 quantises its keys and values.

        Raises `ValueError` with words when its structure is not understood or its attention refuses that.
        """
        self.model, self.tokenizer, self.info = model, tokenizer, info
        found = examine(model, self._whole_cache())
        self.layers: Sequence[nn.Module] = found.layers
        self._embedding: Any = found.embedding
        self._head = found.head
        self._last_row = (
            _LastRow(self._head, "__call__") if self._head else _LastRow(self._embedding, "as_linear")
        )
        self._taps = Taps(self.layers, ())
        self.tokens: list[int] = []
        """Tokens whose keys and values the cache holds."""
        self.kv_bits = kv_bits
        self._quantised = None if kv_bits is None else KvBits(kv_bits, self._whole_cache, self._probe)
        self._cache: list[Any] = self.fresh_cache()
        self._undo = Undo(found.mixers, self._run_again)
        self._fault: str | None = None
        self.vocabulary = int(self._embedding.weight.shape[0])
        self.hidden_size = found.hidden_size
        self.embedding_scale = found.scale

    # ------------------------------------------------------------------ tables for drafters

    def embed(self, ids: mx.array) -> mx.array:
        """See `Tables.embed`."""
        rows: mx.array = self._embedding(ids)
        return rows

    def head(self, hidden: mx.array) -> mx.array:
        """See `Tables.head`."""
        table = self._embedding
        hidden = hidden.astype(table.scales.dtype if "scales" in table else table.weight.dtype)
        out: mx.array = self._head(hidden) if self._head is not None else table.as_linear(hidden)
        return out

    # ------------------------------------------------------------------ taps

    @property
    def taps(self) -> tuple[int, ...]:
        """Tapped layers, in the order of the columns of `Forward.rows`."""
        return self._taps.ids

    def tap(self, ids: Sequence[int]) -> None:
        """Record these layers from now on, instead of those before."""
        self._taps.remove()
        self._taps = Taps(self.layers, ids)

    def columns(self, taps: Sequence[int]) -> mx.array | None:
        """Indices that pick `taps` out of `Forward.rows`, or None when it is all of them in order."""
        if tuple(taps) == self.taps:
            return None
        hidden = self.hidden_size
        starts = [self.taps.index(t) * hidden for t in taps]
        return mx.concatenate([mx.arange(s, s + hidden) for s in starts])

    # ------------------------------------------------------------------ the sequence

    @property
    def length(self) -> int:
        """Number of positions in the cache."""
        return len(self.tokens) + self._ahead

    _ahead = 0
    """Positions in the cache whose tokens the host does not know yet (see `run_ahead`)."""

    def cannot_roll_back(self) -> str | None:
        """Why rejected tokens cannot be taken back on this target, or None when they can."""
        return problem(self._cache) or self._fault

    def distrust(self, fault: str) -> None:
        """Take no drafts from now on; `fault` says why, without a full stop. Plain decoding stays."""
        self._fault = fault

    def forward(self, tokens: mx.array, last_only: bool = False) -> Forward:
        """Run `tokens` `[n]` at positions `length`, ... and add them to the cache. Lazy.

        The caller says with `commit` which tokens they were. `last_only`, for prompts: logits of the last row
        only, and the rows are kept or taken back all together. When the model raises, the sequence is
        forgotten.
        """
        count = int(tokens.shape[0])
        try:
            self._undo.before(self._cache, self.length, count, whole=last_only)
            logits = self._run(tokens, last_only)
            self._undo.after()
        except BaseException:
            # Some layers have the rows and some have not.
            self.reset()
            raise
        self._ahead += count
        return Forward(logits[-1:] if last_only else logits, self._taps.take(), self.taps)

    def _run(self, tokens: mx.array, last_only: bool) -> mx.array:
        self._last_row.active = last_only
        try:
            logits: mx.array = self.model(tokens[None], cache=self._cache)[0]
        finally:
            self._last_row.active = False
        return logits

    def _run_again(self, tokens: Sequence[int]) -> None:
        self._run(mx.array(list(tokens), dtype=mx.uint32), last_only=True)
        self._taps.take()

    def commit(self, tokens: Sequence[int]) -> None:
        """Name the first rows that `forward` added and no `commit` has named yet."""
        self.tokens.extend(tokens)
        self._ahead -= len(tokens)
        self._undo.settle(len(self.tokens))

    def roll_back(self) -> None:
        """Take every row out of the cache that is not committed; starts over when that state is not to be
        had, which a block of several rows with its first one committed never meets."""
        if not self._ahead:
            return
        kept = len(self.tokens)
        if kept and self._undo.cut(self._cache, self.tokens, self.length, kept):
            self._ahead = 0
        else:
            self.reset()

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed positions; starts over when that state is not to be had (see
        `snapshot`)."""
        if not self.try_truncate(length):
            self.reset()

    def try_truncate(self, length: int) -> bool:
        """Keep the first `length` committed positions; False, with nothing changed but rows that no `commit`
        has named taken back, when that state is not to be had."""
        self.roll_back()
        if length >= len(self.tokens):
            return True
        if length <= 0:
            self.reset()
            return True
        if not self._undo.cut(self._cache, self.tokens, self.length, length):
            return False
        self.tokens = self.tokens[:length]
        return True

    def reset(self) -> None:
        """Forget the sequence."""
        self.adopt(self.fresh_cache(), ())

    def snapshot(self) -> Snapshot:
        """The state now, to come back to with `restore`; computed and safe from whatever comes after.

        Raises `ValueError` while there are rows that no `commit` has named.
        """
        if self._ahead:
            raise ValueError(f"a snapshot needs all rows named; {self._ahead} are not")
        return snapshot.take(self._cache, self.tokens)

    def can_restore(self, kept: Snapshot) -> bool:
        """Whether the sequence still begins with the snapshot's tokens."""
        return kept.begins(self.tokens)

    def restore(self, kept: Snapshot) -> None:
        """Go back to a snapshot. Raises `ValueError` when `can_restore` says no."""
        if not self.can_restore(kept):
            raise ValueError(f"the cache does not begin with the {kept.length} tokens of the snapshot")
        if kept.length == 0:
            self.reset()
            return
        snapshot.restore(self._cache, kept, self.length)
        self._undo.clear()
        self.tokens, self._ahead = self.tokens[: kept.length], 0

    @property
    def cache(self) -> list[Any]:
        """The cache of every layer that has one, to look at."""
        return self._cache

    def fresh_cache(self) -> list[Any]:
        """An empty cache of the kinds that this target uses."""
        return self._whole_cache() if self._quantised is None else self._quantised.cache()

    def _whole_cache(self) -> list[Any]:
        cache: list[Any] = make_prompt_cache(self.model)
        return cache

    def _probe(self, cache: list[Any]) -> mx.array:
        logits: mx.array = self.model(mx.zeros((1, 2), dtype=mx.uint32), cache=cache)
        return logits

    def adopt(self, cache: list[Any], tokens: Sequence[int]) -> None:
        """Go on from `cache`, of the kinds of `fresh_cache`, which holds exactly `tokens`."""
        self._cache, self.tokens, self._ahead = cache, list(tokens), 0
        self._undo.adopt(cache)

    def state(self) -> list[mx.array]:
        """The cache's arrays, to evaluate."""
        return arrays_of(self._cache)
