"""The route that a GPU takes, walked on the CPU: weights stay quantised, drafters compute in bf16.

The target's scales are float32 here, so that its text does not hang on rounding.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from numpy_drafters import Shape, write_drafter
from tiny import load_tiny, tiny_llama
from tiny_pair import METHODS, make_session, no_commands, plain_greedy

from dspark_tui.engine import generator, precision
from dspark_tui.engine.answer_text import AnswerText
from dspark_tui.engine.drafters import checkpoint
from dspark_tui.engine.drafters.block import BlockDrafter
from dspark_tui.engine.generator import generate
from dspark_tui.engine.protocol import Method, Sampling
from dspark_tui.engine.reply import Reply
from dspark_tui.engine.sampling import Sampler
from dspark_tui.engine.target import Target

PROMPT = [5, 9, 12, 40, 7, 7, 31]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (generator, checkpoint, precision):
        monkeypatch.setattr(module, "on_cpu", lambda: False)


@pytest.fixture
def target(tmp_path: Path) -> Target:
    made, _ = load_tiny(tiny_llama(tmp_path / "target", vocab=64, layers=5, tied=True))
    nn.quantize(made.model, group_size=32, bits=4)
    return Target(made.model, made.tokenizer, made.info)


def load(folder: Path, method: Method, target: Target, bits: int | None) -> BlockDrafter:
    write_drafter(folder, method, Shape(vocabulary=64), bits=bits)
    return checkpoint.load(checkpoint.inspect(folder), method, target, bits=0)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("bits", [5, None])
@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_stays_as_it_is_stored_and_the_text_is_the_targets(
    tmp_path: Path, target: Target, method: Method, bits: int | None
) -> None:
    known = plain_greedy(target, PROMPT, 24)
    drafter = load(tmp_path / method, method, target, bits)
    kinds = {type(module) for _, module in drafter.model.named_modules()}
    assert (nn.QuantizedLinear in kinds) == (bits is not None)
    reply = Reply(PROMPT, 24, (), AnswerText(target.tokenizer, ()))
    session = make_session(target, drafter)
    for _ in generate(session, reply, Sampler(Sampling(), 0), no_commands()):
        pass
    assert {array.dtype for array in drafter.state()} == {mx.bfloat16}
    assert reply.tokens == known
    assert session.info.state != "fell_back"
    assert any(stat.drafted for stat in reply.rounds)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("method", METHODS)
def test_bf16_drafts_like_float32(
    tmp_path: Path, target: Target, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = load(tmp_path / "narrow", method, target, None)
    for module in (generator, checkpoint, precision):
        monkeypatch.setattr(module, "on_cpu", lambda: True)
    wide = load(tmp_path / "wide", method, target, None)
    rows = mx.random.normal((6, 3 * 64), key=mx.random.key(4))
    same = total = 0
    for anchor in range(40):
        tokens = []
        for drafter in (narrow, wide):
            drafter.reset()
            drafter.extend(rows, 0)
            tokens.append(drafter.propose(anchor, 4, Sampler(Sampling(), 0)).tokens.tolist())
        same += tokens[0][0] == tokens[1][0]
        total += 1
    # Near ties fall either way in bf16; a wrong dtype or scale would agree by chance only (1 in 64).
    assert same / total > 0.7
