"""Published drafters at full size, on paper: what is made of them has the parameters that were published."""

from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from numpy_drafters import NumpyTables
from zoo import ZOO, Published, write_on_paper

from dspark_tui.engine import precision
from dspark_tui.engine.drafters import checkpoint
from dspark_tui.engine.drafters.formats.dflash import default_taps
from dspark_tui.engine.drafters.modules import build

SMALL = 32 * 1024 * 1024


class PaperTables(NumpyTables):
    """Tables by their dimensions only."""

    def __post_init__(self) -> None:
        self.seen = None


@pytest.fixture(params=sorted(ZOO))
def published(request: pytest.FixtureRequest) -> Published:
    return ZOO[request.param]


def test_parameters_and_tensors_are_the_published_ones(published: Published, tmp_path: Path) -> None:
    write_on_paper(tmp_path, published)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    found = checkpoint.inspect(tmp_path)
    assert (found.method, found.drafts) == (published.method, published.drafts)
    assert len(found.tensors) == published.tensors
    assert found.notes == ()
    made = {n: tuple(v.shape) for n, v in tree_flatten(build(found.config, found.head).parameters())}
    stored = {name.removesuffix(".weight"): shape for name, shape in published.shapes.items()}
    assert {name.removesuffix(".weight"): shape for name, shape in made.items()} == stored
    count = sum(math.prod(shape) for shape in made.values())
    if isinstance(published.parameters, int):
        assert count == published.parameters
    elif published.parameters is not None:
        assert round(count / 1e9, published.digits) == published.parameters
    if published.backbone is not None:
        aside = ("embed_tokens", "lm_head", "markov_head")
        rest = sum(math.prod(shape) for name, shape in made.items() if not name.startswith(aside))
        assert round(rest / 1e9, 3) == published.backbone
    tables = PaperTables(found.config.vocabulary, found.config.hidden_size)
    layers = found.target_layers
    assert layers is not None
    assert checkpoint.misfit(found, tables, layers) is None
    assert "(hidden size" in (checkpoint.misfit(found, PaperTables(100, 64), layers) or "")
    assert mx.get_peak_memory() - before < SMALL


def test_sizes_on_disk() -> None:
    """Gigabytes as their pages show them."""

    def gigabytes(name: str) -> float:
        return round(2 * sum(math.prod(shape) for shape in ZOO[name].shapes.values()) / 1e9, 2)

    assert gigabytes("deepseek-ai/dspark_qwen3_4b_block7") == 2.79
    assert gigabytes("deepseek-ai/dspark_qwen3_8b_block7") == 4.74
    assert gigabytes("deepseek-ai/dspark_qwen3_14b_block7") == 6.83
    assert gigabytes("deepseek-ai/dspark_gemma4_12b_block7") == 6.86
    assert gigabytes("z-lab/gemma-4-31B-it-DFlash") == 3.07
    assert gigabytes("incoai/Qwen3.8-27B-DFlash2") == 3.85


def test_what_they_are(tmp_path: Path) -> None:
    def read(name: str) -> checkpoint.Checkpoint:
        write_on_paper(tmp_path / name, ZOO[name])
        return checkpoint.inspect(tmp_path / name)

    second = read("incoai/Qwen3.8-27B-DFlash2")
    assert {(layer.window, layer.causal) for layer in second.config.attention} == {(2048, False)}
    assert (second.config.conv_taps, second.config.conv_group) == (2, 16)
    assert (second.head.selector_rank, second.head.selector_top_k) == (256, 16)
    mixed = read("z-lab/Qwen3.6-27B-DFlash")
    attention = [(layer.window, layer.causal) for layer in mixed.config.attention]
    assert attention == [(2048, True)] * 4 + [(None, False)]
    assert mixed.scaled_by_target
    gemma = read("deepseek-ai/dspark_gemma4_12b_block7")
    assert gemma.config.embedding_scale == 62.0
    assert gemma.config.rope.pairs == 64
    assert (gemma.config.kv_heads, gemma.config.head_dim, gemma.config.keys_are_values) == (1, 512, True)
    assert (gemma.head.softcap, gemma.head.first_row) == (30.0, 0)
    alike = read("deepseek-ai/dflash_qwen3_4b_block7")
    assert (alike.method, alike.head.first_row, alike.head.markov) == ("dflash", 0, None)


@pytest.mark.parametrize(
    ("layers", "target", "taps"),
    [
        (5, 36, (1, 9, 17, 25, 33)),
        (5, 40, (1, 10, 19, 28, 37)),
        (5, 64, (1, 16, 31, 46, 61)),
        (6, 60, (1, 12, 23, 35, 46, 57)),
        (1, 30, (15,)),
    ],
)
def test_default_taps_are_the_published_ones(layers: int, target: int, taps: tuple[int, ...]) -> None:
    assert default_taps(layers, target) == taps


def test_memory_of_a_quantised_drafter_is_known_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 4B head on a GPU: products in 8 or 4 bits with a scale and a bias (bf16) for 64 numbers, the rest
    bf16; its own tables only where the target's are coarser than 8 bits."""
    for module in (checkpoint, precision):
        monkeypatch.setattr(module, "on_cpu", lambda: False)
    write_on_paper(tmp_path, ZOO["deepseek-ai/dspark_qwen3_4b_block7"])
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    found = checkpoint.inspect(tmp_path)
    tables = PaperTables(151936, 2560)
    products = 5 * (2 * 4096 * 2560 + 2 * 1024 * 2560 + 3 * 9728 * 2560)
    table = 151936 * 2560
    wide = 1_393_133_569 - products - 2 * table
    for bits in (8, 4):
        narrow = products * bits // 8 + products // 64 * 4
        assert checkpoint.memory_bytes(found, tables, bits, table_bits=16) == narrow + 2 * wide
        own = 2 * (table + table // 64 * 4)
        assert checkpoint.memory_bytes(found, tables, bits, table_bits=4) == narrow + 2 * wide + own
    assert checkpoint.memory_bytes(found, tables, 0, table_bits=8) == 2 * (products + wide)
    assert checkpoint.memory_bytes(found, tables, None, table_bits=8) == (
        products + products // 64 * 4 + 2 * wide
    )
    assert mx.get_peak_memory() - before < SMALL
