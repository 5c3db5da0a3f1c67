"""Picking the best tokens of a row of logits without ordering the vocabulary."""

from __future__ import annotations

import mlx.core as mx

_CHUNK = 256
"""Vocabulary entries a first-stage group holds: a full partition of a vocabulary row costs six times this."""


def top_candidates(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` largest of each row of `logits` `[n, vocabulary]`: ids `[n, count]` (uint32) and values.

    Exact, in two stages: the largest `count` all lie in the `count` groups with the largest maxima.
    `count` is at most the vocabulary.
    """
    rows, vocabulary = logits.shape
    padding = -vocabulary % _CHUNK
    if padding:
        logits = mx.pad(logits, [(0, 0), (0, padding)], constant_values=-mx.inf)
    groups = logits.reshape(rows, -1, _CHUNK)
    if groups.shape[1] > count:
        best = mx.argpartition(-groups.max(axis=-1), count - 1, axis=-1)[:, :count]
    else:
        best = mx.broadcast_to(mx.arange(groups.shape[1], dtype=mx.uint32), (rows, groups.shape[1]))
    pool = mx.take_along_axis(groups, best[:, :, None], axis=1).reshape(rows, -1)
    inside = mx.argpartition(-pool, count - 1, axis=-1)[:, :count]
    group = mx.take_along_axis(best, inside // _CHUNK, axis=-1)
    # Padding is never among the best of real logits; an id outside the vocabulary would be a wild write.
    ids = mx.minimum(group * _CHUNK + inside % _CHUNK, vocabulary - 1)
    return ids.astype(mx.uint32), mx.take_along_axis(pool, inside, axis=-1)
