"""Every message survives the line it travels on, and the lines are what other programs may rely on."""

from __future__ import annotations

import json
from typing import get_args

import msgspec
import pytest

from dspark_tui.engine import protocol as p
from dspark_tui.engine.wire import clean, encode_line

DRAFTER = p.DrafterInfo("demo-dspark", "dspark", "fell_back", "it is slow", 7, 12, True, False)
ROUND = p.RoundStat("demo-dspark", 7, 3, 4, 1.5, 20.25, 0.5)
RESULT = p.Result(
    text="hé\n",
    thinking="",
    token_ids=[1, 2],
    prompt_tokens=3,
    reused_tokens=1,
    generated_tokens=2,
    finish_reason="length",
    model="demo",
    drafter=DRAFTER,
    accept_length=None,
    tokens_per_second=12.5,
    seconds=p.Seconds(0.0, 0.1, 0.2, 0.3),
    rounds=[ROUND],
)
COMMANDS: list[p.AnyCommand] = [
    p.Hello(1, protocol=1, client="test"),
    p.Load(2, model="demo", drafter="none", drafter_bits=0, kv_bits=8),
    p.Pull(3, model="demo"),
    p.ListModels(4),
    p.Chat(
        5,
        "a",
        [p.Message("user", "hi")],
        p.Sampling(0.5, 0.9, 10, 7, 0.05, 1.1, 0.5, -0.5, {0: -100.0, 12: 2.5}),
        20,
        ["\n\n"],
        True,
        thinking=False,
        effort="high",
    ),
    p.SwitchDrafter(6, drafter="dflash2"),
    p.Stop(7, answer="a"),
    p.Attach(8, answer="a", after=3),
    p.SaveContext(9, chat="first"),
    p.RestoreContext(10, chat="first"),
    p.Shutdown(11),
]
EVENTS: list[p.AnyEvent] = [
    p.Welcome(1, 1, "0.1.0", 123),
    p.Progress(2, "fetch", 1, 2, "bytes"),
    p.Loaded(
        2,
        p.ModelInfo("demo", "/m", "llama", "4-bit", 2048, 9, True, ["low", "high"]),
        DRAFTER,
        [DRAFTER],
        1.5,
        ["a note"],
    ),
    p.Pulled(3, "demo", "/m", 9),
    p.Models(4, [p.ModelRow("demo", "demo", None, "llama", False, "why")]),
    p.Prefill(5, "a", 1, 2, 0),
    p.Text(5, "a", 0, "x\u2028y", True),
    p.Rounds(5, "a", [ROUND], 4, 7, 0.5, None, 8, 16),
    p.DrafterChanged(0, DRAFTER),
    p.ContextSaved(9, "first", 12, 4096),
    p.ContextRestored(10, "first", 0, "another model wrote it"),
    p.Finished(5, "a", RESULT),
    p.Failed(5, "no", "usage", "a", RESULT),
    p.Notice(0, "note"),
]


def test_there_is_an_example_of_every_message() -> None:
    assert {type(command) for command in COMMANDS} == set(get_args(p.AnyCommand))
    assert {type(event) for event in EVENTS} == set(get_args(p.AnyEvent))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda message: type(message).__name__)
def test_commands_survive_the_wire(command: p.AnyCommand) -> None:
    line = p.encode(command)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert p.decode_command(line) == command


@pytest.mark.parametrize("event", EVENTS, ids=lambda message: type(message).__name__)
def test_events_survive_the_wire(event: p.AnyEvent) -> None:
    line = p.encode(event)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert p.decode_event(line) == event


def test_the_line_of_a_command_is_plain_json() -> None:
    assert json.loads(p.encode(p.Stop(7, answer="a"))) == {"type": "stop", "id": 7, "answer": "a"}


def test_what_a_client_leaves_out_has_a_default() -> None:
    line = b'{"type":"chat","id":5,"answer":"a","messages":[{"role":"user","content":"hi"}]}\n'
    assert p.decode_command(line) == p.Chat(5, "a", [p.Message("user", "hi")])


def test_a_newer_peer_may_send_fields_that_are_not_known() -> None:
    assert p.decode_event(b'{"type":"notice","id":0,"message":"m","colour":"red"}') == p.Notice(0, "m")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello",
        b"[]",
        b'{"type":"fly","id":1}',
        b'{"id":1}',
        b'{"type":"stop","id":"one","answer":"a"}',
        b'{"type":"stop","id":1}',
        b'{"type":"chat","id":1,"answer":"a","messages":[{"role":"wizard","content":""}]}',
        b'{"type":"notice","id":0,"message":"an event is no command"}',
        b'{"type":"stop","id":1,"answer":"\xff"}',
    ],
)
def test_anything_else_is_refused(line: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        p.decode_command(line)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (p.Sampling(temperature=-0.1), "temperature is -0.1"),
        (p.Sampling(temperature=2.1), "from 0 (greedy) to 2"),
        (p.Sampling(temperature=float("nan")), "temperature is nan"),
        (p.Sampling(top_p=0.0), "top-p is 0"),
        (p.Sampling(top_p=1.5), "top-p is 1.5"),
        (p.Sampling(top_k=-1), "top-k is -1"),
        (p.Sampling(seed=-1), "seed is -1"),
        (p.Sampling(seed=2**63), "2^63"),
        (p.Sampling(min_p=1.0), "min-p is 1;"),
        (p.Sampling(min_p=-0.1), "min-p is -0.1"),
        (p.Sampling(repetition_penalty=0.0), "repetition penalty is 0; give a number from 0.1 to 10"),
        (p.Sampling(repetition_penalty=float("nan")), "repetition penalty is nan"),
        (p.Sampling(presence_penalty=2.5), "presence penalty is 2.5; give a number from -2 to 2"),
        (p.Sampling(frequency_penalty=-3.0), "frequency penalty is -3"),
        (p.Sampling(frequency_penalty=float("nan")), "frequency penalty is nan"),
        (p.Sampling(logit_bias={-1: 1.0}), "logit bias names token -1"),
        (p.Sampling(logit_bias={7: 101.0}), "logit bias of token 7 is 101; give a number from -100 to 100"),
        (p.Sampling(logit_bias={7: float("nan")}), "logit bias of token 7 is nan"),
    ],
)
def test_sampling_out_of_range_is_named(sampling: p.Sampling, words: str) -> None:
    assert words in (sampling.problem() or "")


@pytest.mark.parametrize(
    "sampling",
    [
        p.Sampling(),
        p.Sampling(2.0, 0.001, 1, 2**63 - 1),
        p.Sampling(0.0, 1.0, 0, 0),
        p.Sampling(1.0, 1.0, 0, None, 0.99, 0.1, -2.0, 2.0, {0: 100.0, 2**31: -100.0}),
    ],
)
def test_sampling_in_range_has_no_problem(sampling: p.Sampling) -> None:
    assert sampling.problem() is None


def test_lone_surrogates_are_cleaned_at_the_border() -> None:
    chat = p.Chat(1, "a", [p.Message("user", "bad \udcff, good \ud83d\ude00, fine é")], stop=["\ud800"])
    sent = p.decode_command(encode_line(chat))
    assert sent == p.Chat(1, "a", [p.Message("user", "bad \ufffd, good 😀, fine é")], stop=["\ufffd"])
    assert clean("plain") == "plain"
