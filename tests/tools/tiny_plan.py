"""A drafter for the tiny target of `tiny_folder`."""

from __future__ import annotations

from training.design import Design, Method, Wishes, design

CONFIG = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}


def plan(method: Method, drafts: int = 4, rank: int = 6) -> Design:
    """A drafter for the tiny target."""
    wishes = Wishes(method, drafts=drafts, layers=2, taps=(0, 2), rank=rank, top_k=5, mask_token=0)
    return design(wishes, CONFIG, hidden=64, vocabulary=64)
