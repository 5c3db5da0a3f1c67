"""The two sides that the controller joins: what it needs from an engine and from a screen."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from dspark_tui.conversation import Exchange
from dspark_tui.engine.protocol import (
    AnyEvent,
    DrafterInfo,
    Loaded,
    Message,
    ModelRow,
    Progress,
    Sampling,
)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How models are loaded; the values are those of `protocol.Load`."""

    drafter_bits: int | None = None
    kv_bits: int | None = None
    lookup: bool | None = None


AS_IT_COMES = LoadOptions()

Severity: TypeAlias = Literal["information", "warning", "error"]


class EngineLike(Protocol):
    """The part of `dspark_tui.engine.client.Engine` that the terminal program uses."""

    on_event: Callable[[AnyEvent], None] | None
    on_gone: Callable[[str], None] | None

    async def load(
        self,
        model: str,
        drafter: str | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        *,
        drafter_bits: int | None = None,
        kv_bits: int | None = None,
        lookup: bool | None = None,
    ) -> Loaded:
        """Load a target and a drafter."""

    async def models(self) -> list[ModelRow]:
        """The targets on this machine."""

    def chat(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        rounds: bool = False,
        answer: str | None = None,
    ) -> AsyncIterator[AnyEvent]:
        """Events of one answer."""

    async def switch_drafter(
        self, drafter: str, on_progress: Callable[[Progress], None] | None = None
    ) -> DrafterInfo:
        """Change the drafter."""

    async def stop(self, answer: str) -> None:
        """End an answer."""

    async def close(self) -> None:
        """End the engine."""


StartEngine: TypeAlias = Callable[[], Awaitable[EngineLike]]


class View(Protocol):
    """What the controller needs from the screen. All calls come on the event loop."""

    def facts_changed(self) -> None:
        """`Controller.facts` is a new object."""

    def exchange_added(self, exchange: Exchange) -> None:
        """A prompt was taken."""

    def answer_changed(self, exchange: Exchange) -> None:
        """State or marks of an answer changed (also at its end)."""

    def text_arrived(self, exchange: Exchange) -> None:
        """The running answer has new pieces."""

    def prompts_returned(self, exchanges: list[Exchange]) -> None:
        """Prompts that were waiting will not be sent: put them back into the editor."""

    def model_wanted(self) -> None:
        """No model is loaded: offer a choice."""

    def conversation_cleared(self) -> None:
        """A new chat began."""

    def say(self, message: str, severity: Severity = "information") -> None:
        """Tell the user something once. `message` may hold foreign text."""
