"""Loading a drafter beside a running answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from dspark_tui.engine.drafters.base import Drafter
from dspark_tui.engine.lane import Lane

_idle: list[Lane] = []
"""Threads between two loads. What MLX makes for a thread outlives it: a thread for each load would add up."""


class Loading:
    """A drafter that is being loaded on another thread.

    Arrays may cross threads once they are evaluated; lazy ones may not, so everything that the drafter
    holds is evaluated over there.
    """

    def __init__(self, name: str, load: Callable[[], Drafter]) -> None:
        self.name = name
        self._load = load
        self._drafter: Drafter | None = None
        self._error: Exception | None = None
        self._done = threading.Event()
        self._lane = _idle.pop() if _idle else Lane("load")
        self._lane.put(self._work)

    @property
    def ready(self) -> bool:
        """Whether `result` returns at once."""
        return self._done.is_set()

    @property
    def failed(self) -> bool:
        """Whether it has ended without a drafter."""
        return self.ready and self._drafter is None

    def result(self) -> Drafter:
        """Wait for the drafter. Raises what loading it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._drafter is not None
        return self._drafter

    def _work(self) -> None:
        try:
            drafter = self._load()
            mx.eval(held_arrays(drafter), drafter.state())
            self._drafter = drafter
        except Exception as error:  # told to whoever waits
            self._error = error
        finally:
            _idle.append(self._lane)
            self._done.set()


def held_arrays(drafter: Drafter) -> list[mx.array]:
    """Every array that a drafter, its modules and its other parts hold, parameters or not.

    Not those of the target whose tables it borrows: a forward of that one is being built meanwhile, and
    its lazy arrays must not be touched from here.
    """
    found: list[mx.array] = []
    seen = {id(getattr(drafter, "tables", None))}
    queue: list[Any] = [drafter]
    while queue:
        thing = queue.pop()
        if isinstance(thing, mx.array):
            found.append(thing)
        elif id(thing) not in seen:
            seen.add(id(thing))
            if isinstance(thing, dict):  # a module too: its arrays and children are its items
                queue += thing.values()
            elif isinstance(thing, list | tuple):
                queue += thing
            if type(thing).__module__.startswith(__package__):
                queue += getattr(thing, "__dict__", {}).values()
    return found
