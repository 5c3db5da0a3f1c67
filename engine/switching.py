"""Changing the drafter while an answer runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dspark_tui.engine.loading import Loading
from dspark_tui.engine.protocol import DrafterInfo, SwitchDrafter
from dspark_tui.engine.session import Session, UnknownDrafter


@dataclass(frozen=True)
class SwitchStep:
    """The drafter changed: by `command`, or by itself (None). `problem`: why a command was refused."""

    command: SwitchDrafter | None
    drafter: DrafterInfo
    problem: Exception | None = None


@dataclass(frozen=True)
class LoadStep:
    """The drafter that `command` asks for is being loaded, or (`done`) was."""

    command: SwitchDrafter
    done: bool


@dataclass(frozen=True)
class _Waiting:
    command: SwitchDrafter
    name: str
    loading: Loading


class Switching:
    """Switches of one session. A drafter that is not resident is loaded while the present one goes on."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waiting: _Waiting | None = None

    def ask(self, command: SwitchDrafter) -> Iterator[SwitchStep | LoadStep]:
        """Switch at once where the drafter is resident, else begin to load it."""
        session, before = self._session, self._waiting
        if before is not None:
            self._waiting = None
            displaced = UnknownDrafter("Another drafter was chosen before this one could start.")
            yield SwitchStep(before.command, session.info, displaced)
        try:
            name = session.find(command.drafter)
            missing = session.missing(name)
            if missing is not None:
                self._waiting = _Waiting(command, name, session.load(missing))
                yield LoadStep(command, done=False)
                return
            session.select(name)
        except Exception as error:  # the answer goes on with the present drafter whatever went wrong
            yield SwitchStep(command, session.info, error)
            return
        yield SwitchStep(command, session.info)

    def arrive(self, wait: bool = False) -> Iterator[SwitchStep | LoadStep]:
        """Switch to the drafter that was being loaded, if it is there by now (`wait`: as soon as it is)."""
        waiting, session = self._waiting, self._session
        if waiting is None or not (wait or waiting.loading.ready):
            return
        self._waiting = None
        problem: Exception | None = None
        try:
            session.keep(waiting.loading)
            session.select(waiting.name)
        except Exception as error:
            problem = error
        yield LoadStep(waiting.command, done=True)
        yield SwitchStep(waiting.command, session.info, problem)
