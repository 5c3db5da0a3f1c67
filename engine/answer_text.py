"""Tokens to text, one at a time: thinking and answer apart; partial characters, possible stop strings and
possible markers are held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark_tui.engine.thinking import Markup, Parts, Piece


class AnswerText:
    """The growing text of one answer. A stop string never shows, not even its first letters; it is looked
    for in the answer, not in the thinking."""

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], markup: Markup | None = None, thinking: bool = False
    ) -> None:
        """`tokenizer` is mlx-lm's wrapper; `stops` are strings; `markup` says how thinking is marked, and
        `thinking` that the prompt has begun it."""
        self._detokenizer = tokenizer.detokenizer
        self._stops = [stop for stop in stops if stop]
        self._parts = Parts(markup, thinking)
        self._read = 0
        """Characters of the detokenizer's text that the parts have."""
        self._answer = self._thinking = ""
        self._pieces: list[Piece] = []
        """What `take` has not given out: thinking in its place; of the answer only where thinking follows."""
        self._shown = self._from = 0
        """Characters of the answer that `take` or a piece has; where stop strings may begin."""
        self._end: int | None = None

    @property
    def text(self) -> str:
        """The answer so far, cut before the stop string if one was met."""
        return self._answer if self._end is None else self._answer[: self._end]

    @property
    def thinking(self) -> str:
        """The thinking so far."""
        return self._thinking

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met."""
        return self._end is not None

    def push(self, token: int) -> None:
        """Add one token."""
        self._detokenizer.add_token(token)
        self._add(self._parts.feed(self._new()))

    def finish(self) -> None:
        """Add what was held back as an unfinished character or marker: no more tokens will come."""
        if not self.stopped:
            self._detokenizer.finalize()
            self._add(self._parts.feed(self._new()))
        if not self.stopped:
            self._add(self._parts.finish())

    def _new(self) -> str:
        text: str = self._detokenizer.text
        new, self._read = text[self._read :], len(text)
        return new

    def _add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if self.stopped:
                return
            if piece.thinking:
                self._think(piece)
            else:
                before = len(self._answer)
                self._answer += piece.text
                self._look_for_stop(before)

    def _think(self, piece: Piece) -> None:
        # No stop string reaches across thinking, so that the answer before it may be shown whole.
        if len(self._answer) > self._shown:
            self._pieces.append(Piece(self._answer[self._shown :]))
        self._shown = self._from = len(self._answer)
        self._thinking += piece.text
        self._pieces.append(piece)

    def _look_for_stop(self, before: int) -> None:
        text = self._answer
        longest = max(map(len, self._stops), default=0)
        # Of two stop strings the one that is complete first counts, however the text came in tokens.
        begin = max(self._from, before - longest + 1)
        found = [(text.find(stop, begin), stop) for stop in self._stops]
        if hits := [(at + len(stop), at) for at, stop in found if at >= 0]:
            self._end = min(hits)[1]

    def take(self, final: bool = False) -> list[Piece]:
        """What may be shown since the last call, in order; with `final` all of it."""
        pieces, self._pieces = self._pieces, []
        text = self.text
        end = len(text) if final or self.stopped else len(text) - self._undecided(text[self._from :])
        if end > self._shown:
            pieces.append(Piece(text[self._shown : end]))
            self._shown = end
        return pieces

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string could begin with."""
        for size in range(min(max(map(len, self._stops), default=1) - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops if len(stop) > size):
                return size
        return 0
