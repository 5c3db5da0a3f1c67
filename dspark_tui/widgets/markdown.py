"""Markdown of a model, made safe: no HTML is swallowed, no entity smuggles a control character in, no link
opens by itself, no tooltip parses text. Imported only when the first answer is shown, since it is slow."""

from __future__ import annotations

from functools import partial

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Markdown, Static
from textual.widgets._markdown import (
    MarkdownBlock,
    MarkdownFence,
    MarkdownTable,
    MarkdownTableCellContents,
    MarkdownTableContent,
)

from dspark_tui.text.sanitize import sanitize
from dspark_tui.text.splitter import Block

_RELATIVES = {"metal": "cpp", "msl": "cpp", "hlsl": "cpp", "jsonc": "json", "sh-session": "console"}


def _clean(token: Token) -> None:
    """Entities such as `&#x202e;` are decoded after the text was sanitised, so tokens are cleaned too."""
    token.content = sanitize(token.content)
    for name, value in token.attrs.items():
        if isinstance(value, str):
            token.attrs[name] = sanitize(value)
    for child in token.children or ():
        _clean(child)


def _clean_all(state: StateCore) -> None:
    for token in state.tokens:
        _clean(token)


def _keep_lines(state: StateCore) -> None:
    """A line break of the model stays one: verses are not joined, and a closing block keeps its height."""
    for token in state.tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"


def _renumber(start: int, state: StateCore) -> None:
    """Let the first ordered list begin with `start`: it goes on with a list that was cut."""
    for token in state.tokens:
        if token.type == "list_item_open" and token.info:
            token.info = str(start)
            return


def make_parser(start: int | None = None) -> MarkdownIt:
    """The parser of answers. HTML is text, since the screen cannot show it. `start` renumbers a list."""
    parser = MarkdownIt("gfm-like", {"html": False})
    parser.core.ruler.push("clean", _clean_all)
    parser.core.ruler.push("keep_lines", _keep_lines)
    if start is not None:
        parser.core.ruler.push("renumber", partial(_renumber, start))
    return parser


class _TableContent(MarkdownTableContent):
    """A table without tooltips: they would parse the cells as markup."""

    def compose(self) -> ComposeResult:
        for header in self.headers:
            yield MarkdownTableCellContents(header, classes="header", markup=False)
        for index, row in enumerate(self.rows, 1):
            for cell in row:
                yield MarkdownTableCellContents(cell, classes=f"row{index} cell", markup=False)
            self.last_row = index


class _Table(MarkdownTable):
    def compose(self) -> ComposeResult:
        for child in super().compose():
            if isinstance(child, MarkdownTableContent):
                yield _TableContent(child.headers, child.rows)


class _Fence(MarkdownFence):
    """Knows some languages by the name of a relative that the highlighter knows."""

    @classmethod
    def highlight(cls, code: str, language: str, ansi: bool = False, dark: bool = False) -> Content:
        """Coloured code; an unknown language gives plain text."""
        name = language.split()[0].lower() if language.strip() else ""
        return super().highlight(code, _RELATIVES.get(name, name), ansi=ansi, dark=dark)


class AnswerMarkdown(Markdown):
    """One closed block of an answer, or a whole one."""

    def __init__(self, block: Block) -> None:
        super().__init__(
            block.text,
            parser_factory=partial(make_parser, block.start),
            open_links=False,
            classes="-continues" if block.continues else None,
        )

    def get_block_class(self, block_name: str) -> type[MarkdownBlock]:
        """Our table, the library's other blocks."""
        return _BLOCKS.get(block_name) or super().get_block_class(block_name)


_BLOCKS: dict[str, type[MarkdownBlock]] = {"table_open": _Table, "fence": _Fence, "code_block": _Fence}


def folded(text: str) -> Static:
    """A finished answer as a single cheap widget, for the older part of a long transcript."""
    from rich.markdown import Markdown as RichMarkdown

    rich = RichMarkdown("", hyperlinks=False)
    rich.parsed = make_parser().parse(text)
    return Static(rich, classes="folded", markup=False)


def same_picture(blocks: list[Block], text: str) -> bool:
    """Whether the blocks one after another look like the whole text parsed at once."""
    whole = _signature(make_parser().parse(text))
    parts: list[tuple[str, ...]] = []
    continues = False
    for block in blocks:
        part = _signature(make_parser(block.start).parse(block.text))
        if continues and parts and part:
            if part[0][0] == "ordered_list_open":
                # Numbers are aligned to the widest of their list, which a cut changes.
                return False
            parts.pop()
            part = part[1:]
        parts += part
        continues = block.continues
    return parts == whole


def _signature(tokens: list[Token]) -> list[tuple[str, ...]]:
    """What of the tokens decides the picture."""
    out: list[tuple[str, ...]] = []
    for token in tokens:
        out.append((token.type, token.tag, token.content, token.info, str(token.attrs)))
        if token.children:
            out += _signature(token.children)
    return out
