"""Tokens to text: partial characters, and stop strings over any split into tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
from tiny import byte_characters

from dspark_tui.engine.answer_text import AnswerText

QUICK = settings(max_examples=300, deadline=None, derandomize=True, database=None)
CHARACTERS = byte_characters()


class Tokenizer:
    """Any byte strings as tokens, with the detokenizer that mlx-lm uses for byte-level vocabularies."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.words = ["".join(CHARACTERS[b] for b in piece) for piece in pieces]

    def __len__(self) -> int:
        return len(self.words)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.words[i] for i in ids]

    @property
    def detokenizer(self) -> BPEStreamingDetokenizer:
        return BPEStreamingDetokenizer(self)


def take(text: AnswerText, final: bool = False) -> str:
    """What `take` gives, as text of the answer."""
    pieces = text.take(final)
    assert not any(piece.thinking for piece in pieces)
    return "".join(piece.text for piece in pieces)


def run(pieces: list[bytes], stops: list[str]) -> tuple[list[str], AnswerText, int]:
    """Push the pieces one by one as the loop does: what was shown after each, and how many were taken."""
    text = AnswerText(Tokenizer(pieces), stops)
    shown, taken = [], 0
    for token in range(len(pieces)):
        text.push(token)
        taken += 1
        shown.append(take(text))
        if text.stopped:
            break
    text.finish()
    shown.append(take(text, final=True))
    return shown, text, taken


def expected(whole: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first; of two, before the one that begins first."""
    ends = [
        (end, end - len(stop))
        for stop in stops
        if stop
        for end in range(len(whole) + 1)
        if whole[:end].endswith(stop)
    ]
    return whole[: min(ends)[1]] if ends else whole


def is_whole(data: bytes) -> bool:
    """Whether no character at the end is unfinished."""
    return not data.decode(errors="replace").endswith("\ufffd")


ALPHABET = "abé€😀 \n"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3)


@st.composite
def split_texts(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    # The first letter is no space: detokenizers drop a leading one.
    whole = "x" + draw(st.text(ALPHABET, max_size=14))
    data = whole.encode()
    cuts = sorted(draw(st.sets(st.integers(1, len(data) - 1), max_size=12))) if len(data) > 1 else []
    return whole, [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@QUICK
@given(split=split_texts(), stops=STOPS)
def test_stop_strings_over_any_split(split: tuple[str, list[bytes]], stops: list[str]) -> None:
    whole, pieces = split
    shown, text, taken = run(pieces, stops)
    assert "".join(shown) == text.text == expected(whole, stops)
    cut = len(text.text) < len(whole)
    assert text.stopped is cut
    # It ended with the token that completed the stop string, unless that waited for a partial character.
    known = [b"".join(pieces[:n]) for n in range(taken) if pieces[n - 1] != b" "]
    assert not any(stop in data.decode() for data in known if is_whole(data) for stop in stops)


@QUICK
@given(split=split_texts(), stops=STOPS)
def test_what_is_shown_is_never_taken_back(split: tuple[str, list[bytes]], stops: list[str]) -> None:
    whole, pieces = split
    text = AnswerText(Tokenizer(pieces), stops)
    shown = ""
    for token in range(len(pieces)):
        text.push(token)
        shown += take(text)
        assert expected(whole, stops).startswith(shown)
        assert "\ufffd" not in shown
        if text.stopped:
            break


def test_held_back_text_shows_as_soon_as_it_cannot_be_a_stop() -> None:
    shown, _, _ = run([b"x", b"EN", b"D", b"O", b"END!"], ["ENDING"])
    assert shown == ["x", "", "", "ENDO", "END!", ""]


def test_held_back_text_shows_at_the_end() -> None:
    shown, text, _ = run([b"x", b"EN"], ["END"])
    assert shown == ["x", "", "EN"]
    assert not text.stopped


def test_without_stops_nothing_is_held_back() -> None:
    assert run([b"x", b"EN", b"D"], [])[0] == ["x", "EN", "D", ""]


def test_empty_stop_strings_do_not_stop() -> None:
    shown, text, taken = run([b"x", b"y"], ["", ""])
    assert "".join(shown) == "xy"
    assert (text.stopped, taken) == (False, 2)


def test_stop_at_the_very_beginning_leaves_nothing() -> None:
    shown, text, taken = run([b"ST", b"OP", b"more"], ["STOP"])
    assert (shown, text.text, text.stopped, taken) == (["", "", ""], "", True, 2)


@pytest.mark.parametrize("stops", [["abcd", "bc"], ["bc", "abcd"]])
@pytest.mark.parametrize("pieces", [[b"xabcd"], [b"x", b"a", b"b", b"c", b"d"], [b"xab", b"cd"]])
def test_overlapping_stops_do_not_depend_on_the_split(stops: list[str], pieces: list[bytes]) -> None:
    assert "".join(run(pieces, stops)[0]) == "xa"


def test_partial_characters_wait() -> None:
    smile = "😀".encode()
    shown, _, _ = run([b"x", smile[:1], smile[1:3], smile[3:], b"y"], [])
    assert shown == ["x", "", "", "😀", "y", ""]


def test_unfinished_character_shows_as_a_replacement_at_the_end() -> None:
    shown, text, _ = run([b"x", "€".encode()[:2]], [])
    assert shown[:2] == ["x", ""]
    assert set(shown[2]) == {"\ufffd"}
    assert text.text == "x" + shown[2]


def test_text_that_came_late_is_looked_through_for_stops() -> None:
    """A single space waits in the detokenizer until the end."""
    shown, text, _ = run([b"x", b"y", b" "], ["y "])
    assert "".join(shown) == "x"
    assert text.stopped


def test_finish_twice_adds_nothing() -> None:
    text = AnswerText(Tokenizer([b"x", "€".encode()[:1]]), [])
    text.push(0)
    text.push(1)
    text.finish()
    once = text.text
    text.finish()
    assert text.text == once
    assert take(text, final=True) == once
    assert text.take(final=True) == []
