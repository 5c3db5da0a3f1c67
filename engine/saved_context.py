"""A session's sequence on disk and back: tokens, the target's cache, its snapshots, and the tap rows for
drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm

from dspark_tui.engine import kv_state
from dspark_tui.engine.kv_store import CannotKeep, ContextStore, Key, NothingKept, model_hash, text_hash
from dspark_tui.engine.rollback import Snapshot
from dspark_tui.engine.session import Session
from dspark_tui.engine.target import Target


def key_of(target: Target) -> Key:
    """What a saved context of `target` has to agree in. Raises OSError when its folder cannot be read."""
    info, kept_in = target.info, "whole" if target.kv_bits is None else f"in {target.kv_bits} bits"
    return Key(
        model=model_hash(Path(info.path)),
        template=text_hash(str(getattr(target.tokenizer, "chat_template", None))),
        numbers=f"{info.precision} weights, keys and values {kept_in}, mlx-lm {mlx_lm.__version__}",
    )


def save(session: Session, store: ContextStore, chat: str) -> tuple[int, int]:
    """Write the present sequence under the name `chat`. Returns its positions and the file's bytes.

    Raises `CannotKeep` with a sentence.
    """
    target = session.target
    target.roll_back()
    if not target.tokens:
        raise CannotKeep("There is no context to save: nothing has been computed since the model was loaded.")
    try:
        arrays, plain = kv_state.dump_cache(target.cache)
        kept = _first_and_newest(session)
        for number, snapshot in enumerate(kept):
            more, others = kv_state.dump_snapshot(snapshot, f"snapshot{number}")
            arrays.update(more)
            plain.update(others)
        key = key_of(target)
    except (kv_state.WrongState, OSError) as error:
        raise CannotKeep(f"The context could not be saved: {error}.") from error
    arrays["tokens"] = mx.array(target.tokens, dtype=mx.uint32)
    start, rows = session.rows.since(0)
    if rows is not None:
        arrays["rows"] = rows
    facts: dict[str, Any] = {
        "kinds": kv_state.kinds(target.cache),
        "plain": plain,
        "snapshots": [snapshot.length for snapshot in kept],
        "taps": list(target.taps),
        "rows_from": start,
    }
    mx.eval(arrays)
    return len(target.tokens), store.save(chat, key, arrays, facts)


def restore(session: Session, store: ContextStore, chat: str) -> int:
    """Take the sequence kept under `chat` in place of the present one. Returns its positions.

    Raises `NothingKept` with the reason; the present sequence then stays.
    """
    target = session.target
    try:
        key = key_of(target)
    except OSError as error:
        raise NothingKept(f"the model's folder cannot be read ({error.strerror or error})") from error
    arrays, facts = store.load(chat, key)
    cache = target.fresh_cache()
    try:
        tokens = _tokens(target, arrays)
        if facts["kinds"] != kv_state.kinds(cache):
            raise kv_state.WrongState("it is of a model with other layers")
        named = arrays, facts["plain"]
        kv_state.fill_cache(cache, named)
        size, kept = len(facts["kinds"]), []
        for number, length in enumerate(facts["snapshots"]):
            kept.append(kv_state.fill_snapshot(tokens[:length], size, named, f"snapshot{number}"))
        rows, start, taps = arrays.get("rows"), int(facts["rows_from"]), tuple(facts["taps"])
    except kv_state.WrongState as error:
        raise NothingKept(f"the saved context cannot be used: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NothingKept("the saved context is damaged or of another program") from error
    session.reset()
    target.adopt(cache, tokens)
    session.snapshots.put(kept)
    session.rows.reset(len(tokens))
    # Rows of other taps say nothing to today's drafters: these then start with the next token.
    if rows is not None and taps == target.taps and start + rows.shape[0] == len(tokens):
        session.rows.reset(start)
        session.rows.append(rows)
    return len(tokens)


def _first_and_newest(session: Session) -> list[Snapshot]:
    """The two that a next turn and a new chat come back to."""
    session.snapshots.keep_to(session.target.tokens)
    kept = session.snapshots.kept
    return kept[:1] + kept[1:][-1:]


def _tokens(target: Target, arrays: dict[str, mx.array]) -> list[int]:
    tokens: list[int] = arrays["tokens"].tolist()  # type: ignore[assignment]
    if len(tokens) >= target.info.context:
        raise kv_state.WrongState(f"it has {len(tokens)} tokens and the model holds {target.info.context}")
    if not tokens or max(tokens) >= target.vocabulary:
        raise kv_state.WrongState("its tokens are not the model's")
    return tokens
