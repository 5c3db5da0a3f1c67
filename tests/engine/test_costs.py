"""What a step is thought to cost, from what steps did cost."""

from __future__ import annotations

import pytest

from dspark_tui.engine.costs import CostCurve, DraftCost


def curve(**widths: float) -> CostCurve:
    costs = CostCurve()
    for name, seconds in widths.items():
        costs.observe(int(name[1:]), 0, seconds)
    return costs


def test_nothing_measured_gives_no_number() -> None:
    assert not CostCurve().measured
    with pytest.raises(LookupError):
        CostCurve().seconds(1, 0)
    assert DraftCost().seconds is None


def test_between_measured_widths_on_a_line_and_beyond_on_the_last_one() -> None:
    costs = curve(w1=10.0, w4=16.0, w8=20.0)
    assert [costs.seconds(w, 0) for w in (1, 2, 3, 4, 6, 8, 10)] == [10, 12, 14, 16, 18, 20, 22]


def test_more_rows_are_never_thought_cheaper_than_the_widest_measured() -> None:
    assert curve(w1=10.0, w8=9.0).seconds(12, 0) == 9.0


def test_a_longer_context_makes_every_width_dearer_once_it_was_seen() -> None:
    costs = curve(w1=10.0, w8=20.0)
    for _ in range(20):
        costs.observe(1, 3000, 20.0)
    assert costs.seconds(1, 3000) == 20.0
    assert costs.seconds(8, 3000) == pytest.approx(40.0)
    assert costs.seconds(8, 100) == 20.0
    # A context not seen yet costs what the nearest one does.
    assert costs.seconds(8, 20_000) == pytest.approx(costs.seconds(8, 3000))


def test_estimates_follow_a_machine_that_slows_down() -> None:
    costs = curve(w1=10.0)
    for _ in range(40):
        costs.observe(1, 0, 30.0)
    assert costs.seconds(1, 0) == pytest.approx(30.0, rel=0.01)


def test_a_step_that_compiled_or_was_preempted_says_nothing() -> None:
    costs = curve(w1=10.0)
    costs.observe(1, 0, 10_000.0)
    assert costs.seconds(1, 0) == 10.0
    fresh = curve(w1=10_000.0)
    fresh.observe(1, 0, 10.0)
    assert fresh.seconds(1, 0) == 10.0


def test_between_known_widths_of_a_long_context_the_short_ones_shape_counts() -> None:
    costs = curve(w1=10.0, w4=10.5, w8=30.0)
    costs.observe(1, 9000, 12.0)
    assert costs.seconds(4, 9000) == pytest.approx(12.6)
    assert costs.seconds(8, 9000) == pytest.approx(36.0)


def test_a_draft_costs_the_lower_quartile_of_the_newest() -> None:
    cost = DraftCost()
    for seconds in (900.0, 800.0, 6.0, 4.0, 5.0):
        cost.observe(seconds)
    assert cost.seconds == 5.0
    for _ in range(7):
        cost.observe(8.0)
    assert cost.seconds == 8.0
