"""What must stay light, and what must never load MLX."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"textual", "mlx", "mlx_lm", "numpy", "transformers", "huggingface_hub", "msgspec"}

PROBE = """
import contextlib, io, json, sys
sys.argv = ["dspark-tui", *json.loads(sys.argv[1])]
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
    try:
        from dspark_tui.cli import main
        code = main()
    except SystemExit as end:
        code = end.code
tops = sorted({name.split(".")[0] for name in sys.modules})
print(json.dumps([code or 0, out.getvalue(), err.getvalue(), tops]))
"""


def loaded_by(arguments: list[str]) -> tuple[int, str, str, set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(arguments)], capture_output=True, text=True, check=True
    )
    code, out, err, modules = json.loads(done.stdout)
    return code, out, err, set(modules)


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["run", "--help"], ["models", "--help"]])
def test_answers_at_once(arguments: list[str]) -> None:
    code, out, _, modules = loaded_by(arguments)
    assert code == 0
    assert out
    assert modules & HEAVY == set()


@pytest.mark.parametrize(
    "arguments", [["--no-such-option"], ["run", "--max-tokens", "0", "hi"], ["models", "x"]]
)
def test_mistakes_are_found_at_once(arguments: list[str]) -> None:
    code, out, err, modules = loaded_by(arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("dspark-tui")
    assert modules & HEAVY == set()


def terminal_modules() -> list[str]:
    """Every module of the terminal program, the engine's parts left out."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "dspark_tui").rglob("*.py")
    ]
    return sorted(name.removesuffix(".__init__") for name in names if not name.endswith("__main__"))


def test_the_terminal_program_never_loads_mlx() -> None:
    program = f"import importlib, sys\nfor name in {terminal_modules()!r}: importlib.import_module(name)\n"
    program += "print(sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"mlx", "mlx_lm", "numpy", "transformers"} & set(json.loads(done.stdout.replace("'", '"')))


def engine_modules() -> list[str]:
    """Every module of the engine and the kernels."""
    return sorted(
        "dspark_tui." + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for folder in ("engine", "kernels")
        for path in (ROOT / folder).rglob("*.py")
    )


def test_the_engine_never_loads_textual() -> None:
    program = f"import importlib, sys\nfor name in {engine_modules()!r}: importlib.import_module(name)\n"
    program += "print('textual' in sys.modules, 'mlx.core' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
