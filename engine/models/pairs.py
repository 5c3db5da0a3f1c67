"""Which drafters are known for a target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_tui.engine.protocol import Method

_BUNDLED = Path(__file__).resolve().parent.parent / "demo_drafters"
_DEMO_FACTS = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}


@dataclass(frozen=True)
class KnownDrafter:
    """A drafter's checkpoint folder; `name` is what the user types."""

    name: str
    method: Method
    path: Path


_DEMO_DRAFTERS = (
    KnownDrafter("dflash2-b8", "dflash2", _BUNDLED / "SmolLM2-135M-Instruct-DFlash2-b8"),
    KnownDrafter("dspark-b7", "dspark", _BUNDLED / "SmolLM2-135M-Instruct-DSpark-b7"),
    KnownDrafter("dflash-b8", "dflash", _BUNDLED / "SmolLM2-135M-Instruct-DFlash-b8"),
)


def known_drafters(config: dict[str, Any]) -> list[KnownDrafter]:
    """The drafters for the target whose config.json holds `config`, the best one first.

    The demo target is known by its shape, not by its name: every build of it fits, and a fine-tune of it
    only drafts less well.
    """
    if is_demo_target(config):
        return list(_DEMO_DRAFTERS)
    return []


def is_demo_target(config: dict[str, Any]) -> bool:
    """Whether `config` describes SmolLM2-135M."""
    return all(config.get(key) == value for key, value in _DEMO_FACTS.items())
