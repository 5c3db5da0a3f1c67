"""Choosing one of several: a filter, rows with the reason why one cannot be chosen, number keys."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from dspark_tui.screens.dialog import Dialog
from dspark_tui.text.sanitize import cells, one_line, sanitize
from dspark_tui.widgets.line import STYLES, Plain

_MOVES = {
    "down": "cursor_down",
    "ctrl+n": "cursor_down",
    "up": "cursor_up",
    "ctrl+p": "cursor_up",
    "pagedown": "page_down",
    "pageup": "page_up",
}


_TWO_ROWS = 52
"""Narrower lists have the detail below the name."""


@dataclass(frozen=True, slots=True)
class Row:
    """One choice. `detail` says what it is; `reason` why it cannot be chosen (then `usable` is False);
    `note` how it fares, on lines of its own."""

    value: str
    name: str
    detail: str = ""
    usable: bool = True
    reason: str = ""
    note: str = ""
    present: bool = False


class _Filter(Input):
    """The filter. While it is empty, a digit chooses; arrows move in the list."""

    class Move(Message):
        """A key that moves in the list."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    class Number(Message):
        """The row with this number, from 1."""

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

    async def _on_key(self, event: events.Key) -> None:
        if event.character and event.character in "123456789" and not self.value:
            self.post_message(self.Number(int(event.character)))
        elif event.key in _MOVES:
            self.post_message(self.Move(event.key))
        else:
            await super()._on_key(event)
            return
        event.stop()
        event.prevent_default()

    def _on_paste(self, event: events.Paste) -> None:
        event.prevent_default()  # else the base class inserts it once more
        event.text = sanitize(event.text)
        super()._on_paste(event)


class PickerScreen(Dialog[str | None]):
    """Gives the value of the chosen row, or None. `free` names what a typed text may be that is no row, such
    as `folder or repository id` (empty: only rows can be chosen)."""

    DEFAULT_CSS = """
    PickerScreen OptionList {
        height: auto;
        max-height: 16;
        background: $surface;
        border: none;
        padding: 0;
        scrollbar-size-vertical: 1;
    }
    PickerScreen Input {
        background: $panel;
        border: none;
        height: 1;
        padding: 0 1;
        margin-bottom: 1;
    }
    """

    def __init__(
        self, heading: str, rows: list[Row], *, hint: str = "", free: str = "", empty: str = ""
    ) -> None:
        super().__init__()
        self._heading = heading
        self._rows = rows
        self._hint = hint
        self._free = free
        self._empty = empty
        self._field = _Filter(placeholder=f"filter, or a {free}" if free else "filter", compact=True)
        self._field.cursor_blink = False
        self._options = OptionList(markup=False, compact=True)
        self._note = Plain(classes="note")

    def compose(self) -> ComposeResult:
        """The parts, top to bottom."""
        with Vertical(classes="box"):
            yield Plain(one_line(self._heading), classes="heading")
            yield self._field
            yield self._options
            yield self._note
            yield Plain(self._hint, classes="hint")

    def on_mount(self) -> None:
        """Show all rows, the present one highlighted."""
        self._field.focus()
        self._show("")

    def on_resize(self) -> None:
        """Rows are made for the width."""
        self.call_after_refresh(self._show, self._field.value)

    def set_rows(self, rows: list[Row], empty: str) -> None:
        """Replace the rows, for lists that come later; `empty` is said when there is none."""
        self._rows, self._empty = rows, sanitize(empty)
        if self.is_mounted:
            self._show(self._field.value)

    # ------------------------------------------------------------------ rows

    def _matching(self, text: str) -> list[Row]:
        words = text.lower().split()
        return [
            row for row in self._rows if all(word in f"{row.name} {row.detail}".lower() for word in words)
        ]

    @on(Input.Changed)
    def _filter(self, event: Input.Changed) -> None:
        self._show(event.value)

    def _show(self, text: str) -> None:
        options = self._options
        matching = self._matching(text)
        width = options.size.width or min(76, self.app.size.width - 8)
        name_width = max([cells(one_line(row.name)) for row in self._rows], default=0)
        name_width = min(name_width, max(8, width // 2))
        options.clear_options()
        options.add_options(
            Option(self._prompt(index, row, name_width, width), id=str(index), disabled=not row.usable)
            for index, row in enumerate(matching)
        )
        typed = text.strip()
        if self._free and typed and not any(row.value == typed for row in matching):
            label = Content.assemble(
                ("    ", ""), one_line(typed, width // 2), (f"  as a {self._free}", STYLES["muted"])
            )
            options.add_option(Option(label, id="free"))
        present = next((i for i, row in enumerate(matching) if row.present and row.usable), None)
        usable = next((i for i, row in enumerate(matching) if row.usable), None)
        best = present if present is not None and not typed else usable
        options.highlighted = best if best is not None else (len(matching) if typed and self._free else None)
        note = self._empty if not self._rows else "nothing matches" if not options.option_count else ""
        self._note.show(note)
        self._note.display = bool(note)

    def _prompt(self, index: int, row: Row, name_width: int, width: int) -> Content:
        sign = "›" if row.present else " "
        number = str(index + 1) if index < 9 else " "
        name = one_line(row.name, name_width)
        name += " " * (name_width - cells(name))
        if width < _TWO_ROWS:
            return _on_two_rows(sign, number, row, width)
        if not row.usable:
            why = f"not usable: {one_line(row.reason) or 'no reason was given'}"
            indent = name_width + 7
            lines = wrap(why, max(16, width - indent - 1)) or [why]
            text = f"{sign} {number}  {name}  " + f"\n{' ' * indent}".join(lines)
            return Content.assemble((text, STYLES["muted"]))
        indent = name_width + 7
        detail = one_line(row.detail, max(0, width - indent))
        note = "".join(f"\n{' ' * indent}{line}" for line in wrap(one_line(row.note), width - indent - 1))
        return Content.assemble(
            (f"{sign} ", STYLES["accent"]),
            (f"{number}  ", STYLES["muted"]),
            (name, STYLES["strong"]),
            (f"  {detail}", STYLES["muted"]),
            (note, STYLES["warn"]),
        )

    # ------------------------------------------------------------------ choosing

    @on(_Filter.Move)
    def _move(self, event: _Filter.Move) -> None:
        getattr(self._options, f"action_{_MOVES[event.key]}")()

    @on(_Filter.Number)
    def _number(self, event: _Filter.Number) -> None:
        if event.number <= len(self._rows) and self._rows[event.number - 1].usable:
            self.dismiss(self._rows[event.number - 1].value)

    @on(Input.Submitted)
    def _enter(self) -> None:
        options = self._options
        if options.highlighted is not None:
            self._choose(options.get_option_at_index(options.highlighted))

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        self._choose(event.option)

    def _choose(self, option: Option) -> None:
        if option.disabled:
            return
        text = self._field.value
        if option.id == "free":
            self.dismiss(text.strip())
        else:
            self.dismiss(self._matching(text)[int(option.id or 0)].value)


def _on_two_rows(sign: str, number: str, row: Row, width: int) -> Content:
    name = one_line(row.name, width - 5)
    if row.usable:
        head = Content.assemble(
            (f"{sign} ", STYLES["accent"]), (f"{number}  ", STYLES["muted"]), (name, STYLES["strong"])
        )
        below = [one_line(row.detail, width - 5), *wrap(one_line(row.note), max(16, width - 6))]
    else:
        head = Content.styled(f"{sign} {number}  {name}", STYLES["muted"])
        below = wrap(f"not usable: {one_line(row.reason) or 'no reason was given'}", max(16, width - 6))
    text = "".join(f"\n     {line}" for line in below if line)
    return head + Content.styled(text, STYLES["muted"])
