"""F1: what the keys do, from the registry of actions."""

from __future__ import annotations

from textwrap import wrap

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content

from dspark_tui.actions import ACTIONS, Action, Situation, key_name
from dspark_tui.screens.dialog import Dialog
from dspark_tui.text.lines import NARROW
from dspark_tui.text.sanitize import cells
from dspark_tui.widgets.line import STYLES, Plain

_PLACES = {"app": "Everywhere", "prompt": "In the prompt", "transcript": "In the transcript (F6 goes there)"}
_KEYS = 14


def help_text(now: Situation, width: int) -> Content:
    """All actions by place, for `width` columns; what does nothing just now is muted and says so."""
    parts: list[Content] = []
    for place, heading in _PLACES.items():
        parts.append(Content.styled(heading, STYLES["strong"]))
        parts += [_entry(action, now, width) for action in ACTIONS if action.place == place]
        parts.append(Content(""))
    return Content("\n").join(parts[:-1])


def _entry(action: Action, now: Situation, width: int) -> Content:
    keys = ", ".join(key_name(key) for key in action.keys) or "(F5)"
    ready = action.when(now)
    pad = " " * max(1, _KEYS - cells(keys))
    head = Content.assemble(
        (f"  {keys}{pad}", STYLES["accent"] if ready else STYLES["muted"]),
        (action.title, "" if ready else STYLES["muted"]),
        ("" if ready else "  (not now)", STYLES["muted"]),
    )
    indent = " " * (_KEYS + 2 if width >= NARROW else 4)
    below = wrap(action.help, max(16, width - len(indent)))
    return head + Content.styled("".join(f"\n{indent}{line}" for line in below), STYLES["muted"])


class HelpScreen(Dialog[None]):
    """Scrolls; Esc or F1 closes it."""

    DEFAULT_CSS = """
    HelpScreen > .box {
        scrollbar-size-vertical: 1;
        scrollbar-gutter: stable;
    }
    """

    BINDINGS = [Binding("f1,q", "dismiss(None)", "Close", show=False)]

    def __init__(self, now: Situation) -> None:
        super().__init__()
        self._now = now
        self._text = Plain()

    def compose(self) -> ComposeResult:
        """The parts, top to bottom."""
        with VerticalScroll(classes="box"):
            yield Plain("Keys", classes="heading")
            yield self._text
            yield Plain("esc closes", classes="hint")

    def on_mount(self) -> None:
        """The keys scroll."""
        self.query_one(VerticalScroll).focus()

    def on_resize(self) -> None:
        """The text is wrapped for the width."""
        self.call_after_refresh(self._wrap)

    def _wrap(self) -> None:
        self._text.show(help_text(self._now, self._text.size.width or self.app.size.width))
