"""What is wrong with a checkpoint, in words."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint that cannot be used; the text is one sentence for the user."""
