"""Which part of a model's output is thinking: markers in the text, and a parser that takes them out.

The markers are those of the model's tokenizer and template: `<think>` ... `</think>` (Qwen3, DeepSeek R1
and many more), Gemma 4's channel `<|channel>thought` ... `<channel|>`, the messages of gpt-oss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

Part: TypeAlias = Literal["answer", "thinking"]


class Piece(NamedTuple):
    """Some text of one part."""

    text: str
    thinking: bool = False


@dataclass(frozen=True)
class Markup:
    """`markers`: what each one begins, None when it begins nothing and only must not show. `anywhere`: the
    thinking may begin after the answer did; otherwise a marker there is text that the model wrote."""

    markers: Mapping[str, Part | None]
    anywhere: bool = False

    @property
    def starts(self) -> tuple[str, ...]:
        """Markers that begin thinking."""
        return tuple(marker for marker, part in self.markers.items() if part == "thinking")


THINK = Markup({"<think>": "thinking", "</think>": "answer"})
HARMONY = Markup(
    {
        "<|channel|>analysis<|message|>": "thinking",
        "<|channel|>commentary<|message|>": "thinking",
        "<|channel|>final<|message|>": "answer",
        "<|end|>": "answer",
        "<|start|>assistant": None,
    },
    anywhere=True,
)
"""The response format of gpt-oss (OpenAI, harmony)."""


def find_markup(tokenizer: Any, source: str | None) -> Markup | None:
    """The markers of a model, from mlx-lm's `tokenizer` wrapper and its chat template's `source` (None when
    the template is no text); None when it has none."""
    vocabulary = tokenizer.get_vocab()
    if "<|channel|>" in vocabulary and "<|message|>" in vocabulary:
        return HARMONY
    if tokenizer.has_thinking:
        start, end = tokenizer.think_start, tokenizer.think_end
        markers: dict[str, Part | None] = {start: "thinking", end: "answer"}
        markers |= dict.fromkeys(tokenizer.structural_markers)
        return Markup(markers, anywhere=start.startswith("<|channel>"))
    if source and "<think>" in source and "</think>" in source:
        return THINK
    return None


class Parts:
    """Splits growing text into parts. Markers vanish with the whitespace after them, and thinking ends
    without the whitespace before its end; whatever may yet become a marker is held back."""

    def __init__(self, markup: Markup | None, thinking: bool = False) -> None:
        """`thinking`: the prompt has begun the thinking already."""
        self._markup = markup or Markup({})
        self._longest = max(map(len, self._markup.markers), default=0)
        self._thinking = thinking
        self._has: set[bool] = set()
        """Of thinking (True) and answer (False), those that have text."""
        self._trim, self._apart = thinking, False
        self._held = ""

    @property
    def thinking(self) -> bool:
        """Whether the next text is thinking."""
        return self._thinking

    def feed(self, text: str) -> list[Piece]:
        """Take in more text; returns what is decided by now."""
        text = self._held + text
        pieces: list[Piece] = []
        while (found := self._first(text)) is not None:
            at, marker = found
            before = text[:at]
            # Whitespace at the edges belongs to the markers.
            self._give(before.rstrip() if self._thinking or not self._begun else before, pieces)
            if (part := self._markup.markers[marker]) is not None:
                self._thinking, self._apart = part == "thinking", True
            self._trim = True
            text = text[at + len(marker) :]
        keep = len(text) - self._undecided(text)
        self._held = text[keep:]
        self._give(text[:keep], pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back: no more text will come."""
        text, self._held = self._held, ""
        pieces: list[Piece] = []
        self._give(text.rstrip() if self._thinking else text, pieces)
        return pieces

    @property
    def _begun(self) -> bool:
        """Whether the answer has text."""
        return False in self._has

    def _first(self, text: str) -> tuple[int, str] | None:
        """The first marker in `text` that counts, and where."""
        found = []
        for marker in self._counting():
            at = text.find(marker)
            begins = self._markup.markers[marker] == "thinking" and not self._thinking
            if at >= 0 and (self._markup.anywhere or not begins or not text[:at].strip()):
                found.append((at, -len(marker), marker))
        return (min(found)[0], min(found)[2]) if found else None

    def _counting(self) -> list[str]:
        """The markers that mean something now."""
        if self._markup.anywhere:
            return list(self._markup.markers)
        if not self._thinking and self._begun:
            return [marker for marker, part in self._markup.markers.items() if part is None]
        wanted = "answer" if self._thinking else "thinking"
        return [marker for marker, part in self._markup.markers.items() if part in (wanted, None)]

    def _undecided(self, text: str) -> int:
        """How much of the end of `text` may belong to a marker that is not complete."""
        markers = self._counting()
        held = 0
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(len(marker) > size and marker.startswith(text[-size:]) for marker in markers):
                held = size
                break
        rest = text[: len(text) - held]
        if self._thinking or (markers and not self._begun and not rest.strip()):
            held = len(text) - len(rest.rstrip())
        return held

    def _give(self, text: str, pieces: list[Piece]) -> None:
        if self._trim:
            text = text.lstrip()
        if not text:
            return
        if self._apart and self._thinking in self._has:
            text = "\n\n" + text
        self._trim = self._apart = False
        self._has.add(self._thinking)
        pieces.append(Piece(text, self._thinking))
