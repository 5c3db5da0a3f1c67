"""A drafter's config.json, read value by value: whatever stands there is taken, or refused in words."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dspark_tui.engine.drafters.formats.errors import CheckpointError


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of `folder`. Raises `CheckpointError`."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if any(folder.glob("*.gguf")):
            raise CheckpointError(
                f"{folder.name} cannot be used: it holds a GGUF file only; fetch the drafter as safetensors."
            ) from error
        raise CheckpointError(f"{folder} has no config.json, so it is not a drafter's folder.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} holds no JSON object.")
    return config


class Settings:
    """Values by key out of several objects; the first one that holds a value other than null counts."""

    def __init__(self, name: str, *places: dict[str, Any]) -> None:
        self.name = name
        self._places = places

    def inside(self, key: str) -> Settings:
        """The settings of the object `key` alone."""
        return Settings(self.name, self.object(key))

    def over(self, *defaults: dict[str, Any]) -> Settings:
        """These settings, then `defaults`."""
        return Settings(self.name, *self._places, *defaults)

    def under(self, *first: dict[str, Any]) -> Settings:
        """`first`, then these settings."""
        return Settings(self.name, *first, *self._places)

    def refusal(self, what: str) -> CheckpointError:
        """The refusal that says `what`."""
        return CheckpointError(f"{self.name} cannot be used: {what}.")

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """The refusal of the value of `key`."""
        value = repr(self.get(key))[:80]
        return self.refusal(f"its config.json gives {key} as {value}, {expected} was expected")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key` as it stands; `default` when it is absent or null."""
        for place in self._places:
            if place.get(key) is not None:
                return place[key]
        return default

    def object(self, key: str) -> dict[str, Any]:
        """An object, empty when it is absent."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return value

    def text(self, key: str, default: str = "") -> str:
        """A string."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def whole(self, key: str, least: int = 1, below: int = 2**31, default: int | None = None) -> int:
        """A whole number from `least`, and below `below`."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(key, f"a whole number from {least}")
        if value >= below:
            raise self.wrong(key, f"a whole number below {below}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.wrong(key, "a number above 0")
        try:
            return float(value)
        except OverflowError:
            raise self.wrong(key, "a number above 0") from None

    def layers(self, key: str, least: int = 0) -> tuple[int, ...]:
        """A list of layer numbers from `least`."""
        value = self.get(key)
        if not isinstance(value, list) or not value or not all(type(t) is int and t >= least for t in value):
            raise self.wrong(key, "a list of layers")
        return tuple(value)

    @property
    def first(self) -> dict[str, Any]:
        """The object that counts first."""
        return self._places[0]
