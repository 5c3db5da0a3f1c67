"""The sampling pipeline against a plain NumPy one, and its random draws."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_sampling import distribution

from dspark_tui.engine.protocol import Sampling
from dspark_tui.engine.sampling import Draws, Sampler, is_greedy, probabilities

QUICK = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def logits(seed: int, rows: int, vocabulary: int, spread: float = 3.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (spread * random.standard_normal((rows, vocabulary))).astype(np.float32)


@QUICK
@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.integers(1, 40),
    rows=st.integers(1, 3),
    temperature=st.floats(0.05, 2.0),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1.0),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 0.99)),
)
def test_equals_the_plain_pipeline(
    seed: int, vocabulary: int, rows: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    x = logits(seed, rows, vocabulary)
    p = np.array(probabilities(mx.array(x), Sampling(temperature, top_p, top_k, min_p=min_p)))
    assert p.shape == x.shape
    assert p.dtype == np.float32
    np.testing.assert_allclose(p.sum(axis=-1), 1, atol=1e-5)
    for got, row in zip(p, x, strict=True):
        wanted = distribution(row, temperature, top_k, top_p, min_p)
        # Rounding may move a token across the edge of top-p or min-p; then both choices are right.
        if (near := _near_edge(row, temperature, top_k, top_p, min_p)) is None:
            np.testing.assert_allclose(got, wanted, atol=1e-5)
        else:
            assert abs(int((got > 0).sum()) - int((wanted > 0).sum())) <= near


def _near_edge(row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> int | None:
    whole = np.sort(distribution(row, temperature, top_k))[::-1]
    close = int((np.abs(np.cumsum(whole) - top_p) < 1e-6).sum()) if top_p < 1 else 0
    close += int((np.abs(whole - min_p * whole[0]) < 1e-6).sum()) if min_p > 0 else 0
    return close or None


@pytest.mark.parametrize("top_p", [1e-9, 1e-30, 1e-39, 1e-300, 5e-324])
def test_tiny_top_p_keeps_the_most_likely_token(top_p: float) -> None:
    """Also where float32 knows no such small number."""
    x = logits(1, 3, 20)
    p = np.array(probabilities(mx.array(x), Sampling(1.0, top_p=top_p)))
    np.testing.assert_array_equal(p, np.eye(20)[x.argmax(axis=-1)])


@pytest.mark.parametrize("top_k", [20, 21, 1000])
def test_top_k_of_the_vocabulary_or_more_keeps_everything(top_k: int) -> None:
    x = mx.array(logits(2, 2, 20))
    everything = probabilities(x, Sampling(1.0))
    np.testing.assert_array_equal(probabilities(x, Sampling(1.0, top_k=top_k)), everything)


def test_top_k_one_is_the_most_likely_token() -> None:
    x = logits(3, 4, 30)
    p = np.array(probabilities(mx.array(x), Sampling(1.3, top_k=1)))
    np.testing.assert_array_equal(p, np.eye(30)[x.argmax(axis=-1)])


def test_ties_at_the_edge_of_top_k_stay_together() -> None:
    p = np.array(probabilities(mx.array([[2.0, 1.0, 1.0, 1.0, 0.0]]), Sampling(1.0, top_k=2)))[0]
    np.testing.assert_allclose(p, distribution(np.array([2.0, 1, 1, 1, 0]), 1.0, top_k=2), atol=1e-6)
    assert (p > 0).tolist() == [True, True, True, True, False]


def test_ties_at_the_edge_of_top_p_keep_just_enough() -> None:
    p = np.array(probabilities(mx.zeros((1, 8)), Sampling(1.0, top_p=0.5)))[0]
    assert (p > 0).sum() == 4
    np.testing.assert_allclose(p[p > 0], 0.25, atol=1e-6)


def test_top_p_counts_what_top_k_left() -> None:
    """Mass is renormalised between the two: 0.6 of the two best is their first, not both."""
    row = np.log(np.array([[0.3, 0.15, 0.55 / 3, 0.55 / 3, 0.55 / 3]]))
    p = np.array(probabilities(mx.array(row), Sampling(1.0, top_k=1, top_p=0.9)))[0]
    np.testing.assert_array_equal(p, [1, 0, 0, 0, 0])
    both = np.array(probabilities(mx.array(np.log([[0.5, 0.25, 0.25 / 2, 0.25 / 2]])), Sampling(1.0, 0.6, 2)))
    np.testing.assert_array_equal(both[0], [1, 0, 0, 0])


def test_min_p_counts_from_the_likeliest_after_the_temperature() -> None:
    row = np.log([[0.5, 0.26, 0.2, 0.04]])
    p = np.array(probabilities(mx.array(row), Sampling(1.0, min_p=0.5)))[0]
    np.testing.assert_allclose(p, [0.5 / 0.76, 0.26 / 0.76, 0, 0], atol=1e-6)
    # At temperature 2 the same logits have 0.6 of the largest weight and more.
    p = np.array(probabilities(mx.array(row), Sampling(2.0, min_p=0.5)))[0]
    assert (p > 0).tolist() == [True, True, True, False]


def test_min_p_comes_after_top_p() -> None:
    """The other order would renormalise first, and top-p 0.7 would then end after the first token."""
    row = np.log([[0.5, 0.2, 0.16, 0.14]])
    p = np.array(probabilities(mx.array(row), Sampling(1.0, top_p=0.69, min_p=0.4)))[0]
    assert (p > 0).tolist() == [True, True, False, False]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_logits_are_widened_first(dtype: mx.Dtype) -> None:
    x = mx.array(logits(4, 2, 50)).astype(dtype)
    p = probabilities(x, Sampling(0.7, top_p=0.9))
    assert p.dtype == mx.float32
    np.testing.assert_array_equal(p, probabilities(x.astype(mx.float32), Sampling(0.7, top_p=0.9)))


def test_forbidden_tokens_stay_forbidden() -> None:
    x = logits(5, 1, 10)
    x[0, [2, 7]] = -np.inf
    for sampling in (Sampling(1.0), Sampling(2.0, 0.99), Sampling(0.5, top_k=9)):
        p = np.array(probabilities(mx.array(x), sampling))
        assert p[0, [2, 7]].tolist() == [0, 0]
        assert np.isfinite(p).all()


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0.0, True), (9e-6, True), (1e-5, False), (0.1, False), (2.0, False)]
)
def test_low_temperatures_are_greedy(temperature: float, greedy: bool) -> None:
    assert is_greedy(Sampling(temperature)) is greedy
    sampler = Sampler(Sampling(temperature), 1)
    assert sampler.greedy is greedy
    x = mx.array(logits(6, 5, 40))
    if temperature < 0.05:
        assert sampler.pick(x).tolist() == mx.argmax(x, axis=-1).tolist()


# ---------------------------------------------------------------------------- draws


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_draws_are_reproducible(seed: int) -> None:
    p = mx.array(np.full((3, 100), 0.01))
    first, second = Draws(seed), Draws(seed)
    for _ in range(3):
        assert first.uniform(5).tolist() == second.uniform(5).tolist()
        assert first.choose(p).tolist() == second.choose(p).tolist()
    assert Draws(seed).uniform(5).tolist() != Draws(seed ^ 1).uniform(5).tolist()


def test_no_two_draws_share_a_key() -> None:
    """Neither within an answer nor across answers of neighbouring seeds."""
    keys = {tuple(draws.key().tolist()) for draws in map(Draws, range(20)) for _ in range(200)}
    assert len(keys) == 20 * 200


def test_other_random_state_does_not_matter() -> None:
    mx.random.seed(1)
    first = Draws(7).uniform(4).tolist()
    mx.random.seed(2)
    assert Draws(7).uniform(4).tolist() == first


def test_uniform_is_uniform() -> None:
    draws = Draws(11)
    values = np.concatenate([np.array(draws.uniform(50)) for _ in range(100)])
    assert values.dtype == np.float32
    assert (values >= 0).all()
    assert (values < 1).all()
    # The Kolmogorov-Smirnov distance stays below 1.63 / sqrt(n) in 99 of 100 samples.
    distance = np.abs(np.sort(values) - np.arange(len(values)) / len(values)).max()
    assert distance < 1.63 / np.sqrt(len(values))
    # First values of successive draws are as independent as values of one draw.
    firsts = values.reshape(100, 50)[:, 0]
    assert abs(np.corrcoef(firsts[:-1], firsts[1:])[0, 1]) < 0.3


def test_choices_have_the_frequencies_of_p() -> None:
    p = np.array([0.5, 0.0, 0.3, 0.15, 0.05], dtype=np.float32)
    n = 20000
    chosen = np.array(Draws(3).choose(mx.array(np.tile(p, (n, 1)))))
    counts = np.bincount(chosen, minlength=5)
    assert counts[1] == 0
    kept = p > 0
    chi2 = ((counts - n * p) ** 2)[kept] / (n * p)[kept]
    # The 99.9th percentile of chi-square with three degrees of freedom.
    assert chi2.sum() < 16.27


def test_choose_needs_no_normalised_weights() -> None:
    p = mx.array(np.random.default_rng(1).random((50, 9)).astype(np.float32))
    assert Draws(5).choose(p).tolist() == Draws(5).choose(p * 8).tolist()
    certain = mx.array([[0.0, 0.0, 1e-6, 0.0]])
    assert Draws(5).choose(certain).tolist() == [2]


def test_pick_draws_from_the_pipeline() -> None:
    x = mx.array(logits(8, 1, 30))
    sampling = Sampling(0.8, top_p=0.7, top_k=10)
    allowed = set(np.flatnonzero(distribution(np.array(x)[0], 0.8, 10, 0.7)).tolist())
    sampler = Sampler(sampling, 4)
    picked = {int(sampler.pick(x).item()) for _ in range(300)}
    assert picked <= allowed
    assert len(picked) > 1
