"""Whether a drafter fits a target, and whose tables serve."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy_drafters import NumpyTables
from twins import DRAFT_VOCAB, HIDDEN, OFFSETS, TARGET, TWINS, VOCAB, write_twin

from dspark_tui.engine.drafters import checkpoint
from dspark_tui.engine.drafters.checkpoint import CheckpointError
from dspark_tui.engine.loader import table_bits


def own_tables(folder: Path, bits: int, tables: NumpyTables) -> tuple[bool, bool]:
    """Whether embedding and head of the drafter's own serve."""
    head = checkpoint.load(checkpoint.inspect(folder), "it", tables, table_bits=bits).head
    return head.own_embedding, head.own_head


@pytest.mark.parametrize(("bits", "own"), [(16, False), (8, False), (6, True), (4, True)])
def test_own_tables_serve_when_the_targets_are_coarse(tmp_path: Path, bits: int, own: bool) -> None:
    write_twin(tmp_path / "full", TWINS["deepspec vanilla"])
    write_twin(tmp_path / "reduced", TWINS["speculators dspark"])
    write_twin(tmp_path / "none", TWINS["dflash"])
    tables = NumpyTables(VOCAB, HIDDEN)
    assert own_tables(tmp_path / "full", bits, tables) == (own, own)
    assert own_tables(tmp_path / "reduced", bits, tables) == (own, True)
    assert own_tables(tmp_path / "none", bits, tables) == (False, False)


@pytest.mark.parametrize(
    ("config", "bits"),
    [
        ({}, 16),
        ({"quantization": {"group_size": 64, "bits": 4}}, 4),
        ({"quantization": {"group_size": 64, "bits": 8, "mode": "affine"}}, 8),
        ({"quantization": {"bits": 4, "model.embed_tokens": {"bits": 8}, "lm_head": {"bits": 6}}}, 6),
        ({"quantization": {"bits": 4, "language_model.model.embed_tokens": False, "lm_head": False}}, 16),
        ({"quantization": {"bits": 4, "model.embed_tokens": True, "lm_head": {"bits": 8}}}, 4),
        ({"quantization": {"bits": 8, "model.layers.0.mlp": {"bits": 2}}}, 8),
        ({"quantization": "4bit"}, 16),
    ],
)
def test_precision_of_the_targets_tables(config: dict[str, Any], bits: int) -> None:
    assert table_bits(config) == bits


def test_a_drafter_with_tables_of_its_own_may_be_narrower_than_the_target(tmp_path: Path) -> None:
    twin = TWINS["speculators dflash"]
    wider = replace(twin, shapes=twin.shapes | {"fc.weight": (HIDDEN, 3 * 96)})
    write_twin(tmp_path, wider, target_hidden_size=96)
    found = checkpoint.inspect(tmp_path)
    tables = NumpyTables(VOCAB, 96)
    assert checkpoint.misfit(found, tables, TARGET) is None
    drafter = checkpoint.load(found, "it", tables)
    assert (drafter.head.own_embedding, drafter.head.own_head) == (True, True)
    drafter.extend(mx.zeros((2, 3 * 96)), 0)
    wanted = "drafter is for another target (hidden size 96, not 64)"
    assert checkpoint.misfit(found, NumpyTables(VOCAB, HIDDEN), TARGET) == wanted


def test_a_drafter_that_borrows_has_to_be_as_wide_as_the_target(tmp_path: Path) -> None:
    twin = TWINS["dflash"]
    wider = replace(twin, shapes=twin.shapes | {"fc.weight": (HIDDEN, 3 * 96)})
    write_twin(tmp_path, wider, target_hidden_size=96)
    found = checkpoint.inspect(tmp_path)
    reason = checkpoint.misfit(found, NumpyTables(VOCAB, 96), TARGET)
    assert reason == "drafter is for another target (hidden size 64, not 96)"


@pytest.mark.parametrize(
    "wrong", [[*OFFSETS[:-1], VOCAB - DRAFT_VOCAB + 1], [-1, *OFFSETS[1:]], [1 << 40] * 30]
)
def test_d2t_that_leads_outside_the_vocabulary(tmp_path: Path, wrong: list[int]) -> None:
    write_twin(tmp_path, replace(TWINS["speculators dspark"], integers={"d2t": wrong}))
    found = checkpoint.inspect(tmp_path)
    with pytest.raises(CheckpointError, match="its d2t leads outside the vocabulary of 80 tokens"):
        checkpoint.load(found, "it", NumpyTables(VOCAB, HIDDEN))


@pytest.mark.parametrize(
    ("integers", "words"),
    [({}, "d2t is missing"), ({"d2t": OFFSETS[:-1]}, "d2t is 29, 30 was expected")],
)
def test_reduced_vocabulary_without_its_map(tmp_path: Path, integers: Any, words: str) -> None:
    write_twin(tmp_path, replace(TWINS["speculators dspark"], integers=integers))
    with pytest.raises(CheckpointError, match=words):
        checkpoint.inspect(tmp_path)


# ---------------------------------------------------------------------------- tokenizers

WORDS = {f"w{i}": i for i in range(70)}


def tokenizer(words: dict[str, int]) -> Any:
    return SimpleNamespace(get_vocab=lambda: words)


def reason(folder: Path, words: dict[str, int], model: Any) -> str | None:
    write_twin(folder, TWINS["dflash"])
    (folder / "tokenizer.json").write_text(json.dumps(model) if not isinstance(model, str) else model)
    return checkpoint.misfit(checkpoint.inspect(folder), NumpyTables(VOCAB, HIDDEN), TARGET, tokenizer(words))


def test_same_tokenizer_with_a_mask_token_of_its_own(tmp_path: Path) -> None:
    added = [{"id": 70, "content": "<|MASK|>"}]
    assert (
        reason(tmp_path, WORDS | {"<|im_end|>": 70}, {"model": {"vocab": WORDS}, "added_tokens": added})
        is None
    )
    pieces = [[word, -0.5] for word in WORDS]
    assert reason(tmp_path, WORDS, {"model": {"vocab": pieces}}) is None


def test_another_tokenizer(tmp_path: Path) -> None:
    swapped = WORDS | {"w5": 6, "w6": 5}
    said = reason(tmp_path, swapped, {"model": {"vocab": WORDS}})
    assert said == "drafter is for another target (its tokenizer gives token 5 to 'w5')"
    fewer = {word: number for word, number in WORDS.items() if number < 60}
    assert reason(tmp_path, fewer, {"model": {"vocab": WORDS}}) == (
        "drafter is for another target (its tokenizer gives token 60 to 'w60')"
    )


@pytest.mark.parametrize(
    "model", ["{", "[]", {"model": 3}, {"model": {"vocab": [3]}}, {"model": {"vocab": None}}]
)
def test_tokenizer_that_cannot_be_read(tmp_path: Path, model: Any) -> None:
    assert reason(tmp_path, WORDS, model) == (
        "its tokenizer.json cannot be read, so it is not certain that it is for this target"
    )


# ---------------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", "cannot be read"),
        ('{"weight_map": 3}', "cannot be read"),
        (
            '{"weight_map": {"a": "model-00002-of-00002.safetensors"}}',
            "lacks 'model-00002-of-00002.safetensors'",
        ),
        ('{"weight_map": {"a": "../elsewhere.safetensors"}}', "lacks '../elsewhere.safetensors'"),
        ('{"weight_map": {"a": "nul\\u0000"}}', "lacks"),
    ],
)
def test_index_that_leads_nowhere(tmp_path: Path, index: str, words: str) -> None:
    write_twin(tmp_path / "drafter", TWINS["dflash"])
    write_twin(tmp_path, TWINS["dflash"])
    (tmp_path / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (tmp_path / "drafter" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.inspect(tmp_path / "drafter")
    assert words in str(caught.value)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    write_twin(tmp_path, TWINS["dflash"])
    mx.save_safetensors(str(tmp_path / "again.safetensors"), {"fc.weight": mx.array(np.zeros((2, 2)))})
    with pytest.raises(CheckpointError, match=r"two of its files hold fc\.weight"):
        checkpoint.inspect(tmp_path)
    mx.save_safetensors(str(tmp_path / "again.safetensors"), {"encoder.fc.weight": mx.zeros((2, 2))})
    with pytest.raises(CheckpointError, match=r"it holds fc\.weight twice"):
        checkpoint.inspect(tmp_path)
