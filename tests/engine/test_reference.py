"""The demo pair against `tests/data/reference.json`, an independent float32 implementation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_pair import no_commands

from dspark_tui.engine.answer_text import AnswerText
from dspark_tui.engine.drafters.base import Proposal
from dspark_tui.engine.generator import generate
from dspark_tui.engine.loader import load_target, make_session
from dspark_tui.engine.models.resolve import ResolvedModel
from dspark_tui.engine.protocol import Sampling
from dspark_tui.engine.reply import Reply
from dspark_tui.engine.sampling import Sampler
from dspark_tui.engine.session import Session

REFERENCE: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "data" / "reference.json").read_text(encoding="utf-8")
)
NAMES = {"dspark": "dspark-b7", "dflash": "dflash-b8", "dflash2": "dflash2-b8"}
NUMBERS = range(len(REFERENCE))

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def session(demo_target: Path) -> Session:
    target, config = load_target(ResolvedModel("demo", demo_target), lambda *_: None)
    made, _ = make_session(target, config, None)
    made.adaptive = False  # the reference verifies every draft, whatever a round costs
    return made


def run(session: Session, number: int, drafter: str) -> Reply:
    session.reset()
    session.select(drafter)
    tokenizer = session.target.tokenizer
    reply = Reply(REFERENCE[number]["prompt_ids"], 200, tokenizer.eos_token_ids, AnswerText(tokenizer, []))
    for _ in generate(session, reply, Sampler(Sampling(), 0), no_commands()):
        pass
    return reply


def test_the_reference_decides_every_token_clearly() -> None:
    assert all(row["min_logit_gap"] > 1e-3 for row in REFERENCE)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_prompt_is_the_reference_prompt(session: Session, number: int) -> None:
    messages = [{"role": "user", "content": REFERENCE[number]["prompt"]}]
    ids = session.target.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert ids == REFERENCE[number]["prompt_ids"]


@pytest.mark.parametrize("number", NUMBERS)
def test_plain_decoding_gives_the_reference_reply(session: Session, number: int) -> None:
    reply = run(session, number, "none")
    assert reply.tokens == REFERENCE[number]["output_ids"]
    assert reply.text.text == REFERENCE[number]["text"].removesuffix("<|im_end|>")
    assert reply.reason == ("stop" if reply.tokens[-1] == 2 else "length")


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_drafter_gives_the_reference_reply_in_the_reference_rounds(
    session: Session, number: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.select(NAMES[method])
    proposals: list[Proposal] = []
    drafter = session.drafter
    propose = drafter.propose

    def recording(anchor: int, k: int, sampler: Sampler) -> Proposal:
        proposals.append(propose(anchor, k, sampler))
        return proposals[-1]

    monkeypatch.setattr(drafter, "propose", recording)
    reply = run(session, number, NAMES[method])
    expected = REFERENCE[number]["rounds"][method]
    assert reply.tokens == REFERENCE[number]["output_ids"]
    assert [stat.committed for stat in reply.rounds] == expected["committed"]
    assert proposals[0].tokens.tolist() == expected["first"]["proposal"]
    if method == "dspark":
        assert proposals[0].confidence is not None
        assert proposals[0].confidence.tolist() == pytest.approx(expected["first"]["confidence"], abs=1e-3)
