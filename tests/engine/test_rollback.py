"""Rejected rows leave the cache: it then equals that of step-by-step decoding."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache
from tiny import load_tiny, tiny_llama

from dspark_tui.engine import rollback
from dspark_tui.engine.target import Target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_tiny(tiny_llama(tmp_path_factory.mktemp("tiny"), layers=2, context=2048))[0]


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Target:
    options = {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
    folder = tiny_llama(tmp_path_factory.mktemp("gemma"), architecture="gemma3_text", **options)
    return load_tiny(folder)[0]


def cached(target: Target) -> list[np.ndarray]:
    """Keys and values of every layer, as far as they count."""
    kept = [layer.keys_and_values() for layer in target._cache]
    return [np.array(part) for pair in kept for part in pair]


def step_by_step(target: Target, tokens: list[int]) -> tuple[list[np.ndarray], np.ndarray]:
    """The cache and the last logits after decoding one token at a time."""
    target.reset()
    for token in tokens:
        forward = target.forward(mx.array([token]))
        target.commit([token])
    return cached(target), np.array(forward.logits)


ROUNDS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=8)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(rounds=ROUNDS, prompt=st.integers(1, 30), seed=st.integers(0, 1000))
def test_rounds_leave_what_single_steps_leave(
    target: Target, rounds: list[tuple[int, int]], prompt: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    draw = lambda n: [int(t) for t in random.integers(0, 64, n)]  # noqa: E731
    target.reset()
    tokens = draw(prompt)
    target.forward(mx.array(tokens))
    target.commit(tokens)
    for drafted, wanted in rounds:
        block = draw(drafted + 1)
        kept = block[: 1 + min(wanted, drafted)]
        target.forward(mx.array(block))
        assert target.length == len(tokens) + len(block)
        target.commit(kept)
        target.roll_back()
        tokens += kept
        assert target.tokens == tokens
        assert target.length == len(tokens)
    # One more token shows that the rejected rows are not read either.
    logits = np.array(target.forward(mx.array([1])).logits)
    state = cached(target)
    stepped, wanted_logits = step_by_step(target, [*tokens, 1])
    for got, want in zip(state, stepped, strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, atol=1e-4)
    np.testing.assert_allclose(logits, wanted_logits, atol=1e-3)


def test_truncation_over_a_step_of_the_cache(target: Target) -> None:
    """mlx-lm's cache grows in steps of 256 rows: cut back below one, and grow over it again."""
    random = np.random.default_rng(3)
    tokens = [int(t) for t in random.integers(0, 64, 270)]
    other = [int(t) for t in random.integers(0, 64, 30)]
    target.reset()
    target.forward(mx.array(tokens))
    target.commit(tokens)
    target.truncate(250)
    assert target.tokens == tokens[:250]
    target.forward(mx.array(other))
    target.commit(other)
    state = cached(target)
    target.reset()
    target.forward(mx.array(tokens[:250] + other))
    for got, want in zip(state, cached(target), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


def test_truncate_of_the_target(target: Target) -> None:
    target.reset()
    target.forward(mx.array([3, 4, 5, 6]))
    target.commit([3, 4])
    # Rows that no commit has named go first.
    target.truncate(2)
    assert (target.tokens, target.length) == ([3, 4], 2)
    target.truncate(9)
    assert target.tokens == [3, 4]
    target.truncate(0)
    assert (target.tokens, target.length) == ([], 0)


def test_cutting_more_than_there_is_is_refused() -> None:
    cache = [KVCache()]
    cache[0].update_and_fetch(mx.zeros((1, 1, 3, 4)), mx.zeros((1, 1, 3, 4)))
    rollback.truncate(cache, 3)
    assert cache[0].offset == 3
    with pytest.raises(ValueError, match="cannot keep 4 positions: the cache holds 3"):
        rollback.truncate(cache, 4)


@pytest.mark.parametrize(
    ("kinds", "named"),
    [
        ([RotatingKVCache(max_size=8)], "RotatingKVCache"),
        ([KVCache(), ArraysCache(size=2)], "ArraysCache"),
        ([RotatingKVCache(max_size=8), KVCache(), ArraysCache(size=2)], "ArraysCache, RotatingKVCache"),
        ([QuantizedKVCache()], "QuantizedKVCache"),
    ],
)
def test_other_kinds_are_refused_by_name(kinds: list[Any], named: str) -> None:
    reason = f"its cache ({named}) cannot give up rejected tokens"
    assert rollback.problem(kinds) == reason
    with pytest.raises(ValueError, match="cannot give up rejected tokens"):
        rollback.truncate(kinds, 0)


def test_plain_kinds_are_accepted() -> None:
    assert rollback.problem([KVCache(), KVCache()]) is None
    assert rollback.problem([]) is None


# ---------------------------------------------------------------------------- sliding windows


def test_sliding_target_says_why_it_takes_no_drafts(sliding: Target) -> None:
    assert sliding.cannot_roll_back() == "its cache (RotatingKVCache) cannot give up rejected tokens"


def test_sliding_target_starts_over_where_it_cannot_cut(sliding: Target) -> None:
    tokens = list(range(3, 15))
    sliding.reset()
    sliding.forward(mx.array(tokens))
    sliding.commit(tokens)
    sliding.truncate(len(tokens))
    assert sliding.tokens == tokens
    sliding.truncate(4)
    assert (sliding.tokens, sliding.length) == ([], 0)


def test_sliding_target_with_a_row_too_many_starts_over(sliding: Target) -> None:
    """A plain step that ran ahead cannot be taken back; the sequence is then computed anew."""
    sliding.reset()
    sliding.forward(mx.array([3, 4, 5]))
    sliding.commit([3, 4])
    sliding.roll_back()
    assert (sliding.tokens, sliding.length) == ([], 0)
