"""What answers at once imports nothing heavy and is quick."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

HEAVY = ("textual", "rich", "mlx", "mlx_lm", "numpy", "asyncio", "msgspec", "huggingface_hub", "transformers")
PROBE = """
import sys
from dspark_tui.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
import json
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), file=sys.stderr)
"""


def imported(*arguments: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, check=True)
    names: list[str] = json.loads(done.stderr.splitlines()[-1])
    return set(names)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],
        ["run", "--help"],
        ["bogus"],
        ["run", "hi"],
        ["run", "--demo", "--max-tokens", "no", "hi"],
        ["run", "--demo", "-d", "a b", "hi"],
        ["models", "list", "--colour"],
    ],
    ids=" ".join,
)
def test_quick_answers_import_nothing_heavy(arguments: list[str]) -> None:
    assert imported(*arguments).isdisjoint(HEAVY)


def test_a_checked_mistake_imports_neither_screen_nor_models() -> None:
    found = imported("run", "--demo", "--temperature", "9", "hi")
    assert found.isdisjoint({"textual", "rich", "mlx", "mlx_lm", "numpy"})


def test_version_takes_at_most_a_tenth_of_a_second() -> None:
    """The best of several tries: other work on the machine must not fail this."""
    best = min(timed() for _ in range(10))
    assert best <= 0.1


def timed() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "dspark_tui", "--version"], check=True, capture_output=True)
    return time.perf_counter() - began
