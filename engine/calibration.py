"""The first rounds of a pair, at load: kernels get compiled, and what a forward costs is measured."""

from __future__ import annotations

import time

import mlx.core as mx

from dspark_tui.engine.answer_text import AnswerText
from dspark_tui.engine.backend import Control
from dspark_tui.engine.costs import CostCurve
from dspark_tui.engine.generator import RoundStep, generate
from dspark_tui.engine.protocol import Sampling
from dspark_tui.engine.reply import Reply
from dspark_tui.engine.sampling import Sampler
from dspark_tui.engine.session import Session
from dspark_tui.engine.target import Target

BUDGET = 0.5
"""Seconds after which no further width is begun; the rounds of answers go on measuring."""

_CONTEXT = 16
"""Positions before the measured rows."""

_ROUNDS = 2


def warm_up(session: Session) -> None:
    """Answer a prompt that means nothing for a few rounds, whole blocks, and forget it."""
    adaptive, session.adaptive = session.adaptive, False
    session.reset()
    try:
        limit = 2 * (session.drafter.drafts + 2)
        reply = Reply([0] * _CONTEXT, limit, (), AnswerText(session.target.tokenizer, ()))
        steps = generate(session, reply, Sampler(Sampling(), 0), Control())
        seen = 0
        for step in steps:
            seen += isinstance(step, RoundStep)
            if seen > _ROUNDS:
                break
        steps.close()
    finally:
        session.adaptive = adaptive
        session.reset()


def calibrate(target: Target, costs: CostCurve, drafts: int) -> None:
    """Time forwards of one row and of up to `drafts + 1` rows, and start the sequence over.

    Each width runs twice and the faster run counts: the first use of a shape may compile something.
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
