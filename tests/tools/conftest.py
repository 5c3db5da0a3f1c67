"""A tiny target on disk, and the pieces of a training run over it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import load_tiny, tiny_llama
from training.teacher import Teacher

from dspark_tui.engine.target import Target


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("targets") / "tiny", tied=True, gain=1.0)


@pytest.fixture
def target(tiny_folder: Path) -> Target:
    return load_tiny(tiny_folder)[0]


@pytest.fixture
def teacher(target: Target) -> Teacher:
    return Teacher(target, (0, 2))
