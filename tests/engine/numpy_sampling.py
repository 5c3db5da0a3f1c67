"""The sampling pipeline in plain NumPy: temperature, top-k, top-p, over one row of logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def softmax(logits: Array) -> Array:
    """Along the last axis."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def distribution(logits: Array, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Array:
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
    return kept / kept.sum()
