"""What a target must do before anybody relies on it, tried on a few tokens when it is loaded."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from dspark_tui.engine.models.errors import ModelError
from dspark_tui.engine.precision import on_cpu
from dspark_tui.engine.taps import EMBEDDING
from dspark_tui.engine.target import Forward, Target

_PROMPT, _BLOCK, _KEPT = 3, 4, 2
_TOLERANCE, _TOLERANCE_NARROW = 0.01, 0.25
"""Root mean square of the difference of two logits rows that should be equal, in units of their spread. Rows
computed together and alone differ by rounding: hardly in float32, visibly in 16 bits and less. Another state
gives a difference of about 1."""


def probe(target: Target) -> None:
    """Warms the kernels up, and proves that logits have the shape that the loop relies on and that the
    weights give numbers at all; raises ModelError when not.

    Then it tries taps, and whether a block that is cut leaves what single steps leave. A target that fails
    there takes no drafters (see `Target.distrust`); plain decoding stays.
    """
    taps = target.taps
    fault = target.cannot_roll_back()
    target.tap(sorted({EMBEDDING, 0, len(target.layers) - 1}))
    try:
        target.reset()
        tokens = [1 + (7919 * i) % (target.vocabulary - 1) for i in range(_PROMPT + _BLOCK)]
        prompt, block = tokens[:_PROMPT], tokens[_PROMPT:]
        last = _step(target, prompt, last_only=True)
        full = target.forward(mx.array(block, dtype=mx.uint32))
        _check_logits(target, last, full)
        fault = fault or _tap_fault(target, full)
        target.commit(block[:_KEPT])
        if fault is None:
            target.roll_back()
            fault = _rollback_fault(target, prompt, block)
    finally:
        target.tap(taps)
        target.reset()
    if fault is not None:
        target.distrust(fault)


def _step(target: Target, tokens: Sequence[int], last_only: bool = False) -> Forward:
    forward = target.forward(mx.array(list(tokens), dtype=mx.uint32), last_only)
    target.commit(tokens)
    mx.eval(forward.logits, target.state())
    return forward


def _check_logits(target: Target, last: Forward, full: Forward) -> None:
    vocabulary = target.vocabulary
    if full.logits.shape != (_BLOCK, vocabulary) or last.logits.shape != (1, vocabulary):
        raise ModelError(
            f"{target.info.name} cannot be used: its forward gives logits of shape {full.logits.shape} and "
            f"{last.logits.shape}, {(_BLOCK, vocabulary)} and {(1, vocabulary)} were expected."
        )
    broken = mx.isnan(full.logits).any()
    mx.eval(broken, full.logits, full.rows)
    if broken.item():
        raise ModelError(
            f"{target.info.name} cannot be used: its weights give no numbers (NaN), so they are damaged; "
            "fetch the model again."
        )


def _tap_fault(target: Target, full: Forward) -> str | None:
    wanted = (_BLOCK, len(target.taps) * target.hidden_size)
    if full.rows is not None and full.rows.shape == wanted:
        return None
    seen = None if full.rows is None else full.rows.shape
    return f"its layers hand on {seen} where {wanted} was expected, which drafters cannot read"


def _rollback_fault(target: Target, prompt: list[int], block: list[int]) -> str | None:
    """After the block was cut to its first rows: go on, and compare with single steps all the way."""
    kept, after = block[:_KEPT], block[:1]
    if target.tokens != prompt + kept:
        return "its cache does not give rejected tokens back"
    ours = _step(target, after).logits
    target.reset()
    _step(target, prompt, last_only=True)
    for token in kept:
        _step(target, [token])
    theirs = _step(target, after).logits
    ours, theirs = ours.astype(mx.float32), theirs.astype(mx.float32)
    spread = mx.maximum(mx.sqrt(mx.var(theirs)), 1e-6)
    off = mx.sqrt(mx.square(ours - theirs).mean()) / spread
    allowed = _TOLERANCE if on_cpu() else _TOLERANCE_NARROW
    if (off <= allowed).item():
        return None
    return f"after a rejection its logits are off by {_number(off):.2f} of their spread"


def _number(array: mx.array) -> float:
    return float(array.item())  # type: ignore[arg-type]
