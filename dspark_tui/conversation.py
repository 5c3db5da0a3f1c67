"""The conversation on the screen: prompts, answers and what became of them. Nothing here imports textual."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from dspark_tui.engine.protocol import DrafterInfo, Message, ModelInfo, Result


class AnswerState(Enum):
    """Where an answer is in its life."""

    WAITING = auto()
    """The model is not ready, or another answer is before it."""
    PREFILL = auto()
    THINKING = auto()
    WRITING = auto()
    DONE = auto()
    STOPPED = auto()
    LENGTH = auto()
    FAILED = auto()

    @property
    def running(self) -> bool:
        """Whether the engine works on it."""
        return self in (AnswerState.PREFILL, AnswerState.THINKING, AnswerState.WRITING)

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self not in (AnswerState.WAITING,) and not self.running


@dataclass(slots=True)
class Answer:
    """One answer as it grows. `pieces` and `thoughts` hold the engine's text untouched, in order."""

    id: str
    state: AnswerState = AnswerState.WAITING
    model: str = ""
    drafters: list[str] = field(default_factory=list)
    """Names of the drafters that worked on it, in order."""
    pieces: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    """Sentences about things that happened in it, such as a switch of drafter."""
    failure: str = ""
    started: float | None = None
    thinking_seconds: float | None = None
    """How long it thought; None while it has not or has not finished."""
    result: Result | None = None

    @property
    def text(self) -> str:
        """All text so far, without the thinking."""
        return "".join(self.pieces)


@dataclass(slots=True)
class Exchange:
    """A prompt and its answer."""

    prompt: str
    answer: Answer


@dataclass(slots=True)
class Conversation:
    """The exchanges in order."""

    exchanges: list[Exchange] = field(default_factory=list)

    def messages(self, last: Exchange) -> list[Message]:
        """What the model is sent to answer `last`: everything before it and its prompt.

        An exchange whose answer has no text is left out, so that user and assistant turns alternate. A
        stopped or failed answer counts with the text that it has.
        """
        messages: list[Message] = []
        for exchange in self.exchanges:
            if exchange is last:
                break
            text = exchange.answer.text
            if exchange.answer.state.over and text:
                messages += [Message("user", exchange.prompt), Message("assistant", text)]
        return [*messages, Message("user", last.prompt)]


class Phase(Enum):
    """What the program as a whole is doing."""

    STARTING = auto()
    """The engine process comes up."""
    NO_MODEL = auto()
    """The engine is there, no model is loaded: one is to be chosen."""
    LOADING = auto()
    READY = auto()
    ANSWERING = auto()
    STOPPING = auto()
    GONE = auto()
    """The engine is lost."""


@dataclass(frozen=True, slots=True)
class LoadFacts:
    """How far a load is."""

    model: str
    stage: str = ""
    done: int = 0
    total: int = 0
    unit: str = ""
    started: float = 0.0


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything the title, status line, banner and pickers show. Immutable: a change makes a new one."""

    phase: Phase = Phase.STARTING
    load: LoadFacts | None = None
    model: ModelInfo | None = None
    drafter: DrafterInfo | None = None
    drafters: tuple[DrafterInfo, ...] = ()
    queued: int = 0
    answer_started: float | None = None
    answer_state: AnswerState | None = None
    temperature: float = 0.0
    joining: str = ""
    """Name of a drafter that is being loaded while the present one goes on."""
    problem: str = ""
    """What keeps the program from answering, in words (load failed, engine gone, no model)."""

    @property
    def busy(self) -> bool:
        """Whether an answer runs."""
        return self.phase in (Phase.ANSWERING, Phase.STOPPING)
