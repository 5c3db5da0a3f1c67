"""Recurrent state after a rejection, by replay and by running again; and that faults are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from cache_states import assert_same, stepwise
from rounds import HYBRIDS, LONG, VOCABULARY, Move, play
from tiny import WINDOW, build_target

from dspark_tui.engine.rollback import Undo
from dspark_tui.engine.rollback.mixers import Mixer
from dspark_tui.engine.rollback.window import Window
from dspark_tui.engine.target import Target


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
