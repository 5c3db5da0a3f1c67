"""Loading a drafter beside a running answer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from dspark_tui.engine.drafters.base import Drafter


class Loading:
    """A drafter that is being loaded on a thread of its own.

    Arrays may cross threads once they are evaluated; lazy ones may not, so everything that the drafter
    holds is evaluated over there.
    """

    def __init__(self, name: str, load: Callable[[], Drafter]) -> None:
        self.name = name
        self._load = load
        self._drafter: Drafter | None = None
        self._error: Exception | None = None
        # A daemon: a disk that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"load {name}", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether `result` returns at once."""
        return not self._thread.is_alive()

    def result(self) -> Drafter:
        """Wait for the drafter. Raises what loading it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._drafter is not None
        return self._drafter

    def _work(self) -> None:
        try:
            drafter = self._load()
            mx.eval(_arrays(drafter), drafter.state())
            self._drafter = drafter
        except Exception as error:  # told to whoever waits
            self._error = error


def _arrays(drafter: Drafter) -> list[mx.array]:
    """Every array that a drafter and its modules hold, parameters or not."""
    held = list(vars(drafter).values())
    for value in list(held):
        if isinstance(value, nn.Module):
            held += [inner for _, module in value.named_modules() for inner in module.values()]
    return [value for value in held if isinstance(value, mx.array)]
