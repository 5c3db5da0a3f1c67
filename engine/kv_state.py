"""A prompt cache, or a snapshot of one, as named arrays and plain values, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from dspark_tui.engine.rollback.parts import leaves, parts
from dspark_tui.engine.rollback.snapshot import Snapshot

Plain: TypeAlias = int | float | bool | str | None
Named: TypeAlias = tuple[dict[str, mx.array], dict[str, Plain]]
"""Arrays and plain values by name: `PREFIX.NUMBER.PATH`."""


class WrongState(ValueError):
    """A state that does not belong to this cache; the text says why, without a full stop."""


def kinds(cache: Sequence[Any]) -> list[str]:
    """The class of every cache object, lists of them unfolded."""
    return [type(leaf).__name__ for leaf in leaves(cache)]


def dump_cache(cache: Sequence[Any], prefix: str = "cache") -> Named:
    """The whole state of every cache object. Rows that are only reserved are left out.

    Raises `WrongState` for a state that no file takes.
    """
    return _dump([_state(leaf, part) for leaf, part in zip(leaves(cache), parts(cache), strict=True)], prefix)


def dump_snapshot(snapshot: Snapshot, prefix: str) -> Named:
    """What a snapshot holds beyond the rows of a cache. Raises as `dump_cache` does."""
    return _dump(snapshot.saved, prefix)


def fill_cache(cache: Sequence[Any], named: Named, prefix: str = "cache") -> None:
    """Give what `dump_cache` named back to `cache`, which is a fresh one of the same model.

    Raises `WrongState` when the names do not fit it.
    """
    found = list(leaves(cache))
    for leaf, part, state in zip(found, parts(cache), _load(named, prefix, len(found)), strict=True):
        try:
            if _keeps_rows(leaf):
                leaf.state = state
            else:
                part.load(state, 0)
        except (TypeError, ValueError, IndexError, AttributeError) as error:
            raise WrongState(f"a layer's state is no {type(leaf).__name__}'s") from error


def fill_snapshot(tokens: Sequence[int], size: int, named: Named, prefix: str) -> Snapshot:
    """What `dump_snapshot` named, of a cache of `size` objects. Raises `WrongState`."""
    saved = tuple(_load(named, prefix, size))
    arrays = [array for name, array in named[0].items() if name.startswith(f"{prefix}.")]
    return Snapshot(tuple(tokens), saved, sum(array.nbytes for array in arrays))


# ---------------------------------------------------------------------------- trees and names


def _keeps_rows(leaf: Any) -> bool:
    return type(leaf) in (KVCache, QuantizedKVCache)


def _state(leaf: Any, part: Any) -> Any:
    if not _keeps_rows(leaf):
        return part.save()
    return leaf.state if leaf.keys is None else (*leaf.keys_and_values(), *leaf.state[2:])


def _dump(states: Sequence[Any], prefix: str) -> Named:
    arrays: dict[str, mx.array] = {}
    plain: dict[str, Plain] = {}
    for number, state in enumerate(states):
        flat: Any = tree_flatten(state)
        for path, value in flat:
            name = f"{prefix}.{number}.{path}"
            if isinstance(value, mx.array):
                arrays[name] = value
            elif value is None or isinstance(value, int | float | str):
                plain[name] = value
            else:
                raise WrongState(f"a layer's cache holds a {type(value).__name__}, which no file takes")
    return arrays, plain


def _load(named: Named, prefix: str, size: int) -> list[Any]:
    states: dict[int, list[tuple[str, Any]]] = {}
    for name, value in {**named[0], **named[1]}.items():
        top, _, rest = name.partition(".")
        number, _, path = rest.partition(".")
        if top == prefix and number.isdecimal():
            states.setdefault(int(number), []).append((path, value))
    if sorted(states) != list(range(size)):
        raise WrongState(f"it holds {len(states)} layers' states and the model has {size}")
    return [_tree(states[number]) for number in range(size)]


def _tree(flat: list[tuple[str, Any]]) -> Any:
    try:
        tree = tree_unflatten(flat)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise WrongState("a layer's state has no shape") from error
    if _has_hole(tree):
        raise WrongState("a layer's state is incomplete")
    return tree


def _has_hole(tree: Any) -> bool:
    # Where a number is missing, tree_unflatten leaves an empty dictionary.
    if isinstance(tree, dict):
        return not tree or any(_has_hole(item) for item in tree.values())
    return isinstance(tree, list) and any(_has_hole(item) for item in tree)
