"""Every cache kind and mixture by itself, also those that no tiny target has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cache_states import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from rounds import MOVES, Move, draw, target_of
from tiny import TARGETS

from dspark_tui.engine.rollback import Undo, problem


class Mixed(nn.Module):
    """Stands for a model: writes keys and values, found by position and token, into any cache."""

    def __init__(self) -> None:
        super().__init__()
        self.table = mx.array(np.random.default_rng(5).standard_normal((2, 512, 2, 32)).astype(np.float32))

    def write(self, cache: Sequence[Any], tokens: Sequence[int], start: int) -> None:
        keys, values = (part[mx.array(list(tokens))].transpose(1, 0, 2)[None] for part in self.table)
        at = mx.arange(start, start + len(tokens)).astype(mx.float32)[:, None]
        for leaf in cache:
            if isinstance(leaf, CacheList):
                self.write(leaf.caches, tokens, start)
            elif isinstance(leaf, ArraysCache):
                for token in tokens:
                    old = leaf[0] if leaf[0] is not None else mx.zeros((1, 4))
                    leaf[0] = 0.9 * old + token
            elif isinstance(leaf, Unknown):
                leaf.write(keys + at)
            else:
                if isinstance(leaf, ChunkedKVCache):
                    leaf.maybe_trim_front()
                leaf.update_and_fetch(keys + at, values - at)


class Unknown:
    """A cache of a kind that nobody knows, with rows that are written in place."""

    def __init__(self) -> None:
        self.rows, self.count = mx.zeros((1, 2, 512, 32)), 0

    def write(self, rows: mx.array) -> None:
        self.rows[:, :, self.count : self.count + rows.shape[2]] = rows
        self.count += rows.shape[2]

    @property
    def counted(self) -> list[np.ndarray]:
        return [np.array(self.rows[:, :, : self.count]), np.array(self.count)]


def kinds_of(make: Callable[[], Sequence[Any]]) -> str:
    return "+".join(type(leaf).__name__ for leaf in make())


MIXTURES: list[Callable[[], Sequence[Any]]] = [
    lambda: [ConcatenateKVCache()],
    lambda: [ChunkedKVCache(16)],
    lambda: [QuantizedKVCache(group_size=32, bits=8)],
    lambda: [KVCache(), RotatingKVCache(max_size=16), ArraysCache(1)],
    lambda: [
        CacheList(ArraysCache(1), KVCache()),
        CacheList(RotatingKVCache(max_size=8), ConcatenateKVCache()),
    ],
    lambda: [Unknown(), RotatingKVCache(max_size=16)],
]


@pytest.mark.parametrize("make", MIXTURES, ids=kinds_of)
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(prompt=st.integers(1, 40), moves=MOVES, seed=st.integers(0, 1000))
def test_every_kind_and_mixture(
    make: Callable[[], Sequence[Any]], prompt: int, moves: list[Move], seed: int
) -> None:
    random, model = np.random.default_rng(seed), Mixed()
    cache = make()
    tokens = draw(random, prompt)
    undo = Undo(None, lambda kept: model.write(cache, kept, len(tokens) - len(kept)))
    model.write(cache, tokens, 0)
    for what, rows, wanted in moves:
        rows = 1 if what == "step" else rows
        block = draw(random, rows)
        keep = min(wanted, rows) if what == "block" else 0 if what == "stopped" and rows > 1 else rows
        start = len(tokens)
        undo.before(cache, start, rows, whole=what in ("chunk", "stopped"))
        model.write(cache, block, start)
        undo.after()
        tokens += block[:keep]
        undo.settle(len(tokens))
        if keep < rows:
            assert undo.cut(cache, tokens, start + rows, len(tokens))
    golden = make()
    for at, token in enumerate(tokens):
        model.write(golden, [token], at)
    flat = lambda found: [leaf for leaf in found if not isinstance(leaf, Unknown)]  # noqa: E731
    assert_same(flat(cache), flat(golden), 1e-5)
    for mine, theirs in zip(cache, golden, strict=True):
        if isinstance(mine, Unknown):
            for got, want in zip(mine.counted, theirs.counted, strict=True):
                np.testing.assert_allclose(got, want, atol=1e-5)


class Slotted:
    __slots__ = ("rows",)


@pytest.mark.parametrize(
    ("kinds", "named"),
    [
        ([RotatingKVCache(max_size=8, keep=4)], "RotatingKVCache"),
        ([KVCache(), CacheList(Slotted(), KVCache())], "Slotted"),
        ([Slotted(), KVCache(), RotatingKVCache(max_size=8, keep=4)], "RotatingKVCache, Slotted"),
    ],
)
def test_kinds_without_a_way_back_are_refused_by_name(kinds: list[Any], named: str) -> None:
    assert problem(kinds) == f"its cache ({named}) cannot give up rejected tokens"


def test_all_other_kinds_are_accepted() -> None:
    for make in MIXTURES:
        assert problem(make()) is None
    assert problem([]) is None
    assert problem([None, KVCache()]) is None
    for name in TARGETS:
        assert target_of(name).cannot_roll_back() is None
