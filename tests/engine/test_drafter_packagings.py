"""Drafters of every packaging in the engine: the text stays the target's, however few bits they have."""

from __future__ import annotations

from pathlib import Path

import pytest
from backend_harness import Engine, refusal
from tiny import tiny_llama
from twins import HIDDEN, TARGET, TWINS, VOCAB, write_twin

from dspark_tui.engine.precision import weight_bytes
from dspark_tui.engine.protocol import Load, Loaded

NAMES = sorted(name for name, twin in TWINS.items() if twin.target_layers in (None, TARGET))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packagings") / "target"
    return tiny_llama(folder, VOCAB, layers=TARGET, hidden=HIDDEN, context=300)


@pytest.fixture(scope="module")
def engine(target: Path) -> Engine:
    return Engine()


@pytest.fixture(scope="module")
def plain(engine: Engine, target: Path) -> list[int]:
    engine.load(target, "none")
    return engine.chat("hello", max_tokens=40).token_ids


def load(engine: Engine, target: Path, folder: Path, bits: int | None = None) -> Loaded:
    engine.backend.load(Load(1, str(target), str(folder), drafter_bits=bits), engine.events.append)
    said = engine.events[-1]
    assert isinstance(said, Loaded)
    return said


@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_the_targets(
    engine: Engine, target: Path, plain: list[int], name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "drafter"
    write_twin(folder, TWINS[name])
    said = load(engine, target, folder)
    assert (said.drafter.name, said.drafter.method, said.drafter.state) == (
        "drafter",
        TWINS[name].method,
        "active",
    )
    result = engine.chat("hello", max_tokens=40, rounds=True)
    assert result.token_ids == plain
    assert result.drafter.state != "fell_back"
    assert sum(stat.drafted for stat in result.rounds or []) > 0


@pytest.mark.parametrize("bits", [8, 4, 0])
def test_drafters_are_rounded_as_asked(
    engine: Engine, target: Path, plain: list[int], bits: int, tmp_path: Path
) -> None:
    stored = write_twin(tmp_path / "drafter", TWINS["dflash"])
    said = load(engine, target, tmp_path / "drafter", bits)
    session = engine.backend.session
    assert session is not None
    model = session.drafter.model  # type: ignore[attr-defined]
    weight = model.layers[1].mlp.up_proj.weight
    distinct = len(set(weight[0, :64].tolist()))
    assert distinct <= 2**bits if bits else distinct > 60
    assert (weight.tolist() == stored["layers.1.mlp.up_proj.weight"].tolist()) == (bits == 0)
    assert said.drafter.weight_bytes == weight_bytes(model)
    assert engine.chat("hello", max_tokens=40).token_ids == plain


def test_bits_that_nobody_offers(engine: Engine, target: Path, tmp_path: Path) -> None:
    write_twin(tmp_path / "drafter", TWINS["dflash"])
    sentence = refusal(lambda: load(engine, target, tmp_path / "drafter", 5))
    assert sentence == "drafter-bits is 5; give 8, 4, or 0 (drafters as they are stored)."


def test_a_drafter_for_another_tokenizer(engine: Engine, target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    write_twin(folder, TWINS["dflash"])
    text = (target / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text)
    assert load(engine, target, folder).drafter.state == "active"
    (folder / "tokenizer.json").write_text(text.replace('"a":3', '"a":4').replace('"a": 3', '"a": 4'))
    sentence = refusal(lambda: load(engine, target, folder))
    assert sentence == (
        "drafter is not usable here: drafter is for another target (its tokenizer gives token 4 to 'a')."
    )


def test_a_misfit_leaves_the_present_pair(
    engine: Engine, target: Path, plain: list[int], tmp_path: Path
) -> None:
    write_twin(tmp_path / "fits", TWINS["dflash"])
    write_twin(tmp_path / "other", TWINS["dflash default taps"])
    load(engine, target, tmp_path / "fits")
    before = engine.backend.session
    sentence = refusal(lambda: load(engine, target, tmp_path / "other"))
    assert sentence == ("other is not usable here: drafter is for another target (36 layers, not 12).")
    assert engine.backend.session is before
    assert engine.chat("hello", max_tokens=40).token_ids == plain
