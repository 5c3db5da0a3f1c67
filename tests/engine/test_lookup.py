"""Lookup against a brute-force search, and its drafts against the target's distribution."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_pair import make_drafter, make_session, make_target, no_commands, plain_greedy

from dspark_tui.engine import verify
from dspark_tui.engine.answer_text import AnswerText
from dspark_tui.engine.drafters.lookup import LONG, SHORT, Lookup, NGrams
from dspark_tui.engine.generator import generate
from dspark_tui.engine.protocol import Sampling
from dspark_tui.engine.reply import Reply
from dspark_tui.engine.sampling import Draws, Sampler

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def brute_force(tokens: list[int]) -> tuple[int, int]:
    """The longest earlier occurrence of the end, the newest of equals, of the newest 16 of three tokens."""
    places = [e for e in range(SHORT, len(tokens)) if tokens[e - SHORT : e] == tokens[-SHORT:]][-16:]
    best = (0, 0)
    for end in reversed(places):
        length = SHORT
        while length < min(end, 32) and tokens[end - length - 1] == tokens[-length - 1]:
            length += 1
        best = max(best, (length, end), key=lambda found: found[0])
    return best


@given(tokens=TEXTS)
def test_the_longest_match_is_found(tokens: list[int]) -> None:
    grams = NGrams()
    grams.extend(tokens)
    assert grams.match() == brute_force(tokens)


@given(tokens=TEXTS, cut=st.integers(0, 60), more=TEXTS)
def test_after_a_cut_it_is_as_if_the_rest_had_never_been(
    tokens: list[int], cut: int, more: list[int]
) -> None:
    grams = NGrams()
    grams.extend(tokens)
    grams.truncate(cut)
    grams.extend(more)
    assert grams.tokens == tokens[:cut] + more
    assert grams.match() == brute_force(tokens[:cut] + more)


def drafted(history: list[int], anchor: int, k: int = 10) -> list[int]:
    proposal = Lookup(lambda: history).propose(anchor, k, Sampler(Sampling(), 0))
    return list(proposal.tokens.tolist())  # type: ignore[call-overload]


def test_what_followed_last_time_is_drafted() -> None:
    assert drafted([7, 1, 2, 3, 8, 9, 5, 1, 2], 3) == [8, 9, 5, 1, 2, 3]
    assert drafted([7, 1, 2, 3, 8, 9, 5, 1, 2], 3, k=2) == [8, 9]
    # Of two places the one that agrees further back counts, else the newer one.
    assert drafted([9, 1, 2, 3, 4, 0, 1, 2, 3, 5, 9, 1, 2], 3, k=1) == [4]
    assert drafted([9, 1, 2, 3, 4, 0, 1, 2, 3, 5, 8, 1, 2], 3, k=1) == [5]


def test_without_a_match_nothing_is_drafted() -> None:
    assert drafted([], 3) == []
    assert drafted([1, 2], 3) == []
    assert drafted([1, 2, 3, 4, 5], 6) == []


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 2), min_size=4, max_size=40), steps=st.lists(st.integers(-6, 6)))
def test_the_history_may_grow_and_shrink_between_drafts(tokens: list[int], steps: list[int]) -> None:
    history = tokens[:-1]
    lookup = Lookup(lambda: history)
    anchor = tokens[-1]
    for step in steps:
        if step < 0:
            del history[len(history) + step :]
            lookup.truncate(len(history))
        else:
            history += [anchor, *((step * 7 + i) % 3 for i in range(step))]
        fresh = Lookup(lambda now=tuple(history): now)
        args = (anchor, 5, Sampler(Sampling(), 0))
        assert lookup.propose(*args).tokens.tolist() == fresh.propose(*args).tokens.tolist()
        assert lookup.match(anchor) == fresh.match(anchor)


def test_certain_drafts_leave_the_targets_distribution() -> None:
    """Counts of the first token of a round whose only draft is always token 2."""
    random = np.random.default_rng(1)
    p = random.dirichlet(np.ones(5), size=2).astype(np.float32)
    drafts = mx.array([2], dtype=mx.uint32)
    draws, counts, runs = Draws(11), Counter[int](), 6000
    for _ in range(runs):
        outcome = verify.sampled(mx.array(p), drafts, verify.PointQ(drafts), draws)
        counts[2 if outcome.accepted.item() else int(outcome.bonus.item())] += 1  # type: ignore[arg-type]
    expected = p[0] / p[0].sum() * runs
    chi = sum((counts[t] - expected[t]) ** 2 / expected[t] for t in range(5))
    assert chi < 18.5  # 4 degrees of freedom: one in a thousand


def test_a_text_that_repeats_itself_is_decoded_in_fewer_rounds() -> None:
    target = make_target(vocabulary=12, seed=4, scale=0.15)
    prompt = [1, 2, 3, 4, 5] * 6
    known = plain_greedy(target, prompt, 80)
    session = make_session(target)
    session.select("lookup")
    session.adaptive = False
    reply = Reply(prompt, 80, (), AnswerText(target.tokenizer, ()))
    list(generate(session, reply, Sampler(Sampling(), 0), no_commands()))
    assert reply.tokens == known
    assert {stat.source for stat in reply.rounds} >= {"lookup"}
    assert len(reply.rounds) < 60


@pytest.mark.parametrize("partner", [True, False])
def test_a_long_match_takes_the_round_from_a_trained_drafter(partner: bool) -> None:
    target = make_target(vocabulary=12, seed=4)
    prompt = [1, 2, 3, 4, 5] * 6
    session = make_session(target, make_drafter("dflash", target))
    session.partner = partner
    session.select("dflash")
    session.costs.observe(1, 0, 1.0)
    session.costs.observe(11, 0, 1.1)
    choice = session.pilot.choose(20, 30, 5)
    assert choice.arm is not None
    session.target.tokens[:] = prompt[:-1]
    matched = session.pilot.choose(20, 30, 5)
    assert matched.arm is not None
    assert choice.arm.drafter.name == "dflash"
    assert (matched.arm.drafter.name == "lookup") == partner
    assert LONG > SHORT
