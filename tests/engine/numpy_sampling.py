"""The sampling pipeline in plain NumPy, one row of logits and one token at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def softmax(logits: Array) -> Array:
    """Along the last axis."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def adjusted(
    logits: Array,
    prompt: Sequence[int] = (),
    answer: Sequence[int] = (),
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: Mapping[int, float] | None = None,
) -> Array:
    """A row of logits `[vocabulary]` with bias and penalties, after the tokens of `prompt` and `answer`."""
    row = np.array(logits, dtype=np.float64)
    for token, value in (bias or {}).items():
        row[token] += value
    for token in set(prompt) | set(answer):
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in answer:
        row[token] -= frequency
    for token in set(answer):
        row[token] -= presence
    return row


def distribution(
    logits: Array, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Array:
    """What one token is drawn from, given its row of logits `[vocabulary]`."""
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    if top_k > 0:
        edge = np.sort(scaled)[::-1][min(top_k, len(scaled)) - 1]
        scaled = np.where(scaled >= edge, scaled, -np.inf)
    p = softmax(scaled)
    kept = np.zeros_like(p)
    for token in np.argsort(-p, kind="stable"):
        if kept.sum() >= top_p:
            break
        kept[token] = p[token]
    kept = np.where(kept >= min_p * kept.max(), kept, 0.0)
    return kept / kept.sum()
