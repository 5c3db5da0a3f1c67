"""The three drafters against their formulas in NumPy, on small random checkpoints."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from numpy_drafters import Array, NumpyTables, Shape, reference, write_drafter

from dspark_tui.engine.drafters import checkpoint
from dspark_tui.engine.drafters.base import Proposal
from dspark_tui.engine.drafters.block import BlockDrafter
from dspark_tui.engine.drafters.candidates import top_candidates
from dspark_tui.engine.protocol import Sampling
from dspark_tui.engine.sampling import Sampler
from dspark_tui.engine.verify import DenseQ, SparseQ

METHODS = ["dspark", "dflash", "dflash2"]
GREEDY = Sampling()
ANCHOR = 21
RUNS = 500
SHAPES = {
    "usual": Shape(),
    "block of two": Shape(block=2),
    "one tap, one layer": Shape(taps=(2,), layers=1, target_layers=3),
    "every head its own keys": Shape(kv_heads=4, head_dim=16, confidence_with_markov=False),
    "three-tap convolution, all candidates": Shape(conv_taps=3, selector_top_k=80, block=4),
}


class Pair:
    """A drafter as the engine loads it, and its reference."""

    def __init__(self, folder: Path, method: str, shape: Shape, bits: int | None = None) -> None:
        weights = write_drafter(folder, method, shape, bits=bits)
        self.shape = shape
        self.tables = NumpyTables(shape.vocabulary, shape.hidden)
        self.reference = reference(method, shape, weights, self.tables)
        self.drafter: BlockDrafter = checkpoint.load(checkpoint.inspect(folder), method, self.tables)

    def rows(self, n: int, seed: int = 1) -> Array:
        """Tap rows of `n` positions."""
        width = len(self.shape.taps) * self.shape.hidden
        return np.random.default_rng(seed).standard_normal((n, width), dtype=np.float32) * 2

    def propose(self, sampling: Sampling = GREEDY, k: int = 99, seed: int = 3) -> tuple[Proposal, Array]:
        """A proposal, and the hidden states that the head was applied to."""
        proposal = self.drafter.propose(ANCHOR, k, Sampler(sampling, seed))
        assert self.tables.seen is not None
        return proposal, np.array(self.tables.seen)

    def check(self, context: Array, base: int = 0) -> None:
        """The greedy proposal and everything behind it equals the reference's."""
        proposal, seen = self.propose()
        hidden = self.reference.hidden(context, ANCHOR, base)
        first = 0 if self.drafter.method == "dspark" else 1
        np.testing.assert_allclose(seen, hidden[first:], atol=1e-4)
        drafts = self.reference.greedy(hidden, ANCHOR)
        assert proposal.tokens.tolist() == drafts
        assert proposal.k == self.drafter.drafts == len(drafts)
        assert proposal.q is None
        assert proposal.finite is not None
        assert proposal.finite.item() is True
        if self.drafter.method == "dspark":
            wanted = [
                self.reference.confidence(hidden, slot, previous)
                for slot, previous in enumerate([ANCHOR, *drafts[:-1]])
            ]
            np.testing.assert_allclose(np.array(proposal.confidence), wanted, atol=1e-4)
        else:
            assert proposal.confidence is None


@pytest.fixture
def make(tmp_path: Path):  # type: ignore[no-untyped-def]
    def pair(method: str, shape: Shape = SHAPES["usual"], bits: int | None = None) -> Pair:
        return Pair(tmp_path / method, method, shape, bits)

    return pair


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("length", [0, 1, 11])
def test_proposal_equals_the_reference(make, method: str, shape: Shape, length: int) -> None:
    pair = make(method, shape)
    context = pair.rows(length)
    if length:
        pair.drafter.extend(mx.array(context), 0)
    assert pair.drafter.length == length
    pair.check(context)
    # A block leaves nothing behind.
    assert pair.drafter.length == length
    pair.check(context)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bits", [4, 5, 8])
def test_quantised_checkpoint_equals_the_reference(make, method: str, bits: int) -> None:
    pair = make(method, SHAPES["usual"], bits)
    context = pair.rows(6)
    pair.drafter.extend(mx.array(context), 0)
    pair.check(context)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.6, top_p=0.8, top_k=20),
        Sampling(temperature=1.7, top_k=3),
    ],
    ids=["T 1", "T 0.6, top-p, top-k", "T 1.7, top-k 3"],
)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_q_is_the_distribution_given_the_drawn_prefix(
    make, method: str, sampling: Sampling, seed: int
) -> None:
    pair = make(method)
    context = pair.rows(9)
    pair.drafter.extend(mx.array(context), 0)
    hidden = pair.reference.hidden(context, ANCHOR)
    proposal, _ = pair.propose(sampling, seed=seed)
    drafts = proposal.tokens.tolist()
    wanted = pair.reference.distributions(
        hidden, ANCHOR, drafts, sampling.temperature, sampling.top_k, sampling.top_p
    )
    q = proposal.q
    assert isinstance(q, SparseQ if method == "dflash2" else DenseQ)
    rows = np.array([np.array(q.row(mx.array(j), pair.shape.vocabulary)) for j in range(len(drafts))])
    np.testing.assert_allclose(rows, wanted, atol=1e-4)
    np.testing.assert_allclose(rows.sum(axis=-1), 1, atol=1e-5)
    np.testing.assert_allclose(np.array(q.of(proposal.tokens)), wanted[range(len(drafts)), drafts], atol=1e-4)
    assert (np.array(q.of(proposal.tokens)) > 0).all()
    if method == "dspark":
        confidence = [
            pair.reference.confidence(hidden, slot, before)
            for slot, before in enumerate([ANCHOR, *drafts[:-1]])
        ]
        np.testing.assert_allclose(np.array(proposal.confidence), confidence, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_drafts_are_drawn_from_q(make, method: str) -> None:
    """Frequencies of the first two drafts over many seeds, by a chi-square test on the likely pairs."""
    pair = make(
        method, Shape(block=3, layers=1, vocabulary=16, selector_top_k=4, markov_rank=8, selector_rank=8)
    )
    context = pair.rows(4)
    pair.drafter.extend(mx.array(context), 0)
    hidden = pair.reference.hidden(context, 5)
    first = pair.reference.distributions(hidden, 5, [0], 1.0, 0, 1.0)[0]
    joint = np.array(
        [first[d] * pair.reference.distributions(hidden, 5, [d, 0], 1.0, 0, 1.0)[1] for d in range(16)]
    )
    proposals = [pair.drafter.propose(5, 2, Sampler(Sampling(temperature=1.0), seed)) for seed in range(RUNS)]
    mx.eval([p.tokens for p in proposals])
    counts = np.zeros((16, 16))
    for p in proposals:
        counts[tuple(p.tokens.tolist())] += 1
    likely = joint * RUNS >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    expected = np.append(joint[likely], joint[~likely].sum()) * RUNS
    chi2 = ((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    degrees = likely.sum()
    # Mean plus four standard deviations of the chi-square distribution.
    assert chi2 < degrees + 4 * np.sqrt(2 * degrees)


@pytest.mark.parametrize("method", METHODS)
def test_fewer_drafts_are_the_first_of_the_full_block(make, method: str) -> None:
    pair = make(method)
    pair.drafter.extend(mx.array(pair.rows(5)), 0)
    full, _ = pair.propose()
    for k in range(1, pair.drafter.drafts + 1):
        fewer, _ = pair.propose(k=k)
        assert fewer.k == k
        assert fewer.tokens.tolist() == full.tokens.tolist()[:k]
        assert full.head(k).tokens.tolist() == fewer.tokens.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_context_may_come_in_any_chunks(make, method: str) -> None:
    """The same outputs, whether rows come one by one or all at once (up to float32 rounding)."""
    pair = make(method)
    context = pair.rows(23)
    hidden = pair.reference.hidden(context, ANCHOR)
    for size in (1, 3, 7, 23):
        pair.drafter.reset()
        for at in range(0, 23, size):
            pair.drafter.extend(mx.array(context[at : at + size]), at)
        proposal, seen = pair.propose()
        np.testing.assert_allclose(seen, hidden[-len(seen) :], atol=1e-4)
        assert proposal.tokens.tolist() == pair.reference.greedy(hidden, ANCHOR)


@pytest.mark.parametrize("method", METHODS)
def test_truncated_context_is_forgotten(make, method: str) -> None:
    pair = make(method)
    old, new = pair.rows(12, seed=1), pair.rows(9, seed=2)
    pair.drafter.extend(mx.array(old), 0)
    pair.drafter.truncate(5)
    pair.check(old[:5])
    pair.drafter.extend(mx.array(new), 5)
    pair.check(np.concatenate([old[:5], new]))
    pair.drafter.truncate(100)
    assert pair.drafter.length == 14
    pair.drafter.truncate(0)
    pair.check(old[:0])


@pytest.mark.parametrize("method", METHODS)
def test_positions_are_absolute(make, method: str) -> None:
    pair = make(method)
    context = pair.rows(6)
    pair.drafter.extend(mx.array(pair.rows(3, seed=8)), 0)
    pair.drafter.reset(1000)
    assert pair.drafter.length == 1000
    pair.drafter.extend(mx.array(context[:4]), 1000)
    pair.drafter.extend(mx.array(context[4:]), 1004)
    pair.check(context, base=1000)
    pair.drafter.truncate(1003)
    pair.check(context[:3], base=1000)
    # Below its first position nothing is left, and the next row belongs to the place of the cut.
    pair.drafter.truncate(500)
    assert pair.drafter.length == 500
    pair.drafter.extend(mx.array(context), 500)
    pair.check(context, base=500)


def test_positions_matter(make) -> None:
    """The check above would be empty if the reference did not depend on where the context lies."""
    pair = make("dflash")
    context = pair.rows(6)
    ordered, shuffled = (pair.reference.hidden(rows, ANCHOR) for rows in (context, context[::-1]))
    assert np.abs(ordered - shuffled).max() > 0.01


@pytest.mark.parametrize("method", METHODS)
def test_a_gap_in_the_context_is_refused(make, method: str) -> None:
    pair = make(method)
    pair.drafter.extend(mx.array(pair.rows(3)), 0)
    with pytest.raises(ValueError, match="position 5, but the context ends at 3"):
        pair.drafter.extend(mx.array(pair.rows(2)), 5)


@pytest.mark.parametrize("method", METHODS)
def test_overflow_is_flagged(make, method: str) -> None:
    pair = make(method)
    rows = pair.rows(3)
    rows[1, 4] = np.inf
    pair.drafter.extend(mx.array(rows), 0)
    proposal, _ = pair.propose()
    assert proposal.finite is not None
    assert proposal.finite.item() is False


@pytest.mark.parametrize("method", METHODS)
def test_state_is_the_context(make, method: str) -> None:
    pair = make(method)
    assert pair.drafter.state() == []
    pair.drafter.extend(mx.array(pair.rows(3)), 0)
    assert len(pair.drafter.state()) == 2 * pair.shape.layers


@cache
def _logits(rows: int, vocabulary: int) -> Array:
    return np.random.default_rng(vocabulary).standard_normal((rows, vocabulary)).astype(np.float32)


@pytest.mark.parametrize("vocabulary", [16, 200, 256, 257, 1000, 4096, 10007])
@pytest.mark.parametrize("count", [1, 4, 16])
def test_top_candidates_are_the_largest(vocabulary: int, count: int) -> None:
    logits = _logits(3, vocabulary)
    ids, values = top_candidates(mx.array(logits), count)
    assert ids.shape == values.shape == (3, count)
    for row, picked, value in zip(logits, np.array(ids), np.array(values), strict=True):
        assert set(picked.tolist()) == set(np.argsort(-row)[:count].tolist())
        np.testing.assert_array_equal(row[picked], value)


def test_top_candidates_with_ties_are_distinct_and_maximal() -> None:
    logits = np.zeros((1, 2000), dtype=np.float32)
    logits[0, [5, 300, 1999]] = 1
    ids, values = top_candidates(mx.array(logits), 16)
    picked = np.array(ids)[0].tolist()
    assert len(set(picked)) == 16
    assert {5, 300, 1999} <= set(picked)
    assert sorted(np.array(values)[0])[-3:] == [1, 1, 1]
