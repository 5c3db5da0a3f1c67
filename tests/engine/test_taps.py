"""Taps on tiny mlx-lm targets, against a hand-written loop over the layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import load_tiny, tiny_llama

from dspark_tui.engine.probe import probe
from dspark_tui.engine.taps import Taps, hook
from dspark_tui.engine.target import Target

IDS = [5, 9, 2, 40, 7, 7, 31]
KINDS = {
    "llama": {"architecture": "llama"},
    "llama, tied": {"architecture": "llama", "tied": True},
    "qwen3": {"architecture": "qwen3"},
    "qwen3, tied": {"architecture": "qwen3", "tied": True},
}


def target_of(folder: Path, **options: Any) -> Target:
    return load_tiny(tiny_llama(folder, **options))[0]


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    return target_of(tmp_path / "tiny", **request.param)


def layer_outputs(target: Target, ids: list[int]) -> list[np.ndarray]:
    """The residual stream after every layer, `[n, hidden]` each: the definition of a tap."""
    inner = target.model.model
    h = inner.embed_tokens(mx.array([ids]))
    mask = nn.MultiHeadAttention.create_additive_causal_mask(len(ids))
    outputs = []
    for layer in inner.layers:
        attended = layer.self_attn(layer.input_layernorm(h), mask, None)
        h = h + attended
        h = h + layer.mlp(layer.post_attention_layernorm(h))
        outputs.append(np.array(h[0]))
    return outputs


@pytest.mark.parametrize("taps", [(0,), (3,), (1, 2), (0, 1, 2, 3), (2, 0)])
def test_rows_are_the_layers_outputs(target: Target, taps: tuple[int, ...]) -> None:
    wanted = layer_outputs(target, IDS)
    target.tap(taps)
    assert target.taps == taps
    forward = target.forward(mx.array(IDS))
    assert forward.rows is not None
    np.testing.assert_allclose(np.array(forward.rows), np.hstack([wanted[i] for i in taps]), atol=1e-4)


def test_rows_come_in_any_chunks(target: Target) -> None:
    target.tap((1, 3))
    whole = np.array(target.forward(mx.array(IDS)).rows)
    target.reset()
    pieces = [target.forward(mx.array(IDS[a:b])).rows for a, b in ((0, 1), (1, 5), (5, 7))]
    np.testing.assert_allclose(np.concatenate([np.array(piece) for piece in pieces]), whole, atol=1e-4)


def test_taps_change_neither_logits_nor_parameters(target: Target) -> None:
    plain = np.array(target.forward(mx.array(IDS)).logits)
    paths = [path for path, _ in tree_flatten(target.model.parameters())]
    modules = [(path, type(module).__name__) for path, module in target.model.named_modules()]
    target.reset()
    target.tap((0, 2))
    np.testing.assert_array_equal(np.array(target.forward(mx.array(IDS)).logits), plain)
    assert [path for path, _ in tree_flatten(target.model.parameters())] == paths
    assert [(path, type(module).__name__) for path, module in target.model.named_modules()] == modules


def test_columns_pick_taps_out_of_the_rows(target: Target) -> None:
    target.tap((0, 1, 3))
    rows = np.array(target.forward(mx.array(IDS)).rows)
    outputs = layer_outputs(target, IDS)
    assert target.columns((0, 1, 3)) is None
    for taps in ((3,), (1, 3), (3, 0)):
        columns = target.columns(taps)
        assert columns is not None
        np.testing.assert_allclose(
            rows[:, np.array(columns)], np.hstack([outputs[i] for i in taps]), atol=1e-4
        )


def test_last_row_alone_equals_the_last_of_all(target: Target) -> None:
    everything = np.array(target.forward(mx.array(IDS)).logits)
    target.reset()
    last = np.array(target.forward(mx.array(IDS), last_only=True).logits)
    assert last.shape == (1, target.vocabulary)
    np.testing.assert_allclose(last[0], everything[-1], atol=1e-4)
    # And the next forward gives all rows again.
    target.reset()
    assert target.forward(mx.array(IDS)).logits.shape == (len(IDS), target.vocabulary)


def test_last_row_alone_spares_the_drafters_head(target: Target) -> None:
    """The head that a drafter borrows gives every row, also in the same moment."""
    hidden = mx.array(np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32))
    before = np.array(target.head(hidden))
    lazy = target.forward(mx.array(IDS), last_only=True)
    assert target.head(hidden).shape == (4, target.vocabulary)
    mx.eval(lazy.logits)
    np.testing.assert_array_equal(np.array(target.head(hidden)), before)
    weight = target.model.model.embed_tokens.weight if target._head is None else target._head.weight
    np.testing.assert_allclose(before, np.array(hidden) @ np.array(weight).T, atol=1e-4)


def test_embedding_rows_are_raw(target: Target) -> None:
    table = np.array(target.model.model.embed_tokens.weight)
    np.testing.assert_array_equal(np.array(target.embed(mx.array(IDS))), table[IDS])


def test_tapping_again_replaces_the_taps(target: Target) -> None:
    target.tap((0, 1))
    target.tap((1,))
    rows = target.forward(mx.array(IDS)).rows
    assert rows is not None
    assert rows.shape == (len(IDS), 64)
    target.tap(())
    assert target.forward(mx.array(IDS)).rows is None
    assert not any(hasattr(type(layer), "_intercepted_class") for layer in target.layers)


def test_two_targets_do_not_disturb_each_other(tmp_path: Path) -> None:
    first, second = (target_of(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 2)))
    first.tap((1,))
    second.tap((0, 3))
    alone = layer_outputs(first, IDS), layer_outputs(second, IDS)
    # Interleaved, and evaluated only afterwards.
    a, b = first.forward(mx.array(IDS)), second.forward(mx.array(IDS))
    np.testing.assert_allclose(np.array(b.rows), np.hstack([alone[1][0], alone[1][3]]), atol=1e-4)
    np.testing.assert_allclose(np.array(a.rows), alone[0][1], atol=1e-4)
    last = first.forward(mx.array(IDS), last_only=True)
    assert last.logits.shape[0] == 1
    assert second.forward(mx.array(IDS)).logits.shape[0] == len(IDS)
    second.tap(())
    assert first.forward(mx.array(IDS)).rows is not None


@pytest.mark.parametrize("taps", [(4,), (-2,), (0, 99)])
def test_taps_outside_the_model_are_refused(target: Target, taps: tuple[int, ...]) -> None:
    with pytest.raises(IndexError, match="do not fit a model of 4 layers"):
        target.tap(taps)
    assert not any(hasattr(type(layer), "_intercepted_class") for layer in target.layers)


def test_probe_accepts_and_leaves_nothing_behind(target: Target) -> None:
    target.tap((0, 2))
    probe(target)
    assert target.length == 0
    assert target.forward(mx.array(IDS)).logits.shape == (len(IDS), target.vocabulary)
    np.testing.assert_allclose(np.array(target.forward(mx.array([1])).logits).shape, (1, target.vocabulary))


# ---------------------------------------------------------------------------- hooks alone


class Doubler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = mx.array([2.0])

    def __call__(self, x: mx.array, extra: int = 0) -> tuple[mx.array, int]:
        return self.weight * x, extra


def test_hook_sees_one_instance_and_can_be_undone() -> None:
    one, other = Doubler(), Doubler()
    seen: list[Any] = []
    undo = hook(one, seen.append)
    assert isinstance(one, Doubler)
    assert type(one) is not Doubler
    assert type(other) is Doubler
    assert type(one).__name__ == "Doubler"
    out = one(mx.array([3.0]), extra=7)
    other(mx.array([5.0]))
    assert seen == [out]
    assert out[1] == 7
    assert [path for path, _ in tree_flatten(one.parameters())] == ["weight"]
    undo()
    assert type(one) is Doubler
    one(mx.array([1.0]))
    assert len(seen) == 1
    assert not hasattr(one, "_around")


def test_hooking_twice_is_refused() -> None:
    one = Doubler()
    undo = hook(one, lambda out: None)
    with pytest.raises(RuntimeError, match="Doubler is tapped already"):
        hook(one, lambda out: None)
    undo()
    hook(one, lambda out: None)


def test_hooks_survive_changed_weights() -> None:
    one = Doubler()
    seen: list[Any] = []
    hook(one, seen.append)
    one.update({"weight": mx.array([10.0])})
    one(mx.array([3.0]))
    assert seen[0][0].tolist() == [30.0]


def test_first_of_a_tuple_is_the_hidden_state() -> None:
    layers = [Doubler(), Doubler()]
    taps = Taps(layers, (1, 0))
    for i, layer in enumerate(layers):
        layer(mx.full((1, 3, 2), i + 1.0), extra=i)
    rows = taps.take()
    assert rows is not None
    np.testing.assert_array_equal(np.array(rows), np.tile([4.0, 4.0, 2.0, 2.0], (3, 1)))
    taps.remove()
    assert [type(layer) for layer in layers] == [Doubler, Doubler]
    taps.remove()
