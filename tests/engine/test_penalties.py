"""Bias and penalties: rows against plain loops, greedy answers against a loop without the engine."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_sampling import adjusted
from tiny_pair import METHODS, Oracle, make_drafter, make_session, make_target, no_commands

from dspark_tui.engine.answer_text import AnswerText
from dspark_tui.engine.generator import generate
from dspark_tui.engine.penalties import Penalties, unknown_biased_token
from dspark_tui.engine.protocol import Sampling, SwitchDrafter
from dspark_tui.engine.reply import Reply
from dspark_tui.engine.sampling import Sampler

QUICK = settings(max_examples=120, deadline=None, derandomize=True, database=None)
VOCABULARY = 24
TARGET = make_target(VOCABULARY)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
COUNT = 48
PENALTIES = {
    "repetition": Sampling(repetition_penalty=1.4),
    "presence": Sampling(presence_penalty=0.9),
    "frequency": Sampling(frequency_penalty=0.35),
    "a reward": Sampling(repetition_penalty=0.8, presence_penalty=-0.3, frequency_penalty=0.2),
    "bias": Sampling(logit_bias={3: -100.0, 7: 1.5}),
    "all": Sampling(
        repetition_penalty=1.15, presence_penalty=0.3, frequency_penalty=0.25, logit_bias={0: 1.0, 11: -2.0}
    ),
}


def plainly(row: np.ndarray, sampling: Sampling, prompt: list[int], answer: list[int]) -> np.ndarray:
    return adjusted(
        row,
        prompt,
        answer,
        repetition=sampling.repetition_penalty,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        bias=sampling.logit_bias,
    )


tokens = st.lists(st.integers(0, 11), max_size=12)
samplings = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, -0.5, 1.2]),
    frequency_penalty=st.sampled_from([0.0, -0.25, 0.75]),
    logit_bias=st.dictionaries(st.integers(0, 11), st.floats(-5, 5, width=32), max_size=3),
)


# ---------------------------------------------------------------------- rows


@QUICK
@given(samplings, tokens, tokens, tokens, st.integers(0, 10**6), st.data())
def test_every_row_counts_the_tokens_before_it(
    sampling: Sampling, prompt: list[int], answer: list[int], ahead: list[int], seed: int, data: st.DataObject
) -> None:
    n = data.draw(st.integers(1, len(ahead) + 1))
    logits = np.random.default_rng(seed).standard_normal((n, 12)).astype(np.float32) * 3
    penalties = Penalties(sampling, 12, prompt)
    half = len(answer) // 2
    penalties.observe(answer[:half])
    penalties.observe(answer[half:])
    lazy = mx.array(ahead, dtype=mx.uint32)
    got = np.array(penalties.rows(mx.array(logits), lazy))
    assert got.dtype == np.float32
    for j in range(n):
        before = answer + ahead[: len(ahead) - (n - 1) + j]
        np.testing.assert_allclose(got[j], plainly(logits[j], sampling, prompt, before), atol=2e-5)
    ids = np.array([7, 0, 11, 3])
    some = penalties.some(mx.array(logits[-1][ids]), mx.array(ids), lazy)
    np.testing.assert_allclose(np.array(some), got[-1][ids], atol=1e-6)


def test_without_penalties_the_logits_are_left_as_they_are() -> None:
    """The very array: no cost, no change of type."""
    sampler = Sampler(Sampling(temperature=0.7, top_k=3, min_p=0.1), 1)
    sampler.begin(VOCABULARY, PROMPT, [1])
    logits = mx.ones((2, VOCABULARY), dtype=mx.bfloat16)
    assert sampler.rows(logits, mx.array([3])) is logits
    assert sampler.some(logits, mx.array([3])) is logits
    assert not sampler.adjusts
    assert not sampler.looks_back


def test_a_bias_alone_does_not_tie_the_rows_together() -> None:
    sampler = Sampler(Sampling(logit_bias={3: 1.0}), 1)
    sampler.begin(VOCABULARY, PROMPT)
    assert sampler.adjusts
    assert not sampler.looks_back


@pytest.mark.parametrize("token", [VOCABULARY, 2**31, 2**40])
def test_a_bias_outside_the_vocabulary_is_refused(token: int) -> None:
    """MLX would write beside the array."""
    sampling = Sampling(logit_bias={0: 1.0, token: 1.0})
    words = f"logit bias names token {token}; this model's token ids go from 0 to {VOCABULARY - 1}."
    assert unknown_biased_token(sampling, VOCABULARY) == words
    with pytest.raises(ValueError, match=f"names token {token}"):
        Sampler(sampling, 1).begin(VOCABULARY, PROMPT)


def test_tokens_outside_the_vocabulary_are_not_counted_anywhere() -> None:
    penalties = Penalties(Sampling(presence_penalty=1.0, repetition_penalty=2.0), 4, [9, 1])
    penalties.observe([2**31, 2])
    got = penalties.rows(mx.ones((1, 4)))
    np.testing.assert_allclose(np.array(got), [[1, 0.5, -0.5, 1]])


# ---------------------------------------------------------------------- whole answers


def brute_force(sampling: Sampling, prompt: list[int] = PROMPT, count: int = COUNT) -> list[int]:
    """Greedy with penalties, the whole sequence again for every token."""
    answer: list[int] = []
    for _ in range(count):
        logits = np.array(TARGET.model(mx.array([[*prompt, *answer]]))[0, -1])
        answer.append(int(plainly(logits, sampling, prompt, answer).argmax()))
    TARGET._taps.take()
    return answer


class Switching:
    """Another drafter every two rounds."""

    stop_requested = waiting = False

    def __init__(self) -> None:
        self.looks = 0

    def take_switch(self) -> SwitchDrafter | None:
        self.looks += 1
        names = ["none", *METHODS]
        return None if self.looks % 3 else SwitchDrafter(self.looks, names[self.looks // 3 % len(names)])


def answer(sampling: Sampling, *drafters: Any, commands: Any = None) -> Reply:
    TARGET.reset()
    session = make_session(TARGET, *drafters)
    reply = Reply(PROMPT, COUNT, (), AnswerText(TARGET.tokenizer, ()))
    sampler = Sampler(sampling, 0)
    sampler.seeded = True  # drafters draft whether it pays or not
    for _ in generate(session, reply, sampler, commands or no_commands()):
        pass
    return reply


@pytest.mark.parametrize("name", PENALTIES)
def test_greedy_answers_are_those_of_a_plain_loop(name: str) -> None:
    sampling = PENALTIES[name]
    wanted = brute_force(sampling)
    assert wanted != brute_force(Sampling()), "the penalty must matter for this test to tell"
    assert answer(sampling).tokens == wanted
    for method in METHODS:
        assert answer(sampling, make_drafter(method, TARGET)).tokens == wanted
    drafters = [make_drafter(method, TARGET) for method in METHODS]
    reply = answer(sampling, *drafters, commands=Switching())
    assert reply.tokens == wanted
    assert {stat.source for stat in reply.rounds} == {"none", *METHODS}


@pytest.mark.parametrize("name", PENALTIES)
def test_the_right_draft_is_accepted_whole(name: str) -> None:
    """Every row of a verify agrees with the step-by-step loop."""
    known = brute_force(PENALTIES[name], count=COUNT + 8)
    reply = answer(PENALTIES[name], Oracle(PROMPT + known, lambda at: False, VOCABULARY, drafts=5))
    assert reply.tokens == known[:COUNT]
    assert all(stat.accepted == stat.drafted for stat in reply.rounds)


def test_a_penalty_that_does_not_see_the_drafts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling(presence_penalty=2.0, frequency_penalty=1.5)
    wanted = brute_force(sampling)
    rows = Penalties.rows
    monkeypatch.setattr(Penalties, "rows", lambda self, logits, ahead=None: rows(self, logits))
    broken = [answer(sampling).tokens]
    broken.append(answer(sampling, Oracle(PROMPT + wanted, lambda at: False, VOCABULARY)).tokens)
    assert all(tokens != wanted for tokens in broken)
