"""The transformer that DSpark, DFlash and DFlash 2 share: block queries over projected target taps.

Formulas after DeepSeek's DeepSpec, z-lab's DFlash (arXiv 2602.06036) and Inco AI's DFlash 2. A
committed token contributes keys and values only: `c = hidden_norm(fc(taps))`, then each layer's
`rope(k_norm(k_proj c))` and `v_proj c`. The block `[anchor, mask, ...]` attends to that context and to
itself; its own keys and values are never kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from dspark_tui.engine.drafters.config import BackboneConfig
from dspark_tui.engine.drafters.context_ring import ContextRing
from dspark_tui.engine.drafters.convolution import GroupedConv
from dspark_tui.engine.drafters.rotary import Rotary


class BlockAttention(nn.Module):
    """Attention of the block rows over `[context, block]`.

    Gemma 4's differs in the scale, which is 1, and in the values: normalised without a weight, and taken
    from `k_proj` when keys are values.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        width, head, bias = config.hidden_size, config.head_dim, config.attention_bias
        gemma = config.style == "gemma4"
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.scale = 1.0 if gemma else head**-0.5
        self.eps, self.values_normed = config.eps, gemma
        self.q_proj = nn.Linear(width, config.heads * head, bias=bias)
        self.k_proj = nn.Linear(width, config.kv_heads * head, bias=bias)
        if not config.keys_are_values:
            self.v_proj = nn.Linear(width, config.kv_heads * head, bias=bias)
        self.o_proj = nn.Linear(config.heads * head, width, bias=bias)
        self.q_norm = nn.RMSNorm(head, eps=config.eps)
        self.k_norm = nn.RMSNorm(head, eps=config.eps)
        self.rope = Rotary(config.rope, head)

    def _split(self, x: mx.array, heads: int) -> mx.array:
        return x.reshape(1, x.shape[0], heads, -1).transpose(0, 2, 1, 3)

    def _keys_values(self, x: mx.array, position: int) -> tuple[mx.array, mx.array]:
        raw = self._split(self.k_proj(x), self.kv_heads)
        values = self._split(self.v_proj(x), self.kv_heads) if "v_proj" in self else raw
        if self.values_normed:
            values = mx.fast.rms_norm(values, None, self.eps)
        return self.rope(self.k_norm(raw), position), values

    def extend(self, context: mx.array, ring: ContextRing) -> None:
        """Append the projections of `context` `[n, hidden]` to `ring`, as far as they can ever be seen."""
        context = context[ring.skip(context.shape[0]) :]
        if context.shape[0]:
            ring.append(*self._keys_values(context, ring.length))

    def __call__(self, x: mx.array, ring: ContextRing) -> mx.array:
        """Block rows `[rows, hidden]` to `[rows, hidden]`; `ring` is as long afterwards as before."""
        rows, start = x.shape[0], ring.length
        queries = self.rope(self.q_norm(self._split(self.q_proj(x), self.heads)), start)
        keys, values = ring.with_block(*self._keys_values(x, start))
        out = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.scale, mask=ring.mask(rows)
        )
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(rows, -1))


class MLP(nn.Module):
    """SwiGLU; in Gemma's style GeGLU with the tanh approximation."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.gemma = config.style == "gemma4"
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """`[rows, hidden]` to `[rows, hidden]`."""
        gate = self.gate_proj(x)
        opened = nn.gelu_approx(gate) if self.gemma else nn.silu(gate)
        return self.down_proj(opened * self.up_proj(x))


class DraftLayer(nn.Module):
    """A pre-norm layer; with `conv_taps` each sublayer stands between two convolutions."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.eps)
        self.self_attn = BlockAttention(config)
        self.mlp = MLP(config)
        self.convolved = config.conv_taps > 0
        if self.convolved:
            self.attention_conv = GroupedConv(config)
            self.mlp_conv = GroupedConv(config)

    def __call__(self, x: mx.array, ring: ContextRing) -> mx.array:
        """`[rows, hidden]` to `[rows, hidden]`."""
        normed = self.input_layernorm(x)
        if not self.convolved:
            x = x + self.self_attn(normed, ring)
            return x + self.mlp(self.post_attention_layernorm(x))
        before, after = self.attention_conv.coefficients(normed)
        attended = self.self_attn(self.attention_conv.convolve(normed, before), ring)
        x = x + self.attention_conv.convolve(attended, after)
        normed = self.post_attention_layernorm(x)
        before, after = self.mlp_conv.coefficients(normed)
        return x + self.mlp_conv.convolve(self.mlp(self.mlp_conv.convolve(normed, before)), after)


class GemmaLayer(nn.Module):
    """Gemma 4's layer: norms on both sides of each sublayer, and a factor of the whole."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.eps
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_feedforward_layernorm = nn.RMSNorm(width, eps=eps)
        self.self_attn = BlockAttention(config)
        self.mlp = MLP(config)
        self.layer_scalar = mx.ones((1,))

    def __call__(self, x: mx.array, ring: ContextRing) -> mx.array:
        """`[rows, hidden]` to `[rows, hidden]`."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), ring))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class Backbone(nn.Module):
    """Parameter names are those of the published checkpoints."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        layer = GemmaLayer if config.style == "gemma4" else DraftLayer
        self.fc = nn.Linear(len(config.taps) * config.tap_width, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.eps)
        self.layers = [layer(config) for _ in range(config.layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.eps)

    def extend(self, rows: mx.array, rings: Sequence[ContextRing]) -> None:
        """Project tap rows `[n, taps * tap_width]` into every layer's context."""
        context = self.hidden_norm(self.fc(rows))
        for layer, ring in zip(self.layers, rings, strict=True):
            layer.self_attn.extend(context, ring)

    def __call__(self, block: mx.array, rings: Sequence[ContextRing]) -> mx.array:
        """Final hidden states `[rows, hidden]` of the embedded block `[rows, hidden]`."""
        for layer, ring in zip(self.layers, rings, strict=True):
            block = layer(block, ring)
        out: mx.array = self.norm(block)
        return out
