"""Rotary positions of a drafter: every published kind, as one object that turns queries and keys.

The angle of pair i at position p is `p * theta^(-2i / head_dim)`. YaRN (Peng et al. 2023, arXiv 2309.00071)
slows the pairs down that turn less than a few times in the context a head was trained on; Gemma 4 turns
only the fastest pairs.
"""

from __future__ import annotations

import math

import mlx.core as mx

from dspark_tui.engine.drafters.config import Rope, Yarn


def frequencies(rope: Rope, head_dim: int) -> list[float]:
    """Radians a position that each of the `head_dim / 2` pairs turns; 0 for a pair that does not."""
    half = head_dim // 2
    plain = [rope.theta ** (-2.0 * i / head_dim) for i in range(half)]
    if rope.yarn is not None:
        plain = _slowed(plain, rope.yarn, rope.theta, head_dim)
    turning = half if rope.pairs is None else rope.pairs
    return [frequency if i < turning else 0.0 for i, frequency in enumerate(plain)]


def _slowed(plain: list[float], yarn: Yarn, theta: float, head_dim: int) -> list[float]:
    """YaRN's "by parts": pairs that turn `beta_fast` times in the original context stay, those below
    `beta_slow` turns are slowed by the factor, a ramp joins them."""

    def pair_of(turns: float) -> float:
        around = yarn.original_context / (2 * math.pi * turns)
        return head_dim * math.log(around) / (2 * math.log(theta))

    first = max(math.floor(pair_of(yarn.beta_fast)), 0)
    last = min(math.ceil(pair_of(yarn.beta_slow)), head_dim - 1)
    width = max(last - first, 0.001)
    slowed = []
    for i, frequency in enumerate(plain):
        share = min(max((i - first) / width, 0.0), 1.0)
        slowed.append(frequency * (1 - share) + frequency / yarn.factor * share)
    return slowed


class Rotary:
    """Turns the pairs of `[1, heads, n, head_dim]` at consecutive positions."""

    def __init__(self, rope: Rope, head_dim: int) -> None:
        """Raises ValueError when more pairs should turn than there are."""
        if head_dim % 2 or (rope.pairs is not None and not 0 <= rope.pairs <= head_dim // 2):
            raise ValueError(
                f"heads of width {head_dim} have no {rope.pairs or 'even number of'} rotary pairs"
            )
        self._head_dim, self._rope = head_dim, rope
        self._factor = 1.0 if rope.yarn is None else rope.yarn.attention_factor
        self._periods: mx.array | None = None
        if rope.pairs is not None or rope.yarn is not None:
            self._periods = mx.array([1 / f if f else math.inf for f in frequencies(rope, head_dim)])

    def __call__(self, x: mx.array, position: int) -> mx.array:
        """`x` `[1, heads, n, head_dim]`, its rows at `position`, `position + 1`, ..."""
        turned = mx.fast.rope(
            x,
            self._head_dim,
            traditional=self._rope.interleaved,
            base=self._rope.theta if self._periods is None else None,
            scale=1.0,
            offset=position,
            freqs=self._periods,
        )
        return turned if self._factor == 1.0 else turned * self._factor
