"""What the one-line widgets say, as spans of (text, style). Pure: facts and numbers in, text out.

A style is one of the names in `Style`; the widgets map it to colours. No state is told by colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from dspark_tui.actions import Situation, key_line
from dspark_tui.conversation import AnswerState, Facts, Phase
from dspark_tui.engine.protocol import DrafterInfo
from dspark_tui.metrics import Snapshot
from dspark_tui.text.format import NOT_MEASURED, clock, percent, plural, size, sparkline
from dspark_tui.text.sanitize import cells, clip, one_line

Style: TypeAlias = Literal["", "muted", "strong", "accent", "good", "warn", "bad"]
Span: TypeAlias = tuple[str, Style]
Line: TypeAlias = tuple[Span, ...]

PROGRAM = "dspark-tui"
SEPARATOR: Span = (" · ", "muted")
NARROW, WIDE = 60, 110

_STATE_SIGNS: dict[str, tuple[str, Style]] = {
    "active": ("● active", "good"),
    "parked": ("‖ parked", "warn"),
    "fell_back": ("! fell back", "bad"),
    "none": ("○ plain", "muted"),
}


def width_of(spans: Sequence[Span]) -> int:
    """Columns that the spans take."""
    return sum(cells(text) for text, _ in spans)


def fit(spans: Sequence[Span], width: int) -> Line:
    """The spans cut to `width` columns."""
    out: list[Span] = []
    for text, style in spans:
        left = width - width_of(out)
        if cells(text) > left:
            return (*out, (clip(text, left), style))
        out.append((text, style))
    return tuple(out)


def justify(left: Sequence[Span], right: Sequence[Span], width: int) -> Line:
    """`left` and `right` at the two ends; what does not fit is cut from `left`."""
    right = fit(right, width)
    room = width - width_of(right) - (2 if right else 0)
    left = fit(left, max(0, room))
    gap = width - width_of(left) - width_of(right)
    return (*left, (" " * gap, ""), *right)


def plain(line: Sequence[Span]) -> str:
    """The text of a line."""
    return "".join(text for text, _ in line)


def drafter_state(drafter: DrafterInfo | None) -> Span:
    """Sign and word of a drafter's state."""
    return _STATE_SIGNS[drafter.state] if drafter else ("", "")


def why_plain(drafter: DrafterInfo | None) -> str:
    """Why a drafter does not draft; empty when it does."""
    return one_line(drafter.reason) if drafter and drafter.state in ("parked", "fell_back") else ""


def title(facts: Facts, width: int) -> Line:
    """Program, model, drafter and its state; the drafter is there at every width."""
    model = facts.model
    if model is None:
        name = facts.load.model if facts.load else "no model"
        return justify([(PROGRAM, "strong")], [(one_line(name, width - len(PROGRAM) - 4), "muted")], width)
    drafter = facts.drafter
    state, style = drafter_state(drafter)
    drafter_name = one_line(drafter.name) if drafter else "none"
    tail: list[Span] = [(drafter_name, "accent")]
    if not (drafter_name == "none" and state == "○ plain"):
        tail.append((" " + state, style))
    if width < NARROW:
        room = width - width_of(tail) - 3
        return justify([(one_line(model.name, max(4, room)), "strong")], tail, width)
    sampling = "greedy" if facts.temperature == 0 else f"temp {facts.temperature:g}"
    right: list[Span] = [
        (one_line(model.name, max(8, width // 3)), "strong"),
        SEPARATOR,
        ("drafter ", "muted"),
        *tail,
    ]
    if width >= WIDE:
        right += [SEPARATOR, (f"{one_line(model.precision)}", "muted"), SEPARATOR, (sampling, "muted")]
    return justify([(PROGRAM, "strong")], right, width)


def status(
    facts: Facts, snapshot: Snapshot, now: float, width: int, situation: Situation, below: int, keys: bool
) -> Line:
    """State first, then what waits, then what is below the screen; `keys` adds the key line to it."""
    left = list(_state(facts, snapshot, now))
    right: list[Span] = []
    if facts.joining:
        right.append((f"loading drafter {one_line(facts.joining, 24)}", "accent"))
    if facts.queued:
        right += [SEPARATOR] if right else []
        right.append((f"queued: {plural(facts.queued, 'prompt')}", "warn"))
    if below > 0:
        right += [SEPARATOR] if right else []
        right.append((f"↓ {plural(below, 'line')} below, ctrl+e follows", "muted"))
    context = context_share(facts, snapshot)
    if context and width >= WIDE:
        right += [SEPARATOR] if right else []
        right.append((f"ctx {context}", "muted"))
    if keys and not right:
        right = list(key_spans(situation, width - width_of(left) - 2))
    return justify(left, right, width)


def short_status(facts: Facts, snapshot: Snapshot, now: float, width: int, below: int) -> Line:
    """One line for narrow screens: speed and acceptance while generating, the state otherwise."""
    hint = f"↓ {below}" if below else "esc stops"
    hint = f"loading {one_line(facts.joining, 12)}" if facts.joining else hint
    if facts.busy and snapshot.speed is not None:
        return justify(_numbers(snapshot, short=True), [(hint, "muted")], width)
    right: list[Span] = []
    if facts.joining:
        right = [(hint, "accent")]
    elif below:
        right = [(f"↓ {below}", "muted")]
    elif facts.queued:
        right = [(f"queued: {facts.queued}", "warn")]
    elif facts.phase is Phase.READY and snapshot.average is not None:
        right = [(f"{snapshot.average:.0f} tok/s", "")]
    elif facts.phase is Phase.READY:
        right = [("F1 help", "muted")]
    return justify(_state(facts, snapshot, now), right, width)


def _state(facts: Facts, snapshot: Snapshot, now: float) -> Line:
    since = clock(max(0.0, now - facts.answer_started)) if facts.answer_started is not None else ""
    match facts.phase:
        case Phase.STARTING:
            return (("◌ ", "accent"), ("starting the engine", ""))
        case Phase.LOADING:
            return (("◌ ", "accent"), (load_words(facts, now), ""))
        case Phase.NO_MODEL:
            return (("! ", "warn"), ("no model", ""), (" · F3 chooses one", "muted"))
        case Phase.GONE:
            return (("! ", "bad"), ("engine gone", ""))
        case Phase.STOPPING:
            return (("● ", "warn"), (f"stopping {since}", ""))
        case Phase.ANSWERING:
            return (
                ("● ", "good"),
                (f"{_answer_words(facts, snapshot)} {since}", ""),
                (" · esc stops", "muted"),
            )
        case Phase.READY:
            return (("○ ", "muted"), ("ready", ""))


def _answer_words(facts: Facts, snapshot: Snapshot) -> str:
    if facts.answer_state is AnswerState.THINKING:
        return "thinking"
    if facts.answer_state is AnswerState.WRITING:
        return "generating"
    if snapshot.prompt_tokens and snapshot.prefill_done is not None:
        return f"reading the prompt {percent(snapshot.prefill_done, snapshot.prompt_tokens)} %"
    return "reading the prompt"


def load_words(facts: Facts, now: float) -> str:
    """Stage, share and seconds of a load."""
    load = facts.load
    if load is None:
        return "loading"
    parts = [f"loading {one_line(load.model, 40)}"]
    if load.stage:
        parts.append(load.stage)
    if load.total:
        parts.append(f"{percent(load.done, load.total)} %")
    elif load.done:
        parts.append(load_amount(facts))
    parts.append(clock(max(0.0, now - load.started)))
    return " ".join(parts)


def load_amount(facts: Facts) -> str:
    """`34.2 MB of 75.0 MB`, `12 of 200 tensors`, or nothing when nothing is known."""
    load = facts.load
    if load is None or not (load.done or load.total):
        return ""
    if load.unit == "bytes":
        return f"{size(load.done)} of {size(load.total)}" if load.total else size(load.done)
    return f"{load.done} of {load.total} {load.unit}" if load.total else f"{load.done} {load.unit}"


def context_share(facts: Facts, snapshot: Snapshot) -> str:
    """Share of the context in use, such as `13 %`; empty when not known."""
    if facts.model is None or snapshot.context is None:
        return ""
    return f"{percent(snapshot.context, facts.model.context)} %"


def key_spans(situation: Situation, width: int) -> Line:
    """As many keys as fit, most useful first."""
    spans: list[Span] = []
    for key, word in key_line(situation):
        item: list[Span] = [("  ", "")] if spans else []
        item += [(key, "accent"), (f" {word}", "muted")]
        if width_of(spans) + width_of(item) > width:
            break
        spans += item
    return tuple(spans)


def _numbers(snapshot: Snapshot, *, short: bool) -> list[Span]:
    speed = snapshot.speed if snapshot.running and snapshot.speed is not None else snapshot.average
    spans: list[Span] = [(f"{speed:.0f} tok/s" if speed is not None else f"{NOT_MEASURED} tok/s", "strong")]
    if snapshot.speedup is not None:
        spans += [(" " if short else " · ", "muted"), (f"{snapshot.speedup:.1f}x", "")]
    if snapshot.drafted:
        mean = snapshot.accepted / snapshot.rounds
        of = snapshot.drafted / snapshot.rounds
        spans += [(" " if short else " · ", "muted"), (f"acc {mean:.1f}/{of:.1f}", "")]
    return spans


def strip(facts: Facts, snapshot: Snapshot, width: int) -> Line:
    """The metrics on one line, for screens without the pane."""
    reason = why_plain(facts.drafter)
    if not snapshot.rounds and snapshot.average is None:
        return fit([(reason, "warn") if reason else ("speed n/a: no answer yet", "muted")], width)
    spans = _numbers(snapshot, short=False)
    if reason:
        # No other row says it on such a screen, and how drafts fared matters less now.
        return fit([spans[0], SEPARATOR, (reason, "warn")], width)
    if snapshot.drafted:
        spans.append((f" {percent(snapshot.accepted, snapshot.drafted)} % ", "muted"))
        spans.append((sparkline(snapshot.spark[-12:], snapshot.drafts or 0), "accent"))
    context = context_share(facts, snapshot)
    if context:
        spans += [SEPARATOR, (f"ctx {context}", "muted")]
    if snapshot.memory is not None:
        spans += [SEPARATOR, (size(snapshot.memory), "muted")]
    return fit(spans, width)
