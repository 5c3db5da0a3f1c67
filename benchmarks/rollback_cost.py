"""What a rejection costs on targets with recurrent state: replay against running the kept rows again.

    python benchmarks/rollback_cost.py [--rounds N]

A random hybrid of middle size (24 layers of width 512, 18 of them recurrent) verifies blocks of eight on a
context of 128 and keeps one, four or seven rows. Processor time of this process, the best of the rounds; both
ways alternate on the same weights.
"""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace
from typing import Any

from dspark_tui.engine.blas import use_fast_blas

BLAS = use_fast_blas()

import mlx.core as mx  # noqa: E402
from mlx_lm.models import qwen3_5  # noqa: E402

from dspark_tui.engine.protocol import ModelInfo  # noqa: E402
from dspark_tui.engine.target import Target  # noqa: E402

CONTEXT, BLOCK, KEPT = 128, 8, (1, 4, 7)
TEXT = {
    "model_type": "qwen3_5_text",
    "hidden_size": 512,
    "num_hidden_layers": 24,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32000,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "tie_word_embeddings": True,
    "rope_parameters": {"type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.25},
}


def hybrid() -> Target:
    """The target, with its replay tried out and found right."""
    mx.random.seed(0)
    model = qwen3_5.Model(qwen3_5.ModelArgs(model_type="qwen3_5", text_config=dict(TEXT)))
    model.eval()
    mx.eval(model.parameters())
    target = Target(model, SimpleNamespace(), ModelInfo("hybrid", "", "qwen3_5", "float32", 4096, 0))
    rejection(target, 2, replay=None)
    assert target._undo.replays
    return target


def rejection(target: Target, kept: int, replay: bool | None) -> tuple[float, float]:
    """Milliseconds of a verify forward and of the way back to its first `kept` rows, state computed."""
    tokens: Any = mx.random.randint(0, TEXT["vocab_size"], (CONTEXT + BLOCK,)).tolist()
    target.reset()
    target._undo.replays = replay
    target.forward(mx.array(tokens[:CONTEXT]), last_only=True)
    target.commit(tokens[:CONTEXT])
    mx.eval(target.state())
    begun = time.process_time()
    forward = target.forward(mx.array(tokens[CONTEXT:]))
    mx.eval(forward.logits, target.state())
    verified = time.process_time()
    target.commit(tokens[CONTEXT : CONTEXT + kept])
    target.roll_back()
    mx.eval(target.state())
    return (verified - begun) * 1e3, (time.process_time() - verified) * 1e3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    target = hybrid()
    print(f"verify of {BLOCK} rows on {CONTEXT}; {BLAS.note or 'fast BLAS'}")
    for kept in KEPT:
        found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for _ in range(rounds):
            for replay in found:
                found[replay].append(rejection(target, kept, replay))
        verify = min(ms for times in found.values() for ms, _ in times)
        for replay, times in found.items():
            back = min(ms for _, ms in times)
            way = "replay" if replay else "run again"
            print(f"keep {kept}: {way:9s} {back:6.1f} ms, {100 * back / verify:5.1f} % of {verify:.1f} ms")


if __name__ == "__main__":
    main()
