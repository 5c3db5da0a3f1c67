"""Measuring at load what a forward of a few rows costs."""

from __future__ import annotations

import time

import mlx.core as mx

from dspark_tui.engine.costs import CostCurve
from dspark_tui.engine.target import Target

BUDGET = 0.5
"""Seconds after which no further width is begun; the rounds of answers go on measuring."""

_CONTEXT = 16
"""Positions before the measured rows."""


def calibrate(target: Target, costs: CostCurve, drafts: int) -> None:
    """Time forwards of one row and of up to `drafts + 1` rows, and start the sequence over.

    Each width runs twice and the faster run counts: on a GPU the first one compiles kernels.
    """
    begun = time.perf_counter()
    target.reset()
    try:
        target.forward(mx.zeros((_CONTEXT,), dtype=mx.uint32), last_only=True)
        target.commit([0] * _CONTEXT)
        mx.eval(target.state())
        whole = drafts + 1
        # The ends first: between measured widths the cost is taken to lie on a line.
        for width in dict.fromkeys((1, whole, (whole + 1) // 2, 2, *range(3, whole))):
            if width > 1 and time.perf_counter() - begun > BUDGET:
                break
            costs.observe(width, _CONTEXT, min(_seconds(target, width) for _ in range(2)))
    finally:
        target.reset()


def _seconds(target: Target, width: int) -> float:
    started = time.perf_counter()
    forward = target.forward(mx.zeros((width,), dtype=mx.uint32))
    mx.eval(mx.argmax(forward.logits, axis=-1), [] if forward.rows is None else forward.rows)
    seconds = time.perf_counter() - started
    target.roll_back()
    return seconds
