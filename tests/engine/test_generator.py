"""The loop on tiny float32 models, against decoding without cache and without engine."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from tiny_pair import (
    METHODS,
    Oracle,
    make_drafter,
    make_session,
    make_target,
    no_commands,
    plain_greedy,
)

from dspark_tui.engine.answer_text import AnswerText
from dspark_tui.engine.drafters.base import Proposal
from dspark_tui.engine.generator import PrefillStep, RoundStep, SwitchStep, generate
from dspark_tui.engine.protocol import Method, Sampling, SwitchDrafter
from dspark_tui.engine.reply import Reply
from dspark_tui.engine.sampling import Sampler
from dspark_tui.engine.session import CHUNK_CPU, Session
from dspark_tui.engine.target import Target

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
COUNT = 40
TARGET = make_target()
KNOWN = plain_greedy(TARGET, PROMPT, COUNT + 8)


def answer(
    session: Session,
    count: int = COUNT,
    *,
    prompt: list[int] = PROMPT,
    ends: tuple[int, ...] = (),
    stops: tuple[str, ...] = (),
    sampling: Sampling = Sampling(),  # noqa: B008
    commands: Any = None,
    seed: int = 0,
) -> tuple[Reply, list[Any]]:
    reply = Reply(prompt, count, ends, AnswerText(session.target.tokenizer, stops))
    steps = list(generate(session, reply, Sampler(sampling, seed), commands or no_commands()))
    return reply, steps


def fresh(*drafters: Any) -> Session:
    TARGET.reset()
    return make_session(TARGET, *drafters)


def oracle(wrong: Any = lambda at: False, drafts: int = 4) -> Oracle:
    return Oracle(PROMPT + KNOWN, wrong, TARGET.vocabulary, drafts)


def stepwise_cache(tokens: list[int]) -> list[Any]:
    """The cache after one token at a time, by mlx-lm alone."""
    cache = make_prompt_cache(TARGET.model)
    for token in tokens:
        mx.eval(TARGET.model(mx.array([[token]]), cache=cache))
    return cache


def assert_cache_is_stepwise(target: Target) -> None:
    for ours, theirs in zip(target._cache, stepwise_cache(target.tokens), strict=True):
        assert ours.offset == theirs.offset == len(target.tokens)
        for mine, golden in zip(ours.keys_and_values(), theirs.keys_and_values(), strict=True):
            np.testing.assert_allclose(np.array(mine), np.array(golden), atol=2e-5)


# ---------------------------------------------------------------------- exactness


def test_plain_decoding_is_the_targets_own() -> None:
    reply, _ = answer(fresh())
    assert reply.tokens == KNOWN[:COUNT]
    assert reply.text.text == "".join(chr(ord("a") + token) for token in KNOWN[:COUNT])
    assert reply.reason == "length"
    assert [stat.committed for stat in reply.rounds] == [1] * (COUNT - 1)


@settings(max_examples=30, deadline=None)
@given(mistakes=st.sets(st.integers(len(PROMPT), len(PROMPT) + COUNT)), drafts=st.integers(1, 7))
def test_any_pattern_of_acceptance_gives_the_same_text_and_the_same_cache(
    mistakes: set[int], drafts: int
) -> None:
    session = fresh(oracle(mistakes.__contains__, drafts))
    reply, _ = answer(session)
    assert reply.tokens == KNOWN[:COUNT]
    assert sum(stat.committed for stat in reply.rounds) == COUNT - 1
    assert all(stat.accepted <= stat.drafted <= drafts for stat in reply.rounds)
    assert_cache_is_stepwise(session.target)
    assert session.target.tokens == (PROMPT + reply.tokens)[: len(session.target.tokens)]
    assert len(PROMPT) + COUNT - 1 == len(session.target.tokens)


def test_a_perfect_drafter_commits_a_whole_block_every_round() -> None:
    reply, _ = answer(fresh(oracle()), 1 + 5 * 6)
    assert [stat.committed for stat in reply.rounds] == [5] * 6
    assert reply.accept_length == 5.0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("block", [2, 5, 8])
def test_a_real_drafter_gives_the_targets_own_text(method: Method, block: int) -> None:
    session = fresh(make_drafter(method, TARGET, block))
    reply, _ = answer(session)
    assert reply.tokens == KNOWN[:COUNT]
    assert_cache_is_stepwise(session.target)
    assert session.drafter.length <= len(session.target.tokens)


@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 300])
def test_prompts_around_the_chunk_size(length: int) -> None:
    prompt = np.random.default_rng(length).integers(0, TARGET.vocabulary, length).tolist()
    known = plain_greedy(TARGET, prompt, 12)
    for method in METHODS:
        reply, steps = answer(fresh(make_drafter(method, TARGET)), 12, prompt=prompt)
        assert reply.tokens == known
        done = [step.done for step in steps if isinstance(step, PrefillStep)]
        assert done[0] == 0
        assert done[-1] == length
        sizes = [b - a for a, b in itertools.pairwise(done)]
        assert sizes[0] == min(length, CHUNK_CPU)
        assert all(b <= 2 * a for a, b in itertools.pairwise(sizes))


# ---------------------------------------------------------------------- ends


@pytest.mark.parametrize("count", range(1, 14))
def test_the_token_limit_is_exact(count: int) -> None:
    for session in (fresh(), fresh(oracle()), fresh(make_drafter("dflash2", TARGET))):
        reply, _ = answer(session, count)
        assert reply.tokens == KNOWN[:count]
        assert reply.reason == "length"


@pytest.mark.parametrize("position", range(12))
def test_an_end_token_inside_an_accepted_block_ends_the_answer(position: int) -> None:
    end = KNOWN[position]
    first = KNOWN.index(end)
    for session in (fresh(), fresh(oracle())):
        reply, _ = answer(session, ends=(end,))
        assert reply.tokens == KNOWN[: first + 1]
        assert reply.reason == "stop"
        assert chr(ord("a") + end) not in reply.text.text
        assert sum(stat.committed for stat in reply.rounds) == first
        assert_cache_is_stepwise(session.target)


def test_a_stop_string_ends_the_answer_and_never_shows() -> None:
    text = "".join(chr(ord("a") + token) for token in KNOWN[:COUNT])
    stop = text[9:12]
    for session in (fresh(), fresh(oracle())):
        reply, _ = answer(session, stops=(stop,))
        assert reply.text.text == text[: text.index(stop)]
        assert reply.reason == "stop"
        assert len(reply.tokens) == text.index(stop) + len(stop)


class StopAfter:
    """Asks for a stop at the n-th look."""

    def __init__(self, looks: int) -> None:
        self.left = looks
        self.waiting = False

    @property
    def stop_requested(self) -> bool:
        self.left -= 1
        return self.left < 0

    def take_switch(self) -> None:
        return None


def test_a_stop_is_heard_at_the_next_round() -> None:
    reply, steps = answer(fresh(oracle()), commands=StopAfter(4))
    # One look before the only prefill chunk, then one before each round.
    assert sum(isinstance(step, RoundStep) and step.stat is not None for step in steps) == 3
    assert reply.reason == "stopped"
    assert reply.tokens == KNOWN[: 1 + 3 * 5]


def test_a_stop_is_heard_at_the_next_prefill_chunk() -> None:
    prompt = [1] * (CHUNK_CPU * 4)
    session = fresh()
    reply, steps = answer(session, prompt=prompt, commands=StopAfter(2))
    assert reply.reason == "stopped"
    assert reply.tokens == []
    done = [step.done for step in steps if isinstance(step, PrefillStep)]
    assert done[:2] == [0, CHUNK_CPU]
    assert len(done) == 3
    assert session.target.tokens == prompt[: done[-1]]
    assert done[-1] < len(prompt)


def test_a_reader_that_goes_away_leaves_a_clean_cache() -> None:
    session = fresh()
    reply = Reply(PROMPT, COUNT, (), AnswerText(TARGET.tokenizer, ()))
    steps = generate(session, reply, Sampler(Sampling(), 0), no_commands())
    for _ in range(6):
        next(steps)
    steps.close()
    assert_cache_is_stepwise(session.target)


# ---------------------------------------------------------------------- switching and falling back


class SwitchEvery:
    """Goes through `names`, one after every `rounds` rounds."""

    def __init__(self, names: list[str], rounds: int) -> None:
        self.names, self.rounds, self.looks = names, rounds, 0
        self.stop_requested = False
        self.waiting = False

    def take_switch(self) -> SwitchDrafter | None:
        self.looks += 1
        if self.looks % (self.rounds + 1):
            return None
        return SwitchDrafter(self.looks, self.names[self.looks // (self.rounds + 1) % len(self.names)])


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_switching_in_mid_answer_changes_nothing_in_the_text(rounds: int) -> None:
    drafters = [make_drafter(method, TARGET) for method in METHODS]
    session = fresh(*drafters)
    commands = SwitchEvery(["none", *METHODS], rounds)
    reply, steps = answer(session, commands=commands)
    assert reply.tokens == KNOWN[:COUNT]
    assert {stat.source for stat in reply.rounds} == {"none", *METHODS}
    assert all(step.problem is None for step in steps if isinstance(step, SwitchStep))
    assert_cache_is_stepwise(session.target)


def test_a_switch_computes_no_target_row_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    session = fresh(*[make_drafter(method, TARGET) for method in METHODS])
    rows = 0
    forward = session.target.forward

    def counting(tokens: mx.array, last_only: bool = False) -> Any:
        nonlocal rows
        rows += tokens.shape[0]
        return forward(tokens, last_only)

    monkeypatch.setattr(session.target, "forward", counting)
    reply, _ = answer(session, commands=SwitchEvery(["none", *METHODS], 2))
    # The prompt, and per round the anchor and what was drafted; plain steps may have one row in flight.
    needed = len(PROMPT) + sum(stat.drafted + 1 for stat in reply.rounds)
    assert needed <= rows <= needed + 1


def test_a_drafter_that_joins_in_mid_answer_starts_with_the_whole_context() -> None:
    late, early = make_drafter("dspark", TARGET), make_drafter("dspark", TARGET)
    early.name = "early"
    first = fresh(early)
    answer(first, 30)
    session = fresh(late)
    session.select("none")
    looks = iter([None] * 10 + [SwitchDrafter(1, "dspark")] + [None] * 50)
    commands = SimpleNamespace(stop_requested=False, waiting=False, take_switch=lambda: next(looks))
    answer(session, 30, commands=commands)
    assert late.length > len(PROMPT) + 10
    shared = min(late.length, early.length)
    for mine, golden in zip(late.state(), early.state(), strict=True):
        np.testing.assert_allclose(np.array(mine)[:, :, :shared], np.array(golden)[:, :, :shared], atol=2e-5)


def test_a_refused_switch_keeps_the_present_drafter() -> None:
    looks = iter([None, SwitchDrafter(7, "nonsense")] + [None] * 50)
    commands = SimpleNamespace(stop_requested=False, waiting=False, take_switch=lambda: next(looks))
    reply, steps = answer(fresh(oracle()), commands=commands)
    (refused,) = [step for step in steps if isinstance(step, SwitchStep)]
    assert "tiny has no drafter called nonsense; choose none, oracle, lookup or auto." in str(refused.problem)
    assert refused.drafter.name == "oracle"
    assert reply.tokens == KNOWN[:COUNT]


def test_a_drafter_whose_numbers_overflow_is_dropped_with_the_reason() -> None:
    drafter = make_drafter("dflash2", TARGET)
    drafter.model.norm.weight = mx.full((32,), float("nan"))
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=1)):
        session = fresh(drafter)
        reply, steps = answer(session, sampling=sampling)
        (fell,) = [step for step in steps if isinstance(step, SwitchStep)]
        assert fell.command is None
        assert fell.drafter.state == "fell_back"
        assert "overflowed" in fell.drafter.reason
        assert len(reply.tokens) == COUNT
        if sampling.temperature == 0:
            assert reply.tokens == KNOWN[:COUNT]
        assert_cache_is_stepwise(session.target)


def test_a_drafter_that_breaks_is_dropped_with_the_reason() -> None:
    class Broken(Oracle):
        def propose(self, anchor: int, k: int, sampler: Sampler) -> Proposal:
            raise RuntimeError("out of memory")

    reply, _ = answer(session := fresh(Broken([], None, TARGET.vocabulary)))
    assert reply.tokens == KNOWN[:COUNT]
    assert session.info.state == "fell_back"
    assert "out of memory" in session.info.reason


def test_a_drafter_that_breaks_on_the_prompt_is_dropped_with_the_reason() -> None:
    class Broken(Oracle):
        def extend(self, rows: mx.array, position: int) -> None:
            raise RuntimeError("no room")

    reply, steps = answer(session := fresh(Broken([], None, TARGET.vocabulary)))
    assert reply.tokens == KNOWN[:COUNT]
    assert session.info.state == "fell_back"
    assert "no room" in session.info.reason
    assert [type(step) for step in steps[:3]] == [PrefillStep, SwitchStep, PrefillStep]


# ---------------------------------------------------------------------- turns and seeds


def test_the_next_turn_computes_only_what_is_new() -> None:
    session = fresh(make_drafter("dflash", TARGET))
    first, _ = answer(session, 20)
    turn = PROMPT + first.tokens + [7, 7, 2]
    again, _ = answer(session, 20, prompt=turn)
    # The last token of an answer is the anchor: the target has not seen it yet.
    assert again.reused == len(PROMPT) + 19
    assert again.tokens == plain_greedy(TARGET, turn, 20)
    edited = [*PROMPT[:4], 0, 0, 0]
    third, _ = answer(session, 20, prompt=edited)
    assert third.reused == 4
    assert third.tokens == plain_greedy(TARGET, edited, 20)
    assert_cache_is_stepwise(session.target)


@pytest.mark.parametrize("name", ["none", *METHODS])
def test_a_seed_gives_the_same_sample_again(name: str) -> None:
    session = fresh(*[make_drafter(method, TARGET) for method in METHODS])
    session.select(name)
    texts = []
    for seed in (5, 5, 6):
        session.reset()
        hot = Sampling(temperature=1.0, seed=seed)
        texts.append(answer(session, sampling=hot, seed=seed)[0].tokens)
    assert texts[0] == texts[1] != texts[2]


def test_a_seed_computes_the_prompt_in_the_same_chunks_however_fast_the_machine_was() -> None:
    """Chunks of other sizes round differently, and with them the sample."""
    prompt, seen = [1 + i % 20 for i in range(500)], []
    for each in (1e-5, 1e-2):
        session = fresh()
        for _ in range(8):
            session.chunks.took(session.chunks.size(), session.chunks.size() * each)
        assert session.chunks.size() == (2048 if each == 1e-5 else 35)
        _, steps = answer(session, 2, prompt=prompt, sampling=Sampling(temperature=0.9, seed=5))
        seen.append([step.done for step in steps if isinstance(step, PrefillStep)])
    assert seen[0] == seen[1] == [0, 128, 256, 384, 500]


def test_a_cache_that_does_not_give_rejected_rows_back_ends_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Going on from an empty cache would be wrong text without an error."""
    session = fresh(oracle(lambda at: at % 3 == 0))
    monkeypatch.setattr(TARGET._undo, "cut", lambda *args: False)
    with pytest.raises(RuntimeError, match="rejected tokens"):
        answer(session)
