"""Where an engine process gets its folder and log, and how its end is worded."""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
from pathlib import Path

import pytest

from dspark_tui.engine import peer, spawn
from dspark_tui.engine.paths import HOME_VARIABLE, cache_dir, log_dir, runtime_dir


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "closed the connection"),
        (0, "ended"),
        (3, "ended with exit code 3"),
        (-9, "was killed by signal 9 (SIGKILL)"),
        (-11, "was killed by signal 11 (SIGSEGV)"),
        (-200, "was killed by signal 200"),
    ],
)
def test_the_end_in_words(code: int | None, words: str) -> None:
    assert spawn.exit_words(code) == words


def test_paths_follow_the_home_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    assert (cache_dir(), log_dir(), runtime_dir()) == (
        tmp_path / "cache",
        tmp_path / "log",
        tmp_path / "run",
    )


def test_a_short_home_holds_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path("/tmp") / f"ds-short-{os.getpid()}"
    monkeypatch.setenv(HOME_VARIABLE, str(home))
    folder = spawn.private_folder()
    try:
        assert folder.parent == home / "run"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        spawn.remove_folder(home)


def test_a_long_home_is_left_for_a_shorter_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    monkeypatch.setenv(HOME_VARIABLE, str(deep))
    folder = spawn.private_folder()
    try:
        assert deep not in folder.parents
        assert len(os.fsencode(folder / spawn.SOCKET_NAME)) < spawn.MAX_SOCKET_PATH_BYTES
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        folder.rmdir()


def test_a_home_that_cannot_be_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv(HOME_VARIABLE, str(blocked))
    folder = spawn.private_folder()
    folder.rmdir()
    assert blocked not in folder.parents


def test_old_folders_of_dead_engines_are_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Path("/tmp") / f"ds-sweep-{os.getpid()}"
    monkeypatch.setenv(HOME_VARIABLE, str(base))
    run = base / "run"
    names = ("e-dead", "e-empty", "e-live", "e-young", "other")
    for name in names:
        (run / name).mkdir(parents=True)
    servers = {}
    for name in ("e-dead", "e-live", "e-young"):
        servers[name] = socket.socket(socket.AF_UNIX)
        servers[name].bind(str(run / name / spawn.SOCKET_NAME))
    servers["e-live"].listen()
    for name in ("e-dead", "e-young"):
        servers[name].close()
    for name in names:
        if name != "e-young":
            os.utime(run / name, (0, 0))
    try:
        fresh = spawn.private_folder()
        assert {path.name for path in run.iterdir()} == {"e-live", "e-young", "other", fresh.name}
    finally:
        servers["e-live"].close()
        spawn.remove_folder(base)


def test_a_large_log_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    log = tmp_path / "log" / "engine.log"
    log.parent.mkdir()
    log.write_bytes(b"x" * (spawn.LOG_BYTES + 1))
    path, handle = spawn._open_log()
    os.close(handle)
    assert path == log
    assert log.stat().st_size == 0
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert (tmp_path / "log" / "engine.log.1").stat().st_size == spawn.LOG_BYTES + 1


def test_the_peer_of_a_real_socket_is_this_user() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert peer.peer_uid(ours) == os.getuid()


class Recorded:
    """A socket that answers with bytes laid out by hand."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked: tuple[int, int] | None = None

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        self.asked = (level, option)
        return self.data[:size]


def test_the_uid_is_read_from_both_systems_structures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    linux = Recorded(struct.pack("=iII", 4321, 501, 20))
    assert peer.peer_uid(linux) == 501
    # struct xucred of macOS: version 0, uid, number of groups, padding, sixteen groups.
    monkeypatch.setattr(sys, "platform", "darwin")
    darwin = Recorded(struct.pack("=IIhh16I", 0, 502, 1, 0, 20, *[0] * 15))
    assert peer.peer_uid(darwin) == 502
    assert darwin.asked == (0, 1)
