"""The script: a short training lifts the accept length, a resumed run equals an uninterrupted one, and
mistakes are told in one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest
import train_drafter
from tiny import SPECIAL, tiny_llama

from dspark_tui.engine.drafters import checkpoint

PROMPTS = "hello\nwhat is this?\na b c\ntell me more\n"
SMALL = (
    *("--dialogues", "48", "--part", "48", "--held-out", "8", "--length", "64"),
    *("--batch", "8", "--anchors", "12", "--layers", "1", "--drafts", "4"),
)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text(PROMPTS)
    return file


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dialogues that all runs share."""
    return tmp_path_factory.mktemp("data")


def train(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = train_drafter.main([str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out, said.err


def common(target: Path, out: Path, data: Path, prompts: Path) -> Sequence[str | Path]:
    return (target, out, "--data", data, "--prompts", prompts, "--rate", "3e-3", *SMALL)


@pytest.mark.parametrize("method", ["dspark", "dflash", "dflash2"])
def test_a_short_training_lifts_the_accept_length(
    method: str,
    tiny_folder: Path,
    tmp_path: Path,
    data: Path,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        *common(tiny_folder, tmp_path / method, data, prompts),
        *("--method", method, "--rank", "8", "--measure", "--measure-tokens", "40", "--measure-prompts"),
        prompts,
    ]
    code, before, _ = train(capsys, *words, "--steps", "0")
    assert code == 0
    code, after, _ = train(capsys, *words, "--steps", "60", "--resume")
    assert code == 0
    loss = [float(text) for text in re.findall(r"held out at step \d+: loss ([\d.]+)", after)]
    assert loss[-1] < 0.9 * loss[0]
    fresh, trained = (float(re.findall(r"accept length ([\d.]+)", said)[-1]) for said in (before, after))
    assert trained > fresh + 0.3

    found = checkpoint.inspect(tmp_path / method)
    assert (found.method, found.drafts) == (method, 4)
    written = json.loads((tmp_path / method / "config.json").read_text())
    assert written["num_target_layers"] == 4
    assert written["dtype"] == "bfloat16"


def test_a_resumed_run_equals_an_uninterrupted_one(
    tiny_folder: Path,
    tmp_path: Path,
    data: Path,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = common(tiny_folder, tmp_path / "whole", data, prompts)
    assert train(capsys, *whole, "--steps", "6")[0] == 0

    parts = common(tiny_folder, tmp_path / "parts", data, prompts)
    asked = iter([False] * 3 + [True] * 9)
    monkeypatch.setattr(train_drafter, "_Interrupt", lambda: Asked(asked))
    code, said, _ = train(capsys, *parts, "--steps", "6")
    assert code == 130
    assert "stopped at step 3" in said
    monkeypatch.undo()
    code, said, _ = train(capsys, *parts, "--steps", "6", "--resume")
    assert code == 0
    assert "going on from step 3" in said
    for file in ("model.safetensors", "training/state.safetensors"):
        one, other = (mx.load(str(tmp_path / name / file)) for name in ("whole", "parts"))
        assert isinstance(one, dict)
        assert isinstance(other, dict)
        assert one.keys() == other.keys()
        assert all(mx.array_equal(one[name], other[name]) for name in one)


class Asked:
    """An interrupt that is asked for when `answers` says so."""

    def __init__(self, answers: object) -> None:
        self._answers = answers

    @property
    def asked(self) -> bool:
        return next(self._answers)  # type: ignore[call-overload, no-any-return]


def test_mistakes_are_told_in_one_sentence(
    tiny_folder: Path, tmp_path: Path, data: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(code: int, sentence: str, *words: str | Path) -> None:
        found, _, said = train(capsys, *words)
        assert (found, said.count("\n")) == (code, 1), said
        assert re.search(sentence, said), said

    out = tmp_path / "out"
    base = common(tiny_folder, out, data, prompts)
    fails(2, "There is nothing to resume in .*; leave --resume out", *base, "--resume")
    fails(2, "no such folder|not .*found|is not", tmp_path / "nowhere", out)
    fails(2, r"The taps 1,9 do not fit the target; give rising .* from 0 to 2", *base, "--taps", "1,9")
    fails(2, "mask token 999 is not in the target's table; give an id below 64", *base, "--mask-token", "999")
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    fails(2, "file of prompts is empty", *base[:4], "--prompts", empty)
    fails(
        2,
        r"no-such-file.txt cannot be read \(No such file",
        *base[:4],
        "--prompts",
        tmp_path / "no-such-file.txt",
    )
    assert train(capsys, *base, "--steps", "1")[0] == 0
    fails(2, "holds the state of a run; go on with --resume, or name another folder", *base, "--steps", "1")
    fails(2, "belongs to a run with other settings", *base, "--resume", "--steps", "2", "--gamma", "9")
    fails(2, "holds dialogues of another target or other settings", *base, "--resume", "--held-out", "9")
    state = out / "training" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:1000])
    fails(1, "state.safetensors is damaged; start again in another folder", *base, "--resume", "--steps", "2")
    with pytest.raises(SystemExit) as ended:
        train_drafter.main([*map(str, base), "--steps", "many"])
    assert ended.value.code == 2
    assert "many is not a whole number from 0" in capsys.readouterr().err


def test_an_unused_special_token_becomes_the_mask(tmp_path: Path) -> None:
    from tiny import load_tiny
    from training.dialogues import read_turns
    from training.run import unused_token

    target, _ = load_tiny(tiny_llama(tmp_path / "tiny", layers=1))
    assert unused_token(target.tokenizer, read_turns(target.tokenizer)) == SPECIAL.index("<unk>")
