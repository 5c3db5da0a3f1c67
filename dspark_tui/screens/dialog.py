"""What all dialogs share: they lie over the transcript, which goes on behind them, and Esc closes them."""

from __future__ import annotations

from typing import TypeVar

from textual.binding import Binding
from textual.screen import ModalScreen

T = TypeVar("T")


class Dialog(ModalScreen[T]):
    """A modal that Esc and ctrl+c close without a result."""

    DEFAULT_CSS = """
    Dialog {
        align: center middle;
        background: $background 50%;
    }
    Dialog > .box {
        width: 84;
        max-width: 96%;
        height: auto;
        max-height: 90%;
        padding: 0 1;
        background: $surface;
        border: round $primary;
    }
    Dialog .heading {
        text-style: bold;
        margin-bottom: 1;
    }
    Dialog.-narrow .heading, Dialog.-narrow Input {
        margin-bottom: 0;
    }
    Dialog.-narrow > .box {
        max-width: 100%;
        max-height: 100%;
    }
    Dialog.-narrow .hint {
        margin-top: 0;
    }
    Dialog .hint {
        color: $foreground 75%;
        margin-top: 1;
    }
    """

    HORIZONTAL_BREAKPOINTS: list[tuple[int, str]] | None = [(0, "-narrow"), (60, "-normal")]
    BINDINGS = [Binding("escape,ctrl+c", "dismiss(None)", "Close", show=False, priority=True)]
