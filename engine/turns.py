"""What the next turn can keep: where prompts will agree, and snapshots of caches that cannot be cut there.

A cache of keys and values is cut wherever two prompts part. A sliding window that has wrapped and recurrent
state cannot: they are kept as snapshots at positions that the next prompts will share with this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dspark_tui.engine.protocol import Message
from dspark_tui.engine.rollback import Snapshot

MAX_SNAPSHOTS = 8
MAX_BYTES = 1 << 30
"""Of all snapshots together; the first and the newest are kept even so."""
WORTH = 64
"""A boundary inside a prompt is worth a stop when so many tokens lie before it."""

Render = Callable[[Sequence[Message]], Sequence[int]]
"""Token ids of a conversation, generation prompt included. May raise anything: templates are programs."""


class Target(Protocol):
    """What is asked of a target here."""

    tokens: list[int]

    def snapshot(self) -> Snapshot:
        """Its state now."""
        ...


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are equal."""
    limit = min(len(one), len(other))
    # Slices are compared in C: conversations have 100,000 tokens.
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# ---------------------------------------------------------------------------- where prompts will agree


def boundaries(render: Render, messages: Sequence[Message], prompt: Sequence[int]) -> list[int]:
    """Positions in `prompt` (the rendering of `messages`) up to which later prompts will be the same: when
    the last message is another one (an edit, or a new chat after the same system prompt), and when an answer
    and a next message follow. Ascending, from 1 to `len(prompt) - 1`.

    The template is asked, by rendering such conversations: what it writes around an answer of an old turn
    (without its thinking, say) is seen, not guessed. Where it refuses that, the end of the last complete
    message and the end of the prompt have to do.
    """
    turns = list(messages)
    answered = _agreed(
        render, prompt, [[*turns, Message("assistant", w), Message("user", w)] for w in _WORDS]
    )
    if answered is None:
        answered = len(prompt)
    edited = None
    if turns and turns[-1].role == "user":
        edited = _agreed(render, prompt, [[*turns[:-1], Message("user", word)] for word in _WORDS])
    last = len(prompt) - 1
    return sorted({min(at, last) for at in (edited, answered) if at is not None and min(at, last) > 0})


def snapshot_stops(boundaries: Sequence[int], reused: int) -> list[int]:
    """Where prefill pauses for a snapshot when the first `reused` positions are there: at the last boundary,
    and at those before it that save as much as another forward costs."""
    ahead = [at for at in boundaries if at > reused]
    return [at for at in ahead if at - reused >= WORTH or at == ahead[-1]]


def chunk_end(done: int, size: int, total: int, stops: Sequence[int]) -> int:
    """Where the chunk that begins at `done` ends: `size` tokens on, at the next stop, or at `total`."""
    return min([done + size, total, *(at for at in stops if at > done)])


_WORDS = ("a", "1")
"""Two, since a real message may begin as one of them does."""


def _agreed(render: Render, prompt: Sequence[int], others: list[list[Message]]) -> int | None:
    """What `prompt` shares with every one of the other conversations, or None when none can be rendered."""
    shared = None
    for other in others:
        try:
            length = shared_length(list(prompt), list(render(other)))
        except Exception:
            continue
        shared = length if shared is None else min(shared, length)
    return shared


# ---------------------------------------------------------------------------- snapshots


class Snapshots:
    """Snapshots along the present sequence, shortest first."""

    def __init__(self, most: int = MAX_SNAPSHOTS, most_bytes: int = MAX_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self.kept: list[Snapshot] = []

    @property
    def lengths(self) -> list[int]:
        """Where they were taken."""
        return [snapshot.length for snapshot in self.kept]

    @property
    def bytes(self) -> int:
        """Memory of all of them."""
        return sum(snapshot.bytes for snapshot in self.kept)

    def take(self, target: Target) -> None:
        """Keep the target's present state, and let others go when there are too many."""
        self.keep_to(target.tokens)
        length = len(target.tokens)
        if length == 0 or length in self.lengths:
            return
        self.kept.append(target.snapshot())
        # The first one serves new chats, the newest the next turn: what lies between goes, oldest first.
        while len(self.kept) > 2 and (len(self.kept) > self._most or self.bytes > self._most_bytes):
            del self.kept[1]

    def best(self, tokens: Sequence[int]) -> Snapshot | None:
        """The longest one whose tokens are the first of `tokens`."""
        return next((kept for kept in reversed(self.kept) if kept.begins(tokens)), None)

    def keep_to(self, tokens: Sequence[int]) -> None:
        """Forget those that are not of `tokens`: the rows that they stand on are gone."""
        self.kept = [kept for kept in self.kept if kept.begins(tokens)]

    def clear(self) -> None:
        """Forget all."""
        self.kept = []

    def put(self, kept: Sequence[Snapshot]) -> None:
        """Have these, shortest first, instead of the present ones."""
        self.kept = list(kept)
