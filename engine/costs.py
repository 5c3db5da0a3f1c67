"""What a step costs: measured seconds of the target's forward by width and context, and of a draft.

A forward of two to sixteen rows costs anything from little more to many times one row's, depending on
chip, kernel and model (mixtures of experts read more experts). So it is measured: at load, then with every
round. Estimates are medians of the newest measurements, since the first use of a shape may compile kernels
for seconds, and other programs may take the processor.
"""

from __future__ import annotations

from collections import deque
from statistics import median, median_low

_BUCKET = 1024
"""Contexts up to this long count as short; from there every doubling is measured apart."""

_KEPT = 9

_Curve = dict[int, deque[float]]
"""Newest measurements by number of rows."""


def _bucket(depth: int) -> int:
    return max(0, (depth // _BUCKET).bit_length())


class CostCurve:
    """Seconds of one target forward with all that a round does around it, by its number of rows (the
    anchor's included) and by the context's length."""

    def __init__(self) -> None:
        self._curves: dict[int, _Curve] = {}

    @property
    def measured(self) -> bool:
        """Whether anything is known."""
        return bool(self._curves)

    def knows(self, width: int) -> bool:
        """Whether a step of so many rows was measured."""
        return any(width in curve for curve in self._curves.values())

    def observe(self, width: int, depth: int, seconds: float) -> None:
        """Take in one measured step."""
        if seconds > 0.0:
            curve = self._curves.setdefault(_bucket(depth), {})
            curve.setdefault(width, deque(maxlen=_KEPT)).append(seconds)

    def seconds(self, width: int, depth: int) -> float:
        """The estimate for `width` rows at `depth` positions, between measured widths on a line. A context
        of which little is known costs what the nearest one does, times what the known widths differ by.

        Raises `LookupError` when nothing was measured.
        """
        if not self._curves:
            raise LookupError("no step was measured yet")
        return self._estimate(_bucket(depth), width, list(self._curves))

    def _estimate(self, bucket: int, width: int, buckets: list[int]) -> float:
        own = self._curves.get(bucket, {})
        if width in own:
            return median_low(own[width])
        others = [other for other in buckets if other != bucket]
        if not others:
            return _line(own, width)
        near = min(others, key=lambda other: (abs(other - bucket), other))
        dearer = [median_low(seen) / self._estimate(near, known, others) for known, seen in own.items()]
        return self._estimate(near, width, others) * (median(dearer) if dearer else 1.0)


def _line(curve: _Curve, width: int) -> float:
    known = sorted(curve)
    below = [w for w in known if w <= width]
    above = [w for w in known if w >= width]
    if below and above:
        low, high = below[-1], above[0]
        first, second = median_low(curve[low]), median_low(curve[high])
        return first if low == high else first + (width - low) / (high - low) * (second - first)
    if not below:
        return median_low(curve[above[0]])
    # Beyond what was measured a row costs what the last rows cost, and at least nothing.
    last = below[-1]
    end = median_low(curve[last])
    slope = (end - median_low(curve[below[-2]])) / (last - below[-2]) if len(below) > 1 else 0.0
    return end + max(0.0, slope) * (width - last)


class DraftCost:
    """Seconds that a draft takes: the lower quartile of the newest ones, since more than one of the first may
    compile something."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=7)

    def observe(self, seconds: float) -> None:
        """Take in one measured draft."""
        self._seen.append(seconds)

    @property
    def seconds(self) -> float | None:
        """The estimate; None when nothing was measured."""
        return sorted(self._seen)[(len(self._seen) - 1) // 4] if self._seen else None
