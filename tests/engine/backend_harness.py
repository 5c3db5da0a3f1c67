"""The backend as a conversation partner: commands in, events and results out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from numpy_drafters import Shape
from tiny import IM_END, IM_START, SPECIAL, encode

from dspark_tui.engine.backend import BackendError, Control
from dspark_tui.engine.protocol import AnyEvent, Chat, Finished, Load, Loaded, Message, Result
from dspark_tui.engine.worker import MlxBackend

METHODS = ["dspark", "dflash", "dflash2"]
VOCABULARY = 52
"""Special tokens and ASCII only: every answer's text gives its tokens again."""

SHAPE = Shape(vocabulary=VOCABULARY, target_layers=4, layers=1)
E = TypeVar("E")


class Engine:
    """A backend with everything that it said."""

    def __init__(self) -> None:
        self.backend = MlxBackend()
        self.events: list[AnyEvent] = []
        self.commands = 0

    def _next(self) -> int:
        self.commands += 1
        self.events.clear()
        return self.commands

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def load(self, model: Path | str, drafter: str | None = "none", **options: Any) -> Loaded:
        self.backend.load(Load(self._next(), str(model), drafter, **options), self.events.append)
        assert isinstance(self.events[-1], Loaded)
        return self.events[-1]

    def chat(
        self,
        *messages: str,
        control: Control | None = None,
        emit: Callable[[AnyEvent], None] | None = None,
        system: str | None = None,
        **options: Any,
    ) -> Result:
        """A conversation in which the user begins."""
        roles = ["user", "assistant"] * len(messages)
        turns = [Message(role, text) for role, text in zip(roles, messages, strict=False)]  # type: ignore[arg-type]
        if system is not None:
            turns.insert(0, Message("system", system))
        command = Chat(self._next(), f"answer {self.commands}", turns, **options)

        def hear(event: AnyEvent) -> None:
            self.events.append(event)
            if emit is not None:
                emit(event)

        self.backend.chat(command, hear, control or Control())
        finished = self.events[-1]
        assert isinstance(finished, Finished)
        assert finished.answer == command.answer
        return finished.result


def refusal(call: Callable[[], object], kind: str = "usage") -> str:
    with pytest.raises(BackendError) as caught:
        call()
    assert caught.value.kind == kind
    assert "\n" not in caught.value.message
    return caught.value.message


def prompt(*messages: str) -> list[int]:
    """The chat template by hand."""
    tokens: list[int] = []
    for role, text in zip(["user", "assistant"] * len(messages), messages, strict=False):
        tokens += [IM_START, *encode(f"{role}\n"), *tokens_of(text), IM_END, *encode("\n")]
    return [*tokens, IM_START, *encode("assistant\n")]


def tokens_of(text: str) -> list[int]:
    """Token ids of a text that may name special tokens."""
    names = {name: i for i, name in enumerate(SPECIAL)}
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text)
    return [t for part in parts for t in ([names[part]] if part in names else encode(part))]
