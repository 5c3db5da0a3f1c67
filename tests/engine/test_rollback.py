"""Rejected rows leave the cache: it then equals that of step-by-step decoding, for every cache kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cache_states import assert_same, counted, stepwise
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
from tiny import TARGETS, WINDOW, build_target

from dspark_tui.engine.rollback import Undo, problem
from dspark_tui.engine.rollback.mixers import Mixer
from dspark_tui.engine.rollback.window import Window
from dspark_tui.engine.target import Target

VOCABULARY = 64
EXACT = [name for name in TARGETS if name != "deepseek_v41"]
"""deepseek_v41 rounds its cache to 4-bit and 8-bit numbers, so rows computed together and alone may land on
neighbouring ones; it has a test of its own."""
HYBRIDS = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "lfm2_moe", "nemotron_h"]


@functools.cache
def target_of(name: str) -> Target:
    return build_target(name, VOCABULARY)


Move = tuple[str, int, int]
"""What to do, and two numbers between 1 and 9: rows, and rows kept (cut to the rows there are)."""
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["block", "block", "block", "step", "chunk", "stopped"]), *[st.integers(1, 9)] * 2
    ),
    min_size=1,
    max_size=14,
)


def draw(random: np.random.Generator, count: int) -> list[int]:
    return [int(token) for token in random.integers(0, VOCABULARY, count)]


def play(target: Target, prompt: int, moves: Sequence[Move], seed: int = 0) -> list[int]:
    """A prompt, then blocks of which the first rows are kept, plain steps, whole chunks, and chunks that are
    stopped before they count. Returns the tokens that stand."""
    random = np.random.default_rng(seed)
    target.reset()
    tokens = draw(random, prompt)
    target.forward(mx.array(tokens), last_only=True)
    target.commit(tokens)
    for what, rows, wanted in moves:
        rows = 1 if what == "step" else rows
        block = draw(random, rows)
        kept = block[: min(wanted, rows)] if what == "block" else [] if what == "stopped" else block
        forward = target.forward(mx.array(block), last_only=what in ("chunk", "stopped"))
        mx.eval(forward.logits)
        assert target.length == len(tokens) + rows
        target.commit(kept)
        target.roll_back()
        tokens += kept
        assert target.tokens == tokens
        assert target.length == len(tokens)
    return tokens


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


LONG: list[Move] = [("block", 1 + i % 9, 1 + (i * 5) % 7) for i in range(24)]

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


# ---------------------------------------------------------------------------- snapshots


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


# ---------------------------------------------------------------------------- replay and running again


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_replay_without_running_the_model_again(name: str) -> None:
    target = build_target(name, VOCABULARY)
    play(target, 7, LONG[:4])
    assert target._undo.replays is True
    runs: list[int] = []
    target._undo._run = lambda tokens: runs.append(len(tokens))
    tokens = play(target, 7, LONG)
    assert runs == []
    assert_same(target.cache, stepwise(target.model, tokens)[0])


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_without_replay_run_the_kept_rows_again(name: str) -> None:
    target = build_target(name, VOCABULARY)
    target._undo.replays = False
    tokens = play(target, 7, LONG)
    assert target._undo.replays is False
    assert_same(target.cache, stepwise(target.model, tokens)[0])


def test_a_replay_that_is_wrong_is_found_out_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    true_replay = Mixer.replay
    monkeypatch.setattr(
        Mixer, "replay", lambda self, tape, cache, rows: true_replay(self, tape, cache, rows + 1)
    )
    target = build_target("qwen3_5", VOCABULARY)
    tokens = play(target, 7, [("block", 6, 2), ("block", 6, 3), ("block", 4, 1)])
    assert target._undo.replays is False
    assert_same(target.cache, stepwise(target.model, tokens)[0])


def test_a_replay_that_breaks_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any) -> None:
        raise TypeError("another signature")

    monkeypatch.setattr(Mixer, "replay", breaks)
    target = build_target("lfm2", VOCABULARY)
    tokens = play(target, 7, [("block", 6, 2), ("block", 6, 3)])
    assert target._undo.replays is False
    assert_same(target.cache, stepwise(target.model, tokens)[0])


def test_prompts_are_not_recorded() -> None:
    """A tape of a whole chunk would hold hundreds of megabytes of a real model."""
    target = build_target("qwen3_5", VOCABULARY)
    target.forward(mx.array([1, 2, 3, 4]), last_only=True)
    assert [forward.tapes for forward in target._undo._pending] == [None]
    target.commit([1, 2, 3, 4])
    assert target._undo._pending == []
    target.forward(mx.array([1]))
    assert [forward.tapes for forward in target._undo._pending] == [None]
    target.commit([1])
    target.forward(mx.array([1, 2]))
    (pending,) = target._undo._pending
    assert pending.tapes is not None
    assert [tape.rows for tape in pending.tapes.values() if tape] == [2, 2, 2]


# ---------------------------------------------------------------------------- a fault of each kind is found

Plant = Callable[[pytest.MonkeyPatch], None]


def rows_one_short(patch: pytest.MonkeyPatch) -> None:
    from dspark_tui.engine.rollback.rows import Rows

    patch.setattr(
        Rows, "cut", lambda self, drop: setattr(self.leaf, "offset", self.leaf.offset - max(drop - 1, 0))
    )


def ring_not_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Window, "cut", lambda self, drop: self.leaf.trim(drop))


def ring_not_filled_up(patch: pytest.MonkeyPatch) -> None:
    import dspark_tui.engine.rollback.window as module

    patch.setattr(module, "_cut", lambda part, rows, missing: part[..., :rows, :])


def state_not_replayed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Undo, "_go_back", staticmethod(lambda found, forward: None))


def state_of_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mixer, "replay", lambda *_: None)
    patch.setattr(Target, "_run_again", lambda *_: None)


@pytest.mark.parametrize(
    ("name", "plant", "moves"),
    [
        ("llama", rows_one_short, [("block", 6, 2)]),
        ("gemma3", ring_not_dropped, [("block", 6, 2)]),
        ("gemma3", ring_not_filled_up, [("stopped", 6, 6), ("step", 1, 1)]),
        ("qwen3_5", state_not_replayed, [("block", 6, 2)]),
        ("nemotron_h", state_of_before, [("block", 6, 2)]),
        ("lfm2", state_of_before, [("block", 6, 2)]),
    ],
)
def test_the_comparison_finds_planted_faults(
    monkeypatch: pytest.MonkeyPatch, name: str, plant: Plant, moves: list[Move]
) -> None:
    target = build_target(name, VOCABULARY)
    tokens = play(target, 2 * WINDOW, moves)
    assert_same(target.cache, stepwise(target.model, tokens)[0])
    plant(monkeypatch)
    target = build_target(name, VOCABULARY)
    with pytest.raises((AssertionError, ValueError)):
        assert_same(target.cache, stepwise(target.model, play(target, 2 * WINDOW, moves))[0])


# ---------------------------------------------------------------------------- kinds that no tiny target has


def rows_of(random: np.random.Generator, count: int) -> tuple[mx.array, mx.array]:
    return tuple(mx.array(random.standard_normal((1, 2, count, 32)).astype(np.float32)) for _ in range(2))  # type: ignore[return-value]


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
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
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
