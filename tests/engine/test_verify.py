"""Acceptance rules against brute force, and their exactness by exact enumeration."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_tui.engine import verify
from dspark_tui.engine.drafters.base import NOTHING, Proposal
from dspark_tui.engine.sampling import Draws
from dspark_tui.engine.verify import DenseQ, SparseQ

QUICK = settings(max_examples=150, deadline=None, derandomize=True, database=None)


class Fixed(Draws):
    """Given uniforms; a choice is recorded and takes the likeliest token."""

    def __init__(self, uniforms: np.ndarray) -> None:
        super().__init__(0)
        self.uniforms = uniforms.astype(np.float32)
        self.chosen_from: np.ndarray | None = None

    def uniform(self, n: int) -> mx.array:
        assert n == len(self.uniforms)
        return mx.array(self.uniforms)

    def choose(self, p: mx.array) -> mx.array:
        assert self.chosen_from is None
        assert p.shape[0] == 1
        self.chosen_from = np.array(p)[0]
        return mx.argmax(p, axis=-1)


def rows(random: np.random.Generator, n: int, vocabulary: int, zeros: float) -> np.ndarray:
    """Distributions in which a share `zeros` of the tokens is forbidden."""
    p = random.random((n, vocabulary)) ** 3
    p[random.random(p.shape) < zeros] = 0
    p[np.arange(n), random.integers(vocabulary, size=n)] += 0.1
    return (p / p.sum(axis=-1, keepdims=True)).astype(np.float32)


def brute_force(
    p: np.ndarray, drafts: np.ndarray, q: np.ndarray, uniforms: np.ndarray
) -> tuple[int, np.ndarray]:
    """How many drafts stand, and the distribution of the bonus token."""
    for j, draft in enumerate(drafts):
        if not uniforms[j] * q[j, draft] < p[j, draft]:
            rest = np.maximum(p[j] - q[j], 0)
            return j, rest / rest.sum() if rest.sum() > 1e-8 else p[j]
    return len(drafts), p[-1]


@QUICK
@given(
    seed=st.integers(0, 10**6),
    k=st.integers(1, 6),
    vocabulary=st.integers(2, 12),
    zeros=st.sampled_from([0.0, 0.5, 0.9]),
    alike=st.booleans(),
)
def test_sampled_equals_brute_force(seed: int, k: int, vocabulary: int, zeros: float, alike: bool) -> None:
    random = np.random.default_rng(seed)
    p, q = rows(random, k + 1, vocabulary, zeros), rows(random, k, vocabulary, zeros)
    if alike:
        q = (0.9 * p[:k] + 0.1 * q).astype(np.float32)
    drafts = np.array([random.choice(vocabulary, p=row / row.sum()) for row in q.astype(np.float64)])
    uniforms = random.random(k, dtype=np.float32)
    accepted, bonus = brute_force(p, drafts, q, uniforms)
    order = random.permuted(np.tile(np.arange(vocabulary), (k, 1)), axis=-1)
    sparse = SparseQ(mx.array(order.astype(np.uint32)), mx.array(np.take_along_axis(q, order, axis=-1)))
    for form in (DenseQ(mx.array(q)), sparse):
        draws = Fixed(uniforms)
        outcome = verify.sampled(mx.array(p), mx.array(drafts.astype(np.uint32)), form, draws)
        assert outcome.accepted.item() == accepted
        assert draws.chosen_from is not None
        chosen_from = draws.chosen_from / draws.chosen_from.sum()
        np.testing.assert_allclose(chosen_from, bonus, atol=1e-6)
        assert outcome.bonus.shape == (1,)


@QUICK
@given(seed=st.integers(0, 10**6), vocabulary=st.integers(2, 30), zeros=st.sampled_from([0.0, 0.6]))
def test_one_round_leaves_the_target_distribution(seed: int, vocabulary: int, zeros: float) -> None:
    """Summed over every draft: q(d) a(d) at d, plus the rejected mass spread as the residual, is p."""
    random = np.random.default_rng(seed)
    p, q = rows(random, 1, vocabulary, zeros)[0], rows(random, 1, vocabulary, zeros)[0]
    stands = q * np.minimum(1, np.divide(p, q, out=np.ones_like(p), where=q > 0))
    rest = np.array(verify.residual(mx.array(p), mx.array(q)), dtype=np.float64)
    out = stands + (q.sum() - stands.sum()) * rest / rest.sum()
    np.testing.assert_allclose(out, p, atol=1e-6)


def test_residual_without_mass_is_p() -> None:
    p = mx.array([0.25, 0.75, 0.0])
    assert verify.residual(p, p).tolist() == [0.25, 0.75, 0.0]
    nearly = mx.array([0.25, 0.75 - 3e-8, 3e-8])
    assert np.array(verify.residual(p, nearly))[2] == 0
    assert verify.residual(mx.array([0.5, 0.5, 0.0]), mx.array([0.0, 1.0, 0.0])).tolist() == [0.5, 0, 0]


def test_forbidden_draft_never_stands() -> None:
    """p is zero and the uniform too: 0 x q < 0 is false."""
    p = mx.array([[0.0, 1.0], [0.5, 0.5]])
    q = DenseQ(mx.array([[1.0, 0.0]]))
    draws = Fixed(np.array([0.0]))
    outcome = verify.sampled(p, mx.array([0], dtype=mx.uint32), q, draws)
    assert outcome.accepted.item() == 0
    assert outcome.bonus.item() == 1


def test_draft_that_the_target_likes_as_much_always_stands() -> None:
    p = mx.array([[0.25, 0.75], [0.5, 0.5]])
    for uniform in (0.0, 0.5, np.nextafter(np.float32(1), np.float32(0))):
        outcome = verify.sampled(p, mx.array([1]), DenseQ(p[:1]), Fixed(np.array([uniform])))
        assert outcome.accepted.item() == 1


def test_nan_in_q_accepts_nothing_and_draws_from_p() -> None:
    p = mx.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    q = DenseQ(mx.full((1, 3), float("nan")))
    outcome = verify.sampled(p, mx.array([0]), q, Draws(1))
    assert (outcome.accepted.item(), outcome.bonus.item()) == (0, 1)


def test_candidates_outside_sparse_q_keep_their_mass() -> None:
    q = SparseQ(mx.array([[4, 1]], dtype=mx.uint32), mx.array([[0.75, 0.25]]))
    assert q.row(mx.array(0), 6).tolist() == [0, 0.25, 0, 0, 0.75, 0]
    assert q.of(mx.array([4], dtype=mx.uint32)).tolist() == [0.75]
    assert q.of(mx.array([0], dtype=mx.uint32)).tolist() == [0]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_heads_of_q_and_proposal(k: int) -> None:
    q = rows(np.random.default_rng(1), 3, 5, 0)
    ids = mx.broadcast_to(mx.arange(5, dtype=mx.uint32), (3, 5))
    tokens = mx.array([4, 2, 0])
    for form in (DenseQ(mx.array(q)), SparseQ(ids, mx.array(q))):
        proposal = Proposal(tokens, form, mx.array([0.9, 0.5, 0.1]), mx.array(True)).head(k)
        assert proposal.k == k
        assert proposal.tokens.tolist() == [4, 2, 0][:k]
        assert proposal.q is not None
        assert proposal.confidence is not None
        assert proposal.finite is not None
        assert proposal.confidence.shape == (k,)
        np.testing.assert_array_equal(np.array(proposal.q.of(proposal.tokens)), q[range(k), [4, 2, 0][:k]])


def test_nothing_drafted_is_a_plain_step() -> None:
    assert NOTHING.k == 0
    logits = mx.array([[0.0, 3.0, 1.0]])
    plain = verify.greedy(logits, NOTHING.tokens)
    assert (plain.accepted.item(), plain.bonus.tolist()) == (0, [1])
    draws = Fixed(np.array([]))
    drawn = verify.sampled(mx.softmax(logits, axis=-1), NOTHING.tokens, None, draws)
    assert (drawn.accepted.item(), drawn.bonus.tolist()) == (0, [1])
    np.testing.assert_allclose(draws.chosen_from, np.array(mx.softmax(logits, axis=-1))[0])


# ---------------------------------------------------------------------------- greedy


@QUICK
@given(choices=st.lists(st.integers(0, 3), min_size=1, max_size=7), data=st.data())
def test_greedy_keeps_the_longest_common_prefix(choices: list[int], data: st.DataObject) -> None:
    k = len(choices) - 1
    drafts = data.draw(st.lists(st.integers(0, 3), min_size=k, max_size=k))
    prefix = 0
    while prefix < k and drafts[prefix] == choices[prefix]:
        prefix += 1
    logits = np.random.default_rng(len(choices)).random((k + 1, 4)).astype(np.float32)
    logits[np.arange(k + 1), choices] += 1
    outcome = verify.greedy(mx.array(logits), mx.array(drafts, dtype=mx.uint32))
    assert outcome.accepted.item() == prefix
    assert outcome.bonus.tolist() == [choices[prefix]]


def test_leading_counts_up_to_the_first_false() -> None:
    flags = [[], [False], [True], [True, False, True], [True, True, True], [False, True, True]]
    counted = [int(verify.leading(mx.array(f, dtype=mx.bool_)).item()) for f in flags]
    assert counted == [0, 0, 1, 1, 3, 0]


# ---------------------------------------------------------------------------- the whole rule, by frequency


@pytest.mark.parametrize("sparse", [False, True])
def test_first_two_tokens_have_the_target_distribution(sparse: bool) -> None:
    """Drafts from a Markov q, verified against a Markov p: the joint frequencies are the target's."""
    random = np.random.default_rng(4)
    p, q = rows(random, 4, 3, 0.0), rows(random, 4, 3, 0.3)
    n = 500
    counts = np.zeros((3, 3))
    draws = Draws(9)
    outcomes = []
    for _ in range(n):
        # Row 3 follows the anchor, row t follows token t.
        first = int(random.choice(3, p=q[3].astype(np.float64) / q[3].sum()))
        path = [3, first]
        targets = mx.array(p[path])
        drawn_from = mx.array(q[[3]])
        if sparse:
            ids = mx.array([[2, 0, 1]], dtype=mx.uint32)
            form: DenseQ | SparseQ = SparseQ(ids, mx.take_along_axis(drawn_from, ids, axis=-1))
        else:
            form = DenseQ(drawn_from)
        outcome = verify.sampled(targets, mx.array([first], dtype=mx.uint32), form, draws)
        outcomes.append((first, outcome))
    mx.eval([[o.accepted, o.bonus] for _, o in outcomes])
    for first, outcome in outcomes:
        tokens = [first, outcome.bonus.item()] if outcome.accepted.item() else [outcome.bonus.item()]
        if len(tokens) == 1:
            second = random.choice(3, p=p[tokens[0]].astype(np.float64) / p[tokens[0]].sum())
            tokens.append(int(second))
        for before, after in pairwise(tokens):
            counts[int(before), int(after)] += 1
    expected = n * p[3][:, None] * p[:3]
    chi2 = ((counts - expected) ** 2 / expected).sum()
    # The 99.9th percentile of chi-square with eight degrees of freedom.
    assert chi2 < 26.12
