"""Loading a target with a drafter: what is said, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from backend_harness import SHAPE, VOCABULARY, Engine, refusal
from numpy_drafters import Shape, write_drafter
from tiny import tiny_llama

from dspark_tui.engine import loader
from dspark_tui.engine.backend import BackendError
from dspark_tui.engine.protocol import Progress, SwitchDrafter
from dspark_tui.engine.target import Target


def test_loading_says_what_it_is(engine: Engine, models: Path) -> None:
    said = engine.load(models / "target")
    info = said.model
    assert (info.name, info.path, info.architecture) == ("target", str(models / "target"), "llama")
    assert (info.precision, info.context) == ("float32", 300)
    weights = dict(mx.load(str(models / "target" / "model.safetensors")))
    assert info.weight_bytes == sum(value.nbytes for value in weights.values())
    assert [d.name for d in said.drafters] == ["none", "lookup", "auto"]
    assert (said.drafter.name, said.drafter.state) == ("none", "none")
    assert said.seconds > 0
    stages = [(p.stage, p.done, p.total) for p in engine.of(Progress)]
    size = (models / "target" / "model.safetensors").stat().st_size
    assert stages == [
        ("read", 0, size),
        ("read", size, size),
        ("drafter", 0, 1),
        ("drafter", 1, 1),
        ("warm up", 0, 1),
        ("warm up", 1, 1),
    ]


@pytest.mark.usefixtures("known")
def test_known_drafters_are_listed_and_the_best_is_taken(engine: Engine, models: Path) -> None:
    said = engine.load(models / "target", None)
    assert (said.drafter.name, said.drafter.state, said.drafter.drafts) == ("dflash2-tiny", "active", 4)
    assert [(d.name, d.method, d.usable) for d in said.drafters] == [
        ("none", "none", True),
        ("dflash2-tiny", "dflash2", True),
        ("dspark-tiny", "dspark", True),
        ("dflash-tiny", "dflash", True),
        ("lookup", "lookup", True),
        ("auto", "auto", True),
    ]
    assert engine.load(models / "target", "dspark").drafter.name == "dspark-tiny"


def test_drafter_from_a_folder(engine: Engine, models: Path) -> None:
    said = engine.load(models / "target", str(models / "dspark"))
    assert (said.drafter.name, said.drafter.method, said.drafter.drafts) == ("dspark", "dspark", 5)


@pytest.mark.usefixtures("known")
def test_unknown_drafter_names_the_allowed(engine: Engine, models: Path) -> None:
    sentence = refusal(lambda: engine.load(models / "target", "eagle"))
    assert sentence == (
        "target has no drafter called eagle; "
        "choose none, dflash2-tiny, dspark-tiny, dflash-tiny, lookup or auto."
    )


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("wanted", ["", "a" * 5000, "nul\0", "~nobody-of-that-name/x"])
def test_odd_drafter_names(engine: Engine, models: Path, wanted: str) -> None:
    sentence = refusal(lambda: engine.load(models / "target", wanted))
    assert f"no drafter called {wanted[:80]}; choose none, dflash2-tiny" in sentence


@pytest.mark.usefixtures("known")
def test_a_method_is_not_taken_for_a_folder(
    engine: Engine, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dspark").mkdir()
    monkeypatch.chdir(tmp_path)
    assert engine.load(models / "target", "dspark").drafter.name == "dspark-tiny"


@pytest.mark.usefixtures("known")
def test_unknown_drafter_leaves_the_present_pair(engine: Engine, models: Path) -> None:
    engine.load(models / "target", "dspark")
    refusal(lambda: engine.load(models / "target", "eagle"))
    refusal(lambda: engine.load(models / "missing", "dspark"))
    assert engine.chat("hello", max_tokens=3).drafter.name == "dspark-tiny"


@pytest.mark.usefixtures("known")
def test_drafter_folder_that_is_called_as_a_known_one(engine: Engine, models: Path, tmp_path: Path) -> None:
    write_drafter(tmp_path / "dspark-tiny", "dspark", replace(SHAPE, block=3))
    said = engine.load(models / "target", str(tmp_path / "dspark-tiny"))
    assert (said.drafter.name, said.drafter.drafts) == ("dspark-tiny", 3)
    assert [d.name for d in said.drafters[:4]] == ["none", "dspark-tiny", "dflash2-tiny", "dflash-tiny"]


@pytest.mark.parametrize("name", ["none", "lookup", "auto"])
def test_drafter_folder_that_is_called_as_a_built_in_one(
    engine: Engine, models: Path, tmp_path: Path, name: str
) -> None:
    write_drafter(tmp_path / name, "dspark", SHAPE)
    said = engine.load(models / "target", str(tmp_path / name))
    assert (said.drafter.name, said.drafter.method, said.drafter.state) == (f"{name}/", "dspark", "active")
    assert engine.load(models / "target", name).drafter.method == name
    engine.backend.switch_drafter(SwitchDrafter(1, str(tmp_path / name)), engine.events.append)
    assert engine.chat("hello", max_tokens=3).drafter.name == f"{name}/"


def test_without_a_trained_drafter_lookup_drafts(engine: Engine, models: Path) -> None:
    assert engine.load(models / "target", None).drafter.name == "lookup"
    assert engine.load(models / "target", None, lookup=False).drafter.name == "none"


@pytest.mark.parametrize("wanted", ["lookup", "auto"])
@pytest.mark.usefixtures("known")
def test_lookup_and_auto_can_be_asked_for(engine: Engine, models: Path, wanted: str) -> None:
    plain = engine.chat("hello", max_tokens=20) if engine.load(models / "target", "none") else None
    said = engine.load(models / "target", wanted)
    assert (said.drafter.name, said.drafter.state) == (wanted, "active")
    assert plain is not None
    assert engine.chat("hello", max_tokens=20).token_ids == plain.token_ids


def test_misfit_drafter_says_why(engine: Engine, models: Path, tmp_path: Path) -> None:
    write_drafter(tmp_path / "wide", "dflash", Shape(vocabulary=VOCABULARY, hidden=96, target_layers=4))
    sentence = refusal(lambda: engine.load(models / "target", str(tmp_path / "wide")))
    assert sentence == "wide is not usable here: drafter is for another target (hidden size 96, not 64)."


def test_broken_drafter_folder_says_why(engine: Engine, models: Path, tmp_path: Path) -> None:
    assert "has no config.json" in refusal(lambda: engine.load(models / "target", str(tmp_path)))


def test_folder_that_is_no_model(engine: Engine, tmp_path: Path) -> None:
    assert "it holds no config.json" in refusal(lambda: engine.load(tmp_path))
    assert "does not exist" in refusal(lambda: engine.load(tmp_path / "missing"))
    with pytest.raises(BackendError):
        engine.chat("hello")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 9}, "could not be loaded"),
        ({"hidden_size": 32}, "could not be loaded"),
        ({"num_attention_heads": "four"}, "could not be loaded"),
        ({"num_hidden_layers": 10**9}, "its config.json gives num_hidden_layers as 1000000000"),
    ],
)
def test_models_that_do_not_load(engine: Engine, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    tiny_llama(tmp_path / "odd")
    config = json.loads((tmp_path / "odd" / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config | changes))
    assert words in refusal(lambda: engine.load(tmp_path / "odd"), "failed")
    assert refusal(lambda: engine.chat("hello")) == "No model is loaded; load one first."


def test_a_part_of_the_configuration_that_is_no_object(engine: Engine, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"text_config": "x"}))
    engine.load(folder, None)
    assert engine.chat("hello", max_tokens=3).generated_tokens == 3


def test_code_of_a_model_that_fails_in_its_own_way(
    engine: Engine, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.load(models / "target")
    folder = tiny_llama(tmp_path / "odd")

    def fail(target: Target) -> None:
        if target.info.name == "odd":
            raise ZeroDivisionError("no heads")

    monkeypatch.setattr(loader, "probe", fail)
    assert refusal(lambda: engine.load(folder), "failed") == "odd could not be used: no heads"
    assert engine.chat("hello", max_tokens=3).model == "target"


def test_a_target_that_cannot_take_tokens_back_says_so_and_answers(
    engine: Engine, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = engine.chat("hello", max_tokens=9) if engine.load(models / "target") else None
    monkeypatch.setattr(loader, "probe", lambda target: target.distrust("its cache forgets"))
    said = engine.load(models / "target", None)
    assert said.drafter.name == "none"
    assert "target answers without drafts: its cache forgets." in said.notes
    assert plain is not None
    assert engine.chat("hello", max_tokens=9).token_ids == plain.token_ids


def test_weights_that_are_no_numbers(engine: Engine, tmp_path: Path) -> None:
    tiny_llama(tmp_path / "odd")
    weights = tmp_path / "odd" / "model.safetensors"
    # Arrays are read lazily: keep them apart from the file that is written.
    tensors = dict(mx.load(str(weights)))
    mx.eval(tensors)
    tensors["model.norm.weight"] = mx.full(tensors["model.norm.weight"].shape, float("nan"))
    mx.save_safetensors(str(weights), tensors)
    said = refusal(lambda: engine.load(tmp_path / "odd"), "failed")
    assert said == (
        "odd cannot be used: its weights give no numbers (NaN), so they are damaged; fetch the model again."
    )


def test_unknown_architecture(engine: Engine, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "odd", architecture="llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "no_such_architecture"}))
    assert "no_such_architecture" in refusal(lambda: engine.load(folder))


def test_broken_tokenizer(engine: Engine, tmp_path: Path) -> None:
    tiny_llama(tmp_path / "odd")
    (tmp_path / "odd" / "tokenizer.json").write_text("{}")
    assert "odd could not be loaded" in refusal(lambda: engine.load(tmp_path / "odd"), "failed")


# ---------------------------------------------------------------------------- damage that only reading shows


def spoil(folder: Path) -> None:
    """Make one number of the first matrix not a number."""
    file = folder / "model.safetensors"
    weights = dict(mx.load(str(file)))
    name = next(name for name, value in sorted(weights.items()) if value.ndim == 2)
    weights[name][0, 0] = float("nan")
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})


def test_a_target_that_turns_out_damaged_leaves_the_pair_that_worked(
    engine: Engine, models: Path, tmp_path: Path
) -> None:
    engine.load(models / "target", str(models / "dspark"))
    before = engine.chat("hello", max_tokens=12)
    shutil.copytree(models / "target", tmp_path / "broken")
    spoil(tmp_path / "broken")
    sentence = refusal(lambda: engine.load(tmp_path / "broken"), "failed")
    assert "broken cannot be used: its weights give no numbers (NaN)" in sentence
    again = engine.chat("hello", max_tokens=12)
    assert (again.token_ids, again.drafter.name) == (before.token_ids, "dspark")


def test_a_target_whose_drafter_is_damaged_decodes_without_it(
    engine: Engine, models: Path, tmp_path: Path
) -> None:
    engine.load(models / "target", "none")
    plain = engine.chat("hello", max_tokens=12)
    shutil.copytree(models / "dspark", tmp_path / "spoilt")
    spoil(tmp_path / "spoilt")
    said = engine.load(models / "target", str(tmp_path / "spoilt"))
    assert (said.drafter.name, said.drafter.state) == ("spoilt", "fell_back")
    assert said.drafter.reason == "spoilt holds numbers that are not finite; fetch it again"
    assert engine.chat("hello", max_tokens=12).token_ids == plain.token_ids
