import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from dspark_tui.text.sanitize import Sanitizer, cells, clip, one_line, sanitize

HOSTILE = [
    ("\x1b]52;c;aGk=\x07", "␛]52;c;aGk=␇"),
    ("\x1b[2Jgone", "␛[2Jgone"),
    ("\x9b31mred", "⟨U+009B⟩31mred"),
    ("a\x00b\x7fc", "a␀b␡c"),
    ("user\u202etxt.exe", "user⟨U+202E⟩txt.exe"),
    ("\u2066x\u2069", "⟨U+2066⟩x⟨U+2069⟩"),
    ("lone \ud800 surrogate", "lone ⟨U+D800⟩ surrogate"),
    ("one\r\ntwo\rthree", "one\ntwo\nthree"),
    ("para\u2029line\u2028end", "para\nline\nend"),
    ("a\tb", "a   b"),
    ("abcd\tb", "abcd    b"),
    ("日\tb", "日  b"),
    ("plain [/b] text", "plain [/b] text"),
    ("emoji 👩‍💻 and é stay", "emoji 👩‍💻 and é stay"),
]


def test_known_cases() -> None:
    for text, expected in HOSTILE:
        assert sanitize(text) == expected


def test_tabs_can_stay() -> None:
    assert sanitize("a\t\x1b", keep_tabs=True) == "a\t␛"


@given(st.text(alphabet=st.characters()), st.data())
def test_nothing_obeyable_is_left_and_chunks_do_not_matter(text: str, data: st.DataObject) -> None:
    whole = sanitize(text)
    for sign in whole:
        assert sign == "\n" or unicodedata.category(sign) not in ("Cc", "Cs")
        assert not 0x202A <= ord(sign) <= 0x202E
        assert not 0x2066 <= ord(sign) <= 0x2069
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stream = Sanitizer()
    assert "".join(map(stream.feed, pieces)) == whole
    assert sanitize(whole) == whole


def test_one_line_and_clip() -> None:
    assert one_line(" two\nlines\tand \x1b") == "two lines and ␛"
    assert one_line("abcdef", 4) == "abc…"
    assert clip("日本語", 5) == "日本…"
    assert clip("日本語", 6) == "日本語"
    assert clip("x", 0) == ""
    assert cells("e\u0301a") == 2
