"""Rounds with random rejections on a tiny target, for tests of what they leave in its cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st
from tiny import TARGETS, build_target

from dspark_tui.engine.target import Target

VOCABULARY = 64
EXACT = [name for name in TARGETS if name != "deepseek_v41"]
"""deepseek_v41 rounds its cache to 4-bit and 8-bit numbers, so rows computed together and alone may land on
neighbouring ones; it has a test of its own."""
HYBRIDS = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "lfm2_moe", "nemotron_h"]


@functools.cache
def target_of(name: str) -> Target:
    return build_target(name, VOCABULARY)


Move = tuple[str, int, int]
"""What to do, and two numbers between 1 and 9: rows, and rows kept (cut to the rows there are)."""
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["block", "block", "block", "step", "chunk", "stopped"]), *[st.integers(1, 9)] * 2
    ),
    min_size=1,
    max_size=14,
)


def draw(random: np.random.Generator, count: int) -> list[int]:
    return [int(token) for token in random.integers(0, VOCABULARY, count)]


def play(target: Target, prompt: int, moves: Sequence[Move], seed: int = 0) -> list[int]:
    """A prompt, then blocks of which the first rows are kept, plain steps, whole chunks, and chunks that are
    stopped before they count. Returns the tokens that stand."""
    random = np.random.default_rng(seed)
    target.reset()
    tokens = draw(random, prompt)
    target.forward(mx.array(tokens), last_only=True)
    target.commit(tokens)
    for what, rows, wanted in moves:
        rows = 1 if what == "step" else rows
        block = draw(random, rows)
        kept = block[: min(wanted, rows)] if what == "block" else [] if what == "stopped" else block
        forward = target.forward(mx.array(block), last_only=what in ("chunk", "stopped"))
        mx.eval(forward.logits)
        assert target.length == len(tokens) + rows
        target.commit(kept)
        target.roll_back()
        tokens += kept
        assert target.tokens == tokens
        assert target.length == len(tokens)
    return tokens


LONG: list[Move] = [("block", 1 + i % 9, 1 + (i * 5) % 7) for i in range(24)]
