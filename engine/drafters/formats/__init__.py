"""How publishers pack drafters: one reader a packaging, all of them into one description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark_tui.engine.drafters.formats import dflash, dspark, speculators
from dspark_tui.engine.drafters.formats.description import Description
from dspark_tui.engine.drafters.formats.detect import detect
from dspark_tui.engine.drafters.formats.stored import Tensor


def describe(name: str, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> Description:
    """What checkpoint `name` is, from its config.json and its tensors' headers.

    Raises `CheckpointError`, which names what is not supported.
    """
    kind = detect(name, config, tensors)
    if kind == "speculators":
        return speculators.read(name, config, tensors)
    if kind in ("dflash", "dflash2"):
        return dflash.read(name, config, tensors, second=kind == "dflash2")
    packaging = {"specforge": "SpecForge", "liquid": "LiquidAI", "deepspec": "DeepSpec"}[kind]
    return dspark.read(name, config, tensors, packaging)  # type: ignore[arg-type]
