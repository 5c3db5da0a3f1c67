"""What stops a training run, in one sentence."""

from __future__ import annotations


class TrainingError(Exception):
    """Something that the person at the keyboard has to know; the text is one sentence for them. `usage`: what
    they asked for was wrong."""

    def __init__(self, message: str, *, usage: bool = False) -> None:
        super().__init__(message)
        self.usage = usage
