"""Which tokens end an answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dspark_tui.engine.models.folder import read_config


def end_tokens(folder: Path) -> list[int]:
    """The end-of-turn tokens that a model's files name, ascending: in generation_config.json, which knows
    how its answers end, and in config.json, at the top or for the text part. Makers list different ones in
    different places (the end of a turn here, the end of a document there), so all of them count; the
    tokenizer adds its own. Raises OSError or ValueError when config.json cannot be read."""
    config = read_config(folder)
    places = [config, config.get("text_config"), _generation(folder)]
    return sorted({token for place in places for token in _listed(place)})


def _listed(place: Any) -> list[int]:
    named = place.get("eos_token_id") if isinstance(place, Mapping) else None
    tokens = named if isinstance(named, list) else [named]
    return [
        token for token in tokens if isinstance(token, int) and not isinstance(token, bool) and token >= 0
    ]


def _generation(folder: Path) -> Any:
    try:
        return msgspec.json.decode((folder / "generation_config.json").read_bytes())
    except (
        OSError,
        RecursionError,
        msgspec.DecodeError,
    ):  # it is optional, and mlx-lm passes over a broken one too
        return None
