"""The backend that runs models, on a tiny random target with its own tokenizer and drafters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import pytest
from numpy_drafters import Shape, write_drafter
from tiny import IM_END, IM_START, SPECIAL, encode, tiny_llama

from dspark_tui.engine.backend import BackendError, Control
from dspark_tui.engine.models import pairs
from dspark_tui.engine.models.pairs import KnownDrafter
from dspark_tui.engine.protocol import (
    AnyEvent,
    Chat,
    DrafterChanged,
    Failed,
    Finished,
    Load,
    Loaded,
    Message,
    Prefill,
    Progress,
    Result,
    Rounds,
    Sampling,
    SwitchDrafter,
    Text,
)
from dspark_tui.engine.target import Forward, Target
from dspark_tui.engine.worker import MlxBackend

METHODS = ["dspark", "dflash", "dflash2"]
VOCABULARY = 52
"""Special tokens and ASCII only: every answer's text gives its tokens again."""

SHAPE = Shape(vocabulary=VOCABULARY, target_layers=4, layers=1)
E = TypeVar("E")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target`, a target that can end its turn, and a drafter of every method."""
    top = tmp_path_factory.mktemp("models")
    tiny_llama(top / "target", VOCABULARY, context=300)
    for method in METHODS:
        write_drafter(top / method, method, SHAPE)
    return top


@pytest.fixture
def known(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three drafters are known for the tiny target."""
    from dspark_tui.engine import loader

    drafters = [KnownDrafter(f"{m}-tiny", m, models / m) for m in ("dflash2", "dspark", "dflash")]  # type: ignore[arg-type]
    monkeypatch.setattr(loader, "known_drafters", lambda config: list(drafters))
    assert pairs.known_drafters({}) == []


class Engine:
    """A backend with everything that it said."""

    def __init__(self) -> None:
        self.backend = MlxBackend()
        self.events: list[AnyEvent] = []
        self.commands = 0

    def _next(self) -> int:
        self.commands += 1
        self.events.clear()
        return self.commands

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def load(self, model: Path | str, drafter: str | None = "none") -> Loaded:
        self.backend.load(Load(self._next(), str(model), drafter), self.events.append)
        assert isinstance(self.events[-1], Loaded)
        return self.events[-1]

    def chat(
        self,
        *messages: str,
        control: Control | None = None,
        emit: Callable[[AnyEvent], None] | None = None,
        **options: Any,
    ) -> Result:
        """A conversation in which the user begins."""
        roles = ["user", "assistant"] * len(messages)
        turns = [Message(role, text) for role, text in zip(roles, messages, strict=False)]  # type: ignore[arg-type]
        command = Chat(self._next(), f"answer {self.commands}", turns, **options)

        def hear(event: AnyEvent) -> None:
            self.events.append(event)
            if emit is not None:
                emit(event)

        self.backend.chat(command, hear, control or Control())
        finished = self.events[-1]
        assert isinstance(finished, Finished)
        assert finished.answer == command.answer
        return finished.result


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def loaded(engine: Engine, models: Path) -> Engine:
    engine.load(models / "target")
    return engine


def refusal(call: Callable[[], object], kind: str = "usage") -> str:
    with pytest.raises(BackendError) as caught:
        call()
    assert caught.value.kind == kind
    assert "\n" not in caught.value.message
    return caught.value.message


# ---------------------------------------------------------------------------- loading


def test_loading_says_what_it_is(engine: Engine, models: Path) -> None:
    said = engine.load(models / "target")
    info = said.model
    assert (info.name, info.path, info.architecture) == ("target", str(models / "target"), "llama")
    assert (info.precision, info.context) == ("float32", 300)
    weights = dict(mx.load(str(models / "target" / "model.safetensors")))
    assert info.weight_bytes == sum(value.nbytes for value in weights.values())
    assert [d.name for d in said.drafters] == ["none"]
    assert (said.drafter.name, said.drafter.state) == ("none", "none")
    assert said.seconds > 0
    stages = [(p.stage, p.done, p.total) for p in engine.of(Progress)]
    size = (models / "target" / "model.safetensors").stat().st_size
    assert stages == [("read", 0, size), ("read", size, size), ("drafter", 0, 1), ("drafter", 1, 1)]


@pytest.mark.usefixtures("known")
def test_known_drafters_are_listed_and_the_best_is_taken(engine: Engine, models: Path) -> None:
    said = engine.load(models / "target", None)
    assert (said.drafter.name, said.drafter.state, said.drafter.drafts) == ("dflash2-tiny", "active", 4)
    assert [(d.name, d.method, d.usable) for d in said.drafters] == [
        ("none", "none", True),
        ("dflash2-tiny", "dflash2", True),
        ("dspark-tiny", "dspark", True),
        ("dflash-tiny", "dflash", True),
    ]
    assert engine.load(models / "target", "dspark").drafter.name == "dspark-tiny"


def test_drafter_from_a_folder(engine: Engine, models: Path) -> None:
    said = engine.load(models / "target", str(models / "dspark"))
    assert (said.drafter.name, said.drafter.method, said.drafter.drafts) == ("dspark", "dspark", 5)


@pytest.mark.usefixtures("known")
def test_unknown_drafter_names_the_allowed(engine: Engine, models: Path) -> None:
    sentence = refusal(lambda: engine.load(models / "target", "eagle"))
    assert (
        sentence == "target has no drafter called eagle; it has none, dflash2-tiny, dspark-tiny, dflash-tiny."
    )


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("wanted", ["", "a" * 5000, "nul\0", "~nobody-of-that-name/x"])
def test_odd_drafter_names(engine: Engine, models: Path, wanted: str) -> None:
    sentence = refusal(lambda: engine.load(models / "target", wanted))
    assert f"no drafter called {wanted[:80]}; it has none, dflash2-tiny" in sentence


@pytest.mark.usefixtures("known")
def test_a_method_is_not_taken_for_a_folder(
    engine: Engine, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dspark").mkdir()
    monkeypatch.chdir(tmp_path)
    assert engine.load(models / "target", "dspark").drafter.name == "dspark-tiny"


@pytest.mark.usefixtures("known")
def test_unknown_drafter_leaves_the_present_pair(engine: Engine, models: Path) -> None:
    engine.load(models / "target", "dspark")
    refusal(lambda: engine.load(models / "target", "eagle"))
    refusal(lambda: engine.load(models / "missing", "dspark"))
    assert engine.chat("hello", max_tokens=3).drafter.name == "dspark-tiny"


@pytest.mark.usefixtures("known")
def test_drafter_folder_that_is_called_as_a_known_one(engine: Engine, models: Path, tmp_path: Path) -> None:
    write_drafter(tmp_path / "dspark-tiny", "dspark", replace(SHAPE, block=3))
    said = engine.load(models / "target", str(tmp_path / "dspark-tiny"))
    assert (said.drafter.name, said.drafter.drafts) == ("dspark-tiny", 3)
    assert [d.name for d in said.drafters] == ["none", "dspark-tiny", "dflash2-tiny", "dflash-tiny"]


def test_misfit_drafter_says_why(engine: Engine, models: Path, tmp_path: Path) -> None:
    write_drafter(tmp_path / "wide", "dflash", Shape(vocabulary=VOCABULARY, hidden=96, target_layers=4))
    sentence = refusal(lambda: engine.load(models / "target", str(tmp_path / "wide")))
    assert sentence == "wide is not usable here: drafter is for another target (hidden size 96, not 64)."


def test_broken_drafter_folder_says_why(engine: Engine, models: Path, tmp_path: Path) -> None:
    assert "has no config.json" in refusal(lambda: engine.load(models / "target", str(tmp_path)))


def test_folder_that_is_no_model(engine: Engine, tmp_path: Path) -> None:
    assert "it holds no config.json" in refusal(lambda: engine.load(tmp_path))
    assert "does not exist" in refusal(lambda: engine.load(tmp_path / "missing"))
    with pytest.raises(BackendError):
        engine.chat("hello")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 9}, "could not be loaded"),
        ({"hidden_size": 32}, "could not be loaded"),
        ({"num_attention_heads": "four"}, "could not be loaded"),
    ],
)
def test_models_that_do_not_load(engine: Engine, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    tiny_llama(tmp_path / "odd")
    config = json.loads((tmp_path / "odd" / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config | changes))
    assert words in refusal(lambda: engine.load(tmp_path / "odd"), "failed")
    assert refusal(lambda: engine.chat("hello")) == "No model is loaded; load one first."


def test_unknown_architecture(engine: Engine, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "odd", architecture="llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "no_such_architecture"}))
    assert "no_such_architecture" in refusal(lambda: engine.load(folder))


def test_broken_tokenizer(engine: Engine, tmp_path: Path) -> None:
    tiny_llama(tmp_path / "odd")
    (tmp_path / "odd" / "tokenizer.json").write_text("{}")
    assert "odd could not be loaded" in refusal(lambda: engine.load(tmp_path / "odd"), "failed")


# ---------------------------------------------------------------------------- answers


@pytest.mark.parametrize("drafter", ["none", *METHODS])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3)], ids=["greedy", "sampled"])
def test_token_limit_is_exact(engine: Engine, models: Path, drafter: str, sampling: Sampling) -> None:
    engine.load(models / "target", drafter if drafter == "none" else str(models / drafter))
    for limit in (1, 2, 3, 7, 30):
        result = engine.chat("hello", max_tokens=limit, sampling=sampling, rounds=True)
        if result.finish_reason == "length":
            assert result.generated_tokens == limit
        else:
            assert result.token_ids[-1] == IM_END
        assert result.generated_tokens == len(result.token_ids) <= limit
        assert result.rounds is not None
        # The first token comes from prefill, the others from the rounds.
        assert sum(r.committed for r in result.rounds) == result.generated_tokens - 1
        assert all(0 < r.committed <= r.accepted + 1 <= r.drafted + 1 for r in result.rounds)
        held = 1
        for r in result.rounds:
            assert held + r.drafted + 1 <= limit, "drafted what could not be committed"
            held += r.committed
        assert (result.accept_length is None) is (not result.rounds)
        assert (result.tokens_per_second is None) is (result.generated_tokens < 2)


@pytest.mark.parametrize("drafter", METHODS)
def test_greedy_answers_do_not_depend_on_the_drafter(engine: Engine, models: Path, drafter: str) -> None:
    engine.load(models / "target")
    plain = [engine.chat(prompt, max_tokens=60) for prompt in ("hello", "what is 1?", "(a, b)")]
    engine.load(models / "target", str(models / drafter))
    drafted = [engine.chat(prompt, max_tokens=60) for prompt in ("hello", "what is 1?", "(a, b)")]
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert [r.text for r in drafted] == [r.text for r in plain]


def test_without_a_limit_the_context_is_filled(loaded: Engine) -> None:
    result = loaded.chat("hello")
    if result.finish_reason == "length":
        assert result.prompt_tokens + result.generated_tokens == 300
    else:
        assert result.token_ids[-1] == IM_END
    assert loaded.chat("hello", max_tokens=10**9).generated_tokens == result.generated_tokens


def test_end_of_turn_is_kept_in_the_tokens_but_not_in_the_text(engine: Engine, tmp_path: Path) -> None:
    """A head that prefers the end of turn from the start."""
    folder = tiny_llama(tmp_path / "short", tied=False)
    weights = dict(mx.load(str(folder / "model.safetensors")))
    head = weights["lm_head.weight"]
    weights["lm_head.weight"] = mx.concatenate([head[:IM_END], mx.zeros((1, 64)), head[IM_END + 1 :]]) * 1e-6
    mx.eval(weights)
    (folder / "model.safetensors").unlink()
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    engine.load(folder)
    seen = {seed: engine.chat("hi", sampling=Sampling(1.0, seed=seed)) for seed in range(3)}
    for result in seen.values():
        assert result.token_ids.count(IM_END) == (1 if result.finish_reason == "stop" else 0)
        assert "im_end" not in result.text
    assert any(r.finish_reason == "stop" for r in seen.values())


def test_events_of_an_answer(loaded: Engine) -> None:
    result = loaded.chat("hello", max_tokens=20, rounds=True)
    prefills = loaded.of(Prefill)
    assert (prefills[0].done, prefills[0].total) == (0, result.prompt_tokens)
    assert prefills[-1].done == result.prompt_tokens
    texts = loaded.of(Text)
    assert [t.seq for t in texts] == list(range(len(texts)))
    assert "".join(t.text for t in texts) == result.text
    assert sum(len(r.rounds) for r in loaded.of(Rounds)) == len(result.rounds or [])
    last = loaded.of(Rounds)[-1]
    assert last.generated_tokens == result.generated_tokens
    assert {type(e) for e in loaded.events} == {Prefill, Text, Rounds, Finished}
    assert all(e.id == loaded.commands for e in loaded.events)
    assert result.seconds.load > 0
    assert loaded.chat("hello", max_tokens=2).seconds.load == 0


def test_long_prompts_come_in_chunks(loaded: Engine) -> None:
    result = loaded.chat("a" * 200, max_tokens=2)
    assert result.prompt_tokens > 200
    done = [p.done for p in loaded.of(Prefill)]
    assert done == sorted(done)
    assert done == [0, 128, result.prompt_tokens]


def test_stop_strings(loaded: Engine) -> None:
    whole = loaded.chat("hello", max_tokens=40).text
    stop = whole[8:10]
    result = loaded.chat("hello", max_tokens=40, stop=[stop])
    assert result.finish_reason == "stop"
    assert result.text == whole[: whole.index(stop)]
    assert stop not in "".join(t.text for t in loaded.of(Text))
    assert result.generated_tokens < 40


# ---------------------------------------------------------------------------- the next turn


@pytest.mark.parametrize("drafter", ["none", *METHODS])
def test_second_turn_reuses_the_first(engine: Engine, models: Path, drafter: str) -> None:
    engine.load(models / "target", drafter if drafter == "none" else str(models / drafter))
    first = engine.chat("hello", max_tokens=25)
    assert first.reused_tokens == 0
    assert engine.backend.session is not None
    held = list(engine.backend.session.target.tokens)
    assert held == _prompt("hello") + first.token_ids[: len(held) - first.prompt_tokens]
    assert len(held) - first.prompt_tokens in (24, 25)
    second = engine.chat("hello", first.text, "and now?", max_tokens=5)
    prompt = _prompt("hello", first.text, "and now?")
    shared = next(i for i, (a, b) in enumerate(zip([*held, -1], [*prompt, -2], strict=False)) if a != b)
    assert second.prompt_tokens == len(prompt)
    assert second.reused_tokens == shared
    assert shared >= first.prompt_tokens
    assert engine.of(Prefill)[0].reused == engine.of(Prefill)[0].done == shared
    # The same conversation without a first turn ends the same.
    again = Engine()
    again.load(models / "target")
    assert again.chat("hello", first.text, "and now?", max_tokens=5).token_ids == second.token_ids


def _prompt(*messages: str) -> list[int]:
    """The chat template by hand."""
    tokens: list[int] = []
    for role, text in zip(["user", "assistant"] * len(messages), messages, strict=False):
        tokens += [IM_START, *encode(f"{role}\n"), *_tokens(text), IM_END, *encode("\n")]
    return [*tokens, IM_START, *encode("assistant\n")]


def _tokens(text: str) -> list[int]:
    """Token ids of a text that may name special tokens."""
    names = {name: i for i, name in enumerate(SPECIAL)}
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text)
    return [t for part in parts for t in ([names[part]] if part in names else encode(part))]


def test_the_same_prompt_again_computes_its_last_token_only(loaded: Engine) -> None:
    first = loaded.chat("hello", max_tokens=8)
    again = loaded.chat("hello", max_tokens=8)
    assert again.reused_tokens == first.prompt_tokens - 1
    assert again.token_ids == first.token_ids


def test_an_edited_prompt_keeps_what_is_before_the_edit(loaded: Engine) -> None:
    loaded.chat("hello there", max_tokens=8)
    edited = loaded.chat("hello you", max_tokens=8)
    assert edited.reused_tokens == len(_prompt("hello ")) - len(
        [IM_END, *encode("\n"), 1, *encode("assistant\n")]
    )


# ---------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("drafter", ["none", *METHODS])
def test_seeds_reproduce(engine: Engine, models: Path, drafter: str) -> None:
    engine.load(models / "target", drafter if drafter == "none" else str(models / drafter))
    sampling = Sampling(temperature=1.2, top_p=0.95, seed=77)
    first = engine.chat("hello", max_tokens=30, sampling=sampling)
    assert engine.chat("hello", max_tokens=30, sampling=sampling).token_ids == first.token_ids
    others = [engine.chat("hello", max_tokens=30, sampling=Sampling(1.2, 0.95, seed=s)) for s in (78, 79)]
    assert all(r.token_ids != first.token_ids for r in others)


def test_without_a_seed_answers_differ(loaded: Engine) -> None:
    answers = {tuple(loaded.chat("hello", max_tokens=20, sampling=Sampling(1.5)).token_ids) for _ in range(4)}
    assert len(answers) > 1


# ---------------------------------------------------------------------------- wrong requests


def test_prompt_longer_than_the_context(loaded: Engine) -> None:
    sentence = refusal(lambda: loaded.chat("a" * 400))
    tokens = len(_prompt("a" * 400))
    assert sentence == (
        f"The prompt has {tokens} tokens and target holds 300 with the reply; shorten it or start a new chat."
    )
    exact = "a" * (300 - len(_prompt("")))
    assert str(300) in refusal(lambda: loaded.chat(exact))
    assert loaded.chat(exact[:-1]).generated_tokens == 1


@pytest.mark.parametrize("limit", [0, -3])
def test_token_limit_below_one(loaded: Engine, limit: int) -> None:
    assert refusal(lambda: loaded.chat("hi", max_tokens=limit)) == f"max-tokens is {limit}; give 1 or more."


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (Sampling(temperature=2.5), "from 0 (greedy) to 2"),
        (Sampling(temperature=-0.1), "from 0 (greedy) to 2"),
        (Sampling(temperature=float("nan")), "from 0 (greedy) to 2"),
        (Sampling(top_p=0.0), "above 0 and up to 1"),
        (Sampling(top_p=1.01), "above 0 and up to 1"),
        (Sampling(top_k=-1), "0 (keep every token)"),
        (Sampling(seed=-1), "from 0 to 2^63 - 1"),
        (Sampling(seed=2**63), "from 0 to 2^63 - 1"),
    ],
)
def test_sampling_out_of_range(loaded: Engine, sampling: Sampling, words: str) -> None:
    assert words in refusal(lambda: loaded.chat("hi", sampling=sampling))


def test_no_chat_template(engine: Engine, tmp_path: Path) -> None:
    engine.load(tiny_llama(tmp_path / "base", template=None))
    assert refusal(lambda: engine.chat("hi")) == (
        "base has no chat template, so it is not a chat model; choose an instruct model."
    )


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('Roles must alternate\nalways') }}", "Roles must alternate always"),
        ("{{ nothing.at.all }}", "nothing"),
        ("{% if %}", "refuses this conversation"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_template_that_raises(engine: Engine, tmp_path: Path, template: str, words: str) -> None:
    engine.load(tiny_llama(tmp_path / "odd", template=template))
    sentence = refusal(lambda: engine.chat("hi"))
    assert sentence.startswith("odd's chat template refuses this conversation: ")
    assert words in sentence


def test_template_that_gives_nothing(engine: Engine, tmp_path: Path) -> None:
    engine.load(tiny_llama(tmp_path / "odd", template=""))
    assert "chat template" in refusal(lambda: engine.chat("hi"))


def test_refused_requests_leave_the_sequence(loaded: Engine) -> None:
    first = loaded.chat("hello", max_tokens=8)
    refusal(lambda: loaded.chat("hello", max_tokens=0))
    assert loaded.chat("hello", max_tokens=8).reused_tokens == first.prompt_tokens - 1


# ---------------------------------------------------------------------------- faults, stops and switches


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
    assert held == (_prompt("hello") + result.token_ids)[: len(held)]
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
    control = Control()
    wanted = iter(["dspark", "dflash2", "nonsense", "none", "dflash"])

    def hear(event: AnyEvent) -> None:
        if isinstance(event, Text) and event.seq % 5 == 4 and (name := next(wanted, None)):
            control.offer_switch(SwitchDrafter(1000 + event.seq, name))

    result = engine.chat("hello", max_tokens=60, control=control, emit=hear, rounds=True)
    assert result.token_ids == whole.token_ids
    changes = engine.of(DrafterChanged)
    assert [c.drafter.name for c in changes] == ["dspark-tiny", "dflash2-tiny", "none", "dflash-tiny"]
    assert all(c.id >= 1000 for c in changes)
    (failed,) = engine.of(Failed)
    assert failed.kind == "usage"
    assert "no drafter called nonsense; it has none, dflash2-tiny" in failed.message
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
def test_sliding_target_lists_its_drafters_with_the_reason(engine: Engine, sliding: Path) -> None:
    said = engine.load(sliding, None)
    assert (said.drafter.name, said.drafter.state) == ("none", "none")
    reason = "its cache (RotatingKVCache) cannot give up rejected tokens"
    assert [(d.usable, d.reason) for d in said.drafters[1:]] == [(False, reason)] * 3
    assert engine.backend.session is not None
    assert engine.backend.session.target.taps == ()
    sentence = refusal(lambda: engine.load(sliding, "dspark"))
    assert sentence == f"dspark-tiny is not usable here: {reason}."


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
