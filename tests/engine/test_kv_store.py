"""Saved contexts as files: whole or not at all, checked, within a cap; and cache states of every kind."""

from __future__ import annotations

import json
import os
import stat
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from tiny import tiny_llama

from dspark_tui.engine import kv_state, kv_store
from dspark_tui.engine.kv_store import CannotKeep, ContextStore, Key, NothingKept
from dspark_tui.engine.rollback.parts import leaves

KEY = Key("0" * 64, "1" * 64, "float32")


@pytest.fixture
def store(tmp_path: Path) -> ContextStore:
    return ContextStore(tmp_path / "contexts", cap=100_000)


def arrays(seed: int = 0, size: int = 1000) -> dict[str, mx.array]:
    draw = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    return {"a.0": mx.array(draw), "half": mx.array(draw[:6]).astype(mx.bfloat16).reshape(2, 3)}


def reason(store: ContextStore, chat: str = "chat", key: Key = KEY) -> str:
    with pytest.raises(NothingKept) as caught:
        store.load(chat, key)
    assert "\n" not in str(caught.value)
    assert not str(caught.value).endswith(".")
    return str(caught.value)


def files(store: ContextStore) -> list[Path]:
    return sorted(store.folder.iterdir())


# ---------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("chat", ["chat", "", "../../etc/passwd", "a/b\0c", "é€😀" * 1000, "\ud800"])
def test_there_and_back(store: ContextStore, chat: str) -> None:
    given = arrays()
    written = store.save(chat, KEY, given, {"n": 3, "list": [1, None, "x"]})
    got, facts = store.load(chat, KEY)
    assert facts == {"n": 3, "list": [1, None, "x"]}
    assert set(got) == set(given)
    for name, value in given.items():
        assert got[name].dtype == value.dtype
        assert mx.array_equal(got[name], value).item()
    (path,) = files(store)
    assert path.stat().st_size == written
    assert set(path.stem) <= set("0123456789abcdef-")


def test_files_are_for_this_user_only(store: ContextStore) -> None:
    store.save("chat", KEY, arrays(), {})
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in files(store)] == [0o600]


def test_a_folder_that_was_open_to_others_is_closed(store: ContextStore) -> None:
    store.folder.mkdir(mode=0o755)
    store.save("chat", KEY, arrays(), {})
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700


def test_the_newest_takes_the_place_of_the_one_before(store: ContextStore) -> None:
    store.save("chat", KEY, arrays(1), {"turn": 1})
    store.save("chat", KEY, arrays(2), {"turn": 2})
    assert len(files(store)) == 1
    assert store.load("chat", KEY)[1] == {"turn": 2}


def test_two_models_keep_one_chat_each(store: ContextStore) -> None:
    other = Key("2" * 64, KEY.template, KEY.numbers)
    store.save("chat", KEY, arrays(1), {"model": "one"})
    store.save("chat", other, arrays(2), {"model": "other"})
    assert store.load("chat", KEY)[1] == {"model": "one"}
    assert store.load("chat", other)[1] == {"model": "other"}


def test_views_are_saved_as_what_they_show(store: ContextStore) -> None:
    table = mx.arange(24).reshape(4, 6)
    store.save("chat", KEY, {"v": table[1:3, ::2].T}, {})
    assert np.array(store.load("chat", KEY)[0]["v"]).tolist() == [[6, 12], [8, 14], [10, 16]]


# ---------------------------------------------------------------------------- what is not taken back


def test_nothing_there(store: ContextStore) -> None:
    assert reason(store) == "nothing is kept for this chat and model"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (Key("0" * 16 + "f" * 48, KEY.template, KEY.numbers), "with another model"),
        (Key(KEY.model, "f" * 64, KEY.numbers), "chat template has changed"),
        (Key(KEY.model, KEY.template, "4-bit"), "other numbers (float32; these are 4-bit)"),
    ],
)
def test_another_key(store: ContextStore, key: Key, words: str) -> None:
    store.save("chat", KEY, arrays(), {})
    assert words in reason(store, key=key)


def test_every_flipped_byte_is_seen(store: ContextStore) -> None:
    store.save("chat", KEY, arrays(size=40), {"fact": "one"})
    (path,) = files(store)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            got, facts = store.load("chat", KEY)
        except NothingKept:
            continue
        # Only bytes that say nothing, such as padding, may differ.
        assert facts == {"fact": "one"}
        assert all(mx.array_equal(got[name], value).item() for name, value in arrays(size=40).items())
    path.write_bytes(whole)
    store.load("chat", KEY)


@pytest.mark.parametrize("keep", [0, 3, 8, 60, -1])
def test_cut_off_files(store: ContextStore, keep: int) -> None:
    store.save("chat", KEY, arrays(), {})
    (path,) = files(store)
    path.write_bytes(path.read_bytes()[:keep])
    assert reason(store) == "the saved context is incomplete or damaged"


def header(entry: dict[str, Any]) -> bytes:
    text = json.dumps(entry).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        b"not a safetensors file at all",
        header({}),
        header({"__metadata__": {"dspark_tui": "{"}}),
        header({"__metadata__": {"dspark_tui": "[]"}}),
        header({"__metadata__": {"dspark_tui": '{"format": 1}'}}),
        header({"__metadata__": {"format": "pt"}}),
    ],
)
def test_foreign_files(store: ContextStore, content: bytes) -> None:
    store.save("chat", KEY, arrays(), {})
    (path,) = files(store)
    path.write_bytes(content)
    assert "damaged" in reason(store)


def test_a_format_to_come(store: ContextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "FORMAT", 99)
    store.save("chat", KEY, arrays(), {})
    monkeypatch.undo()
    assert reason(store) == "the saved context is of another version of this program"


def test_a_folder_in_place_of_the_file(store: ContextStore) -> None:
    store.path("chat", KEY).mkdir(parents=True)
    assert reason(store) == "nothing is kept for this chat and model"
    with pytest.raises(CannotKeep, match=r"could not be saved in .*\.$"):
        store.save("chat", KEY, arrays(), {})
    assert len(files(store)) == 1, "an unfinished file stayed"


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotKeep, match=r"^The context could not be saved in .*: .*\.$"):
        ContextStore(tmp_path / "file" / "contexts").save("chat", KEY, arrays(), {})


# ---------------------------------------------------------------------------- the cap


def age(store: ContextStore, chat: str, seconds: float) -> None:
    path = store.path(chat, KEY)
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def test_the_longest_unused_go_first(store: ContextStore) -> None:
    store.cap = 14_000  # three files of 4 kB
    for number, chat in enumerate("abc"):
        store.save(chat, KEY, arrays(number), {})
        age(store, chat, 100 - 10 * number)
    store.load("a", KEY)  # used now
    store.save("d", KEY, arrays(9), {})
    assert reason(store, "b") == "nothing is kept for this chat and model"
    for chat in "acd":
        store.load(chat, KEY)


def test_one_too_large_is_refused_and_removes_nothing(store: ContextStore) -> None:
    store.save("a", KEY, arrays(), {})
    with pytest.raises(CannotKeep) as caught:
        store.save("b", KEY, arrays(size=50_000), {})
    assert str(caught.value) == (
        "The context takes 0.2 MB and saved contexts may take 0.1 MB: "
        "set DSPARK_TUI_CONTEXT_CAP to more bytes."
    )
    store.load("a", KEY)


def test_the_newest_stays_even_when_its_header_passes_the_cap(store: ContextStore) -> None:
    store.cap = sum(array.nbytes for array in arrays().values())
    assert store.save("a", KEY, arrays(), {}) > store.cap
    store.load("a", KEY)


def test_leftovers_of_an_interrupted_writer_go(store: ContextStore) -> None:
    store.save("a", KEY, arrays(), {})
    old, fresh = store.folder / "x.safetensors.part", store.folder / "y.safetensors.part"
    for path in (old, fresh):
        path.write_bytes(b"half")
    then = old.stat().st_mtime - 7200
    os.utime(old, (then, then))
    store.save("a", KEY, arrays(), {})
    assert not old.exists()
    assert fresh.exists(), "another engine may be writing it"


@pytest.mark.parametrize(
    ("text", "cap"), [("5000", 5000), (" 7 ", 7), ("0", 0), ("", None), ("-1", None), ("many", None)]
)
def test_the_cap_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, home: Path, text: str, cap: int | None
) -> None:
    monkeypatch.setenv(kv_store.CAP_VARIABLE, text)
    store = ContextStore()
    assert store.cap == (kv_store.CAP_BYTES if cap is None else cap)
    assert store.folder == home / "cache" / "contexts"


# ---------------------------------------------------------------------------- which model


def test_models_are_told_apart_without_reading_weights(tmp_path: Path) -> None:
    one = tiny_llama(tmp_path / "one", seed=0)
    assert kv_store.model_hash(one) == kv_store.model_hash(tiny_llama(tmp_path / "same", seed=0))
    assert kv_store.model_hash(one) != kv_store.model_hash(tiny_llama(tmp_path / "deep", layers=5))
    assert kv_store.model_hash(one) != kv_store.model_hash(tiny_llama(tmp_path / "long", context=100))


# ---------------------------------------------------------------------------- states of caches


def every_kind() -> list[Any]:
    return [
        KVCache(),
        QuantizedKVCache(32, 8),
        QuantizedKVCache(64, 4),
        RotatingKVCache(4),
        ArraysCache(2),
        ChunkedKVCache(8),
        CacheList(KVCache(), ArraysCache(1)),
        KVCache(),
    ]


def filled(steps: int) -> list[Any]:
    """Every kind after `steps` rows of its own numbers; the last one stays empty."""
    draw = np.random.default_rng(steps)
    cache = every_kind()
    rows = [cache[0], cache[1], cache[2], cache[3], cache[5], cache[6][0]]
    for _ in range(steps):
        for layer in rows:
            keys, values = (mx.array(draw.standard_normal((1, 2, 1, 64)).astype(np.float32)) for _ in "kv")
            layer.update_and_fetch(keys, values)
        for layer, slots in ((cache[4], 2), (cache[6][1], 1)):
            for slot in range(slots):
                layer[slot] = mx.array(draw.standard_normal((1, 3, 4)).astype(np.float32))
    return cache


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_every_kind_of_cache_comes_back_and_goes_on(store: ContextStore, steps: int) -> None:
    cache = filled(steps)
    saved, plain = kv_state.dump_cache(cache)
    store.cap = 1_000_000
    store.save("chat", KEY, saved, {"plain": plain})
    got, facts = store.load("chat", KEY)
    back = every_kind()
    kv_state.fill_cache(back, (got, facts["plain"]))
    assert kv_state.kinds(back) == kv_state.kinds(cache)
    same_numbers(back, cache)
    row = mx.ones((1, 2, 1, 64))
    for layer in [*leaves(back), *leaves(cache)]:
        if not isinstance(layer, ArraysCache):
            layer.update_and_fetch(row, row)
    same_numbers(back, cache)


def same_numbers(one: list[Any], other: list[Any]) -> None:
    """Offsets, and the rows in the order of time."""
    for mine, theirs in zip(leaves(one), leaves(other), strict=True):
        if isinstance(theirs, ArraysCache):
            pairs = list(zip(mine.cache, theirs.cache, strict=True))
        elif theirs.keys is None:
            assert mine.keys is None
            pairs = []
        else:
            assert mine.offset == theirs.offset
            pairs = list(zip(in_time(mine), in_time(theirs), strict=True))
        assert all(mx.array_equal(a, b).item() for a, b in pairs)


def in_time(layer: Any) -> list[mx.array]:
    if isinstance(layer, RotatingKVCache):
        return [layer._temporal_order(part) for part in (layer.keys, layer.values)]
    if isinstance(layer, QuantizedKVCache):
        return [array for part in layer.keys_and_values() for array in part]
    if isinstance(layer, ChunkedKVCache):
        rows = layer.offset - layer.start_position
        return [layer.keys[..., :rows, :], layer.values[..., :rows, :]]
    return list(layer.keys_and_values())


def test_reserved_rows_are_not_written() -> None:
    saved, _ = kv_state.dump_cache(filled(3))
    assert saved["cache.0.0"].shape == (1, 2, 3, 64)
    assert saved["cache.1.0.0"].shape == (1, 2, 3, 16)


@pytest.mark.parametrize("drop", ["cache.4.cache.0", "cache.0.2", "cache.1.0.1", "cache.3.3", "cache.8.2"])
def test_states_that_do_not_fit(drop: str) -> None:
    saved, plain = kv_state.dump_cache(filled(2))
    assert drop in saved or drop in plain
    # Of the last layer everything goes: its number is missing then.
    gone = [name for name in (*saved, *plain) if name == drop or drop[:7] == name[:7] == "cache.8"]
    for name in gone:
        saved.pop(name, None)
        plain.pop(name, None)
    with pytest.raises(kv_state.WrongState):
        kv_state.fill_cache(every_kind(), (saved, plain))
