"""The answers that the host knows: who follows them, and their text for those who join later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from dspark_tui.engine.backend import Control
from dspark_tui.engine.protocol import AnyEvent, Failed, Finished, Text

KEPT_ANSWERS = 4
"""Finished answers whose text can still be attached to."""


class Follower(Protocol):
    """Somebody who gets events."""

    def send(self, event: AnyEvent) -> None:
        """Take an event, without blocking."""
        ...


class Answer:
    """One answer: its control while it runs, its texts, its end, and its followers."""

    def __init__(self, name: str, serial: int) -> None:
        self.name = name
        self.serial = serial
        """The host's id of the Chat command."""
        self.control = Control()
        self.end: Finished | Failed | None = None
        self._texts: list[Text] = []
        self._followers: list[tuple[Follower, int]] = []

    def follow(self, follower: Follower, command_id: int, after: int | None = None) -> None:
        """Send what is kept with `seq` above `after` (None: nothing), then everything live."""
        if after is not None:
            for text in self._texts:
                if text.seq > after:
                    follower.send(msgspec.structs.replace(text, id=command_id))
        if self.end is not None:
            follower.send(msgspec.structs.replace(self.end, id=command_id))
        else:
            self._followers.append((follower, command_id))

    def leave(self, follower: Follower) -> None:
        """Forget a follower; the answer goes on."""
        self._followers = [pair for pair in self._followers if pair[0] is not follower]

    def tell(self, event: AnyEvent) -> None:
        """Keep what has to be kept of an event and send it to every follower."""
        if self.end is not None:
            return
        if isinstance(event, Text):
            self._texts.append(event)
        for follower, command_id in self._followers:
            follower.send(msgspec.structs.replace(event, id=command_id))
        if isinstance(event, Finished | Failed):
            self.end = event
            self._followers.clear()


class Answers:
    """The running and waiting answers, and the last few that ended."""

    def __init__(self) -> None:
        self._all: dict[str, Answer] = {}

    def __iter__(self) -> Iterator[Answer]:
        return iter(self._all.values())

    def get(self, name: str) -> Answer | None:
        """The answer of that name, if it is still known."""
        return self._all.get(name)

    def add(self, answer: Answer) -> None:
        """Add an accepted answer; the oldest ended ones beyond the bound are forgotten."""
        self._all[answer.name] = answer
        ended = [known for known in self if known.end is not None]
        for known in ended[: max(0, len(ended) - KEPT_ANSWERS)]:
            del self._all[known.name]

    @property
    def open(self) -> list[Answer]:
        """Accepted and not ended, the running one first."""
        return [answer for answer in self if answer.end is None]

    @property
    def busy(self) -> bool:
        """Whether an answer runs or waits that nobody asked to stop."""
        return any(not answer.control.stop_requested for answer in self.open)
