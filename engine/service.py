"""What an engine process does for its clients: takes commands to the backend, and events back.

All state is touched on the event loop; the backend works on threads of its own (`lane`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from dspark_tui import __version__
from dspark_tui.engine.answers import Answer, Answers
from dspark_tui.engine.backend import Backend, BackendError
from dspark_tui.engine.lane import Lane
from dspark_tui.engine.peer import peer_uid
from dspark_tui.engine.protocol import (
    PROTOCOL_VERSION,
    AnyCommand,
    AnyEvent,
    Attach,
    Chat,
    DrafterChanged,
    Failed,
    FailureKind,
    Hello,
    ListModels,
    Load,
    Loaded,
    Progress,
    Pull,
    RestoreContext,
    Rounds,
    SaveContext,
    Shutdown,
    Stop,
    SwitchDrafter,
    Welcome,
    decode_command,
)
from dspark_tui.engine.wire import encode_line

C = TypeVar("C", Load, Pull, ListModels, Chat, SwitchDrafter, SaveContext, RestoreContext)

logger = logging.getLogger(__name__)

BEHIND_BYTES = 1_000_000
"""A client with more than this unread loses metrics, never text."""
FIRST_CLIENT_SECONDS = 30.0
"""An engine that nobody greets ends: whoever started it is dead."""
GRACE_SECONDS = 1.0
"""How long a running step may take at the end of the process."""


class Client:
    """One connection. Writing to it never waits."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.greeted = False
        # What the transport has no room for yet. Kept here as one piece: from Python 3.12 on a transport
        # with many small pieces adds up their sizes at every write.
        self._unsent = bytearray()
        self._sender: asyncio.Task[None] | None = None

    def send(self, event: AnyEvent) -> None:
        """Queue an event; metrics are dropped when the client is far behind."""
        if self.writer.is_closing():
            return
        if isinstance(event, Rounds) and len(self._unsent) > BEHIND_BYTES:
            return
        self._unsent += encode_line(event)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_unsent())

    async def _send_unsent(self) -> None:
        try:
            while self._unsent:
                piece, self._unsent = self._unsent, bytearray()
                self.writer.write(piece)
                await self.writer.drain()
        except OSError:  # it has gone; its reading side says so
            self._unsent.clear()
        finally:
            self._sender = None

    async def close(self) -> None:
        """Send what is left, as long as the client reads, and hang up."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(GRACE_SECONDS):
                if self._sender is not None:
                    await self._sender
                self.writer.close()
                await self.writer.wait_closed()
        self.writer.close()


@dataclass(frozen=True)
class Route:
    """Where the answer to a command goes: the client, and the id that the client gave the command."""

    client: Client
    command_id: int


class Service:
    """Takes commands from clients to the backend and events back.

    Every command gets a serial number of the host's as its id while it is inside, so that clients cannot
    collide and the backend sees one vocabulary. All state is touched on the event loop only.
    """

    def __init__(self, make_backend: Callable[[], Backend], log_path: str = "") -> None:
        self.over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._log_path = log_path
        self._clients: set[Client] = set()
        self._routes: dict[int, Route] = {}
        self._serials = itertools.count(1)
        self._answers = Answers()
        self._switches: dict[int, Answer] = {}
        self._models_lane, self._fetch_lane, self._list_lane = Lane("models"), Lane("fetch"), Lane("list")
        self._backend: Future[Backend] = Future()
        self._models_lane.put(lambda: self._make(make_backend))
        self._loop.call_later(FIRST_CLIENT_SECONDS, self._end_if_alone)

    # ------------------------------------------------------------------ clients

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its first byte to its last."""
        client = Client(writer)
        try:
            uid = peer_uid(writer.get_extra_info("socket"))
            if uid != os.getuid():
                logger.warning("refused a connection of user %d", uid)
                return
            self._clients.add(client)
            while line := await reader.readline():
                self._take(client, line)
        except (OSError, ValueError) as error:
            logger.warning("a connection broke: %s", error)
        finally:
            self._forget(client)
            writer.close()

    def _forget(self, client: Client) -> None:
        self._clients.discard(client)
        for answer in self._answers:
            answer.leave(client)
        if client.greeted:
            self._end_if_alone()

    def _end_if_alone(self) -> None:
        if not any(client.greeted for client in self._clients):
            self.over.set()

    async def close(self) -> None:
        """Stop what runs, give it a moment, and let the clients go."""
        for answer in self._answers.open:
            answer.control.stop()
        drained = asyncio.Event()
        self._models_lane.put(lambda: self._call_soon(drained.set))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(drained.wait(), GRACE_SECONDS)
        for client in list(self._clients):
            await client.close()

    # ------------------------------------------------------------------ commands

    def _take(self, client: Client, line: bytes) -> None:
        try:
            command = decode_command(line)
        except msgspec.DecodeError as error:
            logger.warning("a message was not understood: %s", error)
            client.send(Failed(_id_in(line), f"The engine did not understand a message: {error}.", "usage"))
            return
        if isinstance(command, Hello):
            client.greeted = command.protocol == PROTOCOL_VERSION
            client.send(Welcome(command.id, PROTOCOL_VERSION, __version__, os.getpid()))
        elif not client.greeted:
            client.send(
                Failed(
                    command.id, f"Say hello with protocol {PROTOCOL_VERSION} before anything else.", "usage"
                )
            )
        else:
            self._carry_out(client, command)

    def _carry_out(self, client: Client, command: AnyCommand) -> None:
        match command:
            case Shutdown():
                self.over.set()
            case Stop():
                self._stop(client, command)
            case Attach():
                self._attach(client, command)
            case SwitchDrafter():
                self._switch(self._admit(client, command))
            case Chat():
                self._chat(client, command)
            case Load() if self._answers.busy:
                _refuse(client, command, "An answer is running; stop it before you load another model.")
            case Load():
                load = self._admit(client, command)
                self._queue(self._models_lane, load.id, lambda backend: backend.load(load, self.emit))
            case Pull():
                pull = self._admit(client, command)
                self._queue(self._fetch_lane, pull.id, lambda backend: backend.pull(pull, self.emit))
            case ListModels():
                listing = self._admit(client, command)
                self._queue(
                    self._list_lane, listing.id, lambda backend: backend.list_models(listing, self.emit)
                )
            case SaveContext():
                # Behind a running answer: what it adds is saved with the rest.
                save = self._admit(client, command)
                self._queue(self._models_lane, save.id, lambda backend: backend.save_context(save, self.emit))
            case RestoreContext():
                restore = self._admit(client, command)
                self._queue(
                    self._models_lane,
                    restore.id,
                    lambda backend: backend.restore_context(restore, self.emit),
                )

    def _admit(self, client: Client, command: C) -> C:
        """Remember who asked; the command then carries the host's serial number."""
        serial = next(self._serials)
        self._routes[serial] = Route(client, command.id)
        return msgspec.structs.replace(command, id=serial)

    def _stop(self, client: Client, command: Stop) -> None:
        if answer := self._answers.get(command.answer):
            answer.control.stop()
        else:
            _refuse(client, command, f"There is no answer {command.answer!r} to stop.", "usage")

    def _attach(self, client: Client, command: Attach) -> None:
        if answer := self._answers.get(command.answer):
            answer.follow(client, command.id, command.after)
        else:
            _refuse(client, command, f"The engine does not know an answer {command.answer!r}.", "usage")

    def _switch(self, command: SwitchDrafter) -> None:
        """Hand a switch to the answer that runs, or queue it."""
        if not (running := self._answers.open):
            self._queue(
                self._models_lane, command.id, lambda backend: backend.switch_drafter(command, self.emit)
            )
            return
        answer = running[-1]
        self._switches[command.id] = answer
        if displaced := answer.control.offer_switch(command):
            self.emit(Failed(displaced.id, "Another drafter was chosen before this one could start."))

    def _chat(self, client: Client, command: Chat) -> None:
        if self._answers.busy:
            _refuse(client, command, "An answer is running already; stop it or wait for its end.")
            return
        if not command.answer:
            _refuse(client, command, "The answer has no name; give each a name of its own.", "usage")
            return
        if self._answers.get(command.answer):
            _refuse(
                client, command, f"There is an answer {command.answer!r} already; name each anew.", "usage"
            )
            return
        chat = self._admit(client, command)
        answer = Answer(chat.answer, chat.id)
        self._answers.add(answer)
        answer.follow(client, command.id)
        self._queue(
            self._models_lane,
            chat.id,
            lambda backend: backend.chat(chat, self.emit, answer.control),
            answer,
        )

    # ------------------------------------------------------------------ work on the lanes

    def _make(self, make_backend: Callable[[], Backend]) -> None:
        try:
            self._backend.set_result(make_backend())
        except BaseException as error:
            if not isinstance(error, BackendError):
                logger.exception("the backend could not be made")
            self._backend.set_exception(error)

    def _queue(
        self, lane: Lane, serial: int, call: Callable[[Backend], None], answer: Answer | None = None
    ) -> None:
        lane.put(lambda: self._perform(serial, call, answer))

    def _perform(self, serial: int, call: Callable[[Backend], None], answer: Answer | None) -> None:
        """On a lane's thread: do it, and turn whatever is raised into one sentence."""
        name = answer.name if answer else ""
        try:
            call(self._backend.result())
        except BackendError as error:
            self.emit(Failed(serial, error.message, error.kind, name, error.result))
        except BaseException as error:  # the process must outlive whatever a model does
            logger.exception("command %d failed", serial)
            log = f" ({self._log_path})" if self._log_path else ""
            words = f"The engine failed with {type(error).__name__}; its log{log} has the details."
            self.emit(Failed(serial, words, "failed", name))
        self._call_soon(lambda: self._done(serial, answer))

    def _done(self, serial: int, answer: Answer | None) -> None:
        """A command has been worked off: what it left open is answered here."""
        words = "The engine ended this without a result."
        if answer is None:
            if serial in self._routes:
                self._deliver(Failed(serial, words))
            return
        if answer.end is None:
            self._deliver(Failed(serial, words, answer=answer.name))
        self._routes.pop(serial, None)
        late = answer.control.take_switch()
        for switch in [switch for switch, owner in self._switches.items() if owner is answer]:
            del self._switches[switch]
            if switch in self._routes and (late is None or late.id != switch):
                self._deliver(Failed(switch, "The answer ended before the drafter could change."))
        if late is not None:
            self._switch(late)

    # ------------------------------------------------------------------ events

    def emit(self, event: AnyEvent) -> None:
        """Take an event from any thread."""
        self._call_soon(lambda: self._deliver(event))

    def _call_soon(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: the process is ending
            self._loop.call_soon_threadsafe(call)

    def _deliver(self, event: AnyEvent) -> None:
        name = getattr(event, "answer", "")
        if name and (answer := self._answers.get(name)):
            answer.tell(event)
            return
        route = self._routes.get(event.id)
        if route is not None:
            route.client.send(msgspec.structs.replace(event, id=route.command_id))
            if isinstance(event, Progress):
                return
            del self._routes[event.id]
            self._switches.pop(event.id, None)
        elif event.id != 0:
            logger.warning("nobody waits for %r", type(event).__name__)
            return
        if route is None or isinstance(event, Loaded | DrafterChanged):
            news = msgspec.structs.replace(event, id=0)
            for client in self._clients:
                if client.greeted and (route is None or client is not route.client):
                    client.send(news)


def _refuse(client: Client, command: AnyCommand, message: str, kind: FailureKind = "failed") -> None:
    client.send(Failed(command.id, message, kind, getattr(command, "answer", "")))


class _Numbered(msgspec.Struct):
    id: int = 0


def _id_in(line: bytes) -> int:
    """The id of a message that is not understood otherwise, so that its sender need not wait."""
    try:
        return msgspec.json.decode(line, type=_Numbered).id
    except msgspec.DecodeError:
        return 0
