"""The transformer that DSpark, DFlash and DFlash 2 share: block queries over projected target taps.

Formulas after DeepSeek's DeepSpec, z-lab's DFlash (arXiv 2602.06036) and Inco AI's DFlash 2. A
committed token contributes keys and values only: `c = hidden_norm(fc(taps))`, then each layer's
`rope(k_norm(k_proj c))` and `v_proj c`. The block `[anchor, mask, ...]` attends to that context and to
itself in both directions; its own keys and values are never kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from dspark_tui.engine.drafters.base import Proposal, Tables
from dspark_tui.engine.protocol import Method
from dspark_tui.engine.sampling import Sampler


@dataclass(frozen=True)
class BackboneConfig:
    """Dimensions of a drafter, as read from its checkpoint. `conv_taps` 0: no convolutions."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    eps: float
    rope_theta: float
    block_size: int
    mask_token: int
    taps: tuple[int, ...]
    conv_taps: int = 0
    conv_group: int = 16


class ContextCache:
    """Keys and values of the committed context in one layer, at absolute positions from `base` on."""

    def __init__(self) -> None:
        self.base = 0
        self.kv = KVCache()

    @property
    def length(self) -> int:
        """The position after the last row."""
        return self.base + int(self.kv.offset)


class BlockAttention(nn.Module):
    """Attention of the block rows over `[context, block]`, both directions within the block."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        width, head = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.scale = config.heads, config.kv_heads, head**-0.5
        self.q_proj = nn.Linear(width, config.heads * head, bias=False)
        self.k_proj = nn.Linear(width, config.kv_heads * head, bias=False)
        self.v_proj = nn.Linear(width, config.kv_heads * head, bias=False)
        self.o_proj = nn.Linear(config.heads * head, width, bias=False)
        self.q_norm = nn.RMSNorm(head, eps=config.eps)
        self.k_norm = nn.RMSNorm(head, eps=config.eps)
        self.rope = nn.RoPE(head, traditional=False, base=config.rope_theta)

    def _split(self, x: mx.array, heads: int) -> mx.array:
        return x.reshape(1, x.shape[0], heads, -1).transpose(0, 2, 1, 3)

    def _keys_values(self, x: mx.array, position: int) -> tuple[mx.array, mx.array]:
        keys = self._split(self.k_proj(x), self.kv_heads)
        return self.rope(self.k_norm(keys), offset=position), self._split(self.v_proj(x), self.kv_heads)

    def extend(self, context: mx.array, cache: ContextCache) -> None:
        """Append the projections of `context` `[n, hidden]` to `cache`."""
        cache.kv.update_and_fetch(*self._keys_values(context, cache.length))

    def __call__(self, x: mx.array, cache: ContextCache) -> mx.array:
        """Block rows `[rows, hidden]` to `[rows, hidden]`; `cache` is as long afterwards as before."""
        rows, start = x.shape[0], cache.length
        queries = self.rope(self.q_norm(self._split(self.q_proj(x), self.heads)), offset=start)
        keys, values = cache.kv.update_and_fetch(*self._keys_values(x, start))
        cache.kv.trim(rows)
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(rows, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """`[rows, hidden]` to `[rows, hidden]`."""
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class GroupedConv(nn.Module):
    """DFlash 2's dynamic convolution over the rows of one block, before and after a sublayer.

    Coefficients are `base_kernel` `[side, tap, hidden]` plus `kernel_projection(n)`, one per row, side, tap
    and group of channels. Row 0 has no predecessor; nothing crosses rounds.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.conv_taps, self.group = config.conv_taps, config.conv_group
        self.groups = config.hidden_size // config.conv_group
        self.base_kernel = mx.zeros((2, config.conv_taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * config.conv_taps * self.groups, bias=False)

    def coefficients(self, normed: mx.array) -> mx.array:
        """Of every side, tap, row and channel: `[rows, hidden]` to `[side, tap, rows, hidden]`."""
        rows = normed.shape[0]
        delta = self.kernel_projection(normed).reshape(rows, 2, self.conv_taps, self.groups, 1)
        base = self.base_kernel.reshape(1, 2, self.conv_taps, self.groups, self.group)
        return (base + delta).reshape(rows, 2, self.conv_taps, -1).transpose(1, 2, 0, 3)

    def convolve(self, x: mx.array, taps: mx.array) -> mx.array:
        """`out[i] = sum over t of taps[t, i] * x[i - t]`; `taps` `[tap, rows, hidden]` of one side."""
        out = taps[0] * x
        for t in range(1, self.conv_taps):
            out = out + taps[t] * mx.pad(x[:-t], [(t, 0), (0, 0)])
        return out


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

    def __call__(self, x: mx.array, cache: ContextCache) -> mx.array:
        """`[rows, hidden]` to `[rows, hidden]`."""
        normed = self.input_layernorm(x)
        if not self.convolved:
            x = x + self.self_attn(normed, cache)
            return x + self.mlp(self.post_attention_layernorm(x))
        before, after = self.attention_conv.coefficients(normed)
        attended = self.self_attn(self.attention_conv.convolve(normed, before), cache)
        x = x + self.attention_conv.convolve(attended, after)
        normed = self.post_attention_layernorm(x)
        before, after = self.mlp_conv.coefficients(normed)
        return x + self.mlp_conv.convolve(self.mlp(self.mlp_conv.convolve(normed, before)), after)


class Backbone(nn.Module):
    """Parameter names are those of the published checkpoints."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.eps)
        self.layers = [DraftLayer(config) for _ in range(config.layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.eps)

    def extend(self, rows: mx.array, caches: Sequence[ContextCache]) -> None:
        """Project tap rows `[n, taps * hidden]` into every layer's context."""
        context = self.hidden_norm(self.fc(rows))
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.self_attn.extend(context, cache)

    def __call__(self, block: mx.array, caches: Sequence[ContextCache]) -> mx.array:
        """Final hidden states `[rows, hidden]` of the embedded block `[rows, hidden]`."""
        for layer, cache in zip(self.layers, caches, strict=True):
            block = layer(block, cache)
        out: mx.array = self.norm(block)
        return out


class BlockDrafter(ABC):
    """A block drafter with its context; a subclass turns the block's hidden states into a proposal."""

    method: Method

    def __init__(
        self, name: str, config: BackboneConfig, model: Backbone, tables: Tables, drafts: int, dtype: mx.Dtype
    ) -> None:
        self.name = name
        self.config = config
        self.model = model
        self.tables = tables
        self.drafts = drafts
        self.taps = config.taps
        self._dtype = dtype
        self._masks = mx.array([config.mask_token] * (config.block_size - 1), dtype=mx.uint32)
        self._caches = [ContextCache() for _ in range(config.layers)]

    @property
    def length(self) -> int:
        """The position after the last context row."""
        return self._caches[0].length

    def extend(self, rows: mx.array, position: int) -> None:
        """See `Drafter.extend`. Raises `ValueError` when `position` leaves a gap."""
        if position != self.length:
            raise ValueError(f"context rows for position {position}, but the context ends at {self.length}")
        self.model.extend(rows.astype(self._dtype), self._caches)

    def propose(self, anchor: int, k: int, sampler: Sampler) -> Proposal:
        """See `Drafter.propose`. The block keeps all its rows whatever `k` is: attention runs both ways, so
        a shorter block would change every prediction."""
        ids = mx.concatenate([mx.array([anchor], dtype=mx.uint32), self._masks])
        hidden = self.model(self.tables.embed(ids).astype(self._dtype), self._caches)
        finite = mx.isfinite(hidden).all()
        # Not a number has no place in an order, and what is picked by one could lie outside a table.
        hidden = mx.where(finite, hidden, mx.zeros_like(hidden))
        proposal = self._draft(hidden, anchor, min(k, self.drafts), sampler)
        return Proposal(proposal.tokens, proposal.q, proposal.confidence, finite)

    @abstractmethod
    def _draft(self, hidden: mx.array, anchor: int, k: int, sampler: Sampler) -> Proposal:
        """Turn final hidden states `[block, hidden]` into `k` drafts."""

    def truncate(self, length: int) -> None:
        """See `Drafter.truncate`."""
        for cache in self._caches:
            if length < cache.base:
                self.reset(length)
                return
            cache.kv.trim(max(0, cache.length - length))

    def reset(self, position: int = 0) -> None:
        """See `Drafter.reset`."""
        for cache in self._caches:
            cache.base, cache.kv = position, KVCache()

    def state(self) -> list[mx.array]:
        """See `Drafter.state`."""
        arrays = (array for cache in self._caches for array in (cache.kv.keys, cache.kv.values))
        return [array for array in arrays if array is not None]
