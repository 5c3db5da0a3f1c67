"""Dialogues: every supervised token is the target's own, everything around them is the chat template's."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from tiny import IM_END, IM_START, encode
from training.corpus import Order, beginnings
from training.dialogues import ASSISTANT, USER, Beginning, read_turns, write
from training.errors import TrainingError
from training.teacher import Teacher

HEAD = [IM_START, *encode("user\n")]
TO_ASSISTANT = [IM_END, *encode("\n"), IM_START, *encode("assistant\n")]
TO_USER = [IM_END, *encode("\n"), IM_START, *encode("user\n")]


def plain(teacher: Teacher, tokens: list[int]) -> int:
    """The target's greedy choice after `tokens`, without a cache; special tokens but the end are banned."""
    logits = np.array(teacher.model(mx.array([tokens]))[0, -1])
    logits[[0, IM_START]] = -np.inf
    return int(np.argmax(logits))


def test_the_chat_template_is_taken_apart(teacher: Teacher) -> None:
    turns = read_turns(teacher.target.tokenizer)
    assert (turns.head, turns.to_assistant, turns.to_user) == (HEAD, TO_ASSISTANT, TO_USER)
    assert turns.ends == [IM_END]
    assert turns.banned == [0, IM_START]


def test_a_template_that_refuses_or_rewords_is_named() -> None:
    def refuse(*_: object, **__: object) -> str:
        raise ValueError("only system messages")

    tokenizer = SimpleNamespace(
        eos_token_ids={2},
        all_special_ids=[0],
        added_tokens_decoder={},
        has_chat_template=True,
        apply_chat_template=refuse,
    )
    with pytest.raises(TrainingError, match=r"refuses one user's message: only system messages"):
        read_turns(tokenizer)
    tokenizer.apply_chat_template = lambda *_, **__: "words"
    with pytest.raises(TrainingError, match="changes the user's words"):
        read_turns(tokenizer)


def test_greedy_replies_are_the_targets_own_token_for_token(teacher: Teacher) -> None:
    """Two prompts of different length in one batch; both users' turns follow the template."""
    turns = read_turns(teacher.target.tokenizer)
    begun = [
        Beginning(HEAD + encode("hello there") + TO_ASSISTANT, ASSISTANT, 0.0),
        Beginning(HEAD + encode("a") + TO_ASSISTANT, ASSISTANT, 0.0),
    ]
    tokens, supervised = write(teacher, turns, begun, 72, seed=1)
    for row, beginning in enumerate(begun):
        sequence, n = tokens[row].tolist(), len(beginning.tokens)
        assert sequence[:n] == beginning.tokens
        assert not supervised[row, :n].any()
        at = n
        while at < 72 and supervised[row, at]:
            expected = plain(teacher, sequence[:at])
            # The first two tokens of a turn are no end.
            assert sequence[at] == expected or (at < n + 2 and expected == IM_END)
            at += 1
        assert at == 72 or sequence[at - 1] == IM_END


def test_turns_alternate_as_the_template_writes_them(
    teacher: Teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.dialogues.USER_LIMIT", 3)
    monkeypatch.setattr("training.dialogues.ASSISTANT_LIMIT", 5)
    turns = read_turns(teacher.target.tokenizer)
    tokens, supervised = write(teacher, turns, [Beginning(HEAD, USER, 1.0)] * 4, 90, seed=4)
    for row, mask in zip(tokens.tolist(), supervised.tolist(), strict=True):
        at, role = len(HEAD), USER
        assert row[:at] == HEAD
        while at < 90:
            limit, opening = (3, TO_ASSISTANT) if role == USER else (5, TO_USER)
            length = 0
            while at < 90 and row[at] != IM_END:
                assert row[at] not in (0, IM_START)
                assert mask[at] == (role == ASSISTANT)
                at, length = at + 1, length + 1
            if at == 90:
                break
            assert 2 <= length <= limit
            # An end that the limit put there is not the target's; one it wrote itself is.
            assert mask[at] == (role == ASSISTANT and length < limit)
            piece = row[at : at + len(opening)]
            assert piece == opening[: len(piece)]
            assert not any(mask[at + 1 : at + len(opening)])
            at, role = at + len(opening), 1 - role


def test_beginnings_are_reproducible_and_held_out_ones_greedy(teacher: Teacher) -> None:
    turns = read_turns(teacher.target.tokenizer)
    order = Order(dialogues=8, length=64, part=4, held_out=2, seed=3, prompts=("one", "two"))
    first = beginnings(order, turns, encode, 0, 16, greedy=False)
    assert first == beginnings(order, turns, encode, 0, 16, greedy=False)
    assert first != beginnings(order, turns, encode, 1, 16, greedy=False)
    assert {tuple(b.tokens) for b in first} == {
        tuple(HEAD + encode(text) + TO_ASSISTANT) for text in ("one", "two")
    }
    assert {b.temperature for b in beginnings(order, turns, encode, 9, 8, greedy=True)} == {0.0}


def test_a_prompt_longer_than_the_dialogue_is_named(teacher: Teacher) -> None:
    turns = read_turns(teacher.target.tokenizer)
    with pytest.raises(
        TrainingError, match=r"A prompt has 40 tokens; the dialogues are 32 long \(--length\)"
    ):
        write(teacher, turns, [Beginning([5] * 40, ASSISTANT, 0.0)], 32, seed=0)
