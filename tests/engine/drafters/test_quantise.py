"""Drafters quantised as they are loaded: which tensors, in which numbers, on either device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from numpy_drafters import NumpyTables, Shape, write_drafter
from twins import HIDDEN, LAYERS, TWINS, VOCAB, write_twin

from dspark_tui.engine import precision
from dspark_tui.engine.drafters import checkpoint
from dspark_tui.engine.precision import weight_bytes

PRODUCTS = {
    f"layers.{i}.{name}_proj"
    for i in range(LAYERS)
    for name in (
        "self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"
    )
}  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (checkpoint, precision):
        monkeypatch.setattr(module, "on_cpu", lambda: False)


def load(folder: Path, **options: Any) -> Any:
    """The modules of a twin's drafter."""
    return checkpoint.load(checkpoint.inspect(folder), "it", NumpyTables(VOCAB, HIDDEN), **options).model


def to_bf16(values: Any) -> Any:
    """To nearest, ties to even."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return bits.astype(np.uint32).view(np.float32)


def quantised(model: Any) -> dict[str, int]:
    """Bits by the path of every quantised module."""
    kinds = (nn.QuantizedLinear, nn.QuantizedEmbedding)
    return {path: module.bits for path, module in model.named_modules() if isinstance(module, kinds)}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["deepspec rnn", "dflash", "dflash2", "speculators dspark"])
@pytest.mark.parametrize(("asked", "bits"), [(None, 8), (8, 8), (4, 4)])
def test_only_the_layers_products_become_narrow(
    tmp_path: Path, name: str, asked: int | None, bits: int
) -> None:
    stored = write_twin(tmp_path, TWINS[name])
    model = load(tmp_path, bits=asked)
    tables = {"lm_head": 8} if name.startswith("speculators") else {}
    assert quantised(model) == dict.fromkeys(PRODUCTS, bits) | tables
    for path, value in tree_flatten(model.parameters()):
        module = path.rpartition(".")[0]
        if module in PRODUCTS or module in tables:
            continue
        assert value.dtype == mx.bfloat16, path
        known = stored.get(path, stored.get(path.removesuffix(".weight")))
        np.testing.assert_array_equal(np.array(value.astype(mx.float32)), to_bf16(known), err_msg=path)


@pytest.mark.usefixtures("gpu")
def test_own_tables_take_eight_bits(tmp_path: Path) -> None:
    write_twin(tmp_path, TWINS["deepspec vanilla"])
    own = {"embed_tokens": 8, "lm_head": 8}
    assert quantised(load(tmp_path, bits=4, table_bits=4)) == dict.fromkeys(PRODUCTS, 4) | own
    assert quantised(load(tmp_path, bits=4, table_bits=8)) == dict.fromkeys(PRODUCTS, 4)
    wide = load(tmp_path, bits=0, table_bits=4)
    assert quantised(wide) == {}
    assert wide.embed_tokens.weight.dtype == mx.bfloat16


@pytest.mark.parametrize("bits", [8, 4])
def test_numbers_go_to_the_levels_of_their_group(tmp_path: Path, bits: int) -> None:
    """On the CPU the numbers are those that a GPU keeps in `bits` bits, in float32."""
    stored = write_twin(tmp_path, TWINS["dflash"])
    model = load(tmp_path, bits=bits)
    assert quantised(model) == {}
    name = "layers.0.mlp.up_proj.weight"
    kept, original = np.array(model.layers[0].mlp.up_proj.weight), to_bf16(stored[name])
    assert kept.dtype == np.float32
    groups, wide = kept.reshape(-1, 64), original.reshape(-1, 64)
    for row, known in zip(groups, wide, strict=True):
        levels = np.unique(row)
        assert len(levels) <= 2**bits
        step = np.diff(levels).min()
        # Evenly spaced; whatever lies between the outermost goes to the nearest. Scale and bias are rounded
        # to bf16 themselves, which moves the far levels.
        np.testing.assert_allclose(np.round(np.diff(levels) / step) * step, np.diff(levels), rtol=0.02)
        inside = (known >= row.min()) & (known <= row.max())
        moved = 2**-9 * (2**bits * step + np.abs(row).max())
        assert np.abs(row - known)[inside].max() < 0.5 * step + moved
        assert np.abs(row - known).max() < step + moved
    assert len(np.unique(groups[0])) > 8
    np.testing.assert_array_equal(np.array(model.fc.weight), stored["fc.weight"])


@pytest.mark.parametrize("name", ["dflash", "deepspec gemma4", "speculators dspark"])
@pytest.mark.parametrize("bits", [8, 4])
def test_both_devices_get_the_same_numbers(
    tmp_path: Path, name: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_twin(tmp_path, TWINS[name])
    wide = load(tmp_path, bits=bits, table_bits=4)
    with monkeypatch.context() as patch:
        for module in (checkpoint, precision):
            patch.setattr(module, "on_cpu", lambda: False)
        narrow = load(tmp_path, bits=bits, table_bits=4)
    assert quantised(narrow)
    for path in quantised(narrow):
        there = dict(narrow.named_modules())[path]
        here = dict(wide.named_modules())[path]
        numbers = mx.dequantize(
            there.weight,
            there.scales.astype(mx.float32),
            there.biases.astype(mx.float32),
            group_size=there.group_size,
            bits=there.bits,
        )
        np.testing.assert_array_equal(np.array(here.weight), np.array(numbers), err_msg=path)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("asked", "bits"), [(None, 5), (0, 5), (8, 8), (4, 4)])
def test_a_quantised_drafter_stays_as_it_is_unless_asked(
    tmp_path: Path, asked: int | None, bits: int
) -> None:
    write_drafter(tmp_path, "dspark", bits=5)
    found = quantised(load(tmp_path, bits=asked))
    assert {path: found[path] for path in PRODUCTS} == dict.fromkeys(PRODUCTS, bits)
    assert {path: b for path, b in found.items() if path not in PRODUCTS} == {
        "fc": 5, "markov_head.markov_w1": 5, "markov_head.markov_w2": 5
    }  # fmt: skip


def test_requantised_numbers_start_from_the_dequantised_ones(tmp_path: Path) -> None:
    known = write_drafter(tmp_path, "dflash", bits=5)
    for bits, near in ((8, 0.02), (4, 0.2)):
        model = load(tmp_path, bits=bits)
        name = "layers.1.mlp.down_proj.weight"
        error = np.abs(np.array(model.layers[1].mlp.down_proj.weight) - known[name])
        assert 0 < error.max() < near * np.abs(known[name]).max()
        np.testing.assert_array_equal(np.array(model.fc.weight), known["fc.weight"])


def test_groups_of_what_divides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """96 columns take groups of 32; 40 columns stay wide."""
    for module in (checkpoint, precision):
        monkeypatch.setattr(module, "on_cpu", lambda: False)
    shape = Shape(intermediate=40, heads=4, head_dim=24)
    write_drafter(tmp_path, "dflash", shape)
    model = load(tmp_path)
    modules = dict(model.named_modules())
    assert "layers.0.mlp.down_proj" not in quantised(model)
    assert modules["layers.0.self_attn.o_proj"].group_size == 32
    assert modules["layers.0.self_attn.q_proj"].group_size == 64


@pytest.mark.parametrize("name", sorted(TWINS))
@pytest.mark.parametrize(("bits", "table_bits"), [(None, 16), (4, 4), (0, 4)])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_memory_is_known_before_loading(
    tmp_path: Path,
    name: str,
    bits: int | None,
    table_bits: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (checkpoint, precision):
        monkeypatch.setattr(module, "on_cpu", lambda: device == "cpu")
    write_twin(tmp_path, TWINS[name])
    said = checkpoint.memory_bytes(
        checkpoint.inspect(tmp_path), NumpyTables(VOCAB, HIDDEN), bits=bits, table_bits=table_bits
    )
    assert said == weight_bytes(load(tmp_path, bits=bits, table_bits=table_bits))
