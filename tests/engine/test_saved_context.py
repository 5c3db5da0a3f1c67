"""Contexts on disk: a restarted engine goes on with the same text and computes only what is new."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from backend_harness import METHODS, SHAPE, Engine, prompt, refusal
from numpy_drafters import write_drafter
from test_turn_reuse import FAMILIES, STRIPPING, fresh, held, session_of, shared, start, write

from dspark_tui.engine import kv_store, saved_context
from dspark_tui.engine.protocol import ContextRestored, ContextSaved, RestoreContext, SaveContext

CHAT = "chats/1: é"


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As in the tests of turns, with a template that strips old answers for every other family."""
    top = tmp_path_factory.mktemp("zoo")
    for family in FAMILIES:
        write(top / family, family)
    write(top / "qwen3_5-stripping", "qwen3_5", STRIPPING)
    write(top / "gemma3_text-stripping", "gemma3_text", STRIPPING)
    for method in METHODS:
        write_drafter(top / method, method, SHAPE)
    write_drafter(top / "other", "dflash", dataclasses.replace(SHAPE, taps=(0, 2)))
    return top


@pytest.fixture(autouse=True)
def own_home(home: Path) -> Path:
    """Every test has a cache folder of its own."""
    return home


def files(home: Path) -> list[Path]:
    return sorted((home / "cache" / "contexts").iterdir())


def save(engine: Engine, chat: str = CHAT) -> ContextSaved:
    events: list[Any] = []
    engine.backend.save_context(SaveContext(7, chat), events.append)
    (event,) = events
    assert isinstance(event, ContextSaved)
    assert (event.id, event.chat) == (7, chat)
    return event


def restore(engine: Engine, chat: str = CHAT) -> ContextRestored:
    events: list[Any] = []
    engine.backend.restore_context(RestoreContext(8, chat), events.append)
    (event,) = events
    assert isinstance(event, ContextRestored)
    assert (event.id, event.chat) == (8, chat)
    assert bool(event.reason) == (event.tokens == 0)
    return event


@pytest.mark.parametrize("drafter", ["none", "dspark"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_restarted_engine_goes_on(zoo: Path, own_home: Path, family: str, drafter: str) -> None:
    engine = start(zoo, family, drafter)
    first = engine.chat("hello, how is it?", max_tokens=40)
    turns = ["hello, how is it?", first.text, "and now?"]
    before, rows = held(engine), session_of(engine).rows
    saved = save(engine)
    assert saved.tokens == len(before)
    assert [path.stat().st_size for path in files(own_home)] == [saved.bytes]

    again = start(zoo, family, drafter)
    assert restore(again).tokens == len(before)
    assert held(again) == before
    kept = session_of(again).rows
    if drafter != "none":
        assert (kept.base, kept.length) == (rows.base, rows.length) == (0, len(before))
        assert mx.array_equal(kept.since(0)[1], rows.since(0)[1]).item()
    for one in (engine, again):
        session_of(one).adaptive = False  # the same rounds, whatever the clock says
    going_on, restored = engine.chat(*turns, max_tokens=30), again.chat(*turns, max_tokens=30)
    assert restored.reused_tokens == going_on.reused_tokens == len(before)
    assert restored.token_ids == going_on.token_ids == fresh(zoo, family, *turns, count=30).token_ids
    assert restored.accept_length == going_on.accept_length


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5"])
def test_snapshots_come_back_too(zoo: Path, family: str) -> None:
    """The next turn renders the answer otherwise: only the boundary before it is of use."""
    target = f"{family}-stripping"
    engine = start(zoo, target)
    first = engine.chat("hello", max_tokens=40)
    answer = first.text.replace("x", "y")
    turns = ["hello", f"{answer[:12]}x{answer[12:]}", "and now?"]
    save(engine)
    again = start(zoo, target)
    restore(again)
    second = again.chat(*turns, max_tokens=24)
    assert second.reused_tokens == len(prompt("hello")) - 1
    assert second.token_ids == fresh(zoo, target, *turns).token_ids


def test_a_session_can_be_taken_back_to_an_earlier_chat(zoo: Path) -> None:
    """Chats take turns in one engine; each comes back whole."""
    engine = start(zoo, "gemma3_text", "dflash")
    texts = {}
    for chat in ("one", "other"):
        texts[chat] = engine.chat(f"hello {chat}", max_tokens=40).text
        save(engine, chat)
    for chat in ("one", "other", "one"):
        length = restore(engine, chat).tokens
        turns = [f"hello {chat}", texts[chat], "more"]
        result = engine.chat(*turns, max_tokens=24)
        assert result.reused_tokens == length
        assert result.token_ids == fresh(zoo, "gemma3_text", *turns).token_ids


def test_other_drafters_than_those_that_were_there(zoo: Path) -> None:
    """Rows of other taps are of no use: the target's part is taken back, and the text is the same."""
    engine = start(zoo, "llama", "dspark")
    first = engine.chat("hello", max_tokens=40)
    turns = ["hello", first.text, "more"]
    before = save(engine).tokens
    other = start(zoo, "llama", "other")
    assert restore(other).tokens == before
    assert session_of(other).target.taps != session_of(engine).target.taps
    assert (session_of(other).rows.base, session_of(other).rows.length) == (before, before)
    result = other.chat(*turns, max_tokens=30)
    assert result.reused_tokens == before
    assert result.token_ids == fresh(zoo, "llama", *turns, count=30).token_ids


# ---------------------------------------------------------------------------- what is not taken back


def test_nothing_to_save_and_nothing_kept(zoo: Path) -> None:
    engine = Engine()
    assert "No model is loaded" in refusal(lambda: save(engine))
    assert "No model is loaded" in refusal(lambda: restore(engine))
    engine = start(zoo, "llama")
    assert refusal(lambda: save(engine), "failed") == (
        "There is no context to save: nothing has been computed since the model was loaded."
    )
    assert restore(engine).reason == "nothing is kept for this chat and model"


def change_template(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] += " "
    path.write_text(json.dumps(config))


def change_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = dict(mx.load(str(path)))
    mx.eval(weights)
    path.unlink()
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx", "note": "another"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_template, "the model's chat template has changed since the context was saved"),
        (change_weights, "nothing is kept for this chat and model"),
    ],
)
def test_a_model_that_has_changed(tmp_path: Path, change: Callable[[Path], None], words: str) -> None:
    folder = write(tmp_path / "target", "llama")
    engine = start(tmp_path, "target")
    engine.chat("hello", max_tokens=8)
    save(engine)
    change(folder)
    again = start(tmp_path, "target")
    assert restore(again).reason == words


def test_other_bits_of_keys_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "target", "llama")
    engine = start(tmp_path, "target")
    engine.chat("hello", max_tokens=8)
    save(engine)
    again = start(tmp_path, "target")
    monkeypatch.setattr(session_of(again).target, "kv_bits", 8)
    assert "the context was saved with other numbers" in restore(again).reason


def test_a_longer_context_than_the_model_holds(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import msgspec

    engine = start(zoo, "llama")
    engine.chat("hello", max_tokens=30)
    tokens = save(engine).tokens
    again = start(zoo, "llama")
    target = session_of(again).target
    monkeypatch.setattr(target, "info", msgspec.structs.replace(target.info, context=tokens))
    assert restore(again).reason == (
        f"the saved context cannot be used: it has {tokens} tokens and the model holds {tokens}"
    )


def test_a_damaged_file_leaves_the_present_sequence(zoo: Path, own_home: Path) -> None:
    engine = start(zoo, "qwen3_5", "dflash")
    first = engine.chat("hello", max_tokens=30)
    save(engine)
    (path,) = files(own_home)
    content = bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(content)
    before = held(engine)
    assert restore(engine).reason == "the saved context is damaged: its checksum does not fit"
    assert held(engine) == before
    turns = ["hello", first.text, "more"]
    second = engine.chat(*turns, max_tokens=24)
    assert second.reused_tokens == len(before)
    assert second.token_ids == fresh(zoo, "qwen3_5", *turns).token_ids


@pytest.mark.parametrize("fact", ["kinds", "plain", "taps", "rows_from", "snapshots", "tokens"])
@pytest.mark.parametrize("value", ["gone", None, [], {}, 10**9, [[1]], "text"], ids=str)
def test_facts_that_make_no_sense(zoo: Path, monkeypatch: pytest.MonkeyPatch, fact: str, value: Any) -> None:
    """A file with a right checksum, written by another program: refused or taken whole, never half."""
    engine = start(zoo, "gemma3_text", "dspark")
    first = engine.chat("hello", max_tokens=20)
    before = held(engine)
    save(engine)
    load = kv_store.ContextStore.load

    def bent(store: kv_store.ContextStore, chat: str, key: kv_store.Key) -> Any:
        arrays, facts = load(store, chat, key)
        if fact == "tokens":
            arrays[fact] = mx.array([[1.5]]) if isinstance(value, list) else mx.array([2**31])
        elif value == "gone":
            del facts[fact]
        else:
            facts[fact] = value
        return arrays, facts

    monkeypatch.setattr(kv_store.ContextStore, "load", bent)
    event = restore(engine)
    assert "\n" not in event.reason
    assert held(engine) == before
    turns = ["hello", first.text, "more"]
    assert engine.chat(*turns, max_tokens=8).token_ids == fresh(zoo, "gemma3_text", *turns, count=8).token_ids


def test_the_cap_is_told(zoo: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(zoo, "llama")
    engine.chat("hello", max_tokens=8)
    monkeypatch.setenv(kv_store.CAP_VARIABLE, "1000")
    assert kv_store.CAP_VARIABLE in refusal(lambda: save(engine), "failed")
    monkeypatch.setenv(kv_store.CAP_VARIABLE, "1000000")
    save(engine)
    assert len(files(own_home)) == 1


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "target", "llama")
    engine = start(tmp_path, "target")
    engine.chat("hello", max_tokens=8)
    (folder / "config.json").unlink()
    assert refusal(lambda: save(engine), "failed").startswith("The context could not be saved")
    assert restore(engine).reason == "the model's folder cannot be read (No such file or directory)"


def test_an_answer_that_was_stopped_is_saved_as_it_stands(zoo: Path) -> None:
    from test_turn_reuse import StopAt

    engine = start(zoo, "qwen3_5", "dspark")
    stop = StopAt(12)
    first = engine.chat("hello", control=stop.control, emit=stop, max_tokens=200)
    assert save(engine).tokens == len(held(engine))
    again = start(zoo, "qwen3_5", "dspark")
    restore(again)
    turns = ["hello", first.text, "go on"]
    assert shared(held(again), prompt(*turns)) == len(held(again))
    assert again.chat(*turns, max_tokens=24).token_ids == fresh(zoo, "qwen3_5", *turns).token_ids


def test_the_key_says_what_numbers_are_made_of(zoo: Path) -> None:
    import mlx_lm

    key = saved_context.key_of(session_of(start(zoo, "llama")).target)
    assert key.numbers == f"float32 weights, keys and values whole, mlx-lm {mlx_lm.__version__}"
    assert os.environ.get("DSPARK_TUI_HOME")
