"""Answers of the backend, on a tiny random target with its own tokenizer and drafters."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from backend_harness import METHODS, Engine, prompt, refusal
from tiny import IM_END, encode, tiny_llama

from dspark_tui.engine.protocol import (
    Finished,
    Prefill,
    Rounds,
    Sampling,
    Text,
)


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
    assert done[:2] == [0, 128]
    assert done[-1] == result.prompt_tokens


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
    assert held == prompt("hello") + first.token_ids[: len(held) - first.prompt_tokens]
    assert len(held) - first.prompt_tokens in (24, 25)
    second = engine.chat("hello", first.text, "and now?", max_tokens=5)
    wanted = prompt("hello", first.text, "and now?")
    shared = next(i for i, (a, b) in enumerate(zip([*held, -1], [*wanted, -2], strict=False)) if a != b)
    assert second.prompt_tokens == len(wanted)
    assert second.reused_tokens == shared
    assert shared >= first.prompt_tokens
    assert engine.of(Prefill)[0].reused == engine.of(Prefill)[0].done == shared
    # The same conversation without a first turn ends the same.
    again = Engine()
    again.load(models / "target")
    assert again.chat("hello", first.text, "and now?", max_tokens=5).token_ids == second.token_ids


def test_the_same_prompt_again_computes_its_last_token_only(loaded: Engine) -> None:
    first = loaded.chat("hello", max_tokens=8)
    again = loaded.chat("hello", max_tokens=8)
    assert again.reused_tokens == first.prompt_tokens - 1
    assert again.token_ids == first.token_ids


def test_an_edited_prompt_keeps_what_is_before_the_edit(loaded: Engine) -> None:
    loaded.chat("hello there", max_tokens=8)
    edited = loaded.chat("hello you", max_tokens=8)
    assert edited.reused_tokens == len(prompt("hello ")) - len(
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
    tokens = len(prompt("a" * 400))
    assert sentence == (
        f"The prompt has {tokens} tokens and target holds 300 with the reply; shorten it or start a new chat."
    )
    exact = "a" * (300 - len(prompt("")))
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
