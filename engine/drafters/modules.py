"""From a drafter's configuration to its modules, and from loaded modules to a drafter."""

from __future__ import annotations

import mlx.core as mx

from dspark_tui.engine.drafters.base import Tables
from dspark_tui.engine.drafters.block import BlockDrafter
from dspark_tui.engine.drafters.config import BackboneConfig, HeadConfig
from dspark_tui.engine.drafters.dflash import DFlash
from dspark_tui.engine.drafters.dflash2 import DFlash2
from dspark_tui.engine.drafters.dspark import DSpark
from dspark_tui.engine.drafters.heads import DrafterModel
from dspark_tui.engine.protocol import Method


def build(config: BackboneConfig, head: HeadConfig) -> DrafterModel:
    """The modules with parameters that are not evaluated: shapes and published names, no memory yet.

    Raises ValueError, in words, when the two configurations contradict themselves.
    """
    if problem := contradiction(config, head):
        raise ValueError(problem)
    return DrafterModel(config, head)


def contradiction(config: BackboneConfig, head: HeadConfig) -> str | None:
    """What cannot be built, or None."""
    if len(config.attention) != config.layers:
        return f"{len(config.attention)} kinds of attention were given for {config.layers} layers"
    if config.block_size <= head.first_row:
        return (
            f"a block of {config.block_size} rows whose row {head.first_row} is the first to draft is empty"
        )
    if config.kv_heads < 1 or config.heads % config.kv_heads:
        return f"{config.heads} heads cannot share {config.kv_heads} key heads"
    if config.conv_taps and config.hidden_size % config.conv_group:
        return f"convolution groups of {config.conv_group} do not divide {config.hidden_size} channels"
    if config.conv_taps and config.style != "qwen3":
        return f"convolutions do not go with {config.style} layers"
    if any(layer.window is not None and layer.window < 1 for layer in config.attention):
        return "an attention window must hold a row at least"
    if head.draft_vocabulary is not None and not head.own_head:
        return "a reduced vocabulary needs a head of its own"
    if head.markov is not None and head.markov_rank < 1:
        return "a Markov head needs a rank"
    if head.markov_candidates is not None and head.markov_candidates < 1:
        return "a Markov head needs a candidate to choose"
    if head.confidence == "hidden and markov" and head.markov is None:
        return "the confidence head reads a Markov head that is not there"
    if head.selector_rank:
        if head.draft_vocabulary is not None or head.markov is not None or head.confidence is not None:
            return "a candidate selector does not go with a reduced vocabulary, Markov or confidence head"
        if not 0 < head.selector_top_k <= config.vocabulary:
            return f"{head.selector_top_k} candidates cannot be picked from {config.vocabulary} tokens"
    return None


def bind(
    name: str,
    method: Method,
    config: BackboneConfig,
    head: HeadConfig,
    model: DrafterModel,
    tables: Tables,
    dtype: mx.Dtype,
    d2t: mx.array | None = None,
    mask_embedding: mx.array | None = None,
) -> BlockDrafter:
    """A drafter over `model`, as `build` made it, with weights of `dtype`.

    `d2t` `[draft vocabulary]` integers: target id minus draft id. `mask_embedding` `[hidden]`: a row that
    stands for the mask token. Raises ValueError when they do not fit, or for DFlash 2 in float16.
    """
    kind: type[BlockDrafter] = DFlash
    if head.selector_rank:
        kind = DFlash2
    elif head.markov is not None or head.confidence is not None:
        kind = DSpark
    if dtype == mx.float16 and (head.selector_rank or config.conv_taps):
        raise ValueError("DFlash 2 overflows float16; it runs in bfloat16 or float32")
    return kind(name, method, config, head, model, tables, dtype, d2t, mask_embedding)
