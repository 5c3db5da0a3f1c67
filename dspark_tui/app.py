"""The terminal program: an App that joins the controller (engine, queue, answers) with the screens."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from textual import on
from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.screen import Screen
from textual.worker import WorkerFailed

from dspark_tui.actions import Situation, commands, of_place
from dspark_tui.controller import DEMO, Controller, EngineLike, Severity, StartEngine
from dspark_tui.conversation import Exchange, Facts, Phase
from dspark_tui.metrics import Snapshot
from dspark_tui.paths import log_dir
from dspark_tui.screens.chat import Banner, ChatScreen
from dspark_tui.text.format import plural
from dspark_tui.text.sanitize import one_line, sanitize
from dspark_tui.widgets.prompt import Prompt
from dspark_tui.widgets.transcript import Transcript

if TYPE_CHECKING:
    from textual.widgets import Markdown

    from dspark_tui.screens.picker import PickerScreen

THEME = "atom-one-dark"
"""Keeps its background, surface and panel apart also in 256 colours."""
FLUSH_SECONDS = 0.1
FLUSH_SHARE = 3
"""Pause between two flushes, in multiples of what the last one cost."""
TICK_SECONDS = 0.5
QUIT_SECONDS = 2.0
FAILED, USAGE, STOPPED, HANGUP_STATUS = 1, 2, 130, 129


class DsparkApp(App[int]):
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._wish = (model, drafter)
        self._clock = clock
        self.controller = Controller(self, start_engine, clock, temperature=temperature)
        self._chat = ChatScreen(lambda: self.controller.facts, self._snapshot, self.situation, clock)
        self._drawn = Facts()
        self._wake = asyncio.Event()
        self._quit_armed = 0.0
        self.fault = ""
        """What broke the program, in a sentence; empty while nothing did."""
        self.theme = THEME

    # ------------------------------------------------------------------ life

    def get_default_screen(self) -> Screen[None]:
        """The chat is the only screen that stays."""
        return self._chat

    def on_mount(self) -> None:
        """Start the engine behind the first picture."""
        self._ticking = self.set_interval(TICK_SECONDS, self._tick, pause=True)
        self._handle_signals()
        self.call_after_refresh(self._begin)

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
        self.fault = _report(self._exception)
        self._close_messages_no_wait()

    # ------------------------------------------------------------------ what the screens read

    def _snapshot(self) -> Snapshot:
        return self.controller.metrics()

    def situation(self) -> Situation:
        """The present moment, for the actions."""
        facts, exchanges = self.controller.facts, self.controller.conversation.exchanges
        return Situation(
            answering=facts.busy,
            model_loaded=facts.model is not None,
            engine_gone=facts.phase is Phase.GONE,
            drafters=sum(drafter.usable for drafter in facts.drafters),
            has_thinking=any(exchange.answer.thoughts for exchange in exchanges),
            exchanges=len(exchanges),
        )

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
        self._chat.draw()

    def _banner_focus(self) -> None:
        """A lost engine is offered to restart with one key, unless somebody is typing."""
        if not self._chat.prompt.text and self.screen is self._chat:
            self._chat.banner.focus()
            self._chat.draw()

    def exchange_added(self, exchange: Exchange) -> None:
        """Show a new prompt."""
        self._chat.transcript.add(exchange)

    def answer_changed(self, exchange: Exchange) -> None:
        """Bring the text, header and marks of an answer up to date."""
        self._wake.set()

    def text_arrived(self, exchange: Exchange) -> None:
        """New text waits for the pump."""
        self._wake.set()

    def prompts_returned(self, exchanges: list[Exchange]) -> None:
        """Waiting prompts go back to the editor."""
        self._chat.prompt.put_before("\n\n".join(exchange.prompt for exchange in exchanges))
        self.run_worker(self._chat.transcript.discard(exchanges))
        self.say(f"{plural(len(exchanges), 'waiting prompt')} back in the prompt, not sent.")

    def model_wanted(self) -> None:
        """Offer the models."""
        self.action_pick_model()

    def say(self, message: str, severity: Severity = "information") -> None:
        """A toast; the text is taken literally."""
        self.notify(sanitize(message), severity=severity, markup=False)

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
        transcript = self._chat.transcript
        ended = False
        with self.batch_update():
            for view in list(transcript.views):
                if view.stale:
                    await view.flush()
                    ended = ended or view.exchange.answer.state.over
        if ended:
            await transcript.trim()
            self._chat.draw()

    def _tick(self) -> None:
        self._drawn = self.controller.facts
        self._chat.draw()

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
        self._chat.transcript.action_follow()

    @on(Prompt.Page)
    def _page(self, event: Prompt.Page) -> None:
        self.action_scroll_transcript(event.direction)

    @on(Transcript.Typed)
    def _typed(self, event: Transcript.Typed) -> None:
        self._type(event.character)

    def _type(self, character: str) -> None:
        self._chat.prompt.focus()
        self._chat.prompt.insert(character)

    @on(Transcript.Moved)
    def _moved(self) -> None:
        self._chat.draw_position()

    @on(Banner.Key)
    def _banner_key(self, event: Banner.Key) -> None:
        gone = self.controller.facts.phase is Phase.GONE
        if gone and event.key in ("r", "enter"):
            self._chat.prompt.focus()
            self.action_restart_engine()
        elif event.character and event.key != "enter":
            self._type(event.character)
        self._chat.draw()

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

    # ------------------------------------------------------------------ actions

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The command palette offers what the registry offers now."""
        for action in commands(self.situation()):
            yield SystemCommand(action.title, action.help, self._runner(action.run))

    def _runner(self, run: str) -> Callable[[], None]:
        def later() -> None:
            self.call_later(self.run_action, run)

        return later

    def action_help(self) -> None:
        """F1."""
        from dspark_tui.screens.help import HelpScreen

        self.push_screen(HelpScreen(self.situation()))

    def action_pick_drafter(self) -> None:
        """F2."""
        facts = self.controller.facts
        if facts.model is None:
            self.say("There is no model yet, so there is nothing to draft for.", "warning")
            return
        from dspark_tui.screens.pickers import drafter_picker

        self.push_screen(drafter_picker(facts), self._drafter_chosen)

    def _drafter_chosen(self, name: str | None) -> None:
        if name is not None:
            self.run_worker(self.controller.switch_drafter(name))

    def action_next_drafter(self) -> None:
        """ctrl+t."""
        self.run_worker(self.controller.next_drafter())

    def action_pick_model(self) -> None:
        """F3."""
        from dspark_tui.screens.pickers import model_picker

        picker = model_picker(self.controller.facts)
        self.push_screen(picker, self._model_chosen)
        self.run_worker(self._list_models(picker))

    async def _list_models(self, picker: PickerScreen) -> None:
        from dspark_tui.engine.client import EngineError
        from dspark_tui.screens.pickers import model_rows

        present = self.controller.facts.model
        try:
            rows = model_rows(await self.controller.models(), present.name if present else "")
        except EngineError as error:
            picker.set_rows([], error.message)
        else:
            picker.set_rows(rows, "No model is on this machine: `dspark-tui models pull demo` gets one.")

    def _model_chosen(self, name: str | None) -> None:
        if name is None:
            return
        if self.controller.facts.busy:
            self.say(
                "An answer runs on the present model: stop it first (esc), then choose again.", "warning"
            )
        else:
            self.run_worker(self.controller.load(name))

    def action_new_chat(self) -> None:
        """F4."""
        if self.controller.facts.busy:
            self.say("An answer runs: stop it first (esc), then begin a new chat.", "warning")
        elif self.controller.conversation.exchanges:
            self.controller.new_chat()
            self.say("New chat.")

    def conversation_cleared(self) -> None:
        """Empty the screen."""
        self.run_worker(self._chat.transcript.clear())

    def action_restart_engine(self) -> None:
        """Start a lost engine again."""
        self.run_worker(self.controller.restart())

    def action_stop_answer(self) -> None:
        """Stop at the next round."""
        self.controller.stop()

    def action_toggle_thinking(self) -> None:
        """ctrl+o."""
        if not self.situation().has_thinking:
            self.say("No answer here has thinking to open.")
            return
        self._chat.transcript.toggle_thinking()

    def action_cycle_metrics(self) -> None:
        """F7."""
        self.say(f"Metrics: {self._chat.cycle_metrics()}.")

    def action_scroll_transcript(self, direction: int) -> None:
        """PageUp and PageDown."""
        self._chat.transcript.page(direction)

    def action_next_pane(self) -> None:
        """F6."""
        if self.screen is self._chat:
            prompt, transcript = self._chat.prompt, self._chat.transcript
            (transcript if prompt.has_focus else prompt).focus()

    def action_repaint(self) -> None:
        """ctrl+l."""
        self.refresh(layout=True)
        self.screen.refresh(layout=True)

    # ------------------------------------------------------------------ esc, ctrl+c, leaving

    def action_level_up(self) -> None:
        """Esc: back to the prompt, then stop the answer; with a lost engine, to its banner."""
        prompt = self._chat.prompt
        if not prompt.has_focus:
            prompt.focus()
        elif self.controller.stop():
            pass
        elif self.controller.facts.phase is Phase.GONE:
            self._chat.banner.focus()
        self._chat.draw()

    def action_interrupt(self) -> None:
        """ctrl+c: copy, stop, clear, or quit when pressed twice."""
        prompt = self._chat.prompt
        selected = self.screen.get_selected_text() or (prompt.selected_text if prompt.has_focus else "")
        if self.screen is not self._chat:
            self.screen.dismiss(None)
        elif selected:
            self.copy_to_clipboard(selected)
            self.screen.clear_selection()
            self.say(f"{plural(len(selected), 'character')} sent to the terminal's clipboard.")
        elif self.controller.stop():
            self.say("Stopping; the text is kept.")
        elif prompt.text:
            prompt.clear_prompt()
            self.say("Prompt cleared: ↑ or ctrl+_ brings it back.")
        else:
            self._arm_quit("ctrl+c")

    def action_ask_quit(self) -> None:
        """ctrl+q: leave, but ask while an answer runs."""
        if self.controller.facts.busy:
            self._arm_quit("ctrl+q", "An answer runs. ")
        else:
            self.exit(0)

    def _arm_quit(self, key: str, why: str = "") -> None:
        now = self._clock()
        if self._quit_armed and now - self._quit_armed <= QUIT_SECONDS:
            self.exit(0)
            return
        self._quit_armed = now
        self.notify(f"{why}Press {key} again to quit.", timeout=QUIT_SECONDS, markup=False)


def _warm_up() -> None:
    """Import what the first answer needs while the model loads."""
    import dspark_tui.widgets.markdown  # noqa: F401


def run(model: str | None, drafter: str | None, fake: Path | None, temperature: float = 0.0) -> int:
    """Run the terminal program until the user leaves; gives the exit code.

    `model` None takes the demo when it is on this machine, else a choice is offered. `fake` is a script for
    the fake engine.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        message = "dspark-tui: the chat draws on the terminal through stderr; do not redirect it."
        print(message, file=sys.stderr)
        return USAGE

    async def start_engine() -> EngineLike:
        from dspark_tui.engine.client import Engine

        return await Engine.start(fake=fake)

    app = DsparkApp(
        start_engine,
        model=model or (DEMO if fake else None),
        drafter=drafter,
        temperature=temperature,
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


def _report(error: BaseException | None) -> str:
    """Write the traceback to the log folder and say where it is."""
    if error is None:
        return "dspark-tui: the program broke for an unknown reason; please report it."
    cause = error.error if isinstance(error, WorkerFailed) else error
    what = one_line(f"{type(cause).__name__}: {cause}", 200)
    path = log_dir() / "crash.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(cause)), encoding="utf-8", errors="replace")
    except OSError as failure:
        return f"dspark-tui: the program broke ({what}); the details could not be written: {failure}."
    return f"dspark-tui: the program broke ({what}); please report it with {path}."
