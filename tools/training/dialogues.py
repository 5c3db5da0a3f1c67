"""Dialogues that a target writes by itself: it plays both sides, from a few words or from given prompts.

All sequences of a batch grow together, one token a step. Only what the target wrote as the assistant is
supervised; the user's words and the chat template around them are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from training.errors import TrainingError
from training.teacher import Teacher

USER, ASSISTANT = 0, 1
USER_TEMPERATURE = 0.9
USER_LIMIT, ASSISTANT_LIMIT = 100, 400
LEAST = 2
"""Tokens a turn has at least."""
_MARKS = ("QVXUSERONEXVQ", "QVXREPLYONEXVQ", "QVXUSERTWOXVQ")


@dataclass(frozen=True)
class Turns:
    """The pieces of a chat template, in tokens: `head` before the first user's words, `to_assistant` and
    `to_user` between turns, the end of the turn before included. `to_user` is empty when the template takes
    one turn only, and all three when there is no template: the target then just writes on."""

    head: list[int]
    to_assistant: list[int]
    to_user: list[int]
    ends: list[int]
    banned: list[int] = field(default_factory=list)


def _ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return found


def special_tokens(tokenizer: Any) -> set[int]:
    """Ids that stand for no text, whether the tokenizer has a role for them or not."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def read_turns(tokenizer: Any) -> Turns:
    """Take the tokenizer's chat template apart. Raises `TrainingError` when it cannot be."""
    ends = sorted(tokenizer.eos_token_ids)
    banned = sorted(special_tokens(tokenizer) - set(ends))
    if not ends:
        raise TrainingError("The target's tokenizer names no end token, so its dialogues would never end.")
    if not tokenizer.has_chat_template:
        start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        return Turns(start or ends[:1], [], [], ends, banned)
    first, reply, second = _MARKS
    try:
        one = _render(tokenizer, [first])
    except Exception as error:  # a template is a program of the model's maker
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise TrainingError(f"The target's chat template refuses one user's message: {reason}") from error
    if one.count(first) != 1:
        raise TrainingError(
            "The target's chat template changes the user's words, so it cannot be taken apart."
        )
    before, after = one.split(first)
    to_user = ""
    try:
        two = _render(tokenizer, [first, reply, second])
        if all(two.count(mark) == 1 for mark in _MARKS):
            to_user = two.split(reply)[1].split(second)[0]
    except Exception:  # one turn, then
        to_user = ""
    return Turns(
        _ids(tokenizer, before),
        _ids(tokenizer, after),
        _ids(tokenizer, to_user) if to_user else [],
        ends,
        banned,
    )


def _render(tokenizer: Any, words: Sequence[str]) -> str:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(words)]
    text: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    return text


@dataclass(frozen=True)
class Beginning:
    """How one sequence starts: its first tokens, who goes on writing, and the assistant's temperature."""

    tokens: list[int]
    role: int
    temperature: float


def _forced(turns: Turns) -> tuple[mx.array, mx.array]:
    """The tokens that open a role's turn, `[2, longest]`, and how many they are."""
    opening = [turns.to_user, turns.to_assistant]
    longest = max(1, *map(len, opening))
    end = turns.ends[0]
    table = [piece + [end] * (longest - len(piece)) for piece in opening]
    return mx.array(table, dtype=mx.int32), mx.array([len(piece) for piece in opening])


def write(
    teacher: Teacher, turns: Turns, beginnings: Sequence[Beginning], length: int, seed: int
) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Tokens `[n, length]`, and which of them the target wrote as the assistant.

    A sequence that has ended (no further turn) is filled with the end token, unsupervised. Reproducible
    from `seed` on one machine.
    """
    n, end = len(beginnings), turns.ends[0]
    given = mx.array([len(b.tokens) for b in beginnings])
    widest = max(len(b.tokens) for b in beginnings)
    if widest >= length:
        raise TrainingError(f"A prompt has {widest} tokens; the dialogues are {length} long (--length).")
    starts = mx.array([b.tokens + [end] * (widest - len(b.tokens)) for b in beginnings], dtype=mx.int32)
    warm = mx.array([b.temperature for b in beginnings], dtype=mx.float32)
    role = mx.array([b.role for b in beginnings])
    forced, forced_length = _forced(turns)
    banned, ends = (_penalty(teacher.target.vocabulary, ids) for ids in (turns.banned, turns.ends))
    limits, end_ids = mx.array([USER_LIMIT, ASSISTANT_LIMIT]), mx.array(turns.ends)
    goes_on = mx.array([bool(turns.to_user), bool(turns.to_assistant)])
    opens_itself = mx.array([(turns.to_user[:1] or [end])[0], (turns.to_assistant[:1] or [end])[0]])
    place = mx.full((n,), -1)
    written, over = mx.zeros((n,), dtype=mx.int32), mx.zeros((n,), dtype=mx.bool_)
    cache, token = teacher.cache(), starts[:, 0]
    tokens, supervised = [token], [mx.zeros((n,), dtype=mx.bool_)]
    for t in range(1, length):
        logits = teacher.step(token[:, None], cache).astype(mx.float32) + banned
        logits = logits + mx.where(written < LEAST, 1.0, 0.0)[:, None] * ends
        heat = mx.where(role == ASSISTANT, warm, USER_TEMPERATURE)
        noise = mx.random.gumbel(logits.shape, key=mx.random.key(seed * 1_000_003 + t))
        own = mx.argmax(logits + heat[:, None] * noise, axis=-1).astype(mx.int32)
        inside = given > t
        opening = (place >= 0) & ~inside & ~over
        free = ~inside & ~opening & ~over
        full = written >= limits[role]
        ended = free & ((own[:, None] == end_ids).any(axis=-1) | full)
        following = goes_on[1 - role]
        first = mx.where(following, opens_itself[1 - role], mx.where(full, end, own))
        token = mx.where(ended, first.astype(mx.int32), own)
        token = mx.where(opening, forced[role, mx.maximum(place, 0)], token)
        token = mx.where(inside, starts[:, min(t, widest - 1)], mx.where(over, end, token)).astype(mx.int32)
        tokens.append(token)
        # An end that the limit forced, or that the template writes otherwise, is not the target's word.
        supervised.append(free & (role == ASSISTANT) & (token == own) & ~full)
        place = mx.where(opening, place + 1, place)
        place = mx.where(opening & (place >= forced_length[role]), -1, place)
        turning = ended & following
        role = mx.where(turning, 1 - role, role)
        place = mx.where(turning & (forced_length[role] > 1), 1, place)
        over = over | (ended & ~following)
        written = mx.where(ended | inside, 0, written + free)
        mx.async_eval(token, supervised[-1], place, role, written, over)
    table, mask = mx.stack(tokens, axis=1).astype(mx.uint32), mx.stack(supervised, axis=1)
    mx.eval(table, mask)
    return np.array(table), np.array(mask)


def _penalty(vocabulary: int, ids: Sequence[int]) -> mx.array:
    """`[vocabulary]` to add to logits: hugely negative at `ids`."""
    values = np.zeros(vocabulary, dtype=np.float32)
    values[[i for i in ids if i < vocabulary]] = -1e9
    return mx.array(values)
