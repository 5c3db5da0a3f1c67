"""Finding targets: folders, the Hugging Face cache, the demo target, and the drafters that fit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import mlx.core as mx
import pytest

from dspark_tui.engine.models import demo
from dspark_tui.engine.models.errors import ModelError
from dspark_tui.engine.models.folder import problem, weight_bytes
from dspark_tui.engine.models.inventory import describe, list_models, not_a_target
from dspark_tui.engine.models.pairs import known_drafters
from dspark_tui.engine.models.resolve import pull, resolve
from dspark_tui.engine.protocol import ModelRow

DEMO_SHAPE = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}


def make_model(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    (folder / "tokenizer.json").write_text("{}")
    mx.save_safetensors(str(folder / "model.safetensors"), {"a": mx.zeros((4, 8))})
    return folder


def cached(hub: Path, repo: str, commit: str = "a" * 40, *, main: bool = True, **config: object) -> Path:
    """A repository as huggingface_hub lays it out: blobs, and a snapshot of links to them."""
    top = hub / f"models--{repo.replace('/', '--')}"
    blobs, snapshot = top / "blobs", top / "snapshots" / commit
    made = make_model(top / "made", **config)
    blobs.mkdir(exist_ok=True)
    snapshot.mkdir(parents=True)
    for file in list(made.iterdir()):
        blob = blobs / f"{commit[:4]}-{file.name}"
        file.rename(blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    made.rmdir()
    if main:
        (top / "refs").mkdir(exist_ok=True)
        (top / "refs" / "main").write_text(commit)
    return snapshot


# ---------------------------------------------------------------------------- folders


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def shard_missing(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def config_in_a_pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def index_of_numbers(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5, "b": "x"}}')


def only_gguf(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    (folder / "model.gguf").write_bytes(b"GGUF")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: None, None),
        (lambda folder: (folder / "config.json").unlink(), "it holds no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "its config.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "its config.json is not a JSON object"),
        (lambda folder: (folder / "config.json").write_text("{}"), "its config.json names no model_type"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"), "its config.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[" * 200_000), "its config.json is not JSON"),
        (config_in_a_pipe, "its config.json is no file"),
        (index_of_numbers, "5 is missing"),
        (lambda folder: (folder / "model.safetensors").unlink(), "it holds no model*.safetensors"),
        (truncate, "model.safetensors is incomplete or damaged"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "is incomplete or damaged"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64), "is incomplete or damaged"),
        (shard_missing, "model-00002-of-00002.safetensors is missing"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "it holds no tokenizer"),
        (only_gguf, "GGUF"),
    ],
)
def test_problems_of_a_folder(tmp_path: Path, damage, said: str | None) -> None:
    folder = make_model(tmp_path / "model")
    damage(folder)
    found = problem(folder)
    if said is None:
        assert found is None
    else:
        assert found
        assert said in found


def test_sizes_follow_links(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "org/model")
    assert weight_bytes(snapshot) == (snapshot / "model.safetensors").resolve().stat().st_size


# ---------------------------------------------------------------------------- inventory


def test_inventory_of_an_empty_machine(home: Path, empty_hub: Path) -> None:
    (row,) = list_models()
    assert (row.name, row.where, row.size_bytes, row.usable) == ("demo", "demo", None, True)
    assert "93 MB to fetch" in row.detail


def test_inventory(home: Path, empty_hub: Path) -> None:
    make_model(home / "cache" / "models" / demo.FOLDER_NAME, **DEMO_SHAPE, quantization={"bits": 4})
    good = cached(empty_hub, "zoo/good", quantization={"bits": 8})
    cached(empty_hub, "Bee/drafter", architectures=["DFlash2DraftModel"], model_type="qwen3")
    cached(empty_hub, "ant/unknown", model_type="bert", torch_dtype="float32")
    (cached(empty_hub, "cat/half") / "model.safetensors").unlink()
    (empty_hub / "datasets--org--data" / "snapshots" / ("b" * 40)).mkdir(parents=True)
    rows = {row.name: row for row in list_models()}
    assert list(rows) == ["demo", "ant/unknown", "Bee/drafter", "cat/half", "zoo/good"]
    assert rows["demo"].usable
    assert rows["demo"].detail == "SmolLM2-135M-Instruct, llama, 4-bit"
    assert rows["zoo/good"] == ModelRow(
        name="zoo/good", where="hub cache", size_bytes=weight_bytes(good), detail="llama, 8-bit"
    )
    reasons = {name: row.reason for name, row in rows.items() if not row.usable}
    assert reasons == {
        "ant/unknown": "mlx-lm has no architecture 'bert'",
        "Bee/drafter": "it is a drafter, not a target",
        "cat/half": "it holds no model*.safetensors",
    }


def test_a_config_that_is_odd_does_not_hide_the_others(home: Path, empty_hub: Path) -> None:
    cached(empty_hub, "org/odd", architectures=5)
    cached(empty_hub, "org/good")
    assert [row.name for row in list_models()] == ["demo", "org/good", "org/odd"]


def test_architectures_that_mlx_lm_maps_to_another_are_known() -> None:
    assert not_a_target({"model_type": "mistral"}) is None  # loaded as llama
    assert not_a_target({"model_type": "qwen3"}) is None
    assert not_a_target({"model_type": "no_such_model"}) == "mlx-lm has no architecture 'no_such_model'"


def test_main_wins_over_a_newer_branch(home: Path, empty_hub: Path) -> None:
    main = cached(empty_hub, "org/model", "a" * 40, torch_dtype="bfloat16")
    cached(empty_hub, "org/model", "b" * 40, main=False, torch_dtype="float16")
    assert resolve("org/model").path == main


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama", "quantization": {"bits": 4}}, "llama, 4-bit"),
        ({"model_type": "qwen3", "torch_dtype": "bfloat16"}, "qwen3, bfloat16"),
        ({"model_type": "gemma3", "text_config": {"dtype": "float16"}}, "gemma3, float16"),
        ({"model_type": "gemma3"}, "gemma3"),
    ],
)
def test_words_for_a_model(config: dict[str, object], words: str) -> None:
    assert describe(config) == words


# ---------------------------------------------------------------------------- resolving


def test_resolving_a_folder_a_repository_and_the_demo(
    home: Path, empty_hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "my model")
    snapshot = cached(empty_hub, "org/name")
    ready = make_model(home / "cache" / "models" / demo.FOLDER_NAME)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in (str(folder), "my model", "./my model", "~/my model"):
        assert (resolve(given).name, resolve(given).path) == ("my model", folder)
    assert (resolve("org/name").name, resolve("org/name").path) == ("org/name", snapshot)
    assert (resolve("demo").name, resolve("demo").path) == ("demo", ready)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("org/absent", "org/absent is not on this machine: fetch it with hf download org/absent."),
        ("demo", "The demo model is not on this machine yet: dspark-tui models pull demo fetches it."),
        ("", "No model was named"),
        ("nonsense", "There is no model 'nonsense': give demo, a folder, or ORG/NAME"),
        ("/no/such/folder", "/no/such/folder is not a usable model folder: the folder does not exist."),
        ("/etc/passwd", "/etc/passwd is not a usable model folder: it is a file, not a folder."),
        ("x" * 5000, "There is no model 'xxx"),
        ("a\0b", "There is no model 'a\\x00b'"),
        ("a/b/c", "There is no model 'a/b/c'"),
        ("~no-such-user/x", "~no-such-user/x is not a usable model folder: the folder does not exist."),
    ],
)
def test_what_cannot_be_resolved(home: Path, empty_hub: Path, given: str, said: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve(given)
    assert caught.value.kind == "usage"
    assert said in caught.value.message
    assert len(caught.value.message) < 250
    assert "\n" not in caught.value.message


def test_a_drafter_is_refused_as_target(home: Path, demo_drafter_folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError) as caught:
        resolve(str(demo_drafter_folders["dspark-b7"]))
    assert "not a usable model folder" in caught.value.message


def test_a_name_that_cannot_be_fetched() -> None:
    with pytest.raises(ModelError, match="give demo or ORG/NAME") as caught:
        pull("/some/folder", lambda stage, done, total, unit: None)
    assert caught.value.kind == "usage"


# ---------------------------------------------------------------------------- pairs


def test_the_demo_target_is_known_by_its_shape() -> None:
    drafters = known_drafters(DEMO_SHAPE)
    assert {drafter.name: drafter.method for drafter in drafters} == {
        "dspark-b7": "dspark",
        "dflash-b8": "dflash",
        "dflash2-b8": "dflash2",
    }
    for drafter in drafters:
        assert {file.name for file in drafter.path.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("key", sorted(DEMO_SHAPE))
def test_another_shape_has_no_drafters(key: str) -> None:
    assert known_drafters(DEMO_SHAPE | {key: 7}) == []
    assert known_drafters({name: value for name, value in DEMO_SHAPE.items() if name != key}) == []


def test_the_method_of_each_drafter_is_what_its_checkpoint_says() -> None:
    architectures = {
        drafter.method: json.loads((drafter.path / "config.json").read_text())["architectures"]
        for drafter in known_drafters(DEMO_SHAPE)
    }
    assert architectures == {
        "dspark": ["Qwen3DSparkModel"],
        "dflash": ["DFlashDraftModel"],
        "dflash2": ["DFlash2DraftModel"],
    }
