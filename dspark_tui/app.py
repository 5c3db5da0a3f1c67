"""The terminal program: an App that joins the controller (engine, queue, answers) with the screens."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from textual import on
from textual.binding import Binding
from textual.screen import Screen

from dspark_tui.actions import of_place
from dspark_tui.app_actions import AppActions
from dspark_tui.controller import DEMO, Controller
from dspark_tui.conversation import Exchange, Facts, Phase
from dspark_tui.crash import report, report_text
from dspark_tui.metrics import Snapshot
from dspark_tui.ports import AS_IT_COMES, EngineLike, LoadOptions, StartEngine
from dspark_tui.screens.chat import Banner, ChatScreen
from dspark_tui.terminal_input import forgive_wrong_bytes
from dspark_tui.text.format import plural
from dspark_tui.text.sanitize import one_line
from dspark_tui.widgets.prompt import Prompt
from dspark_tui.widgets.transcript import Transcript

if TYPE_CHECKING:
    from rich.console import RenderableType
    from textual.widgets import Markdown

THEME = "atom-one-dark"
"""Keeps its background, surface and panel apart also in 256 colours."""
FLUSH_SECONDS = 0.1
FLUSH_SHARE = 3
"""Pause between two flushes, in multiples of what the last one cost."""
TICK_SECONDS = 0.5
FAILED, USAGE, STOPPED, HANGUP_STATUS = 1, 2, 130, 129


class DsparkApp(AppActions):
    """Owns the controller and is its view. `start_engine` gives a connected engine; `clock` is monotonic."""

    TITLE = "dspark-tui"
    CSS_PATH = "styles/app.tcss"
    COMMAND_PALETTE_BINDING = "f5"
    ENABLE_COMMAND_PALETTE = True
    NOTIFICATION_TIMEOUT = 4
    BINDINGS = [
        Binding(
            ",".join(action.keys),
            action.run,
            action.title,
            show=False,
            id=action.id,
        )
        for action in of_place("app")
        if action.keys and action.id != "palette"
    ]

    def __init__(
        self,
        start_engine: StartEngine,
        *,
        model: str | None = None,
        drafter: str | None = None,
        temperature: float = 0.0,
        loading: LoadOptions = AS_IT_COMES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._wish = (model, drafter)
        self._said = {}
        self.clock = clock
        self.controller = Controller(self, start_engine, clock, temperature=temperature, loading=loading)
        self.chat = ChatScreen(lambda: self.controller.facts, self._snapshot, self.situation, clock)
        self._drawn = Facts()
        self._wake = asyncio.Event()
        self.fault = ""
        """What broke the program, in a sentence; empty while nothing did."""
        self.theme = THEME

    # ------------------------------------------------------------------ life

    def get_default_screen(self) -> Screen[None]:
        """The chat is the only screen that stays."""
        return self.chat

    def on_mount(self) -> None:
        """Start the engine behind the first picture."""
        self._ticking = self.set_interval(TICK_SECONDS, self._tick, pause=True)
        self._handle_signals()
        self.app_resume_signal.subscribe(self, self._back_from_the_shell)
        self.call_after_refresh(self._begin)

    def _back_from_the_shell(self, _: object) -> None:
        """fg: the screen is empty, while the widgets believe that what they drew is still there."""
        self.action_repaint()

    def on_unmount(self) -> None:
        """Nothing goes on for a screen that is gone."""
        self.controller.drop()

    def _begin(self) -> None:
        self.run_worker(self._pump(), name="pump")
        self.run_worker(self.controller.start(*self._wish), name="start", exit_on_error=True)
        self.run_worker(asyncio.to_thread(_warm_up), name="warm up")

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(signal.SIGTERM, self.exit, STOPPED)
            loop.add_signal_handler(signal.SIGHUP, self._hang_up)

    def _hang_up(self) -> None:
        """The terminal is gone: writing to it would block, so leave without restoring it."""
        os._exit(HANGUP_STATUS)

    async def action_quit(self) -> None:
        """Leave at once."""
        self.exit(0)

    def _fatal_error(self) -> None:
        """A fault of the program: one sentence after the screen is restored, the traceback in a file."""
        self.fault = report(self._exception)
        self._close_messages_no_wait()

    def panic(self, *renderables: RenderableType) -> None:
        """A fault in a thread of the library, told as any other."""
        self.fault = report_text(renderables)
        self._close_messages_no_wait()

    # ------------------------------------------------------------------ what the screens read

    def _snapshot(self) -> Snapshot:
        return self.controller.metrics()

    # ------------------------------------------------------------------ the controller's view

    def facts_changed(self) -> None:
        """Draw at once what a user waits for; progress is drawn by the tick."""
        facts, drawn = self.controller.facts, self._drawn
        if dataclasses.replace(facts, load=None) == dataclasses.replace(drawn, load=None):
            return
        self._drawn = facts
        if facts.phase is Phase.GONE and drawn.phase is not Phase.GONE:
            self.call_after_refresh(self._banner_focus)
        if facts.phase in (Phase.LOADING, Phase.STARTING, Phase.ANSWERING, Phase.STOPPING):
            self._ticking.resume()
        else:
            self._ticking.pause()
        self.chat.draw()

    def _banner_focus(self) -> None:
        """A lost engine is offered to restart with one key, unless somebody is typing."""
        if not self.chat.prompt.text and self.screen is self.chat:
            self.chat.banner.focus()
            self.chat.draw()

    def exchange_added(self, exchange: Exchange) -> None:
        """Show a new prompt."""
        self.chat.transcript.add(exchange)

    def answer_changed(self, exchange: Exchange) -> None:
        """Bring the text, header and marks of an answer up to date."""
        self._wake.set()

    def text_arrived(self, exchange: Exchange) -> None:
        """New text waits for the pump."""
        self._wake.set()

    def prompts_returned(self, exchanges: list[Exchange]) -> None:
        """Waiting prompts go back to the editor."""
        self.chat.prompt.put_before("\n\n".join(exchange.prompt for exchange in exchanges))
        self.run_worker(self.chat.transcript.discard(exchanges))
        self.say(f"{plural(len(exchanges), 'waiting prompt')} back in the prompt, not sent.")

    def model_wanted(self) -> None:
        """Offer the models."""
        self.action_pick_model()

    async def _pump(self) -> None:
        """Bring text on the screen, never more often than the screen can bear."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            started = time.perf_counter()
            await self._show_text()
            cost = time.perf_counter() - started
            await asyncio.sleep(max(FLUSH_SECONDS, FLUSH_SHARE * cost))

    async def _show_text(self) -> None:
        transcript = self.chat.transcript
        ended = False
        with self.batch_update():
            for view in list(transcript.views):
                if view.stale:
                    await view.flush()
                    ended = ended or view.exchange.answer.state.over
        if ended:
            await transcript.trim()
            self.chat.draw()

    def _tick(self) -> None:
        self._drawn = self.controller.facts
        self.chat.draw()

    # ------------------------------------------------------------------ typing

    @on(Prompt.Sent)
    def _sent(self, event: Prompt.Sent) -> None:
        facts = self.controller.facts
        self.controller.submit(event.text)
        if facts.phase in (Phase.GONE, Phase.NO_MODEL):
            self.say("The prompt waits until a model is ready.", "warning")
        elif facts.busy:
            self.say("Queued: it is sent when this answer ends.")

    @on(Prompt.Eof)
    def _eof(self) -> None:
        self._arm_quit("ctrl+d")

    @on(Prompt.Follow)
    def _follow(self) -> None:
        self.chat.transcript.action_follow()

    @on(Prompt.Page)
    def _page(self, event: Prompt.Page) -> None:
        self.action_scroll_transcript(event.direction)

    @on(Transcript.Typed)
    def _typed(self, event: Transcript.Typed) -> None:
        self._type(event.character)

    def _type(self, character: str) -> None:
        self.chat.prompt.focus()
        self.chat.prompt.insert(character)

    @on(Transcript.Moved)
    def _moved(self) -> None:
        self.chat.draw_position()

    @on(Banner.Key)
    def _banner_key(self, event: Banner.Key) -> None:
        gone = self.controller.facts.phase is Phase.GONE
        if gone and event.key in ("r", "enter"):
            self.chat.prompt.focus()
            self.action_restart_engine()
        elif event.character and event.key != "enter":
            self._type(event.character)
        self.chat.draw()

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        """Open web links only, and only where the user sits."""
        address = event.href
        if not address.startswith(("http://", "https://")):
            self.say(f"Not opened: {one_line(address, 200)} is no web address (http or https).", "warning")
        elif "SSH_CONNECTION" in os.environ:
            self.copy_to_clipboard(one_line(address))
            self.say(f"Sent to the terminal's clipboard: {one_line(address, 200)}")
        else:
            self.open_url(address)


def _warm_up() -> None:
    """Import what the first answer needs while the model loads."""
    import dspark_tui.widgets.markdown  # noqa: F401


def run(
    model: str | None,
    drafter: str | None,
    fake: Path | None,
    temperature: float = 0.0,
    loading: LoadOptions = AS_IT_COMES,
) -> int:
    """Run the terminal program until the user leaves; gives the exit code.

    `model` None takes the demo when it is on this machine, else a choice is offered. `fake` is a script for
    the fake engine.
    """
    if not (sys.stdin.isatty() and sys.stderr is not None and sys.stderr.isatty()):
        message = "dspark-tui: the chat draws on the terminal through stderr; do not redirect it."
        print(message, file=sys.stderr)
        return USAGE

    forgive_wrong_bytes()

    async def start_engine() -> EngineLike:
        from dspark_tui.engine.client import Engine

        return await Engine.start(fake=fake)

    app = DsparkApp(
        start_engine,
        model=model or (DEMO if fake else None),
        drafter=drafter,
        temperature=temperature,
        loading=loading,
    )
    return asyncio.run(_run(app))


async def _run(app: DsparkApp) -> int:
    """The terminal is restored first, the engine ends after it."""
    try:
        code = await app.run_async()
    finally:
        await app.controller.close()
    if app.fault:
        print(app.fault, file=sys.stderr)
        return FAILED
    return code if code is not None else app.return_code or 0
