"""What every test shares. The fast BLAS must come before the first `import mlx`, hence the order here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dspark_tui.engine.blas import use_fast_blas
from dspark_tui.engine.models import demo
from dspark_tui.engine.paths import HOME_VARIABLE, cache_dir

BLAS = use_fast_blas()

# Other systems bring a fast BLAS themselves.
collect_ignore = [] if sys.platform == "linux" else ["engine/test_blas.py"]


@pytest.fixture(scope="session")
def demo_target() -> Path:
    """The demo target's folder, fetched on first use into the user's cache (DSPARK_TUI_TEST_CACHE: there)."""
    with pytest.MonkeyPatch.context() as patch:
        other = os.environ.get("DSPARK_TUI_TEST_CACHE")
        if other:
            patch.setenv(HOME_VARIABLE, other)
        path, _ = demo.ensure(lambda stage, done, total, unit: None)
    return path


@pytest.fixture(scope="session")
def demo_drafter_folders() -> dict[str, Path]:
    """The three bundled drafters by name."""
    from dspark_tui.engine.models.pairs import known_drafters

    shape = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}
    return {drafter.name: drafter.path for drafter in known_drafters(shape)}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty DSPARK_TUI_HOME of this test's own, inherited by processes that it starts."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv(HOME_VARIABLE, str(folder))
    return folder


@pytest.fixture
def demo_home(demo_target: Path, home: Path) -> Path:
    """As `home`, with the demo target in its cache."""
    models = cache_dir() / "models"
    models.mkdir(parents=True)
    (models / demo.FOLDER_NAME).symlink_to(demo_target)
    return home


@pytest.fixture
def empty_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache in place of the user's."""
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder
