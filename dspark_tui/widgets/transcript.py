"""The scrolling conversation: follows the end until the user scrolls, keeps a bounded number of widgets."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.message import Message

from dspark_tui.actions import of_place
from dspark_tui.conversation import Exchange
from dspark_tui.text.format import count
from dspark_tui.widgets.exchange import ExchangeView
from dspark_tui.widgets.line import Plain

RICH = 30
"""Newest answers that are live Markdown; older ones are one widget each."""
MOUNTED = 200
"""Exchanges on the screen at most; older ones leave it."""


class Transcript(VerticalScroll, can_focus=True):
    """Holds a welcome text or the exchanges."""

    BINDINGS = [
        Binding(",".join(action.keys), action.run, action.title, show=False, id=action.id)
        for action in of_place("transcript")
    ]

    class Typed(Message):
        """A printable key was pressed here: it belongs to the prompt."""

        def __init__(self, character: str) -> None:
            super().__init__()
            self.character = character

    class Moved(Message):
        """The scroll position or the height changed."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.welcome = Plain(id="welcome")
        self._earlier = Plain(id="earlier")
        self._left_out = 0
        self._views: list[ExchangeView] = []
        self._thinking_open = False

    def compose(self) -> ComposeResult:
        """The parts, top to bottom."""
        yield self.welcome
        yield self._earlier

    def on_mount(self) -> None:
        """Follow from the start."""
        self._earlier.display = False
        self.anchor()

    @property
    def views(self) -> list[ExchangeView]:
        """The exchanges on the screen, oldest first."""
        return self._views

    def view_of(self, exchange: Exchange) -> ExchangeView | None:
        """The view of `exchange`, if it is on the screen."""
        return next((view for view in reversed(self._views) if view.exchange is exchange), None)

    @property
    def lines_below(self) -> int:
        """Rows of the conversation below the visible part; 0 while the end is followed."""
        if self._anchored and not self._anchor_released:
            return 0
        return max(0, round(self.max_scroll_y - self.scroll_y))

    def add(self, exchange: Exchange) -> None:
        """Show a new exchange at the end and follow it."""
        self.welcome.display = False
        view = ExchangeView(exchange, thinking_open=self._thinking_open)
        self._views.append(view)
        self.mount(view)
        self.anchor()

    async def discard(self, exchanges: list[Exchange]) -> None:
        """Take exchanges off the screen."""
        gone = [view for view in self._views if any(view.exchange is exchange for exchange in exchanges)]
        self._views = [view for view in self._views if view not in gone]
        for view in gone:
            await view.remove()
        if not self._views:
            self.welcome.display = True

    async def clear(self) -> None:
        """Empty the transcript."""
        self._left_out = 0
        self._earlier.display = False
        await self.discard([view.exchange for view in self._views])
        self.anchor()

    async def trim(self) -> None:
        """Keep the window: fold what is older than the newest `RICH`, drop what is beyond `MOUNTED`."""
        for view in self._views[:-RICH]:
            await view.fold()
        beyond = self._views[:-MOUNTED]
        if beyond:
            self._left_out += len(beyond)
            self._views = self._views[-MOUNTED:]
            for view in beyond:
                await view.remove()
            self._earlier.show(
                f"▲ {count(self._left_out)} earlier exchanges, not shown; the model still sees them"
            )
            self._earlier.display = True

    def toggle_thinking(self) -> bool:
        """Open or close all thinking; tells whether it is open now."""
        self._thinking_open = not self._thinking_open
        for view in self._views:
            view.open_thinking(self._thinking_open)
        return self._thinking_open

    def action_follow(self) -> None:
        """Go to the end and stay there."""
        self.anchor()

    def page(self, direction: int) -> None:
        """Scroll by a page, -1 up or 1 down, without taking the focus."""
        if direction < 0:
            self.release_anchor()
            self.scroll_page_up(animate=False)
        else:
            self.scroll_page_down(animate=False)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Tell who shows how much is below."""
        super().watch_scroll_y(old_value, new_value)
        if round(old_value) != round(new_value):
            self.post_message(self.Moved())

    def on_key(self, event: events.Key) -> None:
        """Typing belongs to the prompt."""
        if event.is_printable and event.character and event.key not in ("j", "k", "g", "G"):
            event.stop()
            self.post_message(self.Typed(event.character))
