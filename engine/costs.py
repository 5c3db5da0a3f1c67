"""What a step costs: measured seconds of the target's forward by width and context, and of a draft.

A forward of two to sixteen rows costs anything from little more to many times one row's, depending on
chip, kernel and model (mixtures of experts read more experts). So it is measured: once at load, then with
every round.
"""

from __future__ import annotations

from collections import deque
from statistics import median

_BUCKET = 1024
"""Contexts up to this long count as short; from there every doubling is measured apart."""

_SURPRISE = 2.0
"""No single measurement moves an estimate by more than this factor: a step that was preempted says little."""

_TRUST = 0.2
"""Weight of a new measurement, as an exponent."""


def _bucket(depth: int) -> int:
    return max(0, (depth // _BUCKET).bit_length())


class CostCurve:
    """Seconds of one target forward with all that a round does around it, by its number of rows (the
    anchor's included) and by the context's length."""

    def __init__(self) -> None:
        self._widths: dict[int, float] = {}
        # How much dearer a longer context is, for every width alike.
        self._depths: dict[int, float] = {0: 1.0}

    @property
    def measured(self) -> bool:
        """Whether anything is known."""
        return bool(self._widths)

    def knows(self, width: int) -> bool:
        """Whether a step of so many rows was measured."""
        return width in self._widths

    def observe(self, width: int, depth: int, seconds: float) -> None:
        """Take in one measured step."""
        if seconds <= 0.0:
            return
        bucket = _bucket(depth)
        factor = self._factor(bucket)
        if width not in self._widths:
            self._widths[width] = seconds / factor
            self._depths.setdefault(bucket, factor)
            return
        off = seconds / (self._widths[width] * factor)
        off = min(max(off, 1 / _SURPRISE), _SURPRISE)
        if bucket == 0:
            self._widths[width] *= off**_TRUST
        else:
            self._depths[bucket] = factor * off ** (_TRUST / 2)
            self._widths[width] *= off ** (_TRUST / 2)

    def seconds(self, width: int, depth: int) -> float:
        """The estimate for `width` rows at `depth` positions, between measured widths on a line.

        Raises `LookupError` when nothing was measured.
        """
        if not self._widths:
            raise LookupError("no step was measured yet")
        return self._line(width) * self._factor(_bucket(depth))

    def _factor(self, bucket: int) -> float:
        if bucket in self._depths:
            return self._depths[bucket]
        return self._depths[min(self._depths, key=lambda known: (abs(known - bucket), known))]

    def _line(self, width: int) -> float:
        known = sorted(self._widths)
        below = [w for w in known if w <= width]
        above = [w for w in known if w >= width]
        if below and above:
            low, high = below[-1], above[0]
            if low == high:
                return self._widths[low]
            share = (width - low) / (high - low)
            return self._widths[low] + share * (self._widths[high] - self._widths[low])
        if not below:
            return self._widths[above[0]]
        # Beyond what was measured a row costs what the last rows cost, and at least nothing.
        last = below[-1]
        slope = (self._widths[last] - self._widths[below[-2]]) / (last - below[-2]) if len(below) > 1 else 0.0
        return self._widths[last] + max(0.0, slope) * (width - last)


class DraftCost:
    """Seconds that a draft takes, as the median of the newest ones: the first may compile kernels or take
    in a long context."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=7)

    def observe(self, seconds: float) -> None:
        """Take in one measured draft."""
        self._seen.append(seconds)

    @property
    def seconds(self) -> float | None:
        """The estimate; None when nothing was measured."""
        return median(self._seen) if self._seen else None
