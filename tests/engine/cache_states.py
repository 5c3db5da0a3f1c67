"""What counts in a prompt cache, written down independently of how its rows lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, RotatingKVCache, make_prompt_cache


def counted(cache: Sequence[Any]) -> list[np.ndarray]:
    """Of every layer: the positions it has seen, and the keys, values or state that the next token reads."""
    found: list[np.ndarray] = []
    for layer in cache:
        if isinstance(layer, CacheList):
            found += counted(layer.caches)
        elif isinstance(layer, RotatingKVCache):
            found.append(np.array(layer.offset))
            reach = min(layer.offset, layer.max_size - 1)
            for part in () if layer.keys is None else (layer.keys, layer.values):
                # Walk back from the newest row: the writing position, and round the end of the ring.
                rows = np.array(part)
                places = [(layer._idx - 1 - back) % rows.shape[2] for back in range(reach)]
                found.append(rows[:, :, places[::-1]])
        elif isinstance(layer, ArraysCache):
            found += [np.array(a) for a in layer.cache if a is not None]
        elif hasattr(layer, "keys_and_values"):
            found.append(np.array(layer.offset))
            if layer.keys is None or layer.offset == 0:
                continue
            # What lies further back than a chunk is dropped before the next token.
            reach = min(layer.offset, layer.chunk_size) if isinstance(layer, ChunkedKVCache) else layer.offset
            for part in layer.keys_and_values():
                pieces = part if isinstance(part, tuple | list) else (part,)
                found += [np.array(piece)[..., -reach:, :] for piece in pieces]
        else:
            fields = {name: value for name, value in vars(layer).items() if value is not None}
            found += [np.array(fields[name]) for name in sorted(fields)]
    return found


def stepwise(model: Any, tokens: Sequence[int]) -> tuple[list[Any], np.ndarray]:
    """mlx-lm's own cache and the last logits after decoding one token at a time, without the engine."""
    cache = make_prompt_cache(model)
    logits = mx.zeros((1, 1, 1))
    for token in tokens:
        logits = model(mx.array([[token]]), cache=cache)
        mx.eval(logits, [c.state for c in cache])
    return cache, np.array(logits[0, -1])


def assert_same(ours: Sequence[Any], theirs: Sequence[Any], tolerance: float = 2e-4) -> None:
    """Both caches hold the same, up to rounding."""
    mine, golden = counted(ours), counted(theirs)
    assert len(mine) == len(golden)
    for got, want in zip(mine, golden, strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, atol=tolerance * max(1.0, float(np.abs(want).max(initial=0))))
