"""One answer while it comes: events become its text, its marks and its numbers."""

from __future__ import annotations

from collections.abc import Callable

from dspark_tui.conversation import AnswerState, Exchange
from dspark_tui.engine.protocol import DrafterInfo, FinishReason, Rounds, Text
from dspark_tui.metrics import Meter

_END_STATES: dict[FinishReason, AnswerState] = {
    "stop": AnswerState.DONE,
    "length": AnswerState.LENGTH,
    "stopped": AnswerState.STOPPED,
    "error": AnswerState.FAILED,
}


class Answering:
    """Fills the answer of `exchange`; `clock` gives seconds that only grow. Draws nothing."""

    def __init__(
        self, exchange: Exchange, meter: Meter, clock: Callable[[], float], model: str, drafter: str
    ) -> None:
        """The answer begins now, by `model` with `drafter`."""
        self.exchange, self.meter = exchange, meter
        self._clock = clock
        self._switch: tuple[str, str] | None = None
        """Name and method of a drafter of which no round has been seen yet."""
        answer = exchange.answer
        answer.model, answer.drafters, answer.started = model, [drafter], clock()

    def text(self, event: Text) -> AnswerState:
        """Take in a piece of text. Returns the state that it shows."""
        answer = self.exchange.answer
        (answer.thoughts if event.thinking else answer.pieces).append(event.text)
        now = self._clock()
        started = answer.started or now
        self.meter.first_text(now - started)
        if answer.thoughts and not event.thinking and answer.thinking_seconds is None:
            answer.thinking_seconds = now - started
        return AnswerState.THINKING if event.thinking else AnswerState.WRITING

    def rounds(self, event: Rounds) -> bool:
        """Take in rounds. Returns whether one of them has shown the place of a switch."""
        self.meter.rounds(event)
        answer, marked = self.exchange.answer, False
        position = event.generated_tokens - sum(stat.committed for stat in event.rounds)
        for stat in event.rounds:
            if self._switch is not None and _drafts_for(self._switch, stat.source):
                name = self._switch[0]
                answer.marks.append(f"drafter {answer.drafters[-1]} → {name} after {position} tokens")
                answer.drafters.append(name)
                self._switch, marked = None, True
            position += stat.committed
        return marked

    def switched(self, drafter: DrafterInfo) -> None:
        """Another drafter was chosen: where it takes over, its first round will show."""
        back = drafter.name == self.exchange.answer.drafters[-1]
        self._switch = None if back else (drafter.name, drafter.method)

    def end(self) -> AnswerState:
        """Nothing more will come. Returns the state that the answer ends in."""
        answer = self.exchange.answer
        self.meter.finish(answer.result)
        if not answer.failure and answer.result is None:
            answer.failure = "The engine ended the answer without a result."
        if answer.thoughts and answer.thinking_seconds is None and answer.started is not None:
            answer.thinking_seconds = self._clock() - answer.started
        if answer.failure or answer.result is None:
            return AnswerState.FAILED
        return _END_STATES[answer.result.finish_reason]


def _drafts_for(switch: tuple[str, str], source: str) -> bool:
    """Whether a round of this source shows that the drafter with this name and method has taken over. Every
    round may be one of auto's; lookup's are plain where the text does not repeat itself."""
    method = switch[1]
    return source in switch or method == "auto" or (method == "lookup" and source == "none")
