"""The splitter against markdown-it: cut documents must parse to what the whole document parses to."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from dspark_tui.text.splitter import Block, Splitter, split

PARSER = MarkdownIt("gfm-like", {"html": False})


def tokens(text: str) -> list[Any]:
    return [
        (t.type, t.tag, t.content, t.info if t.type == "fence" else "", t.level) for t in PARSER.parse(text)
    ]


def joined_tokens(blocks: list[Block]) -> list[Any]:
    """Tokens of the blocks one after another, a list that was cut put together again."""
    out: list[Any] = []
    continues = False
    for block in blocks:
        part = tokens(block.text)
        if continues:
            assert out[-1][0].endswith("_list_close")
            assert part[0][0] == out[-1][0].replace("close", "open")
            out.pop()
            part = part[1:]
        out += part
        continues = block.continues
    return out


def pieces_of(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


LINES = st.sampled_from(
    [
        "",
        "text",
        "more text",
        "# head",
        "===",
        "---",
        "- a",
        "- b",
        "* c",
        "+ d",
        "1. one",
        "2. two",
        "3) three",
        "10. ten",
        "   inner",
        "  in",
        "    deep\n      - nested",
        "```",
        "```py",
        "~~~",
        "   ```",
        "> quote",
        "a ",
        " b",
        "--- ",
        " ---",
        "    code",
        "\tcode",
        "-",
        "1.",
        "- ```js",
        "[x]: http://a",
        "***",
    ]
)
SOUP = st.lists(LINES, max_size=30).map(lambda lines: "\n".join(lines))


@given(st.one_of(SOUP, st.text(alphabet="-*`~ \n#>1.a)|=\t", max_size=60)), st.data())
@settings(max_examples=400, deadline=None)
def test_chunks_do_not_matter_and_nothing_is_lost(text: str, data: st.DataObject) -> None:
    splitter = Splitter(list_items=3)
    closed: list[Block] = []
    fed = ""
    for piece in pieces_of(text, data):
        closed += splitter.feed(piece)
        fed += piece
        assert "".join(block.text for block in closed) + splitter.tail == fed
    closed += splitter.finish()
    assert closed == split(text, list_items=3)
    assert "".join(block.text for block in closed) == text


WORD = st.sampled_from(
    ["the", "drafter", "proposes", "eight", "tokens", "*one*", "`pass`", "**bold**", "[l](http://x)"]
)
SENTENCE = st.lists(WORD, min_size=1, max_size=6).map(" ".join)
CODE = st.lists(
    st.sampled_from(["def f():", "    return 1", "", "- not a list", "# no head"]), min_size=1, max_size=5
)


@st.composite
def fence(draw: st.DrawFn, indent: str = "") -> str:
    mark = draw(st.sampled_from(["```", "~~~", "````"]))
    body = [indent + line if line else "" for line in draw(CODE)]
    return "\n".join([indent + mark + draw(st.sampled_from(["", "python", "c"])), *body, indent + mark])


@st.composite
def item(draw: st.DrawFn, marker: str) -> str:
    pad = " " * len(marker)
    parts = [marker + draw(SENTENCE)]
    if draw(st.booleans()):
        parts.append(pad + "- " + draw(SENTENCE))
    if draw(st.booleans()):
        parts.append("\n" + draw(fence(pad)))
    return "\n".join(parts)


@st.composite
def any_list(draw: st.DrawFn) -> str:
    ordered = draw(st.booleans())
    first = draw(st.integers(1, 12))
    count = draw(st.integers(1, 9))
    gap = draw(st.sampled_from(["\n", "\n\n"]))
    return gap.join(draw(item(f"{first + i}. " if ordered else "- ")) for i in range(count))


PART = st.one_of(
    SENTENCE,
    st.lists(SENTENCE, min_size=2, max_size=3).map("\n".join),
    SENTENCE.map(lambda s: f"## {s}"),
    SENTENCE.map(lambda s: f"{s}\n==="),
    SENTENCE.map(lambda s: f"> {s}\n> {s}"),
    SENTENCE.map(lambda s: f"| a | b |\n|---|---|\n| {s} | 2 |"),
    st.just("    indented\n\n    code"),
    st.just("---"),
    fence(),
    any_list(),
)


def separate(parts: list[str]) -> str:
    """Join with blank lines; a paragraph keeps two lists, or a list and indented code, apart."""
    return "\n\n".join(part for p in parts for part in (p, "between")) + "\n"


@given(st.lists(PART, max_size=6).map(separate))
@settings(max_examples=300, deadline=None)
def test_blocks_parse_like_the_whole(text: str) -> None:
    assert joined_tokens(split(text, list_items=4)) == tokens(text)


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("one\n\ntwo\n", ["one\n\n", "two\n"]),
        ("say:\n```py\nx\n\ny\n```\nafter", ["say:\n", "```py\nx\n\ny\n```\n", "after"]),
        ("title\n===\n\ntext", ["title\n===\n\n", "text"]),
        ("# head\ntext\n", ["# head\n", "text\n"]),
        ("- a\n\n- b\n\nafter\n", ["- a\n\n- b\n\n", "after\n"]),
        ("- a\n  ```\n  - x\n\n  y\n  ```\n- b\n", ["- a\n  ```\n  - x\n\n  y\n  ```\n- b\n"]),
        ("- a\nlazy\n\nafter", ["- a\nlazy\n\n", "after"]),
        ("1. a\n```\ncode\n```\n2. b\n", ["1. a\n", "```\ncode\n```\n", "2. b\n"]),
        ("    code\n\n    more\n\ntext", ["    code\n\n    more\n\n", "text"]),
        ("````\n```\n````\nx", ["````\n```\n````\n", "x"]),
        ("| a |\n|---|\n| 1 |\n\nx", ["| a |\n|---|\n| 1 |\n\n", "x"]),
        ("```\nnever closed\n\n- a\n", ["```\nnever closed\n\n- a\n"]),
        ("", []),
    ],
)
def test_cuts(text: str, blocks: list[str]) -> None:
    assert [block.text for block in split(text)] == blocks


def test_long_ordered_list_keeps_its_numbers() -> None:
    text = "".join(f"1. item {n}\n   - inner\n" for n in range(5)) + "\nend\n"
    blocks = split(text, list_items=2)
    assert [(b.continues, b.start) for b in blocks] == [(True, None), (True, 3), (False, 5), (False, None)]
    assert blocks[1].text == "1. item 2\n   - inner\n1. item 3\n   - inner\n"


def test_the_tail_is_what_is_open() -> None:
    splitter = Splitter()
    assert [b.text for b in splitter.feed("done\n\n```py\nx = 1\npart")] == ["done\n\n"]
    assert splitter.tail == "```py\nx = 1\npart"
    assert splitter.open_fence
