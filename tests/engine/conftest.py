"""The backend with tiny models. Lying here, this file also lets the folders below find the helpers."""

from __future__ import annotations

from pathlib import Path

import pytest
from backend_harness import METHODS, SHAPE, VOCABULARY, Engine
from numpy_drafters import write_drafter
from tiny import tiny_llama

from dspark_tui.engine.models import pairs
from dspark_tui.engine.models.pairs import KnownDrafter


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target`, a target that can end its turn, and a drafter of every method."""
    top = tmp_path_factory.mktemp("models")
    tiny_llama(top / "target", VOCABULARY, context=300)
    for method in METHODS:
        write_drafter(top / method, method, SHAPE)
    return top


@pytest.fixture
def known(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three drafters are known for the tiny target."""
    from dspark_tui.engine import loader

    drafters = [KnownDrafter(f"{m}-tiny", m, models / m) for m in ("dflash2", "dspark", "dflash")]  # type: ignore[arg-type]
    monkeypatch.setattr(loader, "known_drafters", lambda config: list(drafters))
    assert pairs.known_drafters({}) == []


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def loaded(engine: Engine, models: Path) -> Engine:
    engine.load(models / "target")
    return engine
