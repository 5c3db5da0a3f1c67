"""Quantised weights in float32, against a NumPy reading of the packed numbers."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from numpy_drafters import unpack

from dspark_tui.engine.precision import drafter_dtype, on_cpu, to_float32, weight_bytes


class Mixed(nn.Module):
    """A table, a layer with a bias and one without, a norm, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 64)
        self.layers = [nn.Linear(64, 32, bias=True), nn.Linear(64, 8, bias=False)]
        self.norm = nn.RMSNorm(64)
        self.offsets = mx.array([1, 2, 3])


def stored(bits: int) -> tuple[Mixed, dict[str, np.ndarray]]:
    """A quantised bf16 model, and its matrices as NumPy reads them."""
    mx.random.seed(bits)
    model = Mixed()
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=32, bits=bits)
    wanted = {}
    for name, module in (
        ("embedding", model.embedding),
        *((f"layers.{i}", m) for i, m in enumerate(model.layers)),
    ):
        wanted[f"{name}.weight"] = unpack(module.weight, module.scales, module.biases, bits)
    return model, wanted


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_quantised_becomes_float32(bits: int) -> None:
    model, wanted = stored(bits)
    bias = np.array(model.layers[0].bias.astype(mx.float32))
    to_float32(model)
    parameters = dict(tree_flatten(model.parameters()))
    for name, weight in wanted.items():
        np.testing.assert_array_equal(np.array(parameters[name]), weight)
    np.testing.assert_array_equal(np.array(parameters["layers.0.bias"]), bias)
    assert "bias" not in model.layers[1]
    assert [type(m) for m in (model.embedding, *model.layers)] == [nn.Embedding, nn.Linear, nn.Linear]
    assert {name for name, v in parameters.items() if v.dtype != mx.float32} == {"offsets"}
    x = mx.array(np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32))
    np.testing.assert_allclose(
        np.array(model.layers[0](x)), np.array(x) @ wanted["layers.0.weight"].T + bias, atol=1e-4
    )
    np.testing.assert_allclose(
        np.array(model.embedding.as_linear(x)), np.array(x) @ wanted["embedding.weight"].T, atol=1e-4
    )


def test_plain_modules_are_only_widened() -> None:
    model = Mixed()
    model.set_dtype(mx.float16)
    before = np.array(model.layers[0].weight)
    to_float32(model)
    np.testing.assert_array_equal(np.array(model.layers[0].weight), before.astype(np.float32))
    assert model.norm.weight.dtype == mx.float32


def test_bytes_are_those_of_the_parameters() -> None:
    model = Mixed()
    assert weight_bytes(model) == 4 * (16 * 64 + 32 * 64 + 32 + 8 * 64 + 64 + 3)


def test_drafters_never_run_in_half_precision() -> None:
    assert drafter_dtype() == (mx.float32 if on_cpu() else mx.bfloat16)
