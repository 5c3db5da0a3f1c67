"""What a drafter is: everything its modules need to know, however its publisher packed it.

The readers of checkpoints fill these in; backbone and heads are built from nothing else. Conventions of
packagings (where a number stands, how taps are counted, which row proposes) are resolved by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Style: TypeAlias = Literal["qwen3", "gemma4"]
MarkovKind: TypeAlias = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling of rotary frequencies (Peng et al. 2023); `attention_factor` multiplies cos and sin."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


@dataclass(frozen=True)
class Rope:
    """Rotary positions. `interleaved`: pairs are (2i, 2i + 1), else (i, i + head_dim / 2). `pairs`: how many
    pairs rotate, the lowest first, None for all; the others keep frequency 0 (Gemma 4's proportional
    kind, where the exponents still count over the whole head)."""

    theta: float
    interleaved: bool = False
    pairs: int | None = None
    yarn: Yarn | None = None


@dataclass(frozen=True)
class LayerAttention:
    """How a layer's block rows see. `window` W: keys at distances below W, the row itself included, None for
    all. `causal`: a block row sees the block's rows up to itself, else all of them."""

    window: int | None = None
    causal: bool = False


@dataclass(frozen=True)
class BackboneConfig:
    """The transformer over the block.

    `hidden_size` is the drafter's residual width, `tap_width` that of one target tap. `vocabulary` counts
    the rows of the embedding table (the target's). `taps` are counted after the layer (0: after the
    first), -1 is the embedding as the first layer sees it. `attention` has one entry a layer.
    `embedding_scale` multiplies the raw rows of the table. `keys_are_values`: Gemma 4's `attention_k_eq_v`.
    `conv_taps` 0: no convolutions. `context_limit`: newest context rows that any layer keeps, None for all
    that its window asks for (heads trained on short contexts draft better when they see no more).
    """

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    eps: float
    rope: Rope
    block_size: int
    mask_token: int
    taps: tuple[int, ...]
    tap_width: int
    attention: tuple[LayerAttention, ...]
    style: Style = "qwen3"
    embedding_scale: float = 1.0
    attention_bias: bool = False
    keys_are_values: bool = False
    conv_taps: int = 0
    conv_group: int = 16
    context_limit: int | None = None


@dataclass(frozen=True)
class HeadConfig:
    """From final hidden states to proposals.

    `first_row` 0: row j predicts the next token, the anchor's row included (K = block_size proposals);
    1: rows from 1 on predict their own position (K = block_size - 1). Logits are
    `softcap * tanh(head(h) * multiplier / softcap)`, before any Markov bias. `draft_vocabulary`: rows of the
    head when it is reduced (then `d2t` maps draft ids to target ids by offset), None when it is the target's.
    `own_embedding` and `own_head`: tables in the checkpoint that serve instead of the target's.
    `markov` None: no prefix correction. `markov_candidates`: how many of a row's best tokens the correction
    may choose among, None for all (the full product reads the whole of W2 once a draft). `confidence` None:
    no confidence head; else what it reads.
    `selector_rank` 0: no candidate selector.
    """

    first_row: Literal[0, 1]
    multiplier: float = 1.0
    softcap: float | None = None
    draft_vocabulary: int | None = None
    own_embedding: bool = False
    own_head: bool = False
    markov: MarkovKind | None = None
    markov_rank: int = 0
    markov_candidates: int | None = None
    confidence: Literal["hidden", "hidden and markov"] | None = None
    selector_rank: int = 0
    selector_top_k: int = 0
