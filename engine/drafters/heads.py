"""The modules behind a drafter's block: tables of its own, Markov and confidence heads, the selector."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from dspark_tui.engine.drafters.backbone import Backbone
from dspark_tui.engine.drafters.config import BackboneConfig, HeadConfig, MarkovKind


class MarkovHead(nn.Module):
    """DSpark's prefix correction: a bias on the logits that depends on the token before, through
    `e = W1[previous]` of width `rank`.

    vanilla: `W2 e`. gated: `W2 (sigmoid(gate([h; e])) * e)` of the hidden state `h`. rnn: a state s, zero
    before a block, takes `(g, c, o) = joint([s; e; h])`, `s = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)`, and
    the bias is `W2 tanh(o)`.
    """

    def __init__(self, kind: MarkovKind, rank: int, hidden: int, vocabulary: int, drafted: int) -> None:
        """`vocabulary` rows before, in the target's ids; biases for `drafted` ids."""
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def start(self, like: mx.array) -> mx.array:
        """The state `[1, rank]` before a block."""
        return mx.zeros((1, self.rank), dtype=like.dtype)

    def step(self, entry: mx.array, hidden: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
        """What `markov_w2` turns into the bias, and the next state, both `[1, rank]`, from `entry`
        `[1, rank]` (W1 of the token before), the row's `hidden` `[1, hidden]` and `state`."""
        if self.kind == "gated":
            gate = mx.sigmoid(self.gate_proj(mx.concatenate([hidden, entry], axis=-1)))
            return gate * entry, state
        if self.kind == "rnn":
            joint = self.joint_proj(mx.concatenate([state, entry, hidden], axis=-1))
            gate, candidate, out = mx.split(joint, 3, axis=-1)
            gate = mx.sigmoid(gate)
            return mx.tanh(out), gate * state + (1 - gate) * mx.tanh(candidate)
        return entry, state

    def restricted(self, ids: mx.array) -> mx.array:
        """The rows of W2 that turn `step`'s output into biases of `ids` `[k, c]` alone: `[k, c, rank]`."""
        table = self.markov_w2
        if "scales" not in table:
            return table.weight[ids]
        biases = table.get("biases")
        return mx.dequantize(
            table.weight[ids],
            table.scales[ids],
            None if biases is None else biases[ids],
            group_size=table.group_size,
            bits=table.bits,
            mode=table.mode,
        )


class ConfidenceHead(nn.Module):
    """One logit a position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1, bias=True)


class CandidateSelector(nn.Module):
    """DFlash 2's. The codebooks, published without a `.weight` suffix, are embeddings here."""

    def __init__(self, vocabulary: int, hidden: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Embedding(vocabulary, rank)
        self.successor_codebook = nn.Embedding(vocabulary, rank)
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)


class DrafterModel(Backbone):
    """The backbone and whatever its head needs, under the names of published checkpoints."""

    def __init__(self, config: BackboneConfig, head: HeadConfig) -> None:
        super().__init__(config)
        width, vocabulary = config.hidden_size, config.vocabulary
        drafted = head.draft_vocabulary or vocabulary
        if head.own_embedding:
            self.embed_tokens = nn.Embedding(vocabulary, width)
        if head.own_head:
            self.lm_head = nn.Linear(width, drafted, bias=False)
        if head.markov is not None:
            self.markov_head = MarkovHead(head.markov, head.markov_rank, width, vocabulary, drafted)
        if head.confidence is not None:
            seen = head.markov_rank if head.confidence == "hidden and markov" else 0
            self.confidence_head = ConfidenceHead(width + seen)
        if head.selector_rank:
            self.candidate_selector = CandidateSelector(vocabulary, width, head.selector_rank)
