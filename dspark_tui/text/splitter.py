"""Cut Markdown that arrives in pieces into closed blocks and an open tail.

A closed block never changes again, so it is rendered once; only the tail is shown anew while text arrives.
Decisions are made on complete lines alone, which makes the result independent of how the text was chunked,
and the blocks and the tail joined are always the input. The rules follow CommonMark where a wrong cut would
change the picture; in doubt nothing is cut.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

DEFAULT_LIST_ITEMS = 8

_BLANK = re.compile(r"[ \t]*\n?\Z")
_FENCE = re.compile(r"(?P<indent> {0,3})(?P<mark>`{3,}(?=[^`\n]*$)|~{3,})", re.MULTILINE)
_INNER_FENCE = re.compile(r" *(?P<mark>`{3,}(?=[^`\n]*$)|~{3,})", re.MULTILINE)
_ITEM = re.compile(
    r"(?P<indent> {0,3})(?P<mark>[-+*]|(?P<number>\d{1,9})(?P<delimiter>[.)]))"
    r"(?P<pad> +|(?=\n|\Z))(?P<text>[^\n]*)"
)
_RULE = re.compile(r" {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}\n?\Z")
_HEADING = re.compile(r" {0,3}#{1,6}(?:[ \t]|\n|\Z)")
_QUOTE = re.compile(r" {0,3}>")


@dataclass(frozen=True, slots=True)
class Block:
    """A closed piece of Markdown. `continues` says that the next block goes on with the same list; `start`
    is the number of the first item when this block goes on with an ordered list (None otherwise)."""

    text: str
    continues: bool = False
    start: int | None = None


class _In(Enum):
    NOTHING = auto()
    TEXT = auto()
    FENCE = auto()
    INDENTED = auto()
    LIST = auto()


@dataclass(slots=True)
class _List:
    kind: str
    """`-`, `+`, `*`, `.` or `)`: a change of it begins another list."""
    offset: int
    """Column where the content of the present item begins; lines indented that far belong to it."""
    items: int
    number: int | None
    """Number of the present item as a reader counts it (None in a bullet list)."""
    empty: bool
    fence: str | None = None
    """Opening mark of a fence inside the present item."""


class Splitter:
    """Feed it pieces, take closed `Block`s; `tail` is what is still open.

    `list_items` is the number of top-level items after which a list is cut.
    """

    def __init__(self, list_items: int = DEFAULT_LIST_ITEMS) -> None:
        self._list_items = list_items
        self._lines: list[str] = []
        self._partial: list[str] = []
        self._state = _In.NOTHING
        self._blank_before = False
        self._fence = ""
        self._list: _List | None = None
        self._start: int | None = None
        self._closed: list[Block] = []

    @property
    def tail(self) -> str:
        """The text after the last closed block."""
        return "".join(self._lines) + "".join(self._partial)

    @property
    def open_fence(self) -> bool:
        """Whether the tail is inside a fenced code block."""
        return self._state is _In.FENCE

    def feed(self, piece: str) -> list[Block]:
        """Take the next piece and give the blocks that it closed, in order."""
        head, newline, rest = piece.rpartition("\n")
        if newline:
            complete = "".join(self._partial) + head + "\n"
            self._partial = []
            for line in complete.split("\n")[:-1]:
                self._line(line + "\n")
        if rest:
            self._partial.append(rest)
        closed, self._closed = self._closed, []
        return closed

    def finish(self) -> list[Block]:
        """Close the tail: the text has ended."""
        if self._partial:
            last, self._partial = "".join(self._partial), []
            self._line(last)
        self._cut()
        closed, self._closed = self._closed, []
        return closed

    # ------------------------------------------------------------------ the line machine

    def _line(self, line: str) -> None:
        if self._state is _In.FENCE:
            self._lines.append(line)
            if self._closes_fence(line, self._fence):
                self._cut()
            return
        if _BLANK.match(line):
            self._blank(line)
            return
        if self._state is _In.LIST and self._list_line(line):
            self._blank_before = False
            return
        if self._state is _In.INDENTED and not line.startswith("    "):
            self._cut()
        self._top_line(line)
        self._blank_before = False

    def _blank(self, line: str) -> None:
        self._lines.append(line)
        self._blank_before = True
        if self._state is _In.TEXT:
            self._cut()
        elif self._state is _In.LIST and self._list is not None and self._list.empty:
            # An item may begin with at most one blank line: what follows is not part of it.
            self._list.offset = 1 << 30

    def _top_line(self, line: str) -> None:
        """A line that begins or continues a block outside any list."""
        fence = _FENCE.match(line)
        if fence:
            self._cut_if_text()
            self._state, self._fence = _In.FENCE, fence["mark"]
            self._lines.append(line)
            return
        if self._state is _In.INDENTED or (self._state is _In.NOTHING and line.startswith("    ")):
            self._state = _In.INDENTED
            self._lines.append(line)
            return
        rule = _RULE.match(line)
        if _HEADING.match(line) or (rule and self._state is _In.NOTHING):
            self._cut_if_text()
            self._lines.append(line)
            self._cut()
            return
        item = None if rule else _ITEM.match(line)
        if item and (self._state is _In.NOTHING or self._may_interrupt(item)):
            self._cut_if_text()
            self._begin_list(item)
        elif self._state is _In.NOTHING:
            self._state = _In.TEXT
        self._lines.append(line)

    @staticmethod
    def _may_interrupt(item: re.Match[str]) -> bool:
        """Whether a list item may follow a paragraph without a blank line."""
        return bool(item["text"].strip()) and item["number"] in (None, "1")

    # ------------------------------------------------------------------ lists

    def _begin_list(self, item: re.Match[str]) -> None:
        number = item["number"]
        self._state = _In.LIST
        self._list = _List(
            kind=item["delimiter"] or item["mark"],
            offset=_content_offset(item),
            items=1,
            number=None if number is None else int(number),
            empty=not item["text"].strip(),
            fence=_first_line_fence(item),
        )

    def _list_line(self, line: str) -> bool:
        """Take a non-blank line while in a list; False when it ended the list and is still to be placed."""
        state = self._list
        assert state is not None
        indent = len(line) - len(line.lstrip(" "))
        if indent >= state.offset:
            self._inner_line(state, line)
            return True
        paragraph = state.fence is None and not state.empty
        item = None if _RULE.match(line) else _ITEM.match(line)
        if item:
            kind = item["delimiter"] or item["mark"]
            if kind != state.kind:
                self._cut()
                return False
            self._next_item(state, item)
            self._lines.append(line)
            return True
        if (
            self._blank_before
            or not paragraph
            or any(rule.match(line) for rule in (_RULE, _HEADING, _QUOTE, _FENCE))
        ):
            self._cut()
            return False
        self._lines.append(line)
        return True

    def _next_item(self, state: _List, item: re.Match[str]) -> None:
        number = None if state.number is None else state.number + 1
        items = state.items + 1
        if items > self._list_items:
            self._cut(continues=True, start=number)
            self._state = _In.LIST
            items = 1
        self._list = _List(
            state.kind,
            _content_offset(item),
            items,
            number,
            empty=not item["text"].strip(),
            fence=_first_line_fence(item),
        )

    def _inner_line(self, state: _List, line: str) -> None:
        self._lines.append(line)
        state.empty = False
        if state.fence is not None:
            if self._closes_fence(line.lstrip(" "), state.fence):
                state.fence = None
            return
        fence = _INNER_FENCE.match(line)
        if fence:
            state.fence = fence["mark"]

    # ------------------------------------------------------------------ cutting

    @staticmethod
    def _closes_fence(line: str, opening: str) -> bool:
        indent = len(line) - len(line.lstrip(" "))
        mark = line.strip(" \t\n")
        return indent <= 3 and len(mark) >= len(opening) and set(mark) == {opening[0]}

    def _cut_if_text(self) -> None:
        if self._state is _In.TEXT:
            self._cut()

    def _cut(self, *, continues: bool = False, start: int | None = None) -> None:
        if self._lines:
            self._closed.append(Block("".join(self._lines), continues, self._start))
            self._lines = []
        self._reset()
        self._start = start

    def _reset(self) -> None:
        self._state = _In.NOTHING
        self._fence = ""
        self._list = None
        self._start = None


def _content_offset(item: re.Match[str]) -> int:
    """Column where an item's content begins, by CommonMark's rule for padding and empty items."""
    marker = len(item["indent"]) + len(item["mark"])
    pad = len(item["pad"] or "")
    return marker + (1 if not item["text"].strip() or pad > 4 else pad)


def _first_line_fence(item: re.Match[str]) -> str | None:
    """The mark of a fence that begins on an item's first line."""
    fence = _INNER_FENCE.match(item["text"])
    return fence["mark"] if fence else None


def split(text: str, list_items: int = DEFAULT_LIST_ITEMS) -> list[Block]:
    """All blocks of a finished text."""
    splitter = Splitter(list_items)
    return [*splitter.feed(text), *splitter.finish()]
