"""How many drafts are verified: against exhaustive search, and without favouring any text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_tui.engine.draft_length import Acceptance, best_length, confident_length

CHANCES = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8)
COSTS = st.lists(st.floats(0.0, 3.0), min_size=9, max_size=9)


def seconds(steps: Sequence[float]) -> list[float]:
    """Costs of 0, 1, 2, ... drafts: rising, by any steps."""
    return [1.0 + sum(steps[: k + 1]) for k in range(len(steps))]


@given(chances=CHANCES, steps=COSTS)
def test_the_length_with_the_most_tokens_a_second(chances: list[float], steps: list[float]) -> None:
    cost = seconds(steps)
    survival = list(np.cumprod(chances))
    k, speed = best_length(survival, lambda k: cost[k])
    everything = [(1 + sum(survival[:n])) / cost[n] for n in range(1, len(survival) + 1)]
    assert speed == pytest.approx(max(everything))
    assert everything[k - 1] == pytest.approx(max(everything))


def test_acceptance_is_counted_for_positions_that_were_tried() -> None:
    acceptance = Acceptance(4, chance=0.5)
    for _ in range(400):
        acceptance.observe(drafted=4, accepted=2)
    chances = [acceptance.chance(j) for j in range(4)]
    assert chances[:2] == pytest.approx([1.0, 1.0], abs=0.06)
    assert chances[2] == pytest.approx(0.0, abs=0.06)
    assert chances[3] == 0.5  # nothing ever got that far
    assert acceptance.survival(4)[2] == pytest.approx(0.0, abs=0.06)


def test_acceptance_forgets() -> None:
    acceptance = Acceptance(1)
    for _ in range(100):
        acceptance.observe(1, 0)
    for _ in range(60):
        acceptance.observe(1, 1)
    assert acceptance.chance(0) > 0.85


def test_confidence_is_corrected_by_what_came_of_it() -> None:
    acceptance = Acceptance(1)
    for i in range(400):
        acceptance.observe(1, int(i % 2 == 0), [0.9])
    # Half of what it was nine tenths sure of stood.
    assert acceptance.corrected(0, 0.9) == pytest.approx(0.5, abs=0.07)
    assert acceptance.corrected(0, 0.45) == pytest.approx(0.25, abs=0.05)


def trusted(positions: int, chance: float = 0.75) -> Acceptance:
    """Acceptance that corrects nothing."""
    return Acceptance(positions, chance)


@given(confidence=CHANCES, steps=COSTS)
def test_the_decision_about_a_draft_looks_at_no_later_estimate(
    confidence: list[float], steps: list[float]
) -> None:
    cost = seconds(steps)
    acceptance = trusted(8)
    taken = confident_length(confidence, acceptance, lambda k: cost[k])
    for j in range(len(confidence)):
        # Whatever the estimates after j are, whether j is reached stays as it was.
        for other in (0.0, 1.0):
            changed = confidence[: j + 1] + [other] * (len(confidence) - j - 1)
            again = confident_length(changed, acceptance, lambda k: cost[k])
            assert (again > j) == (taken > j)


def test_sure_drafts_are_taken_and_hopeless_ones_are_not() -> None:
    def cost(k: int) -> float:
        return 1.0 + 0.2 * k

    acceptance = trusted(7)
    assert confident_length([1.0] * 7, acceptance, cost) == 7
    assert confident_length([0.01] * 7, acceptance, cost) == 0
    assert confident_length([1.0, 1.0, 0.01, 1.0, 1.0, 1.0, 1.0], acceptance, cost) == 2


def test_a_free_tile_is_filled() -> None:
    """Widths that share a kernel's tile cost the same: one dear step first, then many for nothing."""
    acceptance = trusted(7, chance=0.9)
    assert confident_length([0.9] * 7, acceptance, lambda k: 1.0 if k == 0 else 1.6) == 7


def test_cutting_by_confidence_leaves_the_distribution_alone() -> None:
    """A toy of three positions over two tokens, summed over every draft: the drafter is confident in
    position 2 after token 0 only, so the cut depends on the first draft. With acceptance by p / q the
    output still has exactly the target's distribution."""
    p = np.array([0.3, 0.7])
    q = np.array([0.6, 0.4])
    acceptance = trusted(3)

    def cost(k: int) -> float:
        return 1.0 + 0.45 * k

    out: dict[tuple[int, ...], float] = dict.fromkeys(itertools.product((0, 1), repeat=4), 0.0)
    for drafts in itertools.product((0, 1), repeat=3):
        chance = float(np.prod(q[list(drafts)]))
        sure = [0.9, 0.95 if drafts[0] == 0 else 0.02, 0.95 if drafts[1] == 0 else 0.02]
        k = confident_length(sure, acceptance, cost)
        for text, weight in verdicts(drafts[:k], p, q):
            # What the round does not decide is decided by later rounds, token by token from p.
            for rest in itertools.product((0, 1), repeat=4 - len(text)):
                out[text + rest] += chance * weight * float(np.prod(p[list(rest)]))
    for text, probability in out.items():
        assert probability == pytest.approx(float(np.prod(p[list(text)])), abs=1e-12)


def verdicts(drafts: tuple[int, ...], p: np.ndarray, q: np.ndarray) -> list[tuple[tuple[int, ...], float]]:
    """What a round commits, with its probability, by the rule of speculative sampling."""
    found = []
    alive = 1.0
    residual = np.maximum(p - q, 0)
    for j, draft in enumerate(drafts):
        stands = min(1.0, p[draft] / q[draft])
        for token in (0, 1):
            found.append(((*drafts[:j], token), alive * (1 - stands) * residual[token] / residual.sum()))
        alive *= stands
    return found + [((*drafts, token), alive * p[token]) for token in (0, 1)]
