"""ctrl+c and SIGTERM for commands without a screen: the first asks, the second ends the process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from types import FrameType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

STOPPED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """The user stopped it before there was anything to keep."""


class Interrupts:
    """Catches the signals while it is entered (main thread, inside a running event loop).

    Handlers of Python's own and not the event loop's: they run even while a write to a full pipe holds the
    loop, so that the second signal always ends the process.
    """

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._count = 0
        self._loop = asyncio.get_running_loop()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def asked(self) -> bool:
        """Whether the user wants an end."""
        return self._count > 0

    async def wait(self) -> None:
        """Until the user wants an end."""
        await self._asked.wait()

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`; raises Stopped, and cancels it, when the user wants an end first."""
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Stopped
            return task.result()
        finally:
            for each in (task, asked):
                each.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            os._exit(STOPPED)
        self._loop.call_soon_threadsafe(self._asked.set)
