"""`Engine`: the async wrapper around the engine process, used by the terminal program and by scripts.

Everything runs on the caller's event loop; nothing here blocks it, imports mlx or imports textual.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec

from dspark_tui import __version__
from dspark_tui.engine.protocol import (
    MAX_LINE_BYTES,
    PROTOCOL_VERSION,
    AnyCommand,
    AnyEvent,
    Attach,
    Chat,
    ContextRestored,
    ContextSaved,
    DrafterChanged,
    DrafterInfo,
    Event,
    Failed,
    FailureKind,
    Finished,
    Hello,
    ListModels,
    Load,
    Loaded,
    Message,
    ModelRow,
    Models,
    Progress,
    Pull,
    Pulled,
    RestoreContext,
    Result,
    Sampling,
    SaveContext,
    Shutdown,
    Stop,
    SwitchDrafter,
    Welcome,
    decode_event,
)
from dspark_tui.engine.spawn import (
    START_SECONDS,
    NotStarted,
    Spawned,
    connect_to_new,
    end,
    exit_words,
    remove_folder,
    spawn,
)
from dspark_tui.engine.wire import encode_line

logger = logging.getLogger(__name__)

OnProgress: TypeAlias = Callable[[Progress], None]

CLOSE_SECONDS = 3.0
"""How long an engine may take to end by itself before it is killed."""


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


class Engine:
    """A connection to an engine process.

    `on_event` gets events that answer nobody (`DrafterChanged`, `Notice`, and `Loaded` when another client
    loaded a model). `on_gone` is called once, with a sentence, when the engine is lost unexpectedly. Both
    are called on the event loop and must not block.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        spawned: Spawned | None = None,
    ) -> None:
        self.on_event: Callable[[AnyEvent], None] | None = None
        self.on_gone: Callable[[str], None] | None = None
        self.version = ""
        self.pid = 0
        self._reader = reader
        self._writer = writer
        self._spawned = spawned
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Queue[_Reply]] = {}
        self._answers: set[int] = set()
        self._gone: str | None = None
        self._exit_words = ""
        self._closing = False
        self._reading = asyncio.create_task(self._read())

    # ------------------------------------------------------------------ life

    @classmethod
    async def start(cls, fake: Path | None = None) -> Engine:
        """Start an engine process of our own and say hello. It ends when this process does.

        `fake` is a script for the fake engine (docs/fake-engine.md). Raises EngineGone when it does not
        come up, EngineFailure when it speaks another protocol.
        """
        try:
            spawned = await spawn(fake)
        except OSError as error:
            raise EngineGone(f"The engine could not be started: {error}.") from error
        try:
            reader, writer = await connect_to_new(spawned)
            return await cls._greet(reader, writer, spawned)
        except NotStarted as error:
            await end(spawned)
            raise EngineGone(str(error)) from None
        except BaseException:
            await end(spawned)
            raise

    @classmethod
    async def connect(cls, socket: Path) -> Engine:
        """Join an engine that runs already. Closing this one only disconnects.

        Raises EngineGone when nobody listens there, EngineFailure when it speaks another protocol.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(str(socket), limit=MAX_LINE_BYTES)
        except OSError as error:
            raise EngineGone(f"No engine answers at {socket}: {error}.") from error
        return await cls._greet(reader, writer, None)

    @classmethod
    async def _greet(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, spawned: Spawned | None
    ) -> Engine:
        engine = cls(reader, writer, spawned)
        try:
            hello = Hello(engine._next_id(), protocol=PROTOCOL_VERSION, client=f"dspark-tui {__version__}")
            async with asyncio.timeout(START_SECONDS):
                welcome = await engine._ask(hello, Welcome)
            if welcome.protocol != PROTOCOL_VERSION:
                raise EngineFailure(
                    f"The engine is version {welcome.version} and speaks protocol {welcome.protocol}, this "
                    f"program is version {__version__} and needs {PROTOCOL_VERSION}; restart the engine."
                )
        except TimeoutError as error:
            await engine.close()
            raise EngineGone(f"The engine did not answer within {START_SECONDS:g} s.") from error
        except BaseException:
            await engine.close()
            raise
        engine.version, engine.pid = welcome.version, welcome.pid
        return engine

    @property
    def alive(self) -> bool:
        """Whether the engine can still be asked."""
        return self._gone is None and not self._closing

    @property
    def exit_reason(self) -> str:
        """How the engine went, such as `was killed by signal 9 (SIGKILL)`; empty while it is there."""
        return self._exit_words

    @property
    def log_path(self) -> Path | None:
        """Where stdout, stderr and tracebacks of the engine process go (None: not started by us)."""
        return self._spawned.log_path if self._spawned else None

    @property
    def socket_path(self) -> Path | None:
        """The socket of an engine that we started, for `connect`."""
        return self._spawned.socket if self._spawned else None

    async def close(self) -> None:
        """End the connection, and the process when it is ours (killed if it does not end by itself)."""
        if self._closing:
            return
        self._closing = True
        if self._spawned is not None and self._gone is None:
            with contextlib.suppress(EngineGone):
                self._write(Shutdown(self._next_id()))
        elif self._spawned is None:
            self._writer.close()
        if self._spawned is not None:
            await end(self._spawned, CLOSE_SECONDS)
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        self._lost("The engine was closed.")
        self._writer.close()

    # ------------------------------------------------------------------ requests

    async def load(
        self,
        model: str,
        drafter: str | None = None,
        on_progress: OnProgress | None = None,
        *,
        drafter_bits: int | None = None,
        kv_bits: int | None = None,
        lookup: bool | None = None,
    ) -> Loaded:
        """Load a target and a drafter (see `protocol.Load` for what all of these may be).

        Raises EngineFailure with a sentence when that does not work, EngineGone when the engine dies.
        """
        command = Load(self._next_id(), model, drafter, drafter_bits, kv_bits, lookup)
        return await self._ask(command, Loaded, on_progress)

    async def pull(self, model: str, on_progress: OnProgress | None = None) -> Pulled:
        """Fetch a model to this machine; an answer may run meanwhile. Raises as `load` does."""
        return await self._ask(Pull(self._next_id(), model=model), Pulled, on_progress)

    async def models(self) -> list[ModelRow]:
        """The targets on this machine. Raises as `load` does."""
        return (await self._ask(ListModels(self._next_id()), Models)).models

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        rounds: bool = False,
        answer: str | None = None,
        thinking: bool | None = None,
        effort: str | None = None,
    ) -> AsyncGenerator[AnyEvent, None]:
        """Answer a conversation: Prefill, Text, Rounds and DrafterChanged events, and at last Finished.

        `answer` names it for `stop` and `attach` (a fresh name when None); for the others see
        `protocol.Chat`. Leaving the iteration early stops the answer. Raises EngineFailure (with the text so
        far in `result`) or EngineGone.
        """
        command = Chat(
            self._next_id(),
            answer=answer or uuid.uuid4().hex,
            messages=list(messages),
            sampling=sampling or Sampling(),
            max_tokens=max_tokens,
            stop=list(stop),
            rounds=rounds,
            thinking=thinking,
            effort=effort,
        )
        finished = False
        try:
            async with contextlib.aclosing(self._follow(command)) as events:
                async for event in events:
                    finished = isinstance(event, Finished)
                    yield event
        except EngineError:
            finished = True
            raise
        finally:
            if not finished and self.alive:
                with contextlib.suppress(EngineGone):
                    self._write(Stop(self._next_id(), answer=command.answer))

    async def attach(self, answer: str, after: int = -1) -> AsyncGenerator[AnyEvent, None]:
        """Follow an answer that was asked for elsewhere or before: the texts with `seq` above `after`, then
        everything live, up to Finished. Leaving early does not stop it. Raises as `chat` does."""
        command = Attach(self._next_id(), answer=answer, after=after)
        async with contextlib.aclosing(self._follow(command)) as events:
            async for event in events:
                yield event

    async def switch_drafter(self, drafter: str, on_progress: OnProgress | None = None) -> DrafterInfo:
        """Change the drafter (see `protocol.Load`); during an answer at its next round, or when it is
        loaded.

        Raises EngineFailure when it is refused (the present one stays), EngineGone when the engine dies.
        """
        command = SwitchDrafter(self._next_id(), drafter=drafter)
        return (await self._ask(command, DrafterChanged, on_progress)).drafter

    async def stop(self, answer: str) -> None:
        """Ask for an answer's end; its iteration then gets Finished with reason `stopped`. No waiting.

        An answer that has ended already is no error. Raises EngineGone when the engine is dead.
        """
        self._write(Stop(self._next_id(), answer=answer))

    async def save_context(self, chat: str) -> ContextSaved:
        """Keep what is computed of the present sequence on disk under the name `chat`; behind a running
        answer, at its end. Raises as `load` does."""
        return await self._ask(SaveContext(self._next_id(), chat=chat), ContextSaved)

    async def restore_context(self, chat: str) -> ContextRestored:
        """Take the sequence kept under `chat` back: with 0 tokens and a reason when there is none that fits
        the loaded model. Raises as `load` does."""
        return await self._ask(RestoreContext(self._next_id(), chat=chat), ContextRestored)

    # ------------------------------------------------------------------ inside

    def _next_id(self) -> int:
        return next(self._ids)

    def _write(self, command: AnyCommand) -> None:
        if self._gone is not None:
            raise EngineGone(self._gone)
        line = encode_line(command)
        if len(line) > MAX_LINE_BYTES:
            raise EngineFailure(
                f"The request is {len(line) / 1e6:.0f} MB; the engine takes at most "
                f"{MAX_LINE_BYTES / 1e6:.0f} MB, shorten the conversation.",
                "usage",
            )
        self._writer.write(line)

    async def _replies(self, command: AnyCommand) -> AsyncGenerator[AnyEvent, None]:
        """Send `command` and yield what answers it, until the caller has enough."""
        queue: asyncio.Queue[_Reply] = asyncio.Queue()
        self._pending[command.id] = queue
        try:
            self._write(command)
            while True:
                reply = await queue.get()
                if isinstance(reply, EngineGone):
                    raise EngineGone(reply.message)
                if isinstance(reply, Failed):
                    raise EngineFailure(reply.message, reply.kind, reply.result)
                yield reply
        finally:
            del self._pending[command.id]

    async def _ask(self, command: AnyCommand, final: type[E], on_progress: OnProgress | None = None) -> E:
        """Send `command` and wait for its one answer, an event of type `final`."""
        async with contextlib.aclosing(self._replies(command)) as replies:
            async for event in replies:
                if isinstance(event, final):
                    return event
                if isinstance(event, Progress) and on_progress is not None:
                    on_progress(event)
        raise AssertionError("replies end only by raising")

    async def _follow(self, command: Chat | Attach) -> AsyncGenerator[AnyEvent, None]:
        """The events of one answer, Finished last."""
        self._answers.add(command.id)
        try:
            async with contextlib.aclosing(self._replies(command)) as replies:
                async for event in replies:
                    yield event
                    if isinstance(event, Finished):
                        return
        finally:
            self._answers.discard(command.id)

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
        if not self._closing:
            await self._name_the_end()

    def _dispatch(self, event: AnyEvent) -> None:
        if queue := self._pending.get(event.id):
            queue.put_nowait(event)
        if isinstance(event, DrafterChanged):
            # Whoever shows an answer needs to know, whoever asked for the change.
            for answer in self._answers:
                self._pending[answer].put_nowait(event)
        if event.id == 0 and self.on_event is not None:
            self.on_event(event)

    async def _name_the_end(self) -> None:
        code: int | None = None
        if self._spawned is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    code = await self._spawned.process.wait()
            remove_folder(self._spawned.folder)
        self._exit_words = exit_words(code)
        hint = f"; its log is {self.log_path}" if self.log_path else ""
        message = f"The engine {self._exit_words}{hint}."
        self._lost(message)
        if self.on_gone is not None and not self._closing:
            self.on_gone(message)

    def _lost(self, message: str) -> None:
        """From here on every request, waiting or new, raises EngineGone."""
        if self._gone is None:
            self._gone = message
            for queue in self._pending.values():
                queue.put_nowait(EngineGone(message))
