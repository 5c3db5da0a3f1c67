"""Starting and ending the engine process: its private folder, its log, and words for how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from dspark_tui.engine.paths import log_dir, runtime_dir
from dspark_tui.engine.protocol import MAX_LINE_BYTES

SOCKET_NAME = "s"
MAX_SOCKET_PATH_BYTES = 100
"""macOS allows 104 bytes with the terminating zero, Linux 108."""

LOG_BYTES = 1_000_000
"""The log is set aside (one older copy is kept) when an engine starts and finds it larger."""

STALE_SECONDS = 3600.0
PREFIX = "e-"
START_SECONDS = 30.0
"""How long a new engine process may take until it answers."""


class NotStarted(Exception):
    """A new engine process did not come up; the text is the sentence for the user."""


@dataclass(frozen=True)
class Spawned:
    """A started engine process. `folder` is private to it and goes when it ends."""

    process: asyncio.subprocess.Process
    folder: Path
    socket: Path
    log_path: Path


async def spawn(fake: Path | None = None) -> Spawned:
    """Start an engine process in a session of its own, so that signals of this terminal pass it by.

    Raises OSError when a folder or the process cannot be made.
    """
    folder = private_folder()
    try:
        path = folder / SOCKET_NAME
        log_path, log = _open_log()
        # -P: a folder or file in the current directory must not shadow a module of the engine.
        arguments = ["-P", "-m", "dspark_tui.engine.host", "--socket", str(path), "--log", str(log_path)]
        arguments.append("--remove-folder")
        if fake is not None:
            arguments += ["--fake", str(fake)]
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
    except BaseException:
        remove_folder(folder)
        raise
    return Spawned(process, folder, path, log_path)


async def connect_to_new(spawned: Spawned) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect as soon as the new process listens. Raises NotStarted when it does not come to that."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_SECONDS
    pause = 0.005
    while True:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return await asyncio.open_unix_connection(str(spawned.socket), limit=MAX_LINE_BYTES)
        if spawned.process.returncode is not None:
            words = exit_words(spawned.process.returncode)
            raise NotStarted(f"The engine {words} before it was ready; its log is {spawned.log_path}.")
        if loop.time() > deadline:
            raise NotStarted(
                f"The engine was not ready within {START_SECONDS:g} s; its log is {spawned.log_path}."
            )
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, 0.05)


async def end(spawned: Spawned, patience: float = 0.0) -> None:
    """Wait `patience` seconds for the process to end, then kill it and what it started; remove its folder.

    Cancelled (a ctrl+c while it waits), it kills at once: no engine outlives its program.
    """
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await spawned.process.wait()
    finally:
        if spawned.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(spawned.process.pid, signal.SIGKILL)
        remove_folder(spawned.folder)
    await spawned.process.wait()


def exit_words(returncode: int | None) -> str:
    """How a process ended, in words that fit after "the engine"."""
    if returncode is None:
        return "closed the connection"
    if returncode < 0:
        number = -returncode
        try:
            return f"was killed by signal {number} ({signal.Signals(number).name})"
        except ValueError:
            return f"was killed by signal {number}"
    return "ended" if returncode == 0 else f"ended with exit code {returncode}"


def private_folder() -> Path:
    """A new folder of mode 0700 whose path is short enough for a socket in it."""
    base = runtime_dir()
    with contextlib.suppress(OSError):
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        # In a shared place somebody else may have made the folder: whoever owns it could swap ours.
        if base.stat().st_uid == os.getuid():
            _sweep(base)
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            if len(os.fsencode(folder / SOCKET_NAME)) < MAX_SOCKET_PATH_BYTES:
                return folder
            folder.rmdir()
    prefix = f"dspark-{PREFIX}"
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    if len(os.fsencode(folder / SOCKET_NAME)) < MAX_SOCKET_PATH_BYTES:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))


def remove_folder(folder: Path) -> None:
    """Remove an engine's private folder; it may be gone already."""
    shutil.rmtree(folder, ignore_errors=True)


def _sweep(base: Path) -> None:
    """Remove what killed engines left behind: old folders whose socket nobody answers."""
    for folder in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > STALE_SECONDS and not _answers(folder / SOCKET_NAME):
                remove_folder(folder)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            return True
    return True


def _open_log() -> tuple[Path, int]:
    """The log's path and a descriptor that appends to it. A log is worth no failure: /dev/null then."""
    path = log_dir() / "engine.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size > LOG_BYTES:
                path.replace(path.with_suffix(".log.1"))
        return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        null = Path(os.devnull)
        return null, os.open(null, os.O_WRONLY)
