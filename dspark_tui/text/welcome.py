"""The start screen: what loads and how far it is, or what can be done now."""

from __future__ import annotations

from dspark_tui import __version__
from dspark_tui.conversation import Facts, Phase
from dspark_tui.text.format import bar, clock, count, percent, plural, size
from dspark_tui.text.lines import NARROW, PROGRAM, Line, Span, drafter_state, load_amount
from dspark_tui.text.sanitize import one_line

_BAR = 24


def welcome(facts: Facts, now: float, width: int) -> list[Line]:
    """Lines for an empty transcript of `width` columns."""
    head: list[Line] = [((PROGRAM, "strong"), (f" {__version__}", "muted"))]
    if width >= NARROW:
        head.append((("Local chat on MLX, made fast by speculative decoding.", "muted"),))
    head.append(())
    match facts.phase:
        case Phase.STARTING:
            body: list[Line] = [(("Starting the engine.", ""),), (), *_type_already(width)]
        case Phase.LOADING:
            body = [*_loading(facts, now, width), (), *_type_already(width)]
        case Phase.NO_MODEL | Phase.GONE:
            body = []
        case _:
            body = _ready(facts, width)
    return head + body


def _type_already(width: int) -> list[Line]:
    if width < NARROW:
        return [(("You can type already.", "muted"),)]
    return [(("You can type already; a prompt that you send waits for the model.", "muted"),)]


def _loading(facts: Facts, now: float, width: int) -> list[Line]:
    load = facts.load
    if load is None:
        return []
    lines: list[Line] = [(("Loading ", ""), (one_line(load.model, max(8, width - 10)), "strong"))]
    elapsed = clock(max(0.0, now - load.started))
    stage: list[Span] = [(f"{load.stage or 'waiting':<8}", "muted")]
    if load.total:
        length = max(6, min(_BAR, width - 24))
        stage.append((bar(load.done / load.total, length), "accent"))
        stage.append((f" {percent(load.done, load.total):>3} %", ""))
    stage.append((f"  {elapsed}", "muted"))
    lines.append(tuple(stage))
    amount = load_amount(facts)
    if amount:
        lines.append(((" " * 8 + amount, "muted"),))
    return lines


def _ready(facts: Facts, width: int) -> list[Line]:
    model, drafter = facts.model, facts.drafter
    lines: list[Line] = []
    if model is not None:
        lines.append((("model    ", "muted"), (one_line(model.name, max(8, width - 10)), "strong")))
        detail = f"{one_line(model.precision)}, {count(model.context)} tokens of context"
        if width >= NARROW and model.weight_bytes:
            detail += f", {size(model.weight_bytes)} of weights"
        lines.append((("         ", ""), (detail, "muted")))
    if drafter is not None:
        lines.append(
            (("drafter  ", "muted"), (one_line(drafter.name), "strong"), (" ", ""), drafter_state(drafter))
        )
        others = sum(row.usable and row.name != drafter.name for row in facts.drafters)
        if others:
            lines.append(
                (("         ", ""), (f"{plural(others, 'other')}: F2 lists, ctrl+t switches", "muted"))
            )
    lines.append(())
    if width < NARROW:
        lines.append((("Enter sends · F1 help", "muted"),))
    else:
        lines.append((("Enter sends, ctrl+j makes a new line, esc stops an answer, F1 helps.", "muted"),))
    return lines
