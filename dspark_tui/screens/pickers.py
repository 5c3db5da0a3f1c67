"""The two pickers: which drafter, which model."""

from __future__ import annotations

from collections.abc import Sequence

from dspark_tui.conversation import Facts
from dspark_tui.engine.protocol import DrafterInfo, ModelRow
from dspark_tui.screens.picker import PickerScreen, Row
from dspark_tui.text.format import plural, size

_STATES = {"active": "active", "parked": "parked", "fell_back": "fell back", "none": ""}
_METHODS = {"lookup": "copies where the text repeats itself", "auto": "chooses the fastest, round by round"}


def drafter_rows(drafters: Sequence[DrafterInfo], present: str) -> list[Row]:
    """All drafters of the pair, with what is known about each."""
    return [
        Row(
            value=drafter.name,
            name=drafter.name,
            detail=_drafter_detail(drafter),
            usable=drafter.usable,
            reason=drafter.reason,
            note=f"{_STATES[drafter.state]}: {drafter.reason}" if drafter.reason else "",
            present=drafter.name == present,
        )
        for drafter in drafters
    ]


def _drafter_detail(drafter: DrafterInfo) -> str:
    if drafter.method == "none":
        return "plain decoding"
    parts: list[str] = [_METHODS.get(drafter.method, drafter.method)]
    if drafter.drafts:
        parts.append(f"{plural(drafter.drafts, 'draft')} a round")
    if drafter.weight_bytes:
        parts.append(size(drafter.weight_bytes))
    if drafter.method not in _METHODS:
        parts.append("loaded" if drafter.loaded else "on disk")
    return " · ".join(parts)


def drafter_picker(facts: Facts) -> PickerScreen:
    """F2."""
    model = facts.model.name if facts.model else ""
    present = facts.drafter.name if facts.drafter else ""
    when = "from the next round on" if facts.busy else "for the next answer"
    return PickerScreen(
        f"Drafter for {model}",
        drafter_rows(facts.drafters, present),
        hint=f"enter or a number switches {when} · esc closes",
        empty="No drafter is known for this model.",
    )


def model_rows(models: Sequence[ModelRow], present: str) -> list[Row]:
    """The targets on this machine."""
    return [
        Row(
            value=model.name,
            name=model.name,
            detail=" · ".join(part for part in (_size(model), model.detail, _where(model)) if part),
            usable=model.usable,
            reason=model.reason,
            present=model.name == present,
        )
        for model in models
    ]


def _size(model: ModelRow) -> str:
    return "" if model.size_bytes is None else size(model.size_bytes)


def _where(model: ModelRow) -> str:
    return "" if model.where == model.name else model.where


def model_picker(facts: Facts) -> PickerScreen:
    """F3. The rows come later, with `set_rows`."""
    return PickerScreen(
        "Model",
        [],
        hint="enter or a number loads · esc closes",
        free="folder or repository id",
        empty="Looking for models on this machine…",
    )
