"""The growing answer: where it ends, and the figures derived from it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_tui.engine.answer_text import AnswerText
from dspark_tui.engine.protocol import RoundStat
from dspark_tui.engine.reply import Reply

END = 9


class Digits:
    """Token i is the digit i."""

    def __init__(self) -> None:
        self.text = ""

    @property
    def detokenizer(self) -> Digits:
        return Digits()

    def add_token(self, token: int) -> None:
        self.text += str(token)

    def finalize(self) -> None:
        return None


def reply(limit: int = 100, stops: tuple[str, ...] = ()) -> Reply:
    return Reply([1, 2], limit, {END}, AnswerText(Digits(), stops))


def test_tokens_after_the_end_are_not_taken() -> None:
    it = reply()
    assert it.take([1, 2, END, 4]) == 3
    assert (it.tokens, it.reason, it.text.text) == ([1, 2, END], "stop", "12")


def test_limit_cuts_a_block() -> None:
    it = reply(limit=3)
    assert it.take([1, 2]) == 2
    assert (it.reason, it.remaining) == (None, 1)
    assert it.take([3, 4, 5]) == 1
    assert (it.tokens, it.reason, it.remaining) == ([1, 2, 3], "length", 0)


def test_stop_string_cuts_a_block() -> None:
    it = reply(stops=("34",))
    assert it.take([2, 3, 4, 5]) == 3
    assert (it.tokens, it.reason, it.text.text) == ([2, 3, 4], "stop", "2")


@pytest.mark.parametrize(("tokens", "stops"), [([1, 2, END], ()), ([1, 2, 3], ("23",))])
def test_an_end_at_the_limit_is_a_stop(tokens: list[int], stops: tuple[str, ...]) -> None:
    it = reply(limit=3, stops=stops)
    it.take(tokens)
    assert it.reason == "stop"


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    limit=st.integers(1, 20),
    stops=st.lists(st.text("0123", min_size=1, max_size=3), max_size=2),
    data=st.data(),
)
def test_blocks_end_where_single_tokens_end(
    tokens: list[int], limit: int, stops: list[str], data: st.DataObject
) -> None:
    """However the same tokens are split into rounds, the answer is the same."""
    single, blocks = reply(limit, tuple(stops)), reply(limit, tuple(stops))
    for token in tokens:
        if single.reason is None:
            assert single.take([token]) == 1
    rest = list(tokens)
    while rest and blocks.reason is None:
        size = data.draw(st.integers(1, 8))
        blocks.take(rest[:size])
        rest = rest[size:]
    assert blocks.tokens == single.tokens
    assert blocks.reason == single.reason
    assert blocks.text.text == single.text.text
    assert len(blocks.tokens) <= limit


def test_figures() -> None:
    it = reply()
    assert (it.accept_length, it.tokens_per_second, it.decode_seconds) == (None, None, 0.0)
    it.take([1])
    assert it.anchor == 1
    assert (it.accept_length, it.tokens_per_second) == (None, None)
    it.take([2, 3, 4])
    it.take([5])
    it.rounds += [RoundStat("x", 7, 2, 3, 1, 1, 1), RoundStat("x", 7, 0, 1, 1, 1, 1)]
    it.first_token_at, it.last_token_at = 10.0, 12.0
    assert it.accept_length == 2.0
    assert it.decode_seconds == 2.0
    assert it.tokens_per_second == 2.0


def test_no_rate_without_measured_time() -> None:
    it = reply()
    it.take([1, 2])
    it.last_token_at = it.first_token_at
    assert it.tokens_per_second is None
