"""Make foreign text safe to show: no control sequence reaches the terminal, no sign is invisible.

Foreign is everything the program did not write itself: model output, prompts that were pasted, file names,
model cards, error messages of libraries. The original text is kept elsewhere; this is for display only.
"""

from __future__ import annotations

import re
import unicodedata

TAB_STOP = 4

_LINE_BREAKS = "\r\u2028\u2029"
_BIDI = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]


def _picture(code: int) -> str:
    """What a sign that must not be printed looks like: a control picture, or its code point in brackets."""
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    return f"⟨U+{code:04X}⟩"


_PICTURES: dict[int, str] = {code: _picture(code) for code in [*range(0x20), *range(0x7F, 0xA0), *_BIDI]}
_PICTURES |= {ord(sign): "\n" for sign in _LINE_BREAKS}
_PICTURES.pop(ord("\n"))
_PICTURES.pop(ord("\t"))
_SURROGATES = re.compile("[\ud800-\udfff]")


def _cells(text: str) -> int:
    """Columns that `text` (one line, no tabs) takes on a terminal."""
    if text.isascii():
        return len(text)
    columns = 0
    for sign in text:
        if unicodedata.combining(sign) or unicodedata.category(sign) in ("Mn", "Me", "Cf"):
            continue
        columns += 2 if unicodedata.east_asian_width(sign) in ("W", "F") else 1
    return columns


class Sanitizer:
    """`sanitize` for text that arrives in pieces: the pieces may be cut anywhere, the result is the same."""

    def __init__(self, *, keep_tabs: bool = False) -> None:
        self._keep_tabs = keep_tabs
        self._after_cr = False
        self._column = 0

    def feed(self, piece: str) -> str:
        """The next piece, safe to show."""
        if not piece:
            return ""
        if self._after_cr and piece[0] == "\n":
            piece = piece[1:]
        if piece:
            self._after_cr = piece[-1] == "\r"
        text = piece.replace("\r\n", "\n").translate(_PICTURES)
        text = _SURROGATES.sub(lambda match: _picture(ord(match[0])), text)
        return text if self._keep_tabs else self._expand(text)

    def _expand(self, text: str) -> str:
        if "\t" not in text:
            tail = text.rpartition("\n")[2]
            self._column = _cells(tail) + (0 if "\n" in text else self._column)
            return text
        parts: list[str] = []
        for sign in re.split(r"([\t\n])", text):
            if sign == "\n":
                self._column = 0
            elif sign == "\t":
                sign = " " * (TAB_STOP - self._column % TAB_STOP)
                self._column += len(sign)
            else:
                self._column += _cells(sign)
            parts.append(sign)
        return "".join(parts)


def sanitize(text: str, *, keep_tabs: bool = False) -> str:
    """`text` with nothing in it that a terminal could obey or hide.

    Control characters (C0, DEL, C1), lone surrogates and bidirectional overrides become visible pictures;
    CR, CRLF and the Unicode line separators become newlines; tabs become spaces (stops every 4 columns)
    unless `keep_tabs`. Newlines stay.
    """
    return Sanitizer(keep_tabs=keep_tabs).feed(text)


def one_line(text: str, width: int | None = None) -> str:
    """`text` sanitised and on a single line, cut to `width` columns with an ellipsis."""
    line = " ".join(sanitize(text).split())
    return line if width is None else clip(line, width)


def clip(line: str, width: int) -> str:
    """`line` (one line, already safe) cut to `width` columns, an ellipsis standing for what was cut."""
    if width <= 0:
        return ""
    if _cells(line) <= width:
        return line
    kept: list[str] = []
    left = width - 1
    for sign in line:
        left -= _cells(sign)
        if left < 0:
            break
        kept.append(sign)
    return "".join(kept) + "…"


def cells(line: str) -> int:
    """Columns that one line takes on a terminal."""
    return _cells(line)
