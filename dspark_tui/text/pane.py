"""The rows of the metrics pane. Every number has its column, so that nothing jumps; what was not measured
is `n/a`."""

from __future__ import annotations

from textwrap import wrap

from dspark_tui.conversation import Facts
from dspark_tui.metrics import Snapshot
from dspark_tui.text.format import NOT_MEASURED, bar, count, percent, seconds, short_count, size, sparkline
from dspark_tui.text.lines import Line, Span, drafter_state, fit, justify, why_plain
from dspark_tui.text.sanitize import cells, one_line

LABEL = 12
_NUMBER = 7
"""Columns of a number, before its unit."""
_A_LINE = 4
"""Positions of a block that one row shows."""


def _row(label: str, value: str, note: str = "") -> Line:
    measured = value != NOT_MEASURED
    shown: Span = (value, "") if measured else (value.rjust(_NUMBER), "muted")
    spans: list[Span] = [(label.ljust(LABEL), "muted"), shown]
    if note:
        spans.append((note, "muted"))
    return tuple(spans)


def _number(value: float | None, unit: str, digits: int = 1) -> str:
    return NOT_MEASURED if value is None else f"{value:7.{digits}f} {unit}"


def rows(facts: Facts, snapshot: Snapshot, width: int) -> list[Line]:
    """All rows for a pane of `width` columns, top to bottom."""
    drafter = facts.drafter
    name = one_line(drafter.name, max(4, width - 13)) if drafter else "no drafter"
    # The reason stands where a low screen does not cut it off.
    out: list[Line] = [justify([(name, "strong")], [drafter_state(drafter)], width), *_fallback(facts, width)]
    out += [(), *_speed(facts, snapshot)]
    out += [(), *_acceptance(snapshot, width)]
    out += [(), *_round(snapshot, width)]
    out += [(), *_memory(facts, snapshot, width)]
    return [fit(row, width) for row in out]


def _speed(facts: Facts, snapshot: Snapshot) -> list[Line]:
    prefill = _number(snapshot.prefill_speed, "tok/s", 0)
    drafting = facts.drafter is not None and facts.drafter.method != "none"
    # Only an answer without a drafter measures it.
    versus = _row("vs plain", NOT_MEASURED, "  try F2 none" if drafting else "")
    if snapshot.speedup is not None:
        versus = _row("vs plain", f"{snapshot.speedup:6.1f}x", f"  of {snapshot.plain:.1f}/s")
    return [
        _row("speed", _number(snapshot.speed, "tok/s")),
        _row("average", _number(snapshot.average, "tok/s")),
        versus,
        _row("first token", _seconds(snapshot.first_token)),
        _row("prefill", prefill),
        _row(
            "prompt", f"{count(snapshot.prompt_tokens):>7} tokens" if snapshot.prompt_tokens else NOT_MEASURED
        ),
    ]


def _seconds(value: float | None) -> str:
    if value is None:
        return NOT_MEASURED
    number, unit = seconds(value).split(" ")
    return f"{number:>7} {unit}"


def _acceptance(snapshot: Snapshot, width: int) -> list[Line]:
    if not snapshot.drafted:
        return [_row("accepted", NOT_MEASURED)]
    mean = snapshot.accepted / snapshot.rounds
    of = snapshot.drafted / snapshot.rounds
    out = [
        _row("accepted", f"{mean:7.2f} of {of:.1f}"),
        _row("", f"{percent(snapshot.accepted, snapshot.drafted):>7} % of drafted"),
        ((sparkline(snapshot.spark[-width:], snapshot.drafts or 0), "accent"),),
    ]
    for first in range(0, len(snapshot.positions), _A_LINE):
        group = snapshot.positions[first : first + _A_LINE]
        last = first + len(group)
        label = f"at {first + 1}" if len(group) == 1 else f"at {first + 1}-{last}"
        cells = "".join(
            f"{round(100 * share):>4}" if share is not None else f"{NOT_MEASURED:>4}" for share in group
        )
        out.append(_row(label, cells.ljust(4 * _A_LINE), " %"))
    return out


def _round(snapshot: Snapshot, width: int) -> list[Line]:
    means = snapshot.means
    if means is None:
        return [_row("round", NOT_MEASURED)]
    return [
        _row("round", f"{means.total_ms:7.1f} ms", f"  {means.committed:.2f} tok"),
        _row("  draft", f"{means.draft_ms:7.1f} ms"),
        _row("  verify", f"{means.verify_ms:7.1f} ms"),
        _row("  other", f"{means.other_ms:7.1f} ms"),
        *_rounds_by(snapshot, width),
    ]


def _rounds_by(snapshot: Snapshot, width: int) -> list[Line]:
    """How many rounds each drafter had; lookup may help, `auto` chooses, and a parked drafter has few."""
    out: list[Line] = []
    text = ""
    room = max(8, width - LABEL)
    for source, rounds in snapshot.sources:
        part = f"{'plain' if source == 'none' else one_line(source, room - 7)} {rounds}"
        if text and cells(text) + 2 + cells(part) > room:
            out.append(_row("" if out else "  by", f"{text},"))
            text = part
        else:
            text = f"{text}, {part}" if text else part
    return [*out, _row("" if out else "  by", text)] if text else out


def _memory(facts: Facts, snapshot: Snapshot, width: int) -> list[Line]:
    limit = facts.model.context if facts.model else None
    out: list[Line] = []
    if snapshot.context is None or limit is None:
        out.append(_row("context", NOT_MEASURED, f" of {short_count(limit)}" if limit else ""))
    else:
        used = f"{short_count(snapshot.context):>7} of {short_count(limit)}"
        out.append(_row("context", used, f"  {percent(snapshot.context, limit)} %"))
        out.append(((" " * LABEL, ""), (bar(snapshot.context / limit, width - LABEL), "accent")))
    reused = f"{count(snapshot.reused):>7} tokens" if snapshot.reused is not None else NOT_MEASURED
    out.append(_row("kv reused", reused))
    out.append(
        _row("memory", f"{size(snapshot.memory):>10}" if snapshot.memory is not None else NOT_MEASURED)
    )
    out.append(_row("  peak", f"{size(snapshot.peak):>10}" if snapshot.peak is not None else NOT_MEASURED))
    if snapshot.kept_for_drafters:
        out.append(_row("  tap rows", f"{size(snapshot.kept_for_drafters):>10}"))
    return out


def _fallback(facts: Facts, width: int) -> list[Line]:
    """Why the drafter does not draft."""
    drafter = facts.drafter
    reason = why_plain(drafter)
    return [((line, "warn"),) for line in wrap(reason, max(8, width))] if reason else []
