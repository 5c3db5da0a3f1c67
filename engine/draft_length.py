"""How many drafted tokens to verify: those that are likely to stand, as long as they pay.

A round commits `1 + sum of a_j` tokens, where `a_j` is the chance that the first j drafts all stand, and
costs the draft and a forward of k + 1 rows. k is chosen so that tokens per second are most.

The choice is lossless: it looks at earlier rounds and, where the drafter estimates its own acceptance
(DSpark's confidence), at estimates that were made before the draft in question was drawn. It never looks
at a token that it would still add: that would favour some texts over others (DSpark paper, arXiv
2607.05147, on its scheduler).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Cost = Callable[[int], float]
"""Seconds of a round that verifies so many drafts, the draft included."""

_FORGET = 0.95
"""What a round's evidence is worth one round later: about the last twenty rounds count."""

_PRIOR_TRIALS = 2.0
_PRIOR_CHANCE = 0.75
"""A new drafter is taken to be good until it is seen."""


class Acceptance:
    """Running estimate of how well each position of a block does, given that those before it stood."""

    def __init__(self, positions: int, chance: float = _PRIOR_CHANCE) -> None:
        self._chance = chance
        self._trials = [0.0] * positions
        self._hits = [0.0] * positions
        self._claims = [0.0] * positions
        self.rounds = 0

    def observe(self, drafted: int, accepted: int, confidence: Sequence[float] = ()) -> None:
        """Take in a round: `accepted` of `drafted` tokens stood, each with its own `confidence` if any.

        Positions after the first rejection were not tried.
        """
        self.rounds += 1
        for j in range(min(accepted + 1, drafted, len(self._trials))):
            self._trials[j] = self._trials[j] * _FORGET + 1.0
            self._hits[j] = self._hits[j] * _FORGET + (1.0 if j < accepted else 0.0)
            claim = confidence[j] if j < len(confidence) else 0.0
            self._claims[j] = self._claims[j] * _FORGET + claim

    def chance(self, j: int) -> float:
        """Estimated chance that draft j (from 0) stands when those before it do."""
        return (self._hits[j] + _PRIOR_TRIALS * self._chance) / (self._trials[j] + _PRIOR_TRIALS)

    def corrected(self, j: int, confidence: float) -> float:
        """The drafter's own estimate for draft j, moved by how far such estimates were off so far."""
        claimed = self._claims[j] + _PRIOR_TRIALS
        stood = self._hits[j] + _PRIOR_TRIALS
        return min(1.0, confidence * stood / claimed)

    def survival(self, most: int) -> list[float]:
        """`a_1 .. a_most`: estimated chances that the first 1, 2, ... drafts all stand."""
        chances, alive = [], 1.0
        for j in range(min(most, len(self._trials))):
            alive *= self.chance(j)
            chances.append(alive)
        return chances


def rate(survival: Sequence[float], k: int, cost: Cost) -> float:
    """Expected tokens per second of a round with k drafts."""
    return (1.0 + sum(survival[:k])) / cost(k)


def best_length(survival: Sequence[float], cost: Cost, least: int = 1) -> tuple[int, float]:
    """The k from `least` to `len(survival)` with the most tokens per second, and those."""
    rates = [(rate(survival, k, cost), -k) for k in range(least, len(survival) + 1)]
    best, k = max(rates)
    return -k, best


def confident_length(confidence: Sequence[float], acceptance: Acceptance, cost: Cost) -> int:
    """How many of the drafts to verify, given the drafter's estimate for each of them.

    Goes from draft to draft. Whether draft j is taken depends on the estimates up to j, which do not
    depend on draft j itself, and beyond j on earlier rounds only.
    """
    usual = [acceptance.chance(j) for j in range(len(confidence))]
    expected, alive, taken = 1.0, 1.0, 0
    for j, estimate in enumerate(confidence):
        stop = expected / cost(j)
        alive *= acceptance.corrected(j, estimate)
        ahead, further, chances = expected, alive, []
        for later in range(j, len(confidence)):
            if later > j:
                further *= usual[later]
            ahead += further
            chances.append(ahead / cost(later + 1))
        if max(chances) < stop:
            break
        expected += alive
        taken = j + 1
    return taken
