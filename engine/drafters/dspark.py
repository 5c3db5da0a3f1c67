"""DSpark (DeepSeek DeepSpec, arXiv 2607.05147): a parallel pass, then a small sequential correction.

Row j of the block, the anchor's included, predicts the next token (position j + 1). A Markov head adds a
bias that depends on the token before: `bias(prev) = W2 W1[prev]`; a confidence head estimates from
`[hidden ; W1[prev]]` whether the draft will be accepted.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from dspark_tui.engine.drafters.backbone import Backbone, BackboneConfig, BlockDrafter
from dspark_tui.engine.drafters.base import Proposal
from dspark_tui.engine.protocol import Method
from dspark_tui.engine.sampling import Sampler
from dspark_tui.engine.verify import DenseQ


class MarkovHead(nn.Module):
    """The vanilla prefix correction, rank `rank`."""

    def __init__(self, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)


class ConfidenceHead(nn.Module):
    """One logit a position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1, bias=True)


class DSparkModel(Backbone):
    """Backbone, Markov head and confidence head."""

    def __init__(self, config: BackboneConfig, rank: int, confidence_with_markov: bool) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config.vocabulary, rank)
        width = config.hidden_size + (rank if confidence_with_markov else 0)
        self.confidence_head = ConfidenceHead(width)
        self.confidence_with_markov = confidence_with_markov


class DSpark(BlockDrafter):
    """Drafts one after the other from the corrected logits."""

    method: Method = "dspark"
    model: DSparkModel

    def _draft(self, hidden: mx.array, anchor: int, k: int, sampler: Sampler) -> Proposal:
        base = self.tables.head(hidden[:k]).astype(mx.float32)
        markov, confidence = self.model.markov_head, self.model.confidence_head
        previous = mx.array([anchor], dtype=mx.uint32)
        tokens: list[mx.array] = []
        q: list[mx.array] = []
        confidences: list[mx.array] = []
        for j in range(k):
            entry = markov.markov_w1(previous)
            row = hidden[j : j + 1]
            seen = mx.concatenate([row, entry], axis=-1) if self.model.confidence_with_markov else row
            confidences.append(mx.sigmoid(confidence.proj(seen))[0])
            logits = base[j : j + 1] + markov.markov_w2(entry)
            logits = sampler.rows(logits, mx.concatenate(tokens) if tokens else None)
            if sampler.greedy:
                previous = mx.argmax(logits, axis=-1)
            else:
                q.append(sampler.probabilities(logits))
                previous = sampler.draws.choose(q[-1])
            tokens.append(previous)
        return Proposal(
            mx.concatenate(tokens),
            DenseQ(mx.concatenate(q)) if q else None,
            mx.concatenate(confidences),
        )
