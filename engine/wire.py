"""Messages to bytes, whatever text they carry."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from dspark_tui.engine.protocol import Command, Event, encode

M = TypeVar("M", Command, Event)


def clean(text: str) -> str:
    """`text` with lone surrogates replaced by U+FFFD (pairs become the character they mean)."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def encode_line(message: M) -> bytes:
    """`protocol.encode` that never raises on text: file names and terminals produce lone surrogates."""
    try:
        return encode(message)
    except UnicodeEncodeError:
        plain = _clean_all(msgspec.to_builtins(message))
        return msgspec.json.encode(plain) + b"\n"


def _clean_all(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {key: _clean_all(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean_all(item) for item in value]
    return value
