"""Errors, stops and switches in mid-answer, and targets that cannot roll back."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from backend_harness import METHODS, VOCABULARY, Engine, prompt, refusal
from tiny import tiny_llama

from dspark_tui.engine.backend import BackendError, Control
from dspark_tui.engine.protocol import (
    AnyEvent,
    DrafterChanged,
    Failed,
    Sampling,
    SwitchDrafter,
    Text,
)
from dspark_tui.engine.target import Forward, Target
from dspark_tui.engine.worker import MlxBackend


@pytest.mark.parametrize("drafter", ["none", "dspark"])
def test_error_in_mid_answer_keeps_the_text(
    engine: Engine, models: Path, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.load(models / "target", drafter if drafter == "none" else str(models / drafter))
    whole = engine.chat("hello", max_tokens=40)
    forward, calls = Target.forward, 0

    def failing(self: Target, tokens: mx.array, last_only: bool = False) -> Forward:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise RuntimeError("[metal] out\nof memory")
        return forward(self, tokens, last_only)

    with monkeypatch.context() as patch:
        patch.setattr(Target, "forward", failing)
        with pytest.raises(BackendError) as caught:
            engine.chat("hello", max_tokens=40)
    result = caught.value.result
    assert result is not None
    assert caught.value.kind == "failed"
    assert caught.value.message == (
        f"The answer broke off after {result.generated_tokens} tokens: [metal] out of memory"
    )
    assert result.finish_reason == "error"
    assert 1 < result.generated_tokens < 40
    assert result.token_ids == whole.token_ids[: result.generated_tokens]
    assert whole.text.startswith(result.text)
    assert result.text
    # And the engine goes on, from nothing.
    again = engine.chat("hello", max_tokens=40)
    assert (again.reused_tokens, again.token_ids) == (0, whole.token_ids)


def test_error_in_prefill(loaded: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Target, tokens: mx.array, last_only: bool = False) -> Forward:
        raise ValueError("no")

    with monkeypatch.context() as patch:
        patch.setattr(Target, "forward", failing)
        with pytest.raises(BackendError) as caught:
            loaded.chat("hello")
    assert caught.value.result is not None
    assert (caught.value.result.generated_tokens, caught.value.result.text) == (0, "")
    assert loaded.chat("hello", max_tokens=3).generated_tokens == 3


@pytest.mark.parametrize("drafter", ["none", *METHODS])
def test_stop_keeps_the_text(engine: Engine, models: Path, drafter: str) -> None:
    engine.load(models / "target", drafter if drafter == "none" else str(models / drafter))
    whole = engine.chat("hello", max_tokens=60)
    control, texts = Control(), 0

    def hear(event: AnyEvent) -> None:
        nonlocal texts
        texts += isinstance(event, Text)
        if texts == 4:
            control.stop()

    result = engine.chat("hello", max_tokens=60, control=control, emit=hear)
    assert result.finish_reason == "stopped"
    assert result.token_ids == whole.token_ids[: result.generated_tokens]
    assert 4 <= result.generated_tokens < 60
    assert whole.text.startswith(result.text)
    assert engine.backend.session is not None
    held = engine.backend.session.target.tokens
    assert held == (prompt("hello") + result.token_ids)[: len(held)]
    assert len(held) >= result.prompt_tokens + result.generated_tokens - 1
    # What was stopped can be gone on from.
    again = engine.chat("hello", max_tokens=60)
    assert (again.reused_tokens, again.token_ids) == (whole.prompt_tokens - 1, whole.token_ids)


def test_stop_in_prefill(loaded: Engine) -> None:
    control = Control()
    control.stop()
    result = loaded.chat("a" * 200, control=control)
    assert (result.finish_reason, result.generated_tokens, result.text) == ("stopped", 0, "")
    assert result.accept_length is None
    assert result.tokens_per_second is None


@pytest.mark.usefixtures("known")
def test_switching_in_mid_answer_keeps_the_answer(engine: Engine, models: Path) -> None:
    engine.load(models / "target", "none")
    whole = engine.chat("hello", max_tokens=60)
    assert engine.backend.session is not None
    for name in ("dspark", "dflash2", "dflash", "none"):
        engine.backend.session.select(name)
    control = Control()
    wanted = iter(["dspark", "dflash2", "nonsense", "none", "dflash"])

    def hear(event: AnyEvent) -> None:
        if isinstance(event, Text) and event.seq % 5 == 4 and (name := next(wanted, None)):
            control.offer_switch(SwitchDrafter(1000 + event.seq, name))

    result = engine.chat("hello", max_tokens=60, control=control, emit=hear, rounds=True)
    assert result.token_ids == whole.token_ids
    # Those with id 0 tell that drafting does not pay for a model this small.
    changes = [change for change in engine.of(DrafterChanged) if change.id]
    assert [c.drafter.name for c in changes] == ["dspark-tiny", "dflash2-tiny", "none", "dflash-tiny"]
    (failed,) = engine.of(Failed)
    assert failed.kind == "usage"
    assert "no drafter called nonsense; choose none, dflash2-tiny" in failed.message
    assert {r.source for r in result.rounds or []} == {"none", "dspark-tiny", "dflash2-tiny", "dflash-tiny"}
    assert result.drafter.name == "dflash-tiny"


@pytest.mark.usefixtures("known")
def test_switching_between_answers(engine: Engine, models: Path) -> None:
    engine.load(models / "target", "none")
    engine.backend.switch_drafter(SwitchDrafter(5, "dspark"), engine.events.append)
    changed = engine.events[-1]
    assert isinstance(changed, DrafterChanged)
    assert (changed.id, changed.drafter.name, changed.drafter.state) == (5, "dspark-tiny", "active")
    refusal(lambda: engine.backend.switch_drafter(SwitchDrafter(6, "x"), engine.events.append))
    assert engine.chat("hello", max_tokens=3).drafter.name == "dspark-tiny"
    empty = MlxBackend()
    refusal(lambda: empty.switch_drafter(SwitchDrafter(1, "none"), engine.events.append))


def test_drafter_that_fails_is_given_up_with_a_reason(engine: Engine, models: Path) -> None:
    engine.load(models / "target")
    whole = engine.chat("hello", max_tokens=30)
    engine.load(models / "target", str(models / "dspark"))
    session = engine.backend.session
    assert session is not None
    session.drafter.model.norm.weight = mx.full((64,), float("nan"))  # type: ignore[attr-defined]
    result = engine.chat("hello", max_tokens=30)
    assert result.token_ids == whole.token_ids
    assert (result.drafter.name, result.drafter.state) == ("dspark", "fell_back")
    assert "its numbers overflowed" in result.drafter.reason
    (changed,) = engine.of(DrafterChanged)
    assert (changed.id, changed.drafter) == (0, result.drafter)


# ---------------------------------------------------------------------------- sliding windows


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
    folder = tmp_path_factory.mktemp("sliding") / "gemma"
    return tiny_llama(folder, VOCABULARY, architecture="gemma3_text", **options)


@pytest.mark.usefixtures("known")
def test_sliding_target_drafts_and_answers_as_without_a_drafter(engine: Engine, sliding: Path) -> None:
    said = engine.load(sliding, "none")
    assert all(d.usable for d in said.drafters)
    plain = engine.chat("hello", max_tokens=60)
    for name in ("dspark", "dflash", "dflash2", "lookup", "auto"):
        engine.load(sliding, name)
        assert engine.chat("hello", max_tokens=60).token_ids == plain.token_ids


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=4)], ids=["greedy", "sampled"])
def test_sliding_target_answers_plainly(engine: Engine, sliding: Path, sampling: Sampling) -> None:
    engine.load(sliding)
    first = engine.chat("hello", max_tokens=30, sampling=sampling)
    assert first.generated_tokens > 1
    assert first.finish_reason in ("length", "stop")
    # The next turn goes on from the end, and is what it would be from nothing.
    second = engine.chat("hello", first.text, "more", max_tokens=6)
    assert second.reused_tokens >= first.prompt_tokens
    engine.load(sliding)
    assert engine.chat("hello", first.text, "more", max_tokens=6).token_ids == second.token_ids
    # An edit cannot be cut back to: it starts over.
    assert engine.chat("hullo", max_tokens=6).reused_tokens == 0


def test_sliding_target_stopped_in_mid_answer(engine: Engine, sliding: Path) -> None:
    engine.load(sliding)
    control = Control()

    def hear(event: AnyEvent) -> None:
        if isinstance(event, Text):
            control.stop()

    result = engine.chat("hello", control=control, emit=hear)
    assert result.finish_reason == "stopped"
