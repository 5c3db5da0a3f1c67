"""Taps, tables and logits of every family of targets, against loops over the layers written down here."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import (
    CHAT_TEMPLATE,
    TARGETS,
    WINDOW,
    build_target,
    load_tiny,
    tiny_llama,
    with_vocabulary,
    write_tokenizer,
)

from dspark_tui.engine.anatomy import examine
from dspark_tui.engine.models.errors import ModelError
from dspark_tui.engine.probe import probe
from dspark_tui.engine.rollback import Undo
from dspark_tui.engine.taps import EMBEDDING, Taps
from dspark_tui.engine.target import Target

VOCABULARY = 64
IDS = [int(i) for i in np.random.default_rng(2).integers(0, VOCABULARY, 2 * WINDOW + 5)]
GEMMAS = ("gemma3", "gemma4_e", "gemma4")
UNTIED = ("qwen3_moe", "qwen3_5_moe", "qwen3_next", "gpt_oss", "nemotron_h", "deepseek_v41")
RECURRENT = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "lfm2_moe", "nemotron_h")


@functools.cache
def target_of(name: str) -> Target:
    return build_target(name, VOCABULARY)


def body(name: str, target: Target) -> Any:
    """The module that holds the layers."""
    if name.startswith(("qwen3_5", "gemma4")):
        return target.model.language_model.model
    return target.model.backbone if name == "nemotron_h" else target.model.model


def table(name: str, target: Target) -> mx.array:
    """The embedding's rows."""
    found: mx.array = (
        target.model.backbone.embeddings.weight
        if name == "nemotron_h"
        else body(name, target).embed_tokens.weight
    )
    return found


def mask(window: int | None = None) -> mx.array:
    """Who sees whom, `[n, n]`."""
    row, column = np.indices((len(IDS), len(IDS)))
    return mx.array((column <= row) & (row - column < (window or len(IDS))))


def is_sliding(name: str, at: int) -> bool:
    if name in ("llama_sliding", "gpt_oss") or name in GEMMAS:
        return at % 2 == 0
    return False


def residual_stream(name: str, target: Target) -> list[np.ndarray]:
    """What layer 0 receives, and what every layer hands on, `[n, hidden]` each: the definition of a tap."""
    inner, ids = body(name, target), mx.array([IDS])
    h = table(name, target)[ids]
    if name in GEMMAS:
        h = h * 64**0.5
    seen = [h]
    if name.startswith("gemma4"):
        extra = None
        if name == "gemma4_e":
            extra = inner._project_per_layer_inputs(h, inner._get_per_layer_inputs(ids))
        shared: dict[bool, Any] = {}
        for at, layer in enumerate(inner.layers):
            sliding = is_sliding(name, at)
            borrowed = shared[sliding] if at >= 4 else (None, None)
            own = None if extra is None else extra[:, :, at]
            seen_by = mask(WINDOW if sliding else None)
            h, pair, offset = layer(
                h, seen_by, None, per_layer_input=own, shared_kv=borrowed[0], offset=borrowed[1]
            )
            shared[sliding] = (pair, offset)
            seen.append(h)
    else:
        for at, layer in enumerate(inner.layers):
            recurrent = not hasattr(layer, "self_attn") and getattr(layer, "block_type", "M") == "M"
            seen_by = None if recurrent else mask(WINDOW if is_sliding(name, at) else None)
            h = layer(h, seen_by, None)
            seen.append(h)
    return [np.array(rows[0]) for rows in seen]


def collapsed_streams(target: Target) -> list[np.ndarray]:
    """deepseek_v41 hands on several streams and the mixture that the next layer reads them by."""
    from mlx_lm.models.deepseek_v41 import _window_indices

    inner, count = target.model.model, len(IDS)
    h = inner.embed_tokens(mx.array([IDS]))
    streams = np.repeat(np.array(h)[:, :, None], inner.args.hc_mult, axis=2)
    mixture = np.zeros((1, count, inner.args.hc_mult), np.float32)
    mixture[..., 0] = 1
    window = _window_indices(previous=0, length=count, window=WINDOW)[None]
    state: Any = (mx.array(streams), mx.array(mixture))
    found, shared = [np.array(h[0])], {}
    for layer, cache in zip(inner.layers, inner.make_cache(), strict=True):
        state = layer(*state, start_pos=0, window_idx=window, cache=cache, shared=shared)
        found.append(np.einsum("nsh,ns->nh", *(np.array(part[0]) for part in state)))
    return found


def wanted_rows(name: str) -> list[np.ndarray]:
    target = target_of(name)
    return collapsed_streams(target) if name == "deepseek_v41" else residual_stream(name, target)


@pytest.mark.parametrize("name", TARGETS)
def test_taps_are_what_goes_from_layer_to_layer(name: str) -> None:
    target, wanted = target_of(name), wanted_rows(name)
    every = range(EMBEDDING, len(target.layers))
    assert len(wanted) == len(every)
    target.reset()
    target.tap(every)
    try:
        rows = np.array(target.forward(mx.array(IDS)).rows)
    finally:
        target.tap(())
    for at, got in enumerate(np.split(rows, len(every), axis=1)):
        np.testing.assert_allclose(got, wanted[at], atol=2e-4 * max(1, np.abs(wanted[at]).max()))


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "deepseek_v41"])
def test_taps_come_in_any_chunks_and_order(name: str) -> None:
    target, wanted = target_of(name), wanted_rows(name)
    target.reset()
    target.tap((2, EMBEDDING, 3))
    try:
        pieces = []
        for start, end in ((0, 1), (1, 20), (20, 21), (21, 24), (24, len(IDS))):
            pieces.append(np.array(target.forward(mx.array(IDS[start:end]), last_only=end == 20).rows))
            target.commit(IDS[start:end])
        columns = target.columns((3, EMBEDDING))
    finally:
        target.tap(())
    golden = np.hstack([wanted[3], wanted[0], wanted[4]])
    np.testing.assert_allclose(np.concatenate(pieces), golden, atol=1e-3)
    assert columns is not None
    np.testing.assert_array_equal(
        np.array(columns), np.r_[2 * target.hidden_size : 3 * target.hidden_size, 64:128]
    )


def test_a_tap_shifted_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    true_init = Taps.__init__
    monkeypatch.setattr(
        Taps, "__init__", lambda self, layers, ids: true_init(self, layers, [i - 1 for i in ids])
    )
    target = build_target("qwen3", VOCABULARY)
    target.tap((1,))
    rows = np.array(target.forward(mx.array(IDS)).rows)
    assert np.abs(rows - wanted_rows("qwen3")[2]).max() > 0.1


@pytest.mark.parametrize("name", TARGETS)
def test_taps_change_neither_logits_nor_parameters(name: str) -> None:
    target = target_of(name)
    plain = build_target(name, VOCABULARY)
    target.reset()
    before = np.array(plain.forward(mx.array(IDS)).logits)
    target.tap(range(EMBEDDING, len(target.layers)))
    try:
        np.testing.assert_array_equal(np.array(target.forward(mx.array(IDS)).logits), before)
        ours, theirs = (tree_flatten(t.model.parameters()) for t in (target, plain))
        assert [path for path, _ in ours] == [path for path, _ in theirs]
    finally:
        target.tap(())


# ---------------------------------------------------------------------------- tables


@pytest.mark.parametrize("name", TARGETS)
def test_tables_that_drafters_borrow(name: str) -> None:
    target = target_of(name)
    rows = np.array(table(name, target))
    assert target.vocabulary == VOCABULARY
    assert target.hidden_size == 64
    assert target.embedding_scale == (8 if name in GEMMAS else 1)
    np.testing.assert_array_equal(np.array(target.embed(mx.array(IDS))), rows[IDS])
    hidden = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    weight = rows
    if name in UNTIED:
        (path,) = (path for path, _ in tree_flatten(target.model.parameters()) if "lm_head" in path)
        weight = np.array(dict(tree_flatten(target.model.parameters()))[path])
        assert np.abs(weight - rows).max() > 0.1
    np.testing.assert_allclose(np.array(target.head(mx.array(hidden))), hidden @ weight.T, atol=1e-4)


@pytest.mark.parametrize(
    ("width", "dtype", "scale"),
    [(64, mx.float32, 8.0), (80, mx.float32, 9.0), (80, mx.bfloat16, 9.0), (1152, mx.bfloat16, 34.0)],
)
def test_scale_of_gemma_is_the_rounded_root(width: int, dtype: mx.Dtype, scale: float) -> None:
    """Gemma 3 rounds the root of its width to bfloat16 (8.944 to 8.9375, 33.94 to 34)."""
    config = {**TARGETS["gemma3"], "hidden_size": width, "num_hidden_layers": 2}
    target = build_target("gemma3", VOCABULARY, config=config)
    target.model.set_dtype(dtype)
    rounded = float(mx.array(width**0.5, dtype=mx.bfloat16).item())
    assert examine(target.model, target.fresh_cache()).scale == pytest.approx(rounded, rel=1e-6)
    assert rounded == pytest.approx(scale, rel=0.01)


def test_an_embedding_with_a_factor_of_its_own() -> None:
    """Granite multiplies by a number in its config."""
    config = {
        **TARGETS["llama"],
        "model_type": "granite",
        "logits_scaling": 8.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }
    target = build_target("granite", VOCABULARY, config=config)
    assert target.embedding_scale == pytest.approx(12, rel=1e-5)


@pytest.mark.parametrize("name", TARGETS)
def test_last_row_alone_equals_the_last_of_all(name: str) -> None:
    target = target_of(name)
    target.reset()
    everything = np.array(target.forward(mx.array(IDS)).logits)
    assert everything.shape == (len(IDS), VOCABULARY)
    target.reset()
    rows: list[int] = []
    head = target._head if target._head is not None else target._embedding
    method = "__call__" if target._head is not None else "as_linear"
    gated = type(head)

    def watch(this: Any, x: mx.array) -> Any:
        out = getattr(gated, method)(this, x)
        rows.append(out.shape[1])
        return out

    head.__class__ = type("Watched", (gated,), {method: watch})
    try:
        last = np.array(target.forward(mx.array(IDS), last_only=True).logits)
    finally:
        head.__class__ = gated
    # The head itself computed one row.
    assert rows == [1]
    np.testing.assert_allclose(last, everything[-1:], atol=1e-4)
    if name == "gemma4":
        assert np.abs(everything).max() < 30


# ---------------------------------------------------------------------------- what no family looks like


class NoLayers(nn.Module):
    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        return ids


class Narrow(nn.Module):
    """Its embedding is not as wide as its layers."""

    def __init__(self, idle: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 4)
        self.up = nn.Linear(4, 6)
        self.layers = [nn.Linear(6, 6)]
        self.idle = idle

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        h = self.up(self.embed_tokens(ids))
        return h if self.idle else self.layers[0](h)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (NoLayers(), "it has no list of decoder layers"),
        (Narrow(), "it has no token embedding as wide as its layers"),
        (Narrow(idle=True), "its first decoder layer takes no part in its forward"),
    ],
)
def test_structures_that_are_not_understood(model: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        examine(model, [])


def test_examining_leaves_the_model_as_it_was() -> None:
    target = build_target("qwen3_5", VOCABULARY)
    kinds = [type(module) for _, module in target.model.named_modules()]
    examine(target.model, target.fresh_cache())
    assert [type(module) for _, module in target.model.named_modules()] == kinds


# ---------------------------------------------------------------------------- the probe


@pytest.mark.parametrize("name", TARGETS)
def test_probe_finds_nothing_wrong_and_leaves_nothing_behind(name: str) -> None:
    target = build_target(name, VOCABULARY)
    target.tap((0, 2))
    probe(target)
    assert target.cannot_roll_back() is None
    assert (target.taps, target.length, target.tokens) == ((0, 2), 0, [])
    assert target._undo.replays is (name in RECURRENT)


def test_a_target_whose_cache_keeps_rejected_state_takes_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Undo, "_go_back", staticmethod(lambda found, forward: None))
    target = build_target("qwen3_5", VOCABULARY)
    probe(target)
    reason = target.cannot_roll_back()
    assert reason is not None
    assert reason.startswith("after a rejection its logits are off by ")
    # Plain decoding goes on.
    assert target.forward(mx.array(IDS)).logits.shape == (len(IDS), VOCABULARY)


def test_a_target_that_starts_over_takes_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Undo, "cut", lambda *_: False)
    target = build_target("qwen3", VOCABULARY)
    probe(target)
    assert target.cannot_roll_back() == "its cache does not give rejected tokens back"


def test_layers_that_hand_on_something_else_take_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    true_take = Taps.take

    def narrow(taps: Taps) -> mx.array | None:
        rows = true_take(taps)
        return None if rows is None else rows[:, :5]

    monkeypatch.setattr(Taps, "take", narrow)
    target = build_target("qwen3", VOCABULARY)
    probe(target)
    assert target.cannot_roll_back() == (
        "its layers hand on (4, 5) where (4, 192) was expected, which drafters cannot read"
    )


def test_a_target_without_numbers_is_refused() -> None:
    target = build_target("lfm2", VOCABULARY)
    target.model.model.layers[1].feed_forward.w1.weight *= float("nan")
    with pytest.raises(ModelError, match="its weights give no numbers"):
        probe(target)


# ---------------------------------------------------------------------------- on disk


def test_an_architecture_that_mlx_lm_lacks_is_named(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "new")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "deepseek_v4"}))
    with pytest.raises(ModelError) as refusal:
        load_tiny(folder)
    assert str(refusal.value) == (
        f"new could not be loaded: mlx-lm {mlx_lm.__version__} does not know the architecture deepseek_v4; "
        "choose another model."
    )


@pytest.mark.parametrize("name", ["qwen3_5", "gemma4_e", "nemotron_h", "gpt_oss"])
def test_families_are_loaded_from_their_folders(name: str, tmp_path: Path) -> None:
    """With the text model's numbers in `text_config` where a family has it, and the context from there."""
    made = target_of(name)
    folder = tmp_path / name
    folder.mkdir()
    config = with_vocabulary(TARGETS[name], VOCABULARY)
    config["architectures"] = ["SomethingForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(made.model.parameters())), {"format": "mlx"}
    )
    write_tokenizer(folder, VOCABULARY, CHAT_TEMPLATE)
    target, _ = load_tiny(folder)
    assert target.info.context == 4096
    assert target.info.architecture == config["model_type"]
    made.reset()
    np.testing.assert_array_equal(
        np.array(target.forward(mx.array(IDS)).logits), np.array(made.forward(mx.array(IDS)).logits)
    )
