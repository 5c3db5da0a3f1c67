"""Keys and values of the target in 8 or 4 bits: exact with every drafter, refused where they cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from backend_harness import METHODS, SHAPE, VOCABULARY, Engine, prompt, refusal
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache
from numpy_drafters import write_drafter
from tiny import tiny_llama

from dspark_tui.engine.kv_bits import KvBits
from dspark_tui.engine.protocol import ContextRestored, Load, Loaded, RestoreContext, SaveContext

WINDOW = 16
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "gemma3_text": {
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "tied": True,
    },
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("zoo")
    for family, settings in FAMILIES.items():
        tiny_llama(top / family, VOCABULARY, architecture=family, context=400, **settings)
    for method in METHODS:
        write_drafter(top / method, method, SHAPE)
    return top


def start(zoo: Path, target: str, drafter: str, bits: int | None) -> Engine:
    engine = Engine()
    wanted = drafter if drafter in ("none", "lookup") else str(zoo / drafter)
    engine.backend.load(Load(1, str(zoo / target), wanted, kv_bits=bits), engine.events.append)
    assert isinstance(engine.events[-1], Loaded)
    return engine


def cache_of(engine: Engine) -> list[Any]:
    assert engine.backend.session is not None
    return engine.backend.session.target.cache


def step_by_step(engine: Engine, tokens: list[int]) -> list[Any]:
    """The cache of the same kinds after one forward for each token, without the engine's forward."""
    assert engine.backend.session is not None
    target = engine.backend.session.target
    cache = target.fresh_cache()
    for token in tokens:
        mx.eval(target.model(mx.array([[token]]), cache=cache))
    return cache


# ---------------------------------------------------------------------------- the same text and state


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("drafter", [*METHODS, "lookup"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_neither_text_nor_state(zoo: Path, family: str, drafter: str, bits: int) -> None:
    plain = start(zoo, family, "none", bits)
    drafted = start(zoo, family, drafter, bits)
    first = plain.chat("aabbaabb, what is it?", max_tokens=60)
    result = drafted.chat("aabbaabb, what is it?", max_tokens=60, rounds=True)
    assert result.token_ids == first.token_ids
    assert result.rounds is not None
    if drafter != "lookup":
        assert any(r.accepted < r.drafted for r in result.rounds), "nothing was rejected"
    # And in a second turn.
    turns = ["aabbaabb, what is it?", first.text, "go on"]
    assert drafted.chat(*turns, max_tokens=30).token_ids == plain.chat(*turns, max_tokens=30).token_ids
    assert drafted.backend.session is not None
    tokens = drafted.backend.session.target.tokens
    same_state(cache_of(drafted), step_by_step(drafted, tokens), len(tokens))


def rows(part: Any, layer: QuantizedKVCache) -> np.ndarray:
    """Rows of a quantised part as numbers."""
    return np.array(mx.dequantize(*part, group_size=layer.group_size, bits=layer.bits))


def same_state(mine: list[Any], wanted: list[Any], length: int) -> None:
    quantised = 0
    for a, b in zip(mine, wanted, strict=True):
        assert type(a) is type(b)
        assert a.offset == b.offset == length
        if isinstance(b, QuantizedKVCache):
            quantised += 1
            for one, other in zip(a.keys_and_values(), b.keys_and_values(), strict=True):
                # A number on the edge of two steps may fall to either, and then moves others in the layers
                # above; another row would be many steps away.
                step = np.abs(np.array(other[1])).max()
                got, want = rows(one, a), rows(other, b)
                assert got.shape == want.shape == (*want.shape[:2], length, want.shape[3])
                assert np.abs(got - want).max() <= 2.01 * step
                assert np.mean(np.abs(got - want) > 1e-4) < (0.002 if a is mine[0] else 0.1)
        else:
            newest = min(length, WINDOW - 1)
            for one, other in ((a.keys, b.keys), (a.values, b.values)):
                x, y = (np.array(c._temporal_order(p))[..., -newest:, :] for c, p in ((a, one), (b, other)))
                np.testing.assert_allclose(x, y, atol=2e-3)
    assert quantised == (4 if not any(isinstance(c, RotatingKVCache) for c in wanted) else 2)


def test_sliding_layers_stay_whole(zoo: Path) -> None:
    whole = cache_of(start(zoo, "gemma3_text", "none", None))
    assert {type(layer) for layer in whole} == {RotatingKVCache, KVCache}
    for bits in (8, 4):
        cache = cache_of(start(zoo, "gemma3_text", "none", bits))
        wanted = [QuantizedKVCache if type(layer) is KVCache else RotatingKVCache for layer in whole]
        assert [type(layer) for layer in cache] == wanted
        assert {(layer.bits, layer.group_size) for layer in cache if hasattr(layer, "bits")} == {(bits, 64)}


def test_groups_fit_the_heads(zoo: Path) -> None:
    cache = cache_of(start(zoo, "llama", "none", 8))
    assert {layer.group_size for layer in cache} == {32}


@pytest.mark.parametrize(("bits", "part"), [(8, 0.35), (4, 0.22)])
def test_they_take_less_memory(zoo: Path, bits: int, part: float) -> None:
    """Of float32 here, with two float32 numbers for every 32."""
    sizes = {}
    for b in (None, bits):
        engine = start(zoo, "llama", "none", b)
        engine.chat("hello", max_tokens=30)
        sizes[b] = sum(layer.nbytes for layer in cache_of(engine))
    assert sizes[bits] <= part * sizes[None]


def test_the_answer_is_that_of_the_numbers_in_8_bits(zoo: Path) -> None:
    """Quantised rows are really used: the logits differ from whole ones, by a little."""
    logits = {}
    for bits in (None, 8, 4):
        engine = start(zoo, "llama", "none", bits)
        assert engine.backend.session is not None
        target = engine.backend.session.target
        tokens = mx.array(prompt("hello, how is it?"))
        logits[bits] = np.array(target.forward(tokens).logits[-1])
    fine, coarse = (np.abs(logits[bits] - logits[None]).max() for bits in (8, 4))
    assert 1e-5 < fine < coarse
    assert fine < 0.5


def test_the_model_says_its_weights_precision(zoo: Path) -> None:
    """Bits of keys and values are no property of the weights."""
    engine = start(zoo, "llama", "none", 4)
    loaded = engine.events[-1]
    assert isinstance(loaded, Loaded)
    assert loaded.model.precision == "float32"


def test_they_are_saved_and_come_back(zoo: Path, home: Path) -> None:
    engine = start(zoo, "gemma3_text", "dspark", 8)
    first = engine.chat("hello, how is it?", max_tokens=40)
    turns = ["hello, how is it?", first.text, "and now?"]
    engine.backend.save_context(SaveContext(1, "chat"), engine.events.append)
    again = start(zoo, "gemma3_text", "dspark", 8)
    again.backend.restore_context(RestoreContext(2, "chat"), again.events.append)
    restored = again.events[-1]
    assert isinstance(restored, ContextRestored)
    second = again.chat(*turns, max_tokens=30)
    assert second.reused_tokens == restored.tokens > 0
    assert second.token_ids == engine.chat(*turns, max_tokens=30).token_ids
    # Of other bits it is of no use.
    whole = start(zoo, "gemma3_text", "dspark", None)
    whole.backend.restore_context(RestoreContext(3, "chat"), whole.events.append)
    refused = whole.events[-1]
    assert isinstance(refused, ContextRestored)
    assert refused.tokens == 0
    assert "with other numbers (float32 weights, keys and values in 8 bits" in refused.reason


# ---------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("bits", [0, 1, 3, 16, -8])
def test_bits_that_are_no_choice(zoo: Path, bits: int) -> None:
    engine = start(zoo, "llama", "none", None)
    sentence = refusal(lambda: load(engine, zoo / "llama", bits))
    assert sentence == (f"kv-bits is {bits}; give 8 or 4, or leave it out to keep keys and values whole.")
    assert engine.chat("hello", max_tokens=4).generated_tokens > 0, "the model of before is gone"


def load(engine: Engine, folder: Path, bits: int) -> None:
    engine.backend.load(Load(2, str(folder), "none", kv_bits=bits), engine.events.append)


def test_heads_that_do_not_divide(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "narrow", VOCABULARY, head_dim=16)
    assert refusal(lambda: load(Engine(), folder, 8), "failed") == (
        "narrow could not be loaded: its keys and values are 16 wide, which groups of 32 do not divide; load "
        "it without kv-bits"
    )


def test_attention_sinks_refuse(tmp_path: Path) -> None:
    folder = tiny_llama(
        tmp_path / "sinks",
        VOCABULARY,
        architecture="gpt_oss",
        head_dim=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    assert refusal(lambda: load(Engine(), folder, 4), "failed") == (
        "sinks could not be loaded: its attention takes no keys and values in 4 bits (Quantized SDPA does "
        "not support attention sinks); load it without kv-bits"
    )


def test_a_model_without_plain_layers_refuses() -> None:
    def run(cache: list[Any]) -> mx.array:
        cache[0].update_and_fetch(mx.zeros((1, 1, 2, 32)), mx.zeros((1, 1, 2, 32)))
        return mx.zeros(1)

    with pytest.raises(ValueError, match="it has no layer whose keys and values could be kept in 8 bits"):
        KvBits(8, lambda: [RotatingKVCache(8)], run)


@pytest.mark.parametrize("error", [TypeError, AttributeError, RuntimeError, IndexError])
def test_attention_of_another_make_refuses(error: Callable[[str], Exception]) -> None:
    """Models that look into the cache themselves find tuples there."""

    def run(cache: list[Any]) -> mx.array:
        if isinstance(cache[0], QuantizedKVCache):
            raise error("tuple has\nno shape.")
        cache[0].update_and_fetch(mx.zeros((1, 1, 2, 32)), mx.zeros((1, 1, 2, 32)))
        return mx.zeros(1)

    with pytest.raises(ValueError, match=r"in 8 bits \(tuple has no shape\); load it without kv-bits$"):
        KvBits(8, lambda: [KVCache()], run)
