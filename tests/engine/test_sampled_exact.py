"""Sampled decoding has exactly the target's distribution: chi-square against full enumeration.

A tiny random target; the loop's own rounds run from one state thousands of times, and the first three
tokens of the rounds are compared with the probabilities that the target gives to every triple. Seeds are
fixed, so the verdict is always the same. Planted faults must make it fail.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy_sampling import adjusted, distribution
from tiny_pair import METHODS, make_drafter, make_session, make_target, no_commands

from dspark_tui.engine import verify
from dspark_tui.engine.answer_text import AnswerText
from dspark_tui.engine.generator import _Loop, generate
from dspark_tui.engine.penalties import Penalties
from dspark_tui.engine.protocol import Method, Sampling
from dspark_tui.engine.reply import Reply
from dspark_tui.engine.sampling import Draws, Sampler

VOCABULARY = 4
PROMPT = [1, 3, 2, 0, 1]
ANCHOR = 3
SEED, SCALE = 3, 0.3
RUNS = 700
WHOLE = 0
"""A seed: drafters then draft whole blocks, whether it pays or not."""
TARGET = make_target(VOCABULARY, seed=SEED, scale=SCALE)


PENALISED = Sampling(
    temperature=0.9,
    seed=WHOLE,
    min_p=0.08,
    repetition_penalty=1.3,
    presence_penalty=0.7,
    frequency_penalty=1.3,
    logit_bias={2: 0.5, 0: -0.4},
)


def exact(sampling: Sampling) -> np.ndarray:
    """P(t1, t2, t3) after prompt and anchor, from the target's logits alone."""
    base = [*PROMPT, ANCHOR]

    def following(*tokens: int) -> np.ndarray:
        logits = TARGET.model(mx.array([[*base, *tokens]]))[0, -1]
        TARGET._taps.take()
        row = adjusted(
            np.array(logits),
            PROMPT,
            [ANCHOR, *tokens],
            repetition=sampling.repetition_penalty,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
            bias=sampling.logit_bias,
        )
        return distribution(row, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)

    p = np.zeros((VOCABULARY,) * 3)
    first = following()
    for a in range(VOCABULARY):
        second = following(a)
        for b in range(VOCABULARY):
            p[a, b] = first[a] * second[b] * following(a, b)
    return p


def observed(
    method: Method, sampling: Sampling, runs: int = RUNS, drafts: int = 2
) -> tuple[np.ndarray, float]:
    """Counts of the first three tokens, and the share of drafts accepted, at `drafts` drafts a round."""
    drafters = []
    if method != "none":
        drafters = [make_drafter(method, TARGET, block=2 if method == "dspark" else 3, seed=7, scale=0.45)]
        drafters[0].drafts = drafts
    TARGET.reset()
    session = make_session(TARGET, *drafters)
    setup = Reply([*PROMPT, ANCHOR], 1, (), AnswerText(TARGET.tokenizer, ()))
    list(generate(session, setup, Sampler(Sampling(), 0), no_commands()))
    sampler = Sampler(sampling, 20)
    counts: Counter[tuple[int, ...]] = Counter()
    drafted = accepted = 0
    for _ in range(runs):
        TARGET.truncate(len(PROMPT))
        session.rows.truncate(len(PROMPT))
        for drafter in drafters:
            drafter.truncate(len(PROMPT))
        reply = Reply(PROMPT, 100, (), AnswerText(TARGET.tokenizer, ()), tokens=[ANCHOR])
        loop = _Loop(session, reply, sampler, no_commands())
        while len(reply.tokens) < 4:
            list(loop.round())
        loop.settle()
        counts[tuple(reply.tokens[1:4])] += 1
        drafted += sum(stat.drafted for stat in reply.rounds)
        accepted += sum(stat.accepted for stat in reply.rounds)
    table = np.zeros((VOCABULARY,) * 3)
    for triple, count in counts.items():
        table[triple] = count
    return table, accepted / max(drafted, 1)


def p_value(table: np.ndarray, p: np.ndarray) -> float:
    """Chi-square test, cells with fewer than five expected counts taken together (Wilson-Hilferty)."""
    expected, seen = p.ravel() * table.sum(), table.ravel()
    big = expected >= 5
    cells = [*zip(seen[big], expected[big], strict=True), (seen[~big].sum(), expected[~big].sum())]
    cells = [(s, e) for s, e in cells if e > 0]
    chi2 = sum((s - e) ** 2 / e for s, e in cells)
    df = len(cells) - 1
    z = ((chi2 / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("method", METHODS)
def test_the_output_has_the_targets_distribution(method: Method, temperature: float) -> None:
    table, share = observed(method, Sampling(temperature, seed=WHOLE))
    assert 0.15 < share < 0.9, "the drafts must be neither hopeless nor perfect for this test to tell"
    assert p_value(table, exact(Sampling(temperature, seed=WHOLE))) > 1e-3


@pytest.mark.parametrize("method", ["none", *METHODS])
def test_with_bias_penalties_and_min_p_as_well(method: Method) -> None:
    wanted = exact(PENALISED)
    assert (wanted == 0).any(), "min-p must forbid something for this test to tell"
    table, share = observed(method, PENALISED, runs=500)
    assert method == "none" or 0.15 < share < 0.9
    assert p_value(table, wanted) > 1e-3
    assert table[wanted < 1e-12].sum() == 0


def no_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection, draw from p instead of max(p - q, 0)."""
    monkeypatch.setattr(verify, "residual", lambda p, q: p)


def other_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept by a q that the draft was not drawn from."""
    for kind in (verify.DenseQ, verify.SparseQ):
        original = kind.of
        monkeypatch.setattr(kind, "of", lambda self, tokens, of=original: of(self, tokens) ** 2)


def stale_bonus(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fully accepted block, draw the bonus from the row before."""
    sampled = verify.sampled

    def broken(p: mx.array, drafts: mx.array, q: verify.Q | None, draws: Draws) -> verify.Outcome:
        return sampled(mx.concatenate([p[:-1], p[-2:-1]]), drafts, q, draws)

    monkeypatch.setattr(verify, "sampled", broken)


@pytest.mark.parametrize("fault", [no_residual, other_q, stale_bonus])
@pytest.mark.parametrize("method", METHODS)
def test_a_planted_fault_is_noticed(method: Method, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    # With one draft a round the bonus is every second token, so that its fault shows at once.
    table, _ = observed(method, Sampling(1.0, seed=WHOLE), runs=400, drafts=1 if fault is stale_bonus else 2)
    assert p_value(table, exact(Sampling(1.0, seed=WHOLE))) < 1e-6


@pytest.mark.parametrize("method", ["none", *METHODS])
def test_penalties_that_do_not_see_the_drafts_are_noticed(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The committed tokens only, in every row; without a drafter that is the step that runs ahead."""
    rows = Penalties.rows
    monkeypatch.setattr(Penalties, "rows", lambda self, logits, ahead=None: rows(self, logits))
    table, _ = observed(method, PENALISED, runs=400)
    assert p_value(table, exact(PENALISED)) < 1e-6
