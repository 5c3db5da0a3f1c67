"""Rejected rows leave the cache: it then equals that of step-by-step decoding, for every family."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cache_states import assert_same, counted, stepwise
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    QuantizedKVCache,
)
from rounds import EXACT, LONG, MOVES, VOCABULARY, Move, draw, play, target_of
from tiny import TARGETS, WINDOW, build_target


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@given(prompt=st.integers(1, 3 * WINDOW), moves=MOVES, seed=st.integers(0, 1000))
def test_any_rejections_leave_what_single_steps_leave(
    name: str, prompt: int, moves: list[Move], seed: int
) -> None:
    target = target_of(name)
    tokens = play(target, prompt, moves, seed)
    assert_same(target.cache, stepwise(target.model, tokens)[0])
    # Two more tokens show that the rejected rows are not read either, by a single row and by several.
    more = draw(np.random.default_rng(seed), 4)
    for count in (1, 3):
        tokens += more[:count]
        logits = np.array(target.forward(mx.array(more[:count])).logits[-1])
        target.commit(more[:count])
        golden, wanted = stepwise(target.model, tokens)
        np.testing.assert_allclose(logits, wanted, atol=1e-3)
        assert_same(target.cache, golden)


MIXED_LAYERS: dict[str, dict[str, Any]] = {
    # Recurrent layers beside sliding ones.
    "recurrent_gemma": {
        **TARGETS["llama"],
        "model_type": "recurrent_gemma",
        "num_hidden_layers": 3,
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "lru_width": 64,
        "block_types": ["recurrent", "recurrent", "attention"],
        "embeddings_scale_by_sqrt_dim": True,
    },
    # Both kinds within every layer, and a mixer that is called by keywords only.
    "falcon_h1": {
        **TARGETS["llama"],
        "model_type": "falcon_h1",
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "attention_bias": False,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
        "mamba_rms_norm": False,
        "mlp_bias": False,
        "projectors_bias": False,
        "attn_layer_indices": None,
    },
}


@pytest.mark.parametrize("name", MIXED_LAYERS)
@pytest.mark.parametrize("replay", [True, False])
def test_recurrent_layers_beside_others(name: str, replay: bool) -> None:
    target = build_target(name, VOCABULARY, config=MIXED_LAYERS[name])
    if not replay:
        target._undo.replays = False
    tokens = play(target, 5, [*LONG[:12], ("stopped", 6, 1), ("step", 1, 1), ("block", 7, 2)])
    assert target._undo.replays is replay
    golden, wanted = stepwise(target.model, [*tokens, 7])
    np.testing.assert_allclose(np.array(target.forward(mx.array([7])).logits[-1]), wanted, atol=1e-3)
    assert_same(target.cache, golden)


@pytest.mark.parametrize("name", EXACT)
def test_many_rounds_past_several_windows(name: str) -> None:
    target = target_of(name)
    tokens = play(target, 5, LONG)
    assert len(tokens) > 3 * WINDOW
    golden, wanted = stepwise(target.model, [*tokens, 7])
    np.testing.assert_allclose(np.array(target.forward(mx.array([7])).logits[-1]), wanted, atol=1e-3)
    assert_same(target.cache, golden)


def test_rejections_with_a_cache_of_rounded_numbers() -> None:
    """deepseek_v41: fields of a kind that is not known go back and the kept rows run again."""
    target = target_of("deepseek_v41")
    tokens = play(target, 5, LONG[:12])
    mine, golden = counted(target.cache), counted(stepwise(target.model, tokens)[0])
    for got, want in zip(mine, golden, strict=True):
        assert got.shape == want.shape
        # All but a few numbers lie on the same step of the 4-bit grid.
        assert np.mean(np.abs(got - want) > 1e-3 * np.abs(want).max(initial=0)) < 0.02


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_quantised_keys_and_values(name: str) -> None:
    """Rounding flips single steps of the 255 here and there, and layers above hand that on: hardly a number
    may be off by more than one."""
    wide = {**TARGETS[name], "head_dim": 32}
    if "text_config" in wide:
        wide["text_config"] = {**wide["text_config"], "head_dim": 32}
    target = build_target(name, VOCABULARY, config=wide, kv_bits=8)
    assert any(isinstance(layer, QuantizedKVCache) for layer in target.cache)
    tokens = play(target, 9, LONG[:8])
    ours = counted(target.cache)
    target.reset()
    for token in tokens:
        mx.eval(target.forward(mx.array([token])).logits)
        target.commit([token])
    for got, want in zip(ours, counted(target.cache), strict=True):
        assert got.shape == want.shape
        if got.dtype == np.uint32:
            off = np.abs(got.view(np.uint8).astype(int) - want.view(np.uint8).astype(int))
            assert off.max() <= 4
            assert np.mean(off > 1) < 0.01
        else:
            np.testing.assert_allclose(got, want, atol=0.02)


# ---------------------------------------------------------------------------- cutting committed positions


def test_truncation_over_a_step_of_the_cache() -> None:
    """mlx-lm's cache grows in steps of 256 rows: cut back below one, and grow over it again."""
    target, random = target_of("llama"), np.random.default_rng(3)
    tokens, other = draw(random, 270), draw(random, 30)
    target.reset()
    target.forward(mx.array(tokens))
    target.commit(tokens)
    target.truncate(250)
    assert target.tokens == tokens[:250]
    target.forward(mx.array(other))
    target.commit(other)
    state = counted(target.cache)
    target.reset()
    target.forward(mx.array(tokens[:250] + other))
    for got, want in zip(state, counted(target.cache), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


def test_truncate_of_the_target() -> None:
    target = target_of("llama")
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


@pytest.mark.parametrize("name", ["llama_sliding", "gemma3", "qwen3_5", "nemotron_h"])
@pytest.mark.parametrize("steps", ["one at a time", "one chunk"])
@pytest.mark.parametrize("cut", [1, 2, 5, 14, 15, 30])
def test_truncation_is_exact_or_starts_over(name: str, steps: str, cut: int) -> None:
    target = target_of(name)
    tokens = draw(np.random.default_rng(cut), 2 * WINDOW + 7)
    target.reset()
    for piece in [tokens] if steps == "one chunk" else [[token] for token in tokens]:
        mx.eval(target.forward(mx.array(piece)).logits)
        target.commit(piece)
    before = counted(target.cache)
    left = tokens[: len(tokens) - cut]
    if not target.try_truncate(len(left)):
        assert target.tokens == tokens
        for got, want in zip(counted(target.cache), before, strict=True):
            np.testing.assert_array_equal(got, want)
        target.truncate(len(left))
        assert (target.tokens, target.length) == ([], 0)
        left = []
    assert target.tokens == left
    golden, wanted = stepwise(target.model, [*left, 9])
    logits = target.forward(mx.array([9])).logits[-1]
    np.testing.assert_allclose(np.array(logits), wanted, atol=1e-3)
    assert_same(target.cache, golden)


def test_a_window_gives_back_all_that_one_chunk_brought() -> None:
    """What a chunk holds beyond the window can be cut, a ring that went round only by a row."""
    target = target_of("gemma3")
    tokens = draw(np.random.default_rng(0), 3 * WINDOW)
    target.reset()
    target.forward(mx.array(tokens))
    target.commit(tokens)
    assert target.try_truncate(len(tokens) - 2 * WINDOW)
    for token in tokens[: 2 * WINDOW]:
        target.forward(mx.array([token]))
        target.commit([token])
    assert target.try_truncate(len(target.tokens) - 1)
    assert not target.try_truncate(len(target.tokens) - 1)


def test_rows_that_cannot_be_had_start_over() -> None:
    """Two plain steps over a full ring are never both taken back by the loop; the state is not to be had."""
    target = target_of("gemma3")
    tokens = draw(np.random.default_rng(1), 2 * WINDOW)
    target.reset()
    for token in tokens:
        target.forward(mx.array([token]))
        target.commit([token])
    for token in (1, 2):
        target.forward(mx.array([token]))
    target.roll_back()
    assert (target.tokens, target.length) == ([], 0)


# ---------------------------------------------------------------------------- a forward that breaks


def test_a_forward_that_breaks_in_the_middle_leaves_no_half_of_it() -> None:
    """Layers below the one that raised have taken the rows in, those above have not."""
    target = build_target("qwen3_5", VOCABULARY)
    begun = play(target, 9, LONG[:3])
    layer = target.model.language_model.model.layers[2]
    kind = type(layer)
    layer.__class__ = type("Broken", (kind,), {"__call__": lambda *_, **__: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        target.forward(mx.array([1, 2, 3]))
    layer.__class__ = kind
    assert (target.tokens, target.length) == ([], 0)
    tokens = play(target, 9, LONG[:3])
    assert tokens == begun
    assert_same(target.cache, stepwise(target.model, tokens)[0])
