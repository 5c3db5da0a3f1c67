"""Never slower than plain decoding, and fast where drafting pays: the loop under a clock of a cost model.

The clock only moves when the target or a drafter computes, by what a table says. So the speed of an
answer is exact, whatever machine runs the test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny_pair import Oracle, make_session, make_target, no_commands, plain_greedy

from dspark_tui.engine import generator
from dspark_tui.engine.answer_text import AnswerText
from dspark_tui.engine.drafters.base import Proposal
from dspark_tui.engine.generator import SwitchStep, _Loop, generate
from dspark_tui.engine.protocol import Sampling
from dspark_tui.engine.reply import Reply
from dspark_tui.engine.sampling import Sampler
from dspark_tui.engine.session import Session
from dspark_tui.engine.verify import DenseQ

COUNT = 400
PROMPT = [1, 5, 9, 2]
TARGET = make_target()
KNOWN = plain_greedy(TARGET, PROMPT, COUNT + 20)

FLAT = [10.0, 10.4, 10.8, 11.2, 11.6, 12.0, 12.4, 12.8, 13.2]
"""Milliseconds by number of drafts: rows are nearly free, as with a small-M kernel."""

STEEP = [10.0, 19.0, 28.0, 37.0, 46.0, 55.0, 64.0, 73.0, 82.0]
"""Every row costs its own: experts, or a product that reads the weights once a row."""

TILE = [10.0, 10.5, 10.5, 10.5, 30.0, 30.0, 30.0, 30.0, 30.0]
"""Four rows fit a tile."""


def milliseconds(costs: Sequence[float], k: int) -> float:
    """Of a forward with k drafts; beyond the table a row costs what the last one does."""
    return costs[k] if k < len(costs) else costs[-1] + (k - len(costs) + 1) * (costs[-1] - costs[-2])


class Clock:
    """Seconds that pass only when something is computed."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Costly(Oracle):
    """Drafts with planted mistakes, for `milliseconds` a block."""

    def __init__(
        self, clock: Clock, chance: Callable[[int], float], milliseconds: float, name: str = "costly"
    ) -> None:
        random = np.random.default_rng(3)
        dice = random.random(len(KNOWN) + 40)
        super().__init__(PROMPT + KNOWN, lambda at: dice[at] >= chance(at), TARGET.vocabulary, drafts=8)
        self.name, self._clock, self._seconds = name, clock, milliseconds / 1e3

    def propose(self, anchor: int, k: int, sampler: Sampler) -> Proposal:
        self._clock.now += self._seconds
        proposal = super().propose(anchor, k, sampler)
        if sampler.greedy:
            return proposal
        one_hot = mx.eye(TARGET.vocabulary)[proposal.tokens]
        return Proposal(proposal.tokens, DenseQ(one_hot))


def run(
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    costs: Sequence[float],
    drafters: Sequence[Oracle],
    name: str,
    sampling: Sampling = Sampling(),  # noqa: B008
) -> tuple[float, Session, list[Any], Reply]:
    """Seconds of the answer's rounds on the clock, after costs were measured as at load."""
    TARGET.reset()
    session = make_session(TARGET, *drafters)
    session.select(name)
    for k in (0, 8, 4, 1, 2, 3):
        session.costs.observe(k + 1, 16, costs[k] / 1e3)
    judge, number, owed = _Loop._judge, generator._number, dict[int, float]()

    def costly(loop: _Loop, choice: Any, block: mx.array, *rest: Any) -> Any:
        step = judge(loop, choice, block, *rest)
        owed[id(step.outcome.accepted)] = milliseconds(costs, block.shape[0] - 1) / 1e3
        return step

    def waiting(array: mx.array) -> int:
        clock.now += owed.pop(id(array), 0.0)
        return number(array)

    monkeypatch.setattr(_Loop, "_judge", costly)
    monkeypatch.setattr(generator, "_number", waiting)
    monkeypatch.setattr(generator, "time", clock)
    reply = Reply(PROMPT, COUNT, (), AnswerText(TARGET.tokenizer, ()))
    steps = list(generate(session, reply, Sampler(sampling, int(time.time())), no_commands()))
    assert len(reply.tokens) == COUNT
    return clock.now, session, steps, reply


def plain(costs: Sequence[float]) -> float:
    return (COUNT - 1) * costs[0] / 1e3


def best_fixed(chance: float, costs: Sequence[float], draft: float) -> float:
    """Seconds with the best fixed number of drafts, by the formula of a geometric run."""
    per_token = [
        (costs[k] + draft) / sum(chance**j for j in range(k + 1)) / 1e3 for k in range(1, len(costs))
    ]
    return (COUNT - 1) * min([*per_token, costs[0] / 1e3])


SAMPLED = Sampling(temperature=1.0)


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("costs", [FLAT, STEEP, TILE], ids=["flat", "steep", "tile"])
@pytest.mark.parametrize("draft", [1.0, 9.0])
def test_a_hopeless_drafter_costs_next_to_nothing(
    monkeypatch: pytest.MonkeyPatch, mode: str, costs: list[float], draft: float
) -> None:
    clock = Clock()
    hopeless = Costly(clock, lambda at: 0.0, draft)
    sampling = Sampling() if mode == "greedy" else SAMPLED
    seconds, session, _, _ = run(monkeypatch, clock, costs, [hopeless], "costly", sampling)
    assert seconds <= 1.06 * plain(costs)
    assert session.info.state == "parked"
    assert "of the plain speed" in session.info.reason


@pytest.mark.parametrize(
    ("chance", "costs", "draft"),
    [(0.9, FLAT, 1.0), (0.7, FLAT, 1.0), (0.8, TILE, 1.0), (0.95, TILE, 3.0), (0.6, FLAT, 3.0)],
)
def test_close_to_the_best_fixed_length(
    monkeypatch: pytest.MonkeyPatch, chance: float, costs: list[float], draft: float
) -> None:
    clock = Clock()
    seconds, session, _, reply = run(
        monkeypatch, clock, costs, [Costly(clock, lambda at: chance, draft)], "costly"
    )
    assert reply.tokens == KNOWN[:COUNT]
    assert seconds <= 1.15 * best_fixed(chance, costs, draft)
    assert session.info.state == "active"


def test_a_dear_row_is_only_paid_for_when_it_is_likely_to_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    _, _, _, reply = run(monkeypatch, clock, TILE, [Costly(clock, lambda at: 0.6, 1.0)], "costly")
    drafted = [stat.drafted for stat in reply.rounds if stat.drafted]
    # Beyond the tile only where it explores.
    assert sum(k > 3 for k in drafted) / len(drafted) < 0.15
    assert max(set(drafted), key=drafted.count) == 3


def test_it_parks_and_comes_back_when_the_text_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    half = len(PROMPT) + COUNT // 2
    turning = Costly(clock, lambda at: 0.0 if at < half else 0.95, 1.0)
    _, session, steps, reply = run(monkeypatch, clock, FLAT, [turning], "costly")
    states = [step.drafter.state for step in steps if isinstance(step, SwitchStep)]
    assert states == ["parked", "active"]
    assert session.info.reason == ""
    late = [stat for stat in reply.rounds[-15:] if stat.drafted]
    assert len(late) > 10


def test_a_good_drafter_that_turns_bad_is_parked_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    half = len(PROMPT) + COUNT // 2
    turning = Costly(clock, lambda at: 0.95 if at < half else 0.0, 2.0)
    seconds, session, _, _ = run(monkeypatch, clock, FLAT, [turning], "costly")
    first_half = best_fixed(0.95, FLAT, 2.0) / 2
    assert session.info.state == "parked"
    assert seconds <= 1.1 * (first_half + plain(FLAT) / 2)


def test_auto_finds_the_fastest_and_stays_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    good = Costly(clock, lambda at: 0.85, 1.0, "good")
    slow = Costly(clock, lambda at: 0.85, 20.0, "slow")
    poor = Costly(clock, lambda at: 0.2, 1.0, "poor")
    seconds, _, _, reply = run(monkeypatch, clock, FLAT, [poor, slow, good], "auto")
    assert reply.tokens == KNOWN[:COUNT]
    sources = [stat.source for stat in reply.rounds]
    assert set(sources) >= {"good", "slow", "poor"}
    assert sources[-60:].count("good") + sources[-60:].count("lookup") > 50
    assert seconds <= 1.25 * best_fixed(0.85, FLAT, 1.0)


def test_auto_decodes_plainly_when_nothing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    bad = [Costly(clock, lambda at: 0.0, 5.0, name) for name in ("one", "two")]
    seconds, _, _, _ = run(monkeypatch, clock, STEEP, bad, "auto", SAMPLED)
    assert seconds <= 1.15 * plain(STEEP)


class Compiling(Costly):
    """The first drafts take seconds, since kernels are compiled."""

    def propose(self, anchor: int, k: int, sampler: Sampler) -> Proposal:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls <= 3:
            self._clock.now += 20.0
        return super().propose(anchor, k, sampler)


@pytest.mark.parametrize("name", ["costly", "auto"])
def test_kernels_that_are_compiled_at_first_do_not_count_against_a_drafter(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    clock = Clock()
    drafter = Compiling(clock, lambda at: 0.9, 1.0)
    _, session, _, reply = run(monkeypatch, clock, FLAT, [drafter], name)
    assert session.info.state == "active"
    late = [stat for stat in reply.rounds[-30:] if stat.source == "costly"]
    assert len(late) > 20


def test_with_a_seed_nothing_depends_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for costs in (FLAT, STEEP):
        clock = Clock()
        with monkeypatch.context() as patch:
            drafter = Costly(clock, lambda at: 0.3, 1.0)
            seeded = Sampling(temperature=1.0, seed=7)
            TARGET.reset()
            texts.append(run_seeded(patch, clock, costs, drafter, seeded))
    assert texts[0] == texts[1]


def run_seeded(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, costs: list[float], drafter: Oracle, sampling: Sampling
) -> list[int]:
    monkeypatch.setattr("test_pilot.time.time", lambda: 7)
    return run(monkeypatch, clock, costs, [drafter], "costly", sampling)[3].tokens
