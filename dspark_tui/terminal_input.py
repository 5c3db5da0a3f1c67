"""Bytes of the terminal that are not UTF-8 must not end the program.

textual decodes what is typed or pasted strictly, and ends at the first wrong byte (a paste in Latin-1, a
line that breaks off). Its reading thread takes the decoder from its module; it gets one that replaces.
"""

from __future__ import annotations

import codecs
from functools import partial
from typing import Any


def _replacing(encoding: str) -> Any:
    return partial(codecs.getincrementaldecoder(encoding), "replace")


def forgive_wrong_bytes() -> None:
    """Let wrong bytes become U+FFFD. Call it before the App runs."""
    from textual.drivers import linux_driver

    linux_driver.getincrementaldecoder = _replacing  # type: ignore[attr-defined]
