"""A drafter's weights by their published names: fresh ones, and the checkpoint they become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.utils import tree_flatten

from dspark_tui.engine.drafters.modules import build
from training.design import Design

Weights: TypeAlias = dict[str, mx.array]

_UNSUFFIXED = ("predecessor_codebook.weight", "successor_codebook.weight")


def shapes(design: Design) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the checkpoint: the parameters of the engine's own modules."""
    parameters: Any = tree_flatten(build(design.backbone, design.head))
    found = {}
    for name, value in sorted(parameters):
        # Published codebooks have no suffix.
        found[name.removesuffix(".weight") if name.endswith(_UNSUFFIXED) else name] = tuple(value.shape)
    return found


def _deviation(name: str, layers: int) -> float:
    """Standard deviation of a fresh matrix. What corrects the backbone's logits starts at nothing, so that
    a fresh drafter is its backbone alone; one factor of each product is not nothing, so that it can learn."""
    if name.endswith(("markov_w2.weight", "successor_codebook", "kernel_projection.weight")):
        return 0.0
    if name.endswith(("markov_w1.weight", "predecessor_codebook")):
        return 0.3
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return float(0.02 / (2 * layers) ** 0.5)
    return 0.02


def fresh(design: Design, seed: int) -> Weights:
    """Float32 weights to start from: normal matrices, norms of one, convolutions that pass their input on."""
    weights: Weights = {}
    for number, (name, shape) in enumerate(shapes(design).items()):
        if "norm" in name:
            weights[name] = mx.ones(shape)
        elif name.endswith("base_kernel"):
            weights[name] = mx.stack([mx.ones((2, shape[2])), *[mx.zeros((2, shape[2]))] * (shape[1] - 1)], 1)
        elif name.endswith("bias"):
            weights[name] = mx.zeros(shape)
        else:
            key = mx.random.key(seed * 100_003 + number)
            weights[name] = _deviation(name, design.backbone.layers) * mx.random.normal(shape, key=key)
    mx.eval(weights)
    return weights


def write_safetensors(file: Path, arrays: Weights, metadata: dict[str, str]) -> None:
    """Write `file` whole or not at all: an interrupted write leaves the one before."""
    beside = file.with_name(f".{file.name}.new.safetensors")
    mx.save_safetensors(str(beside), arrays, metadata)
    beside.replace(file)


def write_json(file: Path, value: Any) -> None:
    """Write `file` whole or not at all."""
    beside = file.with_name(f".{file.name}.new")
    beside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    beside.replace(file)


def export(folder: Path, design: Design, weights: Weights) -> None:
    """Write the drafter as a checkpoint in the published schema: config.json and bf16 tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: value.astype(mx.bfloat16) for name, value in weights.items()}
    write_safetensors(folder / "model.safetensors", stored, {"format": "mlx"})
    write_json(folder / "config.json", design.config)
