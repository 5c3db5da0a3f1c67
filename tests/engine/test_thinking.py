"""Thinking and answer apart, over any split of the text into tokens."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_answer_text import Tokenizer

from dspark_tui.engine.answer_text import AnswerText
from dspark_tui.engine.thinking import HARMONY, THINK, Markup

QUICK = settings(max_examples=250, deadline=None, derandomize=True, database=None)
GEMMA = Markup({"<|channel>thought": "thinking", "<channel|>": "answer"}, anywhere=True)


def parts(
    pieces: list[str | bytes], markup: Markup | None, *, thinking: bool = False, stops: tuple[str, ...] = ()
) -> tuple[list[tuple[str, bool]], AnswerText]:
    """What is shown after each token, neighbours of a kind taken together."""
    data = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    text = AnswerText(Tokenizer(data), stops, markup, thinking)
    shown: list[tuple[str, bool]] = []
    for token in range(len(data) + 1):
        if token < len(data) and not text.stopped:
            text.push(token)
        if token == len(data):
            text.finish()
        for piece in text.take(final=token == len(data)):
            if shown and shown[-1][1] is piece.thinking:
                shown[-1] = (shown[-1][0] + piece.text, piece.thinking)
            else:
                shown.append((piece.text, piece.thinking))
    assert "".join(text for text, is_thinking in shown if not is_thinking) == text.text
    assert "".join(text for text, is_thinking in shown if is_thinking) == text.thinking
    return shown, text


def every_split(whole: str) -> list[list[str]]:
    """In one piece, in characters, and cut once at every place."""
    return [[whole], list(whole), *([whole[:at], whole[at:]] for at in range(1, len(whole)))]


CASES = [
    ("<think>\nI see.\n</think>\n\nYes.", THINK, False, [("I see.", True), ("Yes.", False)]),
    ("\n<think>I see.</think>Yes.", THINK, False, [("I see.", True), ("Yes.", False)]),
    ("I see.\n</think>\n\nYes.\n", THINK, True, [("I see.", True), ("Yes.\n", False)]),
    ("\n\nI see.", THINK, True, [("I see.", True)]),
    ("<think>\n\n</think>\n\nYes.", THINK, False, [("Yes.", False)]),
    ("Yes: <think> is a tag, </think> too.", THINK, False, [("Yes: <think> is a tag, </think> too.", False)]),
    ("<think>a < b</think>a</think>", THINK, False, [("a < b", True), ("a</think>", False)]),
    ("<thin air", THINK, False, [("<thin air", False)]),
    ("<think>so </thi", THINK, False, [("so </thi", True)]),
    ("\n plain", THINK, False, [("\n plain", False)]),
    ("<|channel>thought\nHm.\n<channel|>Yes.", GEMMA, False, [("Hm.", True), ("Yes.", False)]),
    ("<|channel>thought\n<channel|>Yes.", GEMMA, False, [("Yes.", False)]),
    (
        "Well.<|channel>thought\nHm.<channel|>Yes.<|channel>thought\nSo.<channel|>No.",
        GEMMA,
        False,
        [("Well.", False), ("Hm.", True), ("\n\nYes.", False), ("\n\nSo.", True), ("\n\nNo.", False)],
    ),
    (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        HARMONY,
        False,
        [("Hm.", True), ("Yes.", False)],
    ),
    ("<|channel|>final<|message|>Yes.", HARMONY, False, [("Yes.", False)]),
    ("<think>a</think>b", None, False, [("<think>a</think>b", False)]),
]


@pytest.mark.parametrize(
    ("whole", "markup", "thinking", "wanted"), CASES, ids=[case[0][:40] for case in CASES]
)
def test_parts_do_not_depend_on_the_split(
    whole: str, markup: Markup | None, thinking: bool, wanted: list[tuple[str, bool]]
) -> None:
    for pieces in every_split(whole):
        assert parts([*pieces], markup, thinking=thinking)[0] == wanted, pieces


@QUICK
@given(
    thought=st.text("ab <>/think\n", max_size=12),
    answer=st.text("ab <>/think\n", max_size=12),
    closed=st.booleans(),
    opened=st.booleans(),
    cuts=st.sets(st.integers(1, 40), max_size=12),
)
def test_any_thinking_over_any_split(
    thought: str, answer: str, closed: bool, opened: bool, cuts: set[int]
) -> None:
    whole = ("" if opened else "<think>") + thought + ("</think>" + answer if closed else "")
    if not whole:
        return
    # A regular expression over the whole text says what is what.
    found = re.fullmatch(r"(?:<think>)?(.*?)(?:</think>(.*))?", whole, re.DOTALL)
    if opened:
        found = re.fullmatch(r"(.*?)(?:</think>(.*))?", whole, re.DOTALL)
    assert found is not None
    wanted = found.group(1).strip(), (found.group(2) or "")
    edges = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
    _, text = parts([whole[a:b] for a, b in itertools.pairwise(edges)], THINK, thinking=opened)
    assert text.thinking == wanted[0]
    if "<think>" not in answer:
        assert text.text == wanted[1].lstrip()


def test_what_cannot_be_a_marker_shows_at_once() -> None:
    text = AnswerText(
        Tokenizer([b"<think>", b"I", b" see", b".\n", b"So", b"</", b"b", b"</think>", b"Yes"]), [], THINK
    )
    shown = []
    for token in range(9):
        text.push(token)
        shown.append(text.take())
    assert shown == [
        [],
        [("I", True)],
        [(" see", True)],
        [(".", True)],
        [("\nSo", True)],
        [],
        [("</b", True)],
        [],
        [("Yes", False)],
    ]


def test_stop_strings_count_in_the_answer_only() -> None:
    for pieces in every_split("<think>STOP here?</think>No STOP. More"):
        shown, text = parts([*pieces], THINK, stops=("STOP",))
        assert shown == [("STOP here?", True), ("No ", False)]
        assert text.stopped


def test_no_stop_string_reaches_across_thinking() -> None:
    for pieces in every_split("Well, ST<|channel>thought\nHm.<channel|>OP."):
        shown, text = parts([*pieces], GEMMA, stops=("STOP", "ST\n\nOP"))
        assert shown == [("Well, ST", False), ("Hm.", True), ("\n\nOP.", False)]
        assert not text.stopped


def test_unfinished_thinking_stays_thinking() -> None:
    shown, text = parts(["<think>", "I wonder", " if "], THINK)
    assert shown == [("I wonder if", True)]
    assert text.text == ""


def test_partial_characters_wait_in_thinking_too() -> None:
    smile = "😀".encode()
    shown, _ = parts([b"<think>", smile[:2], smile[2:], b"</think>", smile[:1], smile[1:]], THINK)
    assert shown == [("😀", True), ("😀", False)]
