"""A thread that does jobs one after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

Job: TypeAlias = Callable[[], None]


class Lane:
    """Jobs run in the order in which they came, all on one thread. A job must not raise."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        # A daemon: a job that hangs must not keep the process alive.
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def put(self, job: Job) -> None:
        """Append a job."""
        self._jobs.put(job)

    def _work(self) -> None:
        while True:
            self._jobs.get()()
