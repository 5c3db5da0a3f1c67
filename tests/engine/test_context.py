"""Kept context rows against a plain list of positions."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_tui.engine.context import ContextRows

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 9)),
        st.tuples(st.just("truncate"), st.integers(0, 60)),
        st.tuples(st.just("reset"), st.integers(0, 60)),
    ),
    max_size=40,
)


class Model:
    """Every position since the last reset, with the value of its row."""

    def __init__(self) -> None:
        self.first = 0
        self.values: list[int] = []

    @property
    def length(self) -> int:
        return self.first + len(self.values)

    def reset(self, position: int) -> None:
        self.first, self.values = position, []

    def truncate(self, length: int) -> None:
        if length < self.first:
            self.reset(length)
        else:
            del self.values[length - self.first :]


def check(kept: ContextRows, model: Model, newest: int) -> None:
    """Whatever is asked, the rows are those of the positions that are said, without a hole to the end."""
    assert kept.length == model.length
    for position in range(max(0, model.length - 12), model.length + 2):
        start, rows = kept.since(position)
        assert start >= position
        if rows is None:
            assert position >= model.length or start >= model.length
            continue
        got = np.array(rows)
        assert got.shape == (model.length - start, 2)
        assert got[:, 0].astype(int).tolist() == model.values[start - model.first :]
        if position >= model.length - newest and position >= model.first:
            assert start == position, "a row inside the window is gone"


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(operations=OPERATIONS, window=st.integers(1, 12))
def test_equals_a_plain_list(operations: list[tuple[str, int]], window: int) -> None:
    kept, model = ContextRows(window), Model()
    value = 0
    # How many of the newest rows must still be there: a cut into a full window leaves fewer.
    newest = 0
    for name, n in operations:
        if name == "append":
            rows = np.arange(value, value + n)
            kept.append(mx.array(np.stack([rows, -rows], axis=1).astype(np.float32)))
            model.values += rows.tolist()
            value += n
            newest = min(window, newest + n)
        elif name == "truncate":
            n = min(n, model.length)
            newest = max(0, newest - (model.length - n))
            kept.truncate(n)
            model.truncate(n)
        else:
            kept.reset(n)
            model.reset(n)
            newest = 0
        check(kept, model, newest)
        assert kept.length - kept.base <= window + 9, "far more than the window is kept"


def test_many_small_appends_stay_in_order_and_bounded() -> None:
    kept = ContextRows(window=100)
    for i in range(500):
        kept.append(mx.full((1, 1), i))
        assert len(kept._chunks) <= 65
    start, rows = kept.since(0)
    assert rows is not None
    assert start <= 400
    assert np.array(rows)[:, 0].astype(int).tolist() == list(range(start, 500))
    assert rows.shape[0] <= 200


def test_nothing_kept_gives_nothing() -> None:
    kept = ContextRows()
    assert kept.since(0) == (0, None)
    kept.append(mx.zeros((3, 4)))
    assert kept.since(3) == (3, None)
    start, rows = kept.since(1)
    assert (start, rows is not None and rows.shape) == (1, (2, 4))


def test_truncating_beyond_the_end_changes_nothing() -> None:
    kept = ContextRows()
    kept.append(mx.zeros((3, 4)))
    kept.truncate(7)
    assert kept.length == 3
    empty = ContextRows()
    empty.truncate(7)
    assert empty.length == 0


def test_wide_rows_keep_fewer_positions() -> None:
    rows = ContextRows(window=100, limit=10 * 8 * 4)
    for i in range(400):
        rows.append(mx.full((1, 8), float(i)))
    start, kept = rows.since(0)
    assert kept is not None
    assert rows.bytes <= (10 + 64) * 8 * 4
    assert start + kept.shape[0] == 400
    assert kept.shape[0] >= 10
    assert kept[-1, 0].item() == 399.0
