"""A target comes back to a snapshot whatever has happened to its cache since."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from cache_states import assert_same, counted, stepwise
from rounds import EXACT, LONG, draw, play, target_of
from tiny import WINDOW


@pytest.mark.parametrize("name", EXACT)
def test_snapshots_come_back_after_anything(name: str) -> None:
    target = target_of(name)
    begun = play(target, 21, LONG[:5], seed=4)
    kept = target.snapshot()
    assert (kept.length, kept.tokens) == (len(begun), tuple(begun))
    held = counted(target.cache)
    golden = stepwise(target.model, [*begun, 5, 6])
    for again in range(3):
        random = np.random.default_rng(again)
        # In place, several at once, and cut: everything that may reach the kept arrays.
        for rows in (1, 1, 7, 1, 2, 1, 1):
            block = draw(random, rows)
            mx.eval(target.forward(mx.array(block)).logits)
            target.commit(block[: max(1, rows - 2)])
            target.roll_back()
        assert target.can_restore(kept)
        target.restore(kept)
        assert target.tokens == begun
        for got, want in zip(counted(target.cache), held, strict=True):
            np.testing.assert_array_equal(got, want)
        if again == 1:
            target.forward(mx.array([5]))
            target.commit([5])
            logits = np.array(target.forward(mx.array([6])).logits[-1])
            target.commit([6])
            np.testing.assert_allclose(logits, golden[1], atol=1e-3)
            assert_same(target.cache, golden[0])


def test_a_snapshot_holds_what_cannot_be_cut_back() -> None:
    sizes = {}
    for name in ("qwen3", "llama_sliding", "qwen3_5"):
        target = target_of(name)
        target.reset()
        tokens = draw(np.random.default_rng(0), 200)
        target.forward(mx.array(tokens))
        target.commit(tokens)
        sizes[name] = target.snapshot().bytes
    window = 2 * 2 * WINDOW * 2 * 16 * 4  # layers, keys and values, rows, heads, width, float32
    state = 3 * (3 * (2 * 2 * 16 + 4 * 16) + 4 * 16 * 16) * 4  # layers, convolution and recurrence, float32
    assert sizes == {"qwen3": 0, "llama_sliding": window, "qwen3_5": state}


def test_a_snapshot_needs_the_same_beginning() -> None:
    target = target_of("gemma3")
    target.reset()
    target.forward(mx.array([1, 2, 3]))
    with pytest.raises(ValueError, match="a snapshot needs all rows named; 3 are not"):
        target.snapshot()
    target.commit([1, 2, 3])
    kept = target.snapshot()
    target.truncate(2)
    assert not target.can_restore(kept)
    with pytest.raises(ValueError, match="does not begin with the 3 tokens of the snapshot"):
        target.restore(kept)
    target.forward(mx.array([3, 4]))
    target.commit([3, 4])
    target.restore(kept)
    assert target.tokens == [1, 2, 3]
    target.reset()
    empty = target.snapshot()
    assert (empty.length, empty.bytes) == (0, 0)
    target.forward(mx.array([1]))
    target.commit([1])
    target.restore(empty)
    assert (target.tokens, target.length) == ([], 0)
