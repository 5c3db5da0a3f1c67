"""A drafter over many blocks at once, for training: one pass gives every anchor's block of every sequence.

The formulas are those of the engine's drafters (`dspark_tui.engine.drafters`), with the batch, the anchors
and their masks added: block rows of an anchor see the context before the anchor and their own block, never
another block. Weights go by their published names. A test compares the two.
"""

from __future__ import annotations

import mlx.core as mx

from dspark_tui.engine.drafters.config import BackboneConfig, LayerAttention
from training.weights import Weights


def linear(weights: Weights, name: str, x: mx.array) -> mx.array:
    """`x` `[..., inputs]` through the matrix `name`: `[..., outputs]`."""
    return x @ weights[f"{name}.weight"].T


def rotate(x: mx.array, positions: mx.array, theta: float) -> mx.array:
    """Rotary embedding in halves of `x` `[..., heads, head_dim]` at `positions`, of its leading shape."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-mx.arange(half, dtype=mx.float32) / half)
    angles = positions[..., None, None].astype(mx.float32) * frequencies
    cos, sin = mx.cos(angles), mx.sin(angles)
    first, second = x[..., :half].astype(mx.float32), x[..., half:].astype(mx.float32)
    turned = mx.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
    return turned.astype(x.dtype)


def _visible(rule: LayerAttention, anchors: mx.array, block: int, length: int) -> mx.array:
    """Which keys `[sequences, anchors, block, length + block]` each row sees: context, then its block."""
    rows = mx.arange(block)
    context = mx.arange(length)[None, None, None]
    at = anchors[:, :, None, None] + rows[None, None, :, None]
    seen = mx.broadcast_to(context < anchors[:, :, None, None], (*anchors.shape, block, length))
    inside = rows[None, :] <= rows[:, None] if rule.causal else mx.full((block, block), True)
    if rule.window is not None:
        seen = seen & (at - context < rule.window)
        inside = inside & (rows[:, None] - rows[None, :] < rule.window)
    inside = mx.broadcast_to(inside, (*anchors.shape, block, block))
    return mx.concatenate([seen, inside], axis=-1)


class _Attention:
    """What all layers share: positions, masks and the projected context."""

    def __init__(
        self, weights: Weights, config: BackboneConfig, context: mx.array, anchors: mx.array
    ) -> None:
        self.weights, self.config, self.context, self.anchors = weights, config, context, anchors
        self.at = anchors[:, :, None] + mx.arange(config.block_size)
        kinds = set(config.attention)
        length = context.shape[1]
        self.masks = {kind: _visible(kind, anchors, config.block_size, length) for kind in kinds}

    def _project(self, name: str, x: mx.array, heads: int) -> mx.array:
        return linear(self.weights, name, x).reshape(*x.shape[:-1], heads, self.config.head_dim)

    def _turned(self, name: str, norm: str, x: mx.array, heads: int, positions: mx.array) -> mx.array:
        split = self._project(name, x, heads)
        normed = mx.fast.rms_norm(split, self.weights[f"{norm}.weight"], self.config.eps)
        return rotate(normed, positions, self.config.rope.theta)

    def __call__(self, layer: int, x: mx.array) -> mx.array:
        """`x` `[sequences, anchors, block, hidden]`, normed, to the same shape."""
        c, name = self.config, f"layers.{layer}.self_attn"
        sequences, anchors, block, _ = x.shape
        length, shared = self.context.shape[1], c.heads // c.kv_heads
        places = mx.arange(length)[None]
        queries = self._turned(f"{name}.q_proj", f"{name}.q_norm", x, c.heads, self.at)
        # Heads that share keys stand together: [sequences, kv, anchors, block, shared, head_dim].
        queries = queries.reshape(sequences, anchors, block, c.kv_heads, shared, c.head_dim)
        queries = queries.transpose(0, 3, 1, 2, 4, 5) * c.head_dim**-0.5
        far_keys = self._turned(f"{name}.k_proj", f"{name}.k_norm", self.context, c.kv_heads, places)
        far_values = self._project(f"{name}.v_proj", self.context, c.kv_heads).transpose(0, 2, 1, 3)
        near_keys = self._turned(f"{name}.k_proj", f"{name}.k_norm", x, c.kv_heads, self.at)
        near_values = self._project(f"{name}.v_proj", x, c.kv_heads).transpose(0, 3, 1, 2, 4)
        shape = (sequences, c.kv_heads, anchors, block, shared)
        flat = queries.reshape(sequences, c.kv_heads, -1, c.head_dim)
        blocks = queries.reshape(sequences, c.kv_heads, anchors, block * shared, c.head_dim)
        far = (flat @ far_keys.transpose(0, 2, 3, 1)).reshape(*shape, length)
        near = (blocks @ near_keys.transpose(0, 3, 1, 4, 2)).reshape(*shape, block)
        mask = self.masks[c.attention[layer]][:, None, :, :, None]
        scores = mx.where(mask, mx.concatenate([far, near], axis=-1), mx.array(-mx.inf, far.dtype))
        share = mx.softmax(scores, axis=-1, precise=True)
        out = share[..., :length].reshape(sequences, c.kv_heads, -1, length) @ far_values
        near_share = share[..., length:].reshape(sequences, c.kv_heads, anchors, block * shared, block)
        out = out.reshape(*shape, -1) + (near_share @ near_values).reshape(*shape, -1)
        out = out.transpose(0, 2, 3, 1, 4, 5).reshape(sequences, anchors, block, -1)
        return linear(self.weights, f"{name}.o_proj", out)


class _Convolution:
    """DFlash 2's pair of convolutions around one sublayer, with the coefficients of its normed input."""

    def __init__(self, weights: Weights, config: BackboneConfig, name: str, normed: mx.array) -> None:
        groups = config.hidden_size // config.conv_group
        delta = linear(weights, f"{name}.kernel_projection", normed)
        delta = delta.reshape(*normed.shape[:-1], 2, config.conv_taps, groups, 1)
        base = weights[f"{name}.base_kernel"].reshape(2, config.conv_taps, groups, config.conv_group)
        self.taps = (delta + base).reshape(*normed.shape[:-1], 2, config.conv_taps, config.hidden_size)

    def __call__(self, side: int, x: mx.array) -> mx.array:
        """`out[i] = sum over t of taps[i, t] * x[i - t]` over the rows of each block, `x` with its shape."""
        out = self.taps[..., side, 0, :] * x
        for t in range(1, self.taps.shape[-2]):
            earlier = mx.pad(x[:, :, :-t], [(0, 0), (0, 0), (t, 0), (0, 0)])
            out = out + self.taps[..., side, t, :] * earlier
        return out


def _mlp(weights: Weights, name: str, x: mx.array) -> mx.array:
    gate = linear(weights, f"{name}.gate_proj", x)
    return linear(
        weights, f"{name}.down_proj", gate * mx.sigmoid(gate) * linear(weights, f"{name}.up_proj", x)
    )


def hidden_states(
    weights: Weights, config: BackboneConfig, taps: mx.array, blocks: mx.array, anchors: mx.array
) -> mx.array:
    """Final hidden states `[sequences, anchors, block, hidden]` of every anchor's block.

    `taps` `[sequences, length, taps * tap_width]` are the target's, `blocks` `[sequences, anchors, block,
    hidden]` the embedded rows (anchor, then masks), `anchors` `[sequences, anchors]` their positions.
    """

    def norm(name: str, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, weights[f"{name}.weight"], config.eps)

    context = norm("hidden_norm", linear(weights, "fc", taps))
    attention = _Attention(weights, config, context, anchors)
    x = blocks
    for i in range(config.layers):
        normed = norm(f"layers.{i}.input_layernorm", x)
        if config.conv_taps:
            conv = _Convolution(weights, config, f"layers.{i}.attention_conv", normed)
            x = x + conv(1, attention(i, conv(0, normed)))
            normed = norm(f"layers.{i}.post_attention_layernorm", x)
            conv = _Convolution(weights, config, f"layers.{i}.mlp_conv", normed)
            x = x + conv(1, _mlp(weights, f"layers.{i}.mlp", conv(0, normed)))
        else:
            x = x + attention(i, normed)
            x = x + _mlp(weights, f"layers.{i}.mlp", norm(f"layers.{i}.post_attention_layernorm", x))
    return norm("norm", x)
