"""The engine process: a unix socket, one asyncio loop, and one thread that owns MLX.

    python -m dspark_tui.engine.host --socket PATH [--log PATH] [--fake SCRIPT]

The process lives for its clients: it ends when the last one has gone (even killed: the socket closes),
on Shutdown and on SIGTERM. stdout and stderr are the log, the socket carries the protocol only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from dspark_tui import __version__
from dspark_tui.engine.backend import Backend
from dspark_tui.engine.protocol import MAX_LINE_BYTES
from dspark_tui.engine.service import Service

logger = logging.getLogger(__name__)


def listen(path: Path) -> socket.socket:
    """A listening socket of mode 0600 at `path`. Raises OSError with a sentence when that is not safe."""
    folder = path.parent.stat()
    if folder.st_uid != os.getuid() or stat.S_IMODE(folder.st_mode) & 0o077:
        raise OSError(f"The folder {path.parent} is open to other users; give one of mode 0700.")
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        server.bind(str(path))
    except BaseException:
        server.close()
        raise
    finally:
        os.umask(mask)
    return server


def real_backend() -> Backend:
    """The backend that runs models. Imports mlx, so call it on the thread that will own it."""
    from dspark_tui.engine.worker import MlxBackend

    return MlxBackend()


def fake_backend(script: Path) -> Backend:
    """The backend that follows a script (docs/fake-engine.md)."""
    from dspark_tui.engine.fake import FakeBackend

    return FakeBackend(script)


async def run(server: socket.socket, make_backend: Callable[[], Backend], log_path: str = "") -> None:
    """Serve until there is no reason to."""
    loop = asyncio.get_running_loop()
    service = Service(make_backend, log_path)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.over.set)
    listener = await asyncio.start_unix_server(service.serve, sock=server, limit=MAX_LINE_BYTES)
    logger.info("engine %s listens", __version__)
    await service.over.wait()
    listener.close()
    await service.close()


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the engine process. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dspark_tui.engine.host", description="The engine process."
    )
    parser.add_argument(
        "--socket", type=Path, required=True, help="where to listen, in a folder of mode 0700"
    )
    parser.add_argument(
        "--log", default="", help="the file that stdout and stderr go to, to name in messages"
    )
    parser.add_argument("--remove-folder", action="store_true", help="remove the socket's folder at the end")
    parser.add_argument("--fake", type=Path, help="follow a script instead of running models")
    options = parser.parse_args(arguments)
    faulthandler.enable()
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s {os.getpid()} %(levelname)s %(message)s"
    )
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _need_a_folder()
    try:
        server = listen(options.socket)
    except OSError as error:
        logger.error("cannot listen at %s: %s", options.socket, error)
        return 1
    script: Path | None = options.fake
    asyncio.run(run(server, (lambda: fake_backend(script)) if script else real_backend, options.log))
    options.socket.unlink(missing_ok=True)
    if options.remove_folder:
        with contextlib.suppress(OSError):
            options.socket.parent.rmdir()
    logger.info("engine ends")
    return 0


def _need_a_folder() -> None:
    """Libraries look at the working directory when they are imported, and break when it was removed."""
    try:
        Path.cwd()
    except FileNotFoundError:
        os.chdir("/")


def end_children() -> None:
    """End processes that this one started, such as a download; only when the process group is ours."""
    if os.getpgrp() == os.getpid():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    status = main()
    end_children()
    sys.stdout.flush()
    # Without the interpreter's own ending: a lane may be inside MLX, and must not hold the process.
    os._exit(status)
