"""What the host needs from whatever runs the models, and how a running answer hears of commands."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeAlias

from dspark_tui.engine.protocol import (
    AnyEvent,
    Chat,
    FailureKind,
    ListModels,
    Load,
    Pull,
    RestoreContext,
    Result,
    SaveContext,
    SwitchDrafter,
)

Emit: TypeAlias = Callable[[AnyEvent], None]
"""Hands an event to the host. Callable from any thread, never blocks. Events repeat the command's `id`,
or carry 0 when nobody asked."""


class BackendError(Exception):
    """A command cannot be carried out. `message` is one sentence for the user; see `protocol.Failed`."""

    def __init__(self, message: str, kind: FailureKind = "failed", result: Result | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.kind: FailureKind = kind
        self.result = result


class Control:
    """What the user wants of one answer while it runs. Thread-safe; polled every round and prefill chunk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._switch: SwitchDrafter | None = None

    @property
    def stop_requested(self) -> bool:
        """Whether the answer has to end now, keeping its text. Stays true once it is."""
        return self._stop.is_set()

    @property
    def waiting(self) -> bool:
        """Whether anything has to be looked at."""
        return self._stop.is_set() or self._switch is not None

    def stop(self) -> None:
        """Ask for the end of the answer."""
        self._stop.set()

    def wait_stop(self, seconds: float) -> bool:
        """Sleep up to `seconds`, but wake at a stop. Returns `stop_requested`."""
        return self._stop.wait(seconds)

    def offer_switch(self, command: SwitchDrafter) -> SwitchDrafter | None:
        """Leave a switch for the next round boundary. Returns the one that it displaced, if any."""
        with self._lock:
            displaced, self._switch = self._switch, command
        return displaced

    def take_switch(self) -> SwitchDrafter | None:
        """The newest pending switch, once. Whoever takes it answers it (DrafterChanged or Failed)."""
        with self._lock:
            taken, self._switch = self._switch, None
        return taken


class Backend(Protocol):
    """Runs models. `pull` and `list_models` are called on threads of their own, and must not touch the loaded
    model; everything else on one thread, the one that made the object.

    Each emits the events that answer the command (see `protocol`), or raises BackendError. Any other
    exception becomes a Failed that points to the log.
    """

    def load(self, command: Load, emit: Emit) -> None:
        """Load a target and a drafter in place of the present ones: Progress..., Loaded."""
        ...

    def chat(self, command: Chat, emit: Emit, control: Control) -> None:
        """Answer a conversation: Prefill, Text, Rounds..., Finished; and DrafterChanged for switches that
        were taken from `control`."""
        ...

    def switch_drafter(self, command: SwitchDrafter, emit: Emit) -> None:
        """Change the drafter while no answer runs: DrafterChanged."""
        ...

    def save_context(self, command: SaveContext, emit: Emit) -> None:
        """Keep the present sequence on disk: ContextSaved."""
        ...

    def restore_context(self, command: RestoreContext, emit: Emit) -> None:
        """Take a kept sequence back: ContextRestored."""
        ...

    def pull(self, command: Pull, emit: Emit) -> None:
        """Fetch a model to this machine: Progress..., Pulled."""
        ...

    def list_models(self, command: ListModels, emit: Emit) -> None:
        """Models."""
        ...
