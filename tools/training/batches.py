"""From dialogues to what a step learns from: sequences, anchors in them, and the rows of their blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.corpus import Dialogues


@dataclass(frozen=True)
class Batch:
    """`ids` `[sequences, length]`, `anchors` `[sequences, anchors]` (positions), `labels` and `previous`
    `[sequences, anchors, drafts]` (tokens), `counted` of that shape: 1 where the target wrote the label and
    all labels before it, else 0. Positions of anchors that count for nothing are valid all the same."""

    ids: NDArray[np.uint32]
    anchors: NDArray[np.int32]
    labels: NDArray[np.uint32]
    previous: NDArray[np.uint32]
    counted: NDArray[np.float32]


def choose(
    dialogues: Dialogues, rows: NDArray[np.int64], step: int, size: int, seed: int
) -> NDArray[np.int64]:
    """Which `size` sequences of `rows` step `step` (from 0) takes: every epoch takes them in a new order."""
    each_epoch = len(rows) // size
    epoch, place = divmod(step, max(1, each_epoch))
    order = np.random.default_rng([seed, 1, epoch]).permutation(len(rows))
    if not each_epoch:  # fewer sequences than a batch holds
        return rows[np.resize(order, size)]
    return rows[order[place * size : (place + 1) * size]]


def make_batch(
    dialogues: Dialogues, chosen: NDArray[np.int64], anchors: int, drafts: int, draw: np.random.Generator
) -> Batch:
    """Random anchors in the sequences `chosen`: tokens of the target's own whose next one is too."""
    ids, mask = dialogues.tokens[chosen], dialogues.supervised[chosen]
    sequences, length = ids.shape
    last = length - drafts - 1
    good = np.zeros_like(mask)
    good[:, : last + 1] = mask[:, : last + 1] & mask[:, 1 : last + 2]
    rank = np.where(good, draw.random(good.shape), -1.0)[:, : last + 1]
    count = min(anchors, last + 1)
    places = np.argpartition(-rank, count - 1, axis=1)[:, :count]
    taken = np.take_along_axis(good, places, axis=1)
    at = places[:, :, None] + np.arange(drafts)
    flat = at.reshape(sequences, -1)
    labels = np.take_along_axis(ids, flat + 1, axis=1).reshape(at.shape)
    previous = np.take_along_axis(ids, flat, axis=1).reshape(at.shape)
    written = np.take_along_axis(mask, flat + 1, axis=1).reshape(at.shape)
    counted = np.cumprod(written, axis=2) * taken[:, :, None]
    return Batch(ids, places.astype(np.int32), labels, previous, counted.astype(np.float32))
