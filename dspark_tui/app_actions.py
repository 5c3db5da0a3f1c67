"""What the actions of the registry do: the part of the App that keys and commands run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from textual.app import App, SystemCommand
from textual.screen import Screen

from dspark_tui.actions import Situation, commands
from dspark_tui.controller import Controller
from dspark_tui.conversation import Phase
from dspark_tui.ports import Severity
from dspark_tui.screens.chat import ChatScreen
from dspark_tui.text.format import plural
from dspark_tui.text.sanitize import sanitize

if TYPE_CHECKING:
    from dspark_tui.screens.picker import PickerScreen

QUIT_SECONDS = 2.0
"""How long a first ctrl+c, ctrl+d or ctrl+q waits for the second."""


class AppActions(App[int]):
    """Has the actions; `app.DsparkApp` has the rest."""

    controller: Controller
    chat: ChatScreen
    clock: Callable[[], float]
    _quit_armed = 0.0
    _said: dict[str, float]

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

    def say(self, message: str, severity: Severity = "information") -> None:
        """A toast; the text is taken literally. What is on the screen already is not said again."""
        now = self.clock()
        self._said = {text: at for text, at in self._said.items() if now - at < self.NOTIFICATION_TIMEOUT}
        if message not in self._said:
            self._said[message] = now
            self.notify(sanitize(message), severity=severity, markup=False)

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
        self.run_worker(self.chat.transcript.clear())

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
        self.chat.transcript.toggle_thinking()

    def action_cycle_metrics(self) -> None:
        """F7."""
        self.say(f"Metrics: {self.chat.cycle_metrics()}.")

    def action_scroll_transcript(self, direction: int) -> None:
        """PageUp and PageDown."""
        self.chat.transcript.page(direction)

    def action_next_pane(self) -> None:
        """F6."""
        if self.screen is self.chat:
            prompt, transcript = self.chat.prompt, self.chat.transcript
            (transcript if prompt.has_focus else prompt).focus()

    def action_repaint(self) -> None:
        """ctrl+l."""
        self.refresh(layout=True)
        self.screen.refresh(layout=True)

    # ------------------------------------------------------------------ esc, ctrl+c, leaving

    def action_level_up(self) -> None:
        """Esc: back to the prompt, then stop the answer; with a lost engine, to its banner."""
        prompt = self.chat.prompt
        if not prompt.has_focus:
            prompt.focus()
        elif self.controller.stop():
            pass
        elif self.controller.facts.phase is Phase.GONE:
            self.chat.banner.focus()
        self.chat.draw()

    def action_interrupt(self) -> None:
        """ctrl+c: copy, stop, clear, or quit when pressed twice."""
        prompt = self.chat.prompt
        selected = self.screen.get_selected_text() or (prompt.selected_text if prompt.has_focus else "")
        if self.screen is not self.chat:
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
        now = self.clock()
        if self._quit_armed and now - self._quit_armed <= QUIT_SECONDS:
            self.exit(0)
            return
        self._quit_armed = now
        self.notify(f"{why}Press {key} again to quit.", timeout=QUIT_SECONDS, markup=False)
