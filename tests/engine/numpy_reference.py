"""Every kind of block drafter in NumPy, token by token and head by head.

Written from the published formulas in float64, as plain loops: slow, and with nothing in common with the
engine's code but the tensors' names and the words of a configuration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from numpy_sampling import distribution, softmax

from dspark_tui.engine.drafters.config import BackboneConfig, HeadConfig

Array = NDArray[Any]


class ArrayTables(Protocol):
    """The target's tables, `[vocabulary, hidden]`."""

    embedding: Array
    head_weight: Array


def turns(config: BackboneConfig, pair: int) -> float:
    """Radians a position of one rotary pair."""
    rope, width = config.rope, config.head_dim
    if rope.pairs is not None and pair >= rope.pairs:
        return 0.0
    plain = 1.0 / rope.theta ** (2 * pair / width)
    if rope.yarn is None:
        return plain
    yarn = rope.yarn

    def place(rotations: float) -> float:
        return width * math.log(yarn.original_context / rotations / 2 / math.pi) / 2 / math.log(rope.theta)

    low = max(0, math.floor(place(yarn.beta_fast)))
    high = min(width - 1, math.ceil(place(yarn.beta_slow)))
    if pair <= low:
        return plain
    if pair >= high:
        return plain / yarn.factor
    kept = (high - pair) / (high - low)
    return plain * kept + plain / yarn.factor * (1 - kept)


def rotated(config: BackboneConfig, x: Array, position: int) -> Array:
    """One head's vector `[head_dim]` at `position`, pair by pair."""
    half, out = config.head_dim // 2, x.copy()
    stretch = config.rope.yarn.attention_factor if config.rope.yarn else 1.0
    for pair in range(half):
        one, two = (2 * pair, 2 * pair + 1) if config.rope.interleaved else (pair, pair + half)
        angle = position * turns(config, pair)
        out[one] = stretch * (x[one] * math.cos(angle) - x[two] * math.sin(angle))
        out[two] = stretch * (x[one] * math.sin(angle) + x[two] * math.cos(angle))
    return out


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


class Reference:
    """One drafter over a context of tap rows, recomputed from nothing at every call."""

    def __init__(
        self,
        config: BackboneConfig,
        head: HeadConfig,
        weights: dict[str, Array],
        tables: ArrayTables,
        d2t: Sequence[int] | None = None,
        mask_embedding: Array | None = None,
    ) -> None:
        self.config, self.head, self.tables = config, head, tables
        self.weights = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
        self.d2t, self.mask_embedding = d2t, mask_embedding

    def _rms(self, x: Array, name: str | None) -> Array:
        size = np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.config.eps)
        return x / size if name is None else x / size * self.weights[f"{name}.weight"]

    def _linear(self, x: Array, name: str) -> Array:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    # ------------------------------------------------------------------ backbone

    def _key_value(self, x: Array, position: int, layer: str) -> tuple[list[Array], list[Array]]:
        """Per key/value head, of one position."""
        heads, name = self.config.kv_heads, f"{layer}.self_attn"
        raw = np.split(self._linear(x, f"{name}.k_proj"), heads)
        values = raw
        if not self.config.keys_are_values:
            values = np.split(self._linear(x, f"{name}.v_proj"), heads)
        if self.config.style == "gemma4":
            values = [self._rms(v, None) for v in values]
        return [rotated(self.config, self._rms(k, f"{name}.k_norm"), position) for k in raw], values

    def _sees(self, number: int, row: int, start: int, key: int) -> bool:
        """Whether the block's row `row` sees the position `key` in layer `number`."""
        layer, limit = self.config.attention[number], self.config.context_limit
        at = start + row
        if key < start and limit is not None and key < start - limit:
            return False
        if layer.window is not None and abs(at - key) >= layer.window:
            return False
        return not (layer.causal and key > at)

    def _attend(self, x: Array, context: Array, base: int, number: int) -> Array:
        layer = f"layers.{number}"
        start = base + len(context)
        entries = [self._key_value(c, base + i, layer) for i, c in enumerate(context)]
        entries += [self._key_value(row, start + j, layer) for j, row in enumerate(x)]
        shared = self.config.heads // self.config.kv_heads
        scale = 1.0 if self.config.style == "gemma4" else 1 / math.sqrt(self.config.head_dim)
        out = []
        for j, row in enumerate(x):
            seen = [e for i, e in enumerate(entries) if self._sees(number, j, start, base + i)]
            mixed = []
            queries = np.split(self._linear(row, f"{layer}.self_attn.q_proj"), self.config.heads)
            for h, query in enumerate(queries):
                query = rotated(self.config, self._rms(query, f"{layer}.self_attn.q_norm"), start + j)
                shares = softmax(np.array([query @ keys[h // shared] for keys, _ in seen]) * scale)
                mixed.append(sum(share * e[1][h // shared] for share, e in zip(shares, seen, strict=True)))
            out.append(self._linear(np.concatenate(mixed), f"{layer}.self_attn.o_proj"))
        return np.array(out)

    def _mlp(self, x: Array, layer: str) -> Array:
        gate = self._linear(x, f"{layer}.mlp.gate_proj")
        if self.config.style == "gemma4":
            cubed = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
            opened = gate / 2 * (1 + np.tanh(cubed))
        else:
            opened = gate * sigmoid(gate)
        return self._linear(opened * self._linear(x, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")

    def _convolve(self, x: Array, normed: Array, side: int, name: str) -> Array:
        """Row i: the sum over taps t of (base + delta of row i) times row i - t, channel by channel."""
        taps, group = self.config.conv_taps, self.config.conv_group
        if not taps:
            return x
        groups = self.config.hidden_size // group
        out = np.zeros_like(x)
        for i in range(len(x)):
            delta = self._linear(normed[i], f"{name}.kernel_projection")
            for t in range(min(taps, i + 1)):
                for c in range(self.config.hidden_size):
                    place = (side * taps + t) * groups + c // group
                    weight = self.weights[f"{name}.base_kernel"][side, t, c] + delta[place]
                    out[i, c] += weight * x[i - t, c]
        return out

    def _sublayer(self, x: Array, context: Array, base: int, number: int, kind: str) -> Array:
        """Attention or MLP of one layer with the norm before it and what else stands around it."""
        layer = f"layers.{number}"
        gemma = self.config.style == "gemma4"
        if kind == "attention":
            before, after = "input_layernorm", "post_attention_layernorm"
        elif gemma:
            before, after = "pre_feedforward_layernorm", "post_feedforward_layernorm"
        else:
            before, after = "post_attention_layernorm", ""
        normed = self._rms(x, f"{layer}.{before}")
        inward = self._convolve(normed, normed, 0, f"{layer}.{kind}_conv")
        out = self._attend(inward, context, base, number) if kind == "attention" else self._mlp(inward, layer)
        if gemma:
            return self._rms(out, f"{layer}.{after}")
        return self._convolve(out, normed, 1, f"{layer}.{kind}_conv")

    def _block(self, anchor: int) -> Array:
        table = self.tables.embedding
        if self.head.own_embedding:
            table = self.weights["embed_tokens.weight"]
        rows = [table[anchor].astype(np.float64)]
        for _ in range(self.config.block_size - 1):
            mask = table[self.config.mask_token] if self.mask_embedding is None else self.mask_embedding
            rows.append(mask.astype(np.float64))
        return np.array(rows) * self.config.embedding_scale

    def hidden(self, rows: Array, anchor: int, base: int = 0) -> Array:
        """Final hidden states `[block, hidden]` after context `rows` at the positions from `base` on."""
        context = self._rms(self._linear(rows.astype(np.float64), "fc"), "hidden_norm")
        x = self._block(anchor)
        for number in range(self.config.layers):
            for kind in ("attention", "mlp"):
                x = x + self._sublayer(x, context, base, number, kind)
            if self.config.style == "gemma4":
                x = x * self.weights[f"layers.{number}.layer_scalar"]
        return self._rms(x, "norm")

    # ------------------------------------------------------------------ heads

    @property
    def drafts(self) -> int:
        """Tokens proposed a round."""
        return self.config.block_size - self.head.first_row

    def _base(self, row: Array) -> Array:
        """A row's logits before any prefix correction, over the ids of the head."""
        table = self.tables.head_weight.astype(np.float64)
        if self.head.own_head:
            table = self.weights["lm_head.weight"]
        logits = table @ row * self.head.multiplier
        if self.head.softcap is not None:
            logits = self.head.softcap * np.tanh(logits / self.head.softcap)
        return logits

    def _bias(self, hidden: Array, slot: int, before: Sequence[int]) -> Array:
        """The Markov bias of `slot` after the tokens `before`: the anchor and the drafts up to `slot`."""
        w1, w2 = (self.weights[f"markov_head.markov_{w}.weight"] for w in ("w1", "w2"))
        first = self.head.first_row
        entry, row = w1[before[slot]], hidden[slot + first]
        if self.head.markov == "gated":
            gate = self._linear(np.concatenate([row, entry]), "markov_head.gate_proj")
            return w2 @ (sigmoid(gate) * entry)
        if self.head.markov == "vanilla":
            return w2 @ entry
        # The rnn has seen every row of the block up to this one; the row before the first draft comes after
        # the anchor as well.
        state = out = np.zeros(self.head.markov_rank)
        for at in range(slot + first + 1):
            previous = before[max(0, at - first)]
            joint = self._linear(np.concatenate([state, w1[previous], hidden[at]]), "markov_head.joint_proj")
            gate, candidate, out = np.split(joint, 3)
            state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
        return w2 @ np.tanh(out)

    def scores(self, hidden: Array, slot: int, before: Sequence[int]) -> Array:
        """Scores of every target token for draft `slot` after `before` (the anchor and the drafts before this
        one); -inf where nothing can be drafted."""
        row = hidden[slot + self.head.first_row]
        logits = self._base(row)
        if self.head.markov is not None:
            corrected = logits + self._bias(hidden, slot, before)
            kept = np.argsort(-logits)[: self.head.markov_candidates]
            logits = np.full_like(logits, -np.inf)
            logits[kept] = corrected[kept]
        if self.head.draft_vocabulary is not None:
            assert self.d2t is not None
            spread = np.full(self.config.vocabulary, -np.inf)
            for draft_id, offset in enumerate(self.d2t):
                spread[draft_id + offset] = logits[draft_id]
            return spread
        if not self.head.selector_rank:
            return logits
        best = np.argsort(-logits)[: self.head.selector_top_k]
        codebooks = [f"candidate_selector.{side}_codebook.weight" for side in ("predecessor", "successor")]
        ahead, behind = (self.weights[name] for name in codebooks)
        weight = self._linear(row, "candidate_selector.hidden_projection")
        walked = np.full_like(logits, -np.inf)
        for token in best:
            walked[token] = logits[token] + sum(ahead[before[slot]] * weight * behind[token])
        return walked

    def confidence(self, hidden: Array, slot: int, previous: int) -> float:
        """DSpark's estimate that draft `slot` is accepted if those before it are."""
        seen = hidden[slot + self.head.first_row]
        if self.head.confidence == "hidden and markov":
            seen = np.concatenate([seen, self.weights["markov_head.markov_w1.weight"][previous]])
        return float(sigmoid(self._linear(seen, "confidence_head.proj"))[0])

    def greedy(self, hidden: Array, anchor: int) -> list[int]:
        """The greedy proposal."""
        tokens = [anchor]
        for slot in range(self.drafts):
            tokens.append(int(np.argmax(self.scores(hidden, slot, tokens))))
        return tokens[1:]

    def distributions(
        self, hidden: Array, anchor: int, drafts: list[int], temperature: float, top_k: int, top_p: float
    ) -> Array:
        """What each of `drafts` was drawn from, given those before. DFlash 2 takes the temperature only."""
        if self.head.selector_rank:
            top_k, top_p = 0, 1.0
        before = [anchor, *drafts]
        rows = [self.scores(hidden, slot, before[: slot + 1]) for slot in range(len(drafts))]
        return np.array([distribution(row, temperature, top_k, top_p) for row in rows])
