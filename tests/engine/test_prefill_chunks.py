"""Chunk sizes from measured speeds, on a clock that the tests make up."""

from __future__ import annotations

import pytest

from dspark_tui.engine.prefill_chunks import LARGEST, SMALLEST, PrefillChunks


def run(chunks: PrefillChunks, tokens_a_second: float, steps: int) -> list[int]:
    """Sizes of `steps` chunks on a machine of that speed."""
    sizes = []
    for _ in range(steps):
        size = chunks.size()
        sizes.append(size)
        chunks.took(size, size / tokens_a_second)
    return sizes


@pytest.mark.parametrize("speed", [100.0, 400.0, 1300.0, 5000.0])
@pytest.mark.parametrize("first", [64, 128, 512])
def test_a_chunk_settles_between_a_quarter_and_half_a_second(speed: float, first: int) -> None:
    settled = run(PrefillChunks(first), speed, 12)[-1]
    assert 0.25 <= settled / speed <= 0.5


def test_it_grows_step_by_step_up_to_the_largest() -> None:
    sizes = run(PrefillChunks(128), 1e6, 8)
    assert sizes == [128, 256, 512, 1024, 2048, 2048, 2048, 2048]
    assert LARGEST == 2048


def test_it_shrinks_at_once_when_the_context_makes_tokens_dear() -> None:
    chunks = PrefillChunks(512)
    run(chunks, 5000, 5)
    size = chunks.size()
    chunks.took(size, size / 500)
    assert 0.25 <= chunks.size() / 500 <= 0.5


def test_a_very_slow_machine_still_gets_on() -> None:
    assert run(PrefillChunks(128), 2, 4)[-1] == SMALLEST


def test_a_waiting_command_makes_it_short() -> None:
    chunks = PrefillChunks(512)
    assert chunks.size(waiting=True) < chunks.size()
    run(chunks, 1000, 6)
    assert chunks.size(waiting=True) / 1000 <= 0.1
    assert chunks.size() / 1000 >= 0.25
    run(chunks, 2, 6)
    assert chunks.size(waiting=True) == SMALLEST


def test_a_prompts_last_tokens_say_nothing_of_speed() -> None:
    """One token takes as long as many: its rate would halve the next chunks."""
    chunks = PrefillChunks(512)
    run(chunks, 1500, 6)
    before = chunks.size()
    chunks.took(1, 0.03)
    chunks.took(0, 0.0)
    assert chunks.size() == before
    chunks.took(before // 2, 3.0)
    assert chunks.size() < before
