"""Write rows of the demo target, read from its published GGUF with NumPy alone, for the tests.

python tools/golden_rows.py SmolLM2-135M-Instruct.Q4_1.gguf > tests/data/demo_rows.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "engine"))

import gguf_file  # type: ignore[import-not-found]

_ROWS = [
    ("token_embd", "model.embed_tokens", 16, None),
    ("token_embd", "model.embed_tokens", 49151, None),
    ("blk.0.attn_q", "model.layers.0.self_attn.q_proj", 1, 9),
    ("blk.0.attn_q", "model.layers.0.self_attn.q_proj", 575, 9),
    ("blk.7.attn_k", "model.layers.7.self_attn.k_proj", 33, 3),
    ("blk.29.attn_k", "model.layers.29.self_attn.k_proj", 130, 3),
    ("blk.12.attn_v", "model.layers.12.self_attn.v_proj", 100, None),
    ("blk.20.attn_output", "model.layers.20.self_attn.o_proj", 7, None),
    ("blk.3.ffn_gate", "model.layers.3.mlp.gate_proj", 1500, None),
    ("blk.29.ffn_down", "model.layers.29.mlp.down_proj", 300, None),
]


def main() -> None:
    """Print the rows as JSON: 64 values of each."""
    reader = gguf_file.Reader(Path(sys.argv[1]).read_bytes())
    rows = []
    for gguf_name, name, row, heads in _ROWS:
        tensor = reader.tensor(f"{gguf_name}.weight")
        if heads:
            tensor = gguf_file.half_split(tensor, heads)
        rows.append(
            {"name": name, "row": row, "values": [float(f"{value:.7g}") for value in tensor[row][:64]]}
        )
    print("[\n" + ",\n".join(json.dumps(entry) for entry in rows) + "\n]")


if __name__ == "__main__":
    main()
