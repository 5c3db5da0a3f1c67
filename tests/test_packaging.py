"""Wheel and sdist hold what the checkout holds, and run where the checkout is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from dspark_tui import __version__

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "dspark_tui": "dspark_tui",
    "engine": "dspark_tui/engine",
    "kernels": "dspark_tui/kernels",
    "themes": "dspark_tui/themes",
}
INFO = f"dspark_tui-{__version__}.dist-info"


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, env=os.environ | environment
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def sources() -> dict[str, Path]:
    """Every file of the packages by its name in the wheel."""
    return {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}": path
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


def test_every_package_is_named_in_the_build() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {
        name.rsplit("/", 1)[0].replace("/", ".") for name in sources() if name.endswith("/__init__.py")
    }
    assert set(setuptools["packages"]) == packages


def test_the_wheel_holds_the_packages_and_nothing_else(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as archive:
        names = {name for name in archive.namelist() if not name.startswith(INFO)}
        assert names == set(sources())
        for name, path in sources().items():
            assert archive.read(name) == path.read_bytes(), name
        licences = {name for name in archive.namelist() if name.startswith(f"{INFO}/licenses/")}
        assert {name.split("/licenses/")[1] for name in licences} == {
            "LICENSE",
            "NOTICE",
            "engine/demo_drafters/LICENSE",
        }
    assert built["wheel"].name == f"dspark_tui-{__version__}-py3-none-any.whl"


def test_the_sdist_holds_the_sources(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {path.relative_to(ROOT).as_posix() for path in sources().values()} <= names
    assert {"LICENSE", "NOTICE", "README.md", "pyproject.toml"} <= names


@pytest.mark.demo
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_installed_it_runs_outside_the_checkout(
    built: dict[str, Path], kind: str, tmp_path: Path, demo_home: Path
) -> None:
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", venv)
    python = venv / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", built[kind], cwd=tmp_path)
    # What it depends on is taken from here; a folder in a .pth file brings no editable install along.
    (site,) = venv.glob("lib/python*/site-packages")
    here = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "dependencies.pth").write_text(f"{here}\n")
    probe = (
        "import importlib.util, json, dspark_tui, dspark_tui.engine, dspark_tui.kernels, dspark_tui.themes\n"
        "found = [name for name in ('engine', 'kernels', 'themes') if importlib.util.find_spec(name)]\n"
        "print(json.dumps([dspark_tui.__file__, dspark_tui.engine.__file__, found]))"
    )
    top, engine, found = json.loads(run(python, "-c", probe, cwd=tmp_path).stdout)
    assert Path(top).is_relative_to(site)
    assert Path(engine).is_relative_to(site / "dspark_tui")
    assert found == []
    command = venv / "bin" / "dspark-tui"
    assert run(command, "--version", cwd=tmp_path).stdout == f"dspark-tui {__version__}\n"
    said = run(command, "run", "--demo", "--json", "--max-tokens", "8", "Say hello.", cwd=tmp_path).stdout
    answer = json.loads(said)
    assert answer["generated_tokens"] == 8
    assert answer["drafter"]["method"] == "dflash2"
    # On a busy machine drafting may not pay.
    assert answer["drafter"]["state"] in ("active", "parked")
