"""A prompt cache as named arrays and plain values, and back, for every cache kind of mlx-lm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache

Plain: TypeAlias = int | float | bool | str | None


class WrongState(ValueError):
    """A state that does not belong to this cache; the text says why, without a full stop."""


def leaves(cache: Sequence[Any]) -> Iterator[Any]:
    """Every cache of a layer, those inside a `CacheList` one by one, in order."""
    for layer in cache:
        if hasattr(layer, "caches"):
            yield from leaves(layer.caches)
        else:
            yield layer


def kinds(cache: Sequence[Any]) -> list[str]:
    """The class of every leaf."""
    return [type(leaf).__name__ for leaf in leaves(cache)]


def dump(cache: Sequence[Any], prefix: str = "cache") -> tuple[dict[str, mx.array], dict[str, Plain]]:
    """Arrays and plain values of every leaf's state, named `PREFIX.LEAF.PATH`.

    Rows that a `KVCache` has only reserved are left out. Raises `WrongState` for a state of another make.
    """
    arrays: dict[str, mx.array] = {}
    plain: dict[str, Plain] = {}
    for number, leaf in enumerate(leaves(cache)):
        for path, value in _flat(_state(leaf)):
            name = f"{prefix}.{number}.{path}"
            if isinstance(value, mx.array):
                arrays[name] = value
            elif value is None or isinstance(value, int | float | str):
                plain[name] = value
            else:
                raise WrongState(f"{type(leaf).__name__} holds a {type(value).__name__}, which no file takes")
    return arrays, plain


def fill(
    cache: Sequence[Any], arrays: dict[str, mx.array], plain: dict[str, Plain], prefix: str = "cache"
) -> None:
    """Give what `dump` named back to the leaves of `cache`, which is a fresh one of the same model.

    Raises `WrongState` when the names do not fit it.
    """
    states: dict[int, list[tuple[str, Any]]] = {}
    for name, value in {**arrays, **plain}.items():
        top, _, rest = name.partition(".")
        number, _, path = rest.partition(".")
        if top == prefix and number.isdecimal():
            states.setdefault(int(number), []).append((path, value))
    found = list(leaves(cache))
    if sorted(states) != list(range(len(found))):
        raise WrongState(f"it holds {len(states)} layers' states and the model has {len(found)}")
    for at, leaf in enumerate(found):
        try:
            state = tree_unflatten(sorted(states[at], key=_order))
            if _has_hole(state):
                raise WrongState(f"the state of layer {at} is incomplete")
            leaf.state = state
        except (TypeError, ValueError, IndexError, KeyError) as error:
            raise WrongState(f"the state of layer {at} is no {type(leaf).__name__}'s") from error


def nbytes(arrays: dict[str, mx.array]) -> int:
    """Bytes of all arrays."""
    return sum(array.nbytes for array in arrays.values())


def _order(item: tuple[str, Any]) -> list[int]:
    return [int(part) for part in item[0].split(".")]


def _has_hole(state: Any) -> bool:
    # Where a number is missing, tree_unflatten leaves an empty dictionary.
    return isinstance(state, dict) or (isinstance(state, list) and any(map(_has_hole, state)))


def _state(leaf: Any) -> Any:
    if type(leaf) in (KVCache, QuantizedKVCache) and leaf.keys is not None:
        return (*leaf.keys_and_values(), *leaf.state[2:])
    return leaf.state


def _flat(state: Any) -> list[tuple[str, Any]]:
    flat: Any = tree_flatten(state)
    return list(flat)
