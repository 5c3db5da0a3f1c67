"""Numbers as words: sizes, counts, times, bars. Every function gives plain, safe, single-line text."""

from __future__ import annotations

from collections.abc import Sequence

NOT_MEASURED = "n/a"
_BARS = "▁▂▃▄▅▆▇█"
_UNITS = ("B", "KB", "MB", "GB", "TB")
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def size(count: int | None) -> str:
    """Bytes in decimal units with two or three significant digits: `35.2 MB`."""
    if count is None:
        return NOT_MEASURED
    value = float(count)
    unit = 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value /= 1000
        unit += 1
    digits = 0 if unit == 0 or value >= 100 else 1
    return f"{value:.{digits}f} {_UNITS[unit]}"


def count(number: int) -> str:
    """A count with thin groups of three: `1 204`."""
    return f"{number:,}".replace(",", " ")


def short_count(number: int) -> str:
    """A count for narrow places: `812`, `4.3k`, `128k`."""
    if number < 1000:
        return str(number)
    thousands = number / 1000
    return f"{thousands:.1f}k" if thousands < 100 else f"{thousands:.0f}k"


def clock(seconds: float) -> str:
    """Whole seconds as `00:08` or `1:02:03`."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, second = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{second:02}" if hours else f"{minutes:02}:{second:02}"


def seconds(value: float | None) -> str:
    """A duration: `0.41 s`, `8.5 s`, `95 s`."""
    if value is None:
        return NOT_MEASURED
    return f"{value:.2f} s" if value < 1 else f"{value:.1f} s" if value < 60 else f"{value:.0f} s"


def percent(part: float, whole: float) -> int:
    """Whole percent of `whole`, 0 when there is no whole."""
    return round(100 * part / whole) if whole else 0


def sparkline(values: Sequence[float], top: float) -> str:
    """One block character a value, 0 the lowest and `top` the highest."""
    last = len(_BARS) - 1
    return "".join(_BARS[min(last, round(last * value / top))] if top else _BARS[0] for value in values)


def bar(share: float, width: int) -> str:
    """A horizontal bar of `width` columns, filled to `share` (0 to 1) in eighths."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    text = _EIGHTHS[8] * full + (_EIGHTHS[part] if part else "")
    return text.ljust(width)


def plural(number: int, word: str) -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{count(number)} {word}{'' if number == 1 else 's'}"
