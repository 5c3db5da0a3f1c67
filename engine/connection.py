"""One connection to an engine process: commands go out, and every event to whoever waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeAlias, TypeVar

import msgspec

from dspark_tui.engine.protocol import (
    MAX_LINE_BYTES,
    AnyCommand,
    AnyEvent,
    Attach,
    Chat,
    DrafterChanged,
    Event,
    Failed,
    FailureKind,
    Finished,
    Progress,
    Result,
    decode_event,
)
from dspark_tui.engine.wire import encode_line

logger = logging.getLogger(__name__)

OnProgress: TypeAlias = Callable[[Progress], None]


class EngineError(Exception):
    """Base of what can go wrong with the engine. `message` is one sentence for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class EngineFailure(EngineError):
    """The engine could not do what was asked; it lives on.

    `kind` is `usage` (the request was wrong) or `failed`; `result` holds the text so far when an answer
    broke off.
    """

    def __init__(self, message: str, kind: FailureKind = "failed", result: Result | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.result = result


class EngineGone(EngineError):
    """The engine process or the connection to it is lost. Start another one."""


_Reply: TypeAlias = AnyEvent | EngineGone
E = TypeVar("E", bound=Event)


class Connection:
    """Reads from the moment it is made. `on_event` gets events that answer nobody; `on_end` is awaited once
    the other side has hung up, and says so with `lose`."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_event: Callable[[AnyEvent], None],
        on_end: Callable[[], Awaitable[None]],
    ) -> None:
        self.gone: str | None = None
        """Why nothing can be asked any more, as a sentence; None while it can."""
        self._reader, self._writer = reader, writer
        self._on_event, self._on_end = on_event, on_end
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Queue[_Reply]] = {}
        self._answers: set[int] = set()
        self._reading = asyncio.create_task(self._read())

    def hang_up(self) -> None:
        """Tell the other side that nothing more will come."""
        self._writer.close()

    async def close(self, message: str) -> None:
        """Read no more; from here on every request raises `EngineGone` with `message`."""
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        self.lose(message)
        self._writer.close()

    def lose(self, message: str) -> None:
        """From here on every request, waiting or new, raises EngineGone."""
        if self.gone is None:
            self.gone = message
            for queue in self._pending.values():
                queue.put_nowait(EngineGone(message))

    # ------------------------------------------------------------------ commands

    def next_id(self) -> int:
        """An id for a command."""
        return next(self._ids)

    def write(self, command: AnyCommand) -> None:
        """Send a command. Raises EngineGone, or EngineFailure when it is too long."""
        if self.gone is not None:
            raise EngineGone(self.gone)
        line = encode_line(command)
        if len(line) > MAX_LINE_BYTES:
            raise EngineFailure(
                f"The request is {len(line) / 1e6:.0f} MB; the engine takes at most "
                f"{MAX_LINE_BYTES / 1e6:.0f} MB, shorten the conversation.",
                "usage",
            )
        self._writer.write(line)

    async def ask(self, command: AnyCommand, final: type[E], on_progress: OnProgress | None = None) -> E:
        """Send `command` and wait for its one answer, an event of type `final`. Raises EngineError."""
        async with contextlib.aclosing(self._replies(command)) as replies:
            async for event in replies:
                if isinstance(event, final):
                    return event
                if isinstance(event, Progress) and on_progress is not None:
                    on_progress(event)
        raise AssertionError("replies end only by raising")

    async def follow(self, command: Chat | Attach) -> AsyncGenerator[AnyEvent, None]:
        """The events of one answer, Finished last. Raises EngineError."""
        self._answers.add(command.id)
        try:
            async with contextlib.aclosing(self._replies(command)) as replies:
                async for event in replies:
                    yield event
                    if isinstance(event, Finished):
                        return
        finally:
            self._answers.discard(command.id)

    async def _replies(self, command: AnyCommand) -> AsyncGenerator[AnyEvent, None]:
        """Send `command` and yield what answers it, until the caller has enough."""
        queue: asyncio.Queue[_Reply] = asyncio.Queue()
        self._pending[command.id] = queue
        try:
            self.write(command)
            while True:
                reply = await queue.get()
                if isinstance(reply, EngineGone):
                    raise EngineGone(reply.message)
                if isinstance(reply, Failed):
                    raise EngineFailure(reply.message, reply.kind, reply.result)
                yield reply
        finally:
            del self._pending[command.id]

    # ------------------------------------------------------------------ events

    async def _read(self) -> None:
        """Hand every line to whoever waits for it, until the connection ends."""
        try:
            while line := await self._reader.readline():
                try:
                    event = decode_event(line)
                except msgspec.DecodeError as error:
                    logger.warning("an event was not understood: %s", error)
                    continue
                self._dispatch(event)
        except (OSError, ValueError) as error:
            logger.warning("the connection to the engine broke: %s", error)
        await self._on_end()

    def _dispatch(self, event: AnyEvent) -> None:
        if queue := self._pending.get(event.id):
            queue.put_nowait(event)
        if isinstance(event, DrafterChanged):
            # Whoever shows an answer needs to know, whoever asked for the change.
            for answer in self._answers:
                self._pending[answer].put_nowait(event)
        if event.id == 0:
            self._on_event(event)
