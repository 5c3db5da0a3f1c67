"""The chat: title, transcript, metrics, prompt and status. It draws facts and forwards what is typed."""

from __future__ import annotations

from collections.abc import Callable

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.message import Message
from textual.screen import Screen

from dspark_tui.actions import Situation
from dspark_tui.conversation import Facts, Phase
from dspark_tui.metrics import Snapshot
from dspark_tui.text import lines, pane
from dspark_tui.text.sanitize import sanitize
from dspark_tui.text.welcome import welcome
from dspark_tui.widgets.line import InfoLine, Plain, Rows, lines_content
from dspark_tui.widgets.prompt import Prompt
from dspark_tui.widgets.transcript import Transcript

MIN_WIDTH, MIN_HEIGHT = 40, 10
TOO_SMALL = f"dspark-tui needs {MIN_WIDTH}x{MIN_HEIGHT}"
METRICS = ("full", "strip", "off")


class Banner(Plain, can_focus=True):
    """Says what keeps the program from answering. While it has the focus, r restarts a lost engine."""

    class Key(Message):
        """A key was pressed on the banner."""

        def __init__(self, key: str, character: str | None) -> None:
            super().__init__()
            self.key = key
            self.character = character

    def on_key(self, event: events.Key) -> None:
        """Everything that is no command goes on to the app."""
        if event.key in ("enter",) or (event.is_printable and event.character):
            event.stop()
            self.post_message(self.Key(event.key, event.character))


class ChatScreen(Screen[None]):
    """See the module. `facts`, `snapshot` and `situation` are asked for whenever something is drawn."""

    AUTO_FOCUS = "#prompt"
    BINDINGS = [Binding("ctrl+c", "app.interrupt", show=False)]
    HORIZONTAL_BREAKPOINTS: list[tuple[int, str]] | None = [
        (0, "-tiny"),
        (MIN_WIDTH, "-narrow"),
        (lines.NARROW, "-medium"),
        (lines.WIDE, "-wide"),
    ]
    VERTICAL_BREAKPOINTS: list[tuple[int, str]] | None = [
        (0, "-flat"),
        (MIN_HEIGHT, "-low"),
        (20, "-tall"),
    ]

    def __init__(
        self,
        facts: Callable[[], Facts],
        snapshot: Callable[[], Snapshot],
        situation: Callable[[], Situation],
        clock: Callable[[], float],
    ) -> None:
        super().__init__()
        self._facts = facts
        self._snapshot = snapshot
        self._situation = situation
        self._clock = clock
        self.metrics_mode = "full"
        self.transcript = Transcript(id="transcript")
        self.prompt = Prompt(id="prompt")
        self._title_line = InfoLine(lambda width: lines.title(facts(), width), id="title")
        self._metrics = Rows(lambda width: pane.rows(facts(), snapshot(), width), id="metrics")
        self._strip = InfoLine(lambda width: lines.strip(facts(), snapshot(), width), id="strip")
        self._status = InfoLine(self._status_line, id="status")
        self._keys = InfoLine(lambda width: lines.key_spans(situation(), width), id="keys")
        self.banner = Banner(id="banner")

    def compose(self) -> ComposeResult:
        """The parts, top to bottom."""
        yield Plain(TOO_SMALL, id="too-small")
        yield self._title_line
        with Horizontal(id="body"):
            yield self.transcript
            yield self._metrics
        yield self.banner
        with Horizontal(id="prompt-row"):
            yield Plain("›", id="sign")
            yield self.prompt
        yield self._strip
        yield self._status
        yield self._keys

    def on_mount(self) -> None:
        """Draw the first picture."""
        self.draw()

    def on_resize(self) -> None:
        """Texts depend on the width."""
        self._show_metrics()
        self.draw()

    def on_descendant_focus(self) -> None:
        """The banner says which key works from here."""
        self._draw_banner(self._facts())

    def on_descendant_blur(self) -> None:
        """As above."""
        self._draw_banner(self._facts())

    # ------------------------------------------------------------------ drawing

    def draw(self) -> None:
        """Bring every line up to date; unchanged ones are not written."""
        facts = self._facts()
        self._draw_welcome(facts)
        self._draw_banner(facts)
        for line in (self._title_line, self._strip, self._status, self._keys):
            if line.display:
                line.refresh_line()
        if self._metrics.display:
            self._metrics.refresh_rows()

    def draw_position(self) -> None:
        """The scroll position changed."""
        self._status.refresh_line()

    def _draw_welcome(self, facts: Facts) -> None:
        if self.transcript.welcome.display:
            width = self.transcript.size.width or self.size.width
            self.transcript.welcome.show(lines_content(welcome(facts, self._clock(), width)))

    def _draw_banner(self, facts: Facts) -> None:
        fits = self.size.width >= MIN_WIDTH and self.size.height >= MIN_HEIGHT
        self.banner.display = bool(facts.problem) and fits
        self.banner.set_class(facts.phase is Phase.GONE, "-gone")
        if not facts.problem:
            return
        if facts.phase is Phase.GONE:
            hint = "r restarts it" if self.banner.has_focus else "esc, then r restarts it"
            what = f"{sanitize(facts.problem)} The conversation is kept: {hint}."
        else:
            what = sanitize(facts.problem) + ("" if "F3" in facts.problem else " F3 chooses a model.")
        self.banner.show(what)

    def _status_line(self, width: int) -> lines.Line:
        facts, snapshot, now = self._facts(), self._snapshot(), self._clock()
        below = self.transcript.lines_below if self.transcript.views else 0
        if width + 2 < lines.NARROW:
            return lines.short_status(facts, snapshot, now, width, below)
        return lines.status(
            facts, snapshot, now, width, self._situation(), below, keys=not self._keys.display
        )

    # ------------------------------------------------------------------ metrics

    def cycle_metrics(self) -> str:
        """Full, strip, off; gives the new mode."""
        self.metrics_mode = METRICS[(METRICS.index(self.metrics_mode) + 1) % len(METRICS)]
        self._show_metrics()
        self.call_after_refresh(self.draw)
        return self.metrics_mode

    def _show_metrics(self) -> None:
        wide = self.size.width >= lines.WIDE
        fits = self.size.width >= lines.NARROW and self.size.height >= MIN_HEIGHT
        self._metrics.display = wide and self.metrics_mode == "full"
        strip = self.metrics_mode == "strip" or (not wide and self.metrics_mode == "full")
        self._strip.display = strip and fits
