"""What goes wrong with a model before it runs."""

from __future__ import annotations

from dspark_tui.engine.protocol import FailureKind


class ModelError(Exception):
    """A sentence for the user; `kind` `usage` means the request was wrong, `failed` that it did not work."""

    def __init__(self, message: str, kind: FailureKind = "failed") -> None:
        super().__init__(message)
        self.message = message
        self.kind: FailureKind = kind
