"""Seeing and changing the calls of one module, without a copy of any model's forward.

The class of one module *instance* is swapped for a subclass whose `__call__` goes through a function.
Parameter paths, `isinstance` and attributes stay as they are, other instances of the class are not touched,
and the swap can be undone. It must be the class: `__call__` is looked up on the type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.nn as nn

Around = Callable[..., Any]
"""`around(call, *args, **kwargs)`: `call` is the module's own, and what is returned is what callers get."""
_classes: dict[type, type] = {}


def _intercepted(base: type) -> type:
    if base not in _classes:

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self._around(base.__call__.__get__(self), *args, **kwargs)

        attributes = {"__call__": call, "__module__": base.__module__, "_intercepted_class": base}
        _classes[base] = type(base.__name__, (base,), attributes)
    return _classes[base]


def is_intercepted(module: nn.Module) -> bool:
    """Whether `intercept` is at work on this module."""
    return hasattr(type(module), "_intercepted_class")


def intercept(module: nn.Module, around: Around) -> Callable[[], None]:
    """Let `around` stand in front of every call of this one module. Returns the function that undoes it.

    Raises `RuntimeError` when that is so already.
    """
    base = type(module)
    if is_intercepted(module):
        raise RuntimeError(f"{base.__name__} is tapped already")
    object.__setattr__(module, "_around", around)
    module.__class__ = _intercepted(base)

    def undo() -> None:
        module.__class__ = base
        object.__delattr__(module, "_around")

    return undo
