"""Tokens to text, one at a time: partial characters and possible stop strings are held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class AnswerText:
    """The growing text of one answer. A stop string never shows, not even its first letters."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        """`tokenizer` is mlx-lm's wrapper; `stops` are non-empty strings."""
        self._detokenizer = tokenizer.detokenizer
        self._stops = [stop for stop in stops if stop]
        self._shown = 0
        self._end: int | None = None

    @property
    def text(self) -> str:
        """Everything so far, cut before the stop string if one was met."""
        text: str = self._detokenizer.text
        return text if self._end is None else text[: self._end]

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met."""
        return self._end is not None

    def push(self, token: int) -> None:
        """Add one token."""
        before = len(self._detokenizer.text)
        self._detokenizer.add_token(token)
        self._look_for_stop(before)

    def finish(self) -> None:
        """Add what was held back as an unfinished character: no more tokens will come."""
        if not self.stopped:
            before = len(self._detokenizer.text)
            self._detokenizer.finalize()
            self._look_for_stop(before)

    def _look_for_stop(self, before: int) -> None:
        text = self._detokenizer.text
        longest = max(map(len, self._stops), default=0)
        # Of two stop strings the one that is complete first counts, however the text came in tokens.
        found = [(text.find(stop, max(0, before - longest + 1)), stop) for stop in self._stops]
        if hits := [(at + len(stop), at) for at, stop in found if at >= 0]:
            self._end = min(hits)[1]

    def take(self, final: bool = False) -> str:
        """The text that may be shown since the last call; with `final` all of it."""
        text = self.text
        end = len(text) if final or self.stopped else len(text) - self._undecided(text)
        piece = text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string could begin with."""
        for size in range(min(max(map(len, self._stops), default=1) - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops if len(stop) > size):
                return size
        return 0
