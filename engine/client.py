"""`Engine`: the async wrapper around the engine process, used by the terminal program and by scripts.

Everything runs on the caller's event loop; nothing here blocks it, imports mlx or imports textual.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

from dspark_tui import __version__
from dspark_tui.engine.connection import (
    Connection,
    EngineError,
    EngineFailure,
    EngineGone,
    OnProgress,
)
from dspark_tui.engine.protocol import (
    MAX_LINE_BYTES,
    PROTOCOL_VERSION,
    AnyEvent,
    Attach,
    Chat,
    ContextRestored,
    ContextSaved,
    DrafterChanged,
    DrafterInfo,
    Finished,
    Hello,
    ListModels,
    Load,
    Loaded,
    Message,
    ModelRow,
    Models,
    Pull,
    Pulled,
    RestoreContext,
    Sampling,
    SaveContext,
    Shutdown,
    Stop,
    SwitchDrafter,
    Welcome,
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

__all__ = ["Engine", "EngineError", "EngineFailure", "EngineGone", "OnProgress"]

CLOSE_SECONDS = 3.0
"""How long an engine may take to end by itself before it is killed."""


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
        self._spawned = spawned
        self._exit_words = ""
        self._closing = False
        self._connection = Connection(reader, writer, self._unasked, self._name_the_end)

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
            hello = Hello(
                engine._connection.next_id(), protocol=PROTOCOL_VERSION, client=f"dspark-tui {__version__}"
            )
            async with asyncio.timeout(START_SECONDS):
                welcome = await engine._connection.ask(hello, Welcome)
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
        return self._connection.gone is None and not self._closing

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
        connection = self._connection
        if self._spawned is not None and connection.gone is None:
            with contextlib.suppress(EngineGone):
                connection.write(Shutdown(connection.next_id()))
        elif self._spawned is None:
            connection.hang_up()
        if self._spawned is not None:
            await end(self._spawned, CLOSE_SECONDS)
        await connection.close("The engine was closed.")

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
        command = Load(self._connection.next_id(), model, drafter, drafter_bits, kv_bits, lookup)
        return await self._connection.ask(command, Loaded, on_progress)

    async def pull(self, model: str, on_progress: OnProgress | None = None) -> Pulled:
        """Fetch a model to this machine; an answer may run meanwhile. Raises as `load` does."""
        return await self._connection.ask(Pull(self._connection.next_id(), model=model), Pulled, on_progress)

    async def models(self) -> list[ModelRow]:
        """The targets on this machine. Raises as `load` does."""
        return (await self._connection.ask(ListModels(self._connection.next_id()), Models)).models

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
            self._connection.next_id(),
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
            async with contextlib.aclosing(self._connection.follow(command)) as events:
                async for event in events:
                    finished = isinstance(event, Finished)
                    yield event
        except EngineError:
            finished = True
            raise
        finally:
            if not finished and self.alive:
                with contextlib.suppress(EngineGone):
                    self._connection.write(Stop(self._connection.next_id(), answer=command.answer))

    async def attach(self, answer: str, after: int = -1) -> AsyncGenerator[AnyEvent, None]:
        """Follow an answer that was asked for elsewhere or before: the texts with `seq` above `after`, then
        everything live, up to Finished. Leaving early does not stop it. Raises as `chat` does."""
        command = Attach(self._connection.next_id(), answer=answer, after=after)
        async with contextlib.aclosing(self._connection.follow(command)) as events:
            async for event in events:
                yield event

    async def switch_drafter(self, drafter: str, on_progress: OnProgress | None = None) -> DrafterInfo:
        """Change the drafter (see `protocol.Load`); during an answer at its next round, or when it is
        loaded.

        Raises EngineFailure when it is refused (the present one stays), EngineGone when the engine dies.
        """
        command = SwitchDrafter(self._connection.next_id(), drafter=drafter)
        return (await self._connection.ask(command, DrafterChanged, on_progress)).drafter

    async def stop(self, answer: str) -> None:
        """Ask for an answer's end; its iteration then gets Finished with reason `stopped`. No waiting.

        An answer that has ended already is no error. Raises EngineGone when the engine is dead.
        """
        self._connection.write(Stop(self._connection.next_id(), answer=answer))

    async def save_context(self, chat: str) -> ContextSaved:
        """Keep what is computed of the present sequence on disk under the name `chat`; behind a running
        answer, at its end. Raises as `load` does."""
        return await self._connection.ask(SaveContext(self._connection.next_id(), chat=chat), ContextSaved)

    async def restore_context(self, chat: str) -> ContextRestored:
        """Take the sequence kept under `chat` back: with 0 tokens and a reason when there is none that fits
        the loaded model. Raises as `load` does."""
        return await self._connection.ask(
            RestoreContext(self._connection.next_id(), chat=chat), ContextRestored
        )

    # ------------------------------------------------------------------ inside

    def _unasked(self, event: AnyEvent) -> None:
        if self.on_event is not None:
            self.on_event(event)

    async def _name_the_end(self) -> None:
        if self._closing:
            return
        code: int | None = None
        if self._spawned is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    code = await self._spawned.process.wait()
            remove_folder(self._spawned.folder)
        self._exit_words = exit_words(code)
        hint = f"; its log is {self.log_path}" if self.log_path else ""
        message = f"The engine {self._exit_words}{hint}."
        self._connection.lose(message)
        if self.on_gone is not None and not self._closing:
            self.on_gone(message)
