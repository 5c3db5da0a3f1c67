"""Chunk sizes from measured times, on machines that the tests make up."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_tui.engine.prefill_chunks import LARGEST, SECONDS_MOST, SMALLEST, PrefillChunks


def run(chunks: PrefillChunks, each: float, steps: int, fixed: float = 0.0) -> list[int]:
    """Sizes of `steps` chunks where one takes `fixed` seconds and `each` a token."""
    sizes = []
    for _ in range(steps):
        size = chunks.size()
        sizes.append(size)
        chunks.took(size, fixed + size * each)
    return sizes


@pytest.mark.parametrize("fixed", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("speed", [200.0, 400.0, 1300.0, 5000.0])
@pytest.mark.parametrize("first", [64, 128, 512])
def test_a_chunk_settles_between_a_quarter_and_half_a_second(first: int, speed: float, fixed: float) -> None:
    sizes = run(PrefillChunks(first), 1 / speed, 20, fixed)
    assert all(0.25 <= fixed + size / speed <= 0.5 for size in sizes[-5:])


def test_it_grows_step_by_step_up_to_the_largest() -> None:
    sizes = run(PrefillChunks(128), 1e-6, 8)
    assert sizes == [128, 256, 512, 1024, 2048, 2048, 2048, 2048]
    assert LARGEST == 2048


def test_it_shrinks_when_the_context_makes_tokens_dear() -> None:
    chunks = PrefillChunks(512)
    run(chunks, 1 / 5000, 6)
    sizes = run(chunks, 1 / 500, 20)
    assert sizes[1] < sizes[0]
    assert 0.25 <= sizes[-1] / 500 <= 0.5


def test_a_very_slow_machine_still_gets_on() -> None:
    assert run(PrefillChunks(128), 0.5, 6)[-1] == SMALLEST


@pytest.mark.parametrize("first", [128, 512])
@pytest.mark.parametrize(("fixed", "each"), [(2.0, 0.02), (0.5, 0.001), (0.4, 0.01)])
def test_chunks_stay_worth_their_fixed_cost(first: int, fixed: float, each: float) -> None:
    """One forward alone takes longer than wanted: small chunks would make a prompt endless."""
    settled = run(PrefillChunks(first), each, 20, fixed)[-1]
    assert 0.9 * fixed <= settled * each
    assert fixed + settled * each <= max(2.2 * fixed, SECONDS_MOST)


@pytest.mark.parametrize("load", [1, 3, 10])
@pytest.mark.parametrize(("fixed", "speed"), [(0.04, 400), (0.015, 400), (0.02, 1400)])
def test_hiccups_do_not_ruin_it(fixed: float, speed: float, load: float) -> None:
    """A busy machine, whose times are between one and three times its usual ones: never is more than half
    lost to small chunks."""
    random = np.random.default_rng(0)
    chunks, total, seconds = PrefillChunks(128), 0, 0.0
    for _ in range(150):
        size = chunks.size()
        took = load * (fixed + size / speed) * random.uniform(1, 3)
        chunks.took(size, took)
        total, seconds = total + size, seconds + took
    assert total / seconds > 0.5 * speed / (2 * load)


def test_a_waiting_command_makes_it_short() -> None:
    chunks = PrefillChunks(512)
    assert chunks.size(waiting=True) < chunks.size()
    run(chunks, 1 / 1000, 8)
    assert chunks.size(waiting=True) / 1000 <= 0.1
    assert chunks.size() / 1000 >= 0.25


def test_a_prompts_last_tokens_do_not_shrink_it() -> None:
    """One token takes as long as many: its rate would halve the next chunks."""
    chunks = PrefillChunks(512)
    run(chunks, 1 / 1500, 6, 0.02)
    before = chunks.size()
    chunks.took(1, 0.021)
    chunks.took(0, 0.0)
    assert chunks.size() >= 0.9 * before
    run(chunks, 1 / 1500, 3, 0.02)
    assert 0.25 <= chunks.size() / 1500 <= 0.5
    lonely = PrefillChunks(512)
    lonely.took(1, 0.03)
    assert lonely.size() == 512


def test_a_short_chunk_that_took_long_shrinks_it() -> None:
    chunks = PrefillChunks(512)
    chunks.took(256, 3.0)
    assert chunks.size() == 256
