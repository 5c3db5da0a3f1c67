"""What a drafter learns from: the losses of DSpark, DFlash and DFlash 2 over the rows of many blocks.

After DeepSeek's DeepSpec (arXiv 2607.05147), z-lab's DFlash (arXiv 2602.06036) and the open recipes for
DFlash 2. Row k of an anchor's block stands for the k-th draft; it counts `exp(-k / gamma)`, and nothing from
the first row on that the target did not write itself. Teacher forcing: what depends on the token before
sees the one that the target wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import mlx.core as mx

from dspark_tui.engine.drafters.candidates import top_candidates
from training.design import Design
from training.forward import hidden_states, linear
from training.weights import Weights

LossName: TypeAlias = Literal["ce", "mixed"]
LOSSES: tuple[LossName, ...] = ("ce", "mixed")
CE_SHARE, DISTANCE_SHARE = 0.1, 0.9
Head: TypeAlias = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class Objective:
    """`loss`: `mixed` is `0.1 CE + 0.9 distance` to the target's distribution, `ce` cross entropy alone.
    The distance is the L1 norm for DSpark and half of it (total variation) for the others."""

    loss: LossName
    gamma: float = 4.0
    selector_share: float = 1.0


@dataclass(frozen=True)
class Rows:
    """The rows that learn, flattened to `n`. `labels` `[n]` are the tokens the target wrote there, `previous`
    `[n]` those before, `logits` `[n, vocabulary]` the target's own, `weights` `[n]` what a row counts."""

    labels: mx.array
    previous: mx.array
    logits: mx.array
    weights: mx.array


def _log_sum(logits: mx.array) -> mx.array:
    return mx.logsumexp(logits, axis=-1, keepdims=True)


def cross_entropy(logits: mx.array, labels: mx.array) -> mx.array:
    """`[n]` of float32 `logits` `[n, classes]` at `labels` `[n]`."""
    picked = mx.take_along_axis(logits, labels[:, None].astype(mx.uint32), axis=-1)
    return (_log_sum(logits) - picked)[:, 0]


def distance(logits: mx.array, target_logits: mx.array) -> mx.array:
    """L1 norm `[n]` of the difference of two rows' distributions: 0 to 2."""
    p = mx.softmax(target_logits.astype(mx.float32), axis=-1)
    return mx.abs(mx.softmax(logits, axis=-1) - mx.stop_gradient(p)).sum(axis=-1)


def binary_cross_entropy(logits: mx.array, wanted: mx.array) -> mx.array:
    """`[n]` of `logits` for probabilities `wanted`, both `[n]`: `log(1 + exp(x)) - wanted x`."""
    return mx.logaddexp(logits, mx.zeros_like(logits)) - wanted * logits


def mean(values: mx.array, weights: mx.array) -> mx.array:
    """Weighted mean; 0 when nothing counts."""
    return (values * weights).sum() / mx.maximum(weights.sum(), 1e-6)


def proposing_rows(
    design: Design, weights: Weights, taps: mx.array, blocks: mx.array, at: mx.array
) -> mx.array:
    """Hidden states `[sequences * anchors * drafts, hidden]` of the rows that propose."""
    hidden = hidden_states(weights, design.backbone, taps, blocks, at)
    return hidden[:, :, design.head.first_row :].reshape(-1, hidden.shape[-1])


def dspark_logits(weights: Weights, base: mx.array, previous: mx.array) -> tuple[mx.array, mx.array]:
    """Corrected logits `[n, vocabulary]`, float32, and the Markov entries `[n, rank]` of `previous`."""
    entry = weights["markov_head.markov_w1.weight"][previous]
    bias = linear(weights, "markov_head.markov_w2", entry)
    return base.astype(mx.float32) + bias.astype(mx.float32), entry


def candidate_scores(
    weights: Weights, hidden: mx.array, base: mx.array, previous: mx.array, ids: mx.array
) -> mx.array:
    """DFlash 2's scores `[n, k]`, float32, of the candidates `ids` `[n, k]` after `previous` `[n]`."""
    selector = "candidate_selector"
    entry = weights[f"{selector}.predecessor_codebook"][previous]
    w = linear(weights, f"{selector}.hidden_projection", hidden) * entry
    after = weights[f"{selector}.successor_codebook"][ids]
    pair = (after @ w[:, :, None])[:, :, 0]
    return mx.take_along_axis(base, ids, axis=-1).astype(mx.float32) + pair.astype(mx.float32)


def with_gold(ids: mx.array, labels: mx.array) -> tuple[mx.array, mx.array]:
    """Candidates `[n, k]` that hold the label, in the last place where they did not, and its place `[n]`."""
    found = ids == labels[:, None]
    missing = mx.logical_not(found.any(axis=-1))
    last = mx.arange(ids.shape[1]) == ids.shape[1] - 1
    ids = mx.where(missing[:, None] & last[None], labels[:, None].astype(ids.dtype), ids)
    place = mx.where(missing, ids.shape[1] - 1, mx.argmax(found.astype(mx.int32), axis=-1))
    return ids, place


def loss(
    design: Design, objective: Objective, weights: Weights, head: Head, hidden: mx.array, rows: Rows
) -> tuple[mx.array, mx.array]:
    """The loss (scalar, float32), and the drafts `[n]` (token ids) of a greedy drafter that saw the right
    token before each. `hidden` `[n, hidden]` as `proposing_rows` gives them; `head` is the target's."""
    base = head(hidden).astype(mx.float32)
    if design.method == "dspark":
        logits, entry = dspark_logits(weights, base, rows.previous)
        apart = distance(logits, rows.logits)
        seen = mx.concatenate([hidden, entry.astype(hidden.dtype)], axis=-1)
        sure = linear(weights, "confidence_head.proj", seen) + weights["confidence_head.proj.bias"]
        sure_loss = binary_cross_entropy(sure[:, 0].astype(mx.float32), mx.stop_gradient(1 - 0.5 * apart))
        each = _backbone_loss(objective, logits, rows, apart) + sure_loss
        return mean(each, rows.weights), mx.argmax(logits, axis=-1)
    half = 0.5 * distance(base, rows.logits) if objective.loss == "mixed" else None
    each = _backbone_loss(objective, base, rows, half)
    if design.method == "dflash":
        return mean(each, rows.weights), mx.argmax(base, axis=-1)
    ids = mx.stop_gradient(top_candidates(mx.stop_gradient(base), design.head.selector_top_k)[0])
    scores = candidate_scores(weights, hidden, base, rows.previous, ids)
    drafts = mx.take_along_axis(ids, mx.argmax(scores, axis=-1, keepdims=True), axis=-1)[:, 0]
    taught, place = with_gold(ids, rows.labels)
    chosen = cross_entropy(candidate_scores(weights, hidden, base, rows.previous, taught), place)
    return mean(each + objective.selector_share * chosen, rows.weights), drafts


def _backbone_loss(objective: Objective, logits: mx.array, rows: Rows, apart: mx.array | None) -> mx.array:
    ce = cross_entropy(logits, rows.labels)
    if objective.loss == "ce" or apart is None:
        return ce
    return CE_SHARE * ce + DISTANCE_SHARE * apart
