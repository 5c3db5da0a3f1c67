"""Where later prompts will agree with this one, and which snapshots are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_tui.engine.protocol import Message
from dspark_tui.engine.turns import (
    WORTH,
    Snapshots,
    boundaries,
    chunk_end,
    shared_length,
    snapshot_stops,
)

# ---------------------------------------------------------------------------- equal beginnings

TOKENS = st.lists(st.integers(0, 2), max_size=40)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(start=TOKENS, one=TOKENS, other=TOKENS)
def test_shared_length(start: list[int], one: list[int], other: list[int]) -> None:
    a, b = start + one, start + other
    wanted = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        wanted += 1
    assert shared_length(a, b) == wanted


# ---------------------------------------------------------------------------- boundaries


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def plain(turns: Sequence[Message]) -> str:
    return "".join(f"<{t.role[0]}>{t.content}</>" for t in turns) + "<a>"


def with_default_system(turns: Sequence[Message]) -> str:
    return ("" if turns[0].role == "system" else "<s>Be kind.</>") + plain(turns)


def thinking_off(turns: Sequence[Message]) -> str:
    """As Qwen3 with thinking switched off: an empty thought is opened, and not rendered in old turns."""
    return plain(turns) + "<think></think>"


def stripped(turns: Sequence[Message]) -> str:
    """Old answers lose their thoughts; the prompt ends with a plain `<a>`."""
    return plain([Message(t.role, t.content.rpartition("</think>")[2]) for t in turns])


def strict(turns: Sequence[Message]) -> str:
    if len(turns) % 2 == 0:
        raise ValueError("roles must alternate")
    return plain(turns)


def ask(content: str, *before: str) -> list[Message]:
    roles = ["user", "assistant"] * len(before)
    turns = [Message(role, text) for role, text in zip(roles, before, strict=False)]  # type: ignore[arg-type]
    return [*turns, Message("user", content)]


def found(template: Callable[[Sequence[Message]], str], turns: list[Message]) -> list[str]:
    """The parts of the prompt before each boundary."""
    prompt = template(turns)
    return [prompt[:at] for at in boundaries(lambda t: letters(template(t)), turns, letters(prompt))]


@pytest.mark.parametrize("template", [plain, stripped, strict])
def test_a_plain_template_agrees_up_to_its_last_token(template: Callable[[Sequence[Message]], str]) -> None:
    assert found(template, ask("hello")) == ["<u>", "<u>hello</><a"]
    assert found(template, ask("more", "hello", "yes")) == [
        "<u>hello</><a>yes</><u>",
        "<u>hello</><a>yes</><u>more</><a",
    ]


def test_a_default_system_prompt_is_seen() -> None:
    assert found(with_default_system, ask("hello"))[0] == "<s>Be kind.</><u>"
    turns = [Message("system", "Be brief."), *ask("hello")]
    assert found(with_default_system, turns)[0] == "<s>Be brief.</><u>"


def test_what_is_not_rendered_in_old_turns_is_left_out() -> None:
    assert found(thinking_off, ask("hello"))[-1] == "<u>hello</><a>"


@pytest.mark.parametrize("content", ["a", "1", "apple", "12", ""])
def test_a_message_that_begins_as_the_probe_does(content: str) -> None:
    assert found(plain, ask(content))[0] == "<u>"
    turns = ask("x", "hello", content)
    assert found(plain, turns)[-1] == plain(turns)[:-1]


def test_a_template_that_raises_on_a_next_turn() -> None:
    """It renders the conversation itself only: the prompt's end has to do."""

    def once(turns: Sequence[Message]) -> str:
        if len(turns) > 1:
            raise RuntimeError("one message only")
        return plain(turns)

    assert found(once, ask("hello")) == ["<u>", "<u>hello</><a"]


def test_a_template_that_raises_always_but_once() -> None:
    turns = ask("hello")
    prompt = letters(plain(turns))

    def broken(_: Sequence[Message]) -> list[int]:
        raise KeyError("content")

    assert boundaries(broken, turns, prompt) == [len(prompt) - 1]


def test_a_template_that_forgets_old_turns() -> None:
    """Nothing of this prompt comes again after an answer: only an edit can keep its beginning."""
    assert found(lambda turns: f"{turns[-1].content}!<a>", ask("hello")) == []


def test_a_conversation_that_ends_with_an_answer() -> None:
    """Continuing an answer: there is no last question to edit."""
    turns = [*ask("hello"), Message("assistant", "I")]
    assert found(plain, turns) == ["<u>hello</><a>I</><a"]


def test_prompts_of_one_token_have_no_boundary() -> None:
    assert boundaries(lambda turns: [7], ask("x"), [7]) == []
    assert boundaries(lambda turns: [7], [], [7, 8]) == [1]


# ---------------------------------------------------------------------------- where prefill pauses


def test_prefill_pauses_at_the_last_boundary_and_where_it_pays() -> None:
    assert snapshot_stops([WORTH, 500], 0) == [WORTH, 500]
    assert snapshot_stops([WORTH - 1, 500], 0) == [500]
    assert snapshot_stops([WORTH, 500], 1) == [500]
    assert snapshot_stops([300, 500], 300) == [500]
    assert snapshot_stops([300, 301], 299) == [301]
    assert snapshot_stops([300, 500], 500) == []
    assert snapshot_stops([], 0) == []


def test_chunks_end_at_stops() -> None:
    ends, done = [], 0
    while done < 100:
        done = chunk_end(done, 32, 100, [40, 41, 99])
        ends.append(done)
    assert ends == [32, 40, 41, 73, 99, 100]


# ---------------------------------------------------------------------------- snapshots


@dataclass(frozen=True)
class Taken:
    tokens: tuple[int, ...]
    bytes: int = 10

    @property
    def length(self) -> int:
        return len(self.tokens)

    def begins(self, tokens: Sequence[int]) -> bool:
        return tuple(tokens[: self.length]) == self.tokens


class Sequenced:
    """A target that only knows its tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def snapshot(self) -> Taken:
        return Taken(tuple(self.tokens))

    def at(self, snapshots: Snapshots, *lengths: int) -> None:
        for length in lengths:
            self.tokens = list(range(length))
            snapshots.take(self)


def test_the_longest_that_fits_is_found() -> None:
    snapshots, target = Snapshots(), Sequenced()
    target.at(snapshots, 3, 6, 9)
    assert snapshots.lengths == [3, 6, 9]
    assert snapshots.bytes == 30

    def best(tokens: Sequence[int]) -> int | None:
        kept = snapshots.best(tokens)
        return None if kept is None else kept.length

    assert [best(range(n)) for n in (2, 3, 5, 6, 8, 9, 20)] == [None, 3, 3, 6, 6, 9, 9]
    assert best([0, 1, 2, 3, 4, 99, 6, 7, 8, 9]) == 3
    assert best([5, 5, 5, 5]) is None


def test_the_same_place_is_kept_once() -> None:
    snapshots, target = Snapshots(), Sequenced()
    target.at(snapshots, 0, 4, 4)
    assert snapshots.lengths == [4]


def test_the_first_and_the_newest_stay() -> None:
    snapshots, target = Snapshots(most=4), Sequenced()
    target.at(snapshots, *range(1, 10))
    assert snapshots.lengths == [1, 7, 8, 9]
    snapshots = Snapshots(most_bytes=35)
    target.at(snapshots, *range(1, 10))
    assert snapshots.lengths == [1, 8, 9]
    snapshots = Snapshots(most_bytes=5)
    target.at(snapshots, *range(1, 10))
    assert snapshots.lengths == [1, 9]


def test_those_of_another_sequence_go() -> None:
    """Their layers of plain keys and values are gone with the rows."""
    snapshots, target = Snapshots(), Sequenced()
    target.at(snapshots, 3, 6, 9)
    target.tokens = [0, 1, 2, 3, 50, 51, 52]
    snapshots.take(target)
    assert snapshots.lengths == [3, 7]
    snapshots.keep_to([0, 1])
    assert snapshots.lengths == []
    target.at(snapshots, 3)
    snapshots.clear()
    assert snapshots.bytes == 0
