"""Looking at a model folder without reading its weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

_HEADER_LIMIT = 100_000_000
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")


def problem(folder: Path) -> str | None:
    """Why mlx-lm could not load `folder`, in a few words without a full stop, or None when it could.

    Reads config.json and the headers of the safetensors files: a truncated file is found, damaged
    numbers are not.
    """
    try:
        if not folder.exists():
            return "the folder does not exist"
        if not folder.is_dir():
            return "it is a file, not a folder"
        names = {path.name for path in folder.iterdir()}
        if "config.json" not in names:
            if any(name.endswith(".gguf") for name in names):
                return "it holds a GGUF file, which MLX models do not come as"
            return "it holds no config.json"
        if not (folder / "config.json").is_file():
            return "its config.json is no file"
        if not isinstance(read_config(folder).get("model_type"), str):
            return "its config.json names no model_type"
        weights = weight_files(folder)
        if not weights:
            return "it holds no model*.safetensors"
        missing = _indexed(folder) - {path.name for path in weights}
        if missing:
            return f"{sorted(missing)[0]} is missing"
        for path in weights:
            if not whole(path):
                return f"{path.name} is incomplete or damaged"
        if not names & set(_TOKENIZERS):
            return "it holds no tokenizer (tokenizer.json)"
    except PermissionError:
        return "it may not be read (permission denied)"
    except OSError as error:
        return f"it cannot be read ({error.strerror or error})"
    except ValueError as error:
        return str(error)
    return None


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as a dictionary. Raises OSError, or ValueError (a sentence without a full stop)."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError("its config.json is not JSON") from None
    if not isinstance(config, dict):
        raise ValueError("its config.json is not a JSON object")
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """What a config.json says of the text model alone, where it says it apart; else empty."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else {}


def weight_files(folder: Path) -> list[Path]:
    """The files that mlx-lm reads weights from, sorted by name."""
    return sorted(folder.glob("model*.safetensors"))


def weight_bytes(folder: Path) -> int:
    """Size of the weight files in bytes. Raises OSError."""
    return sum(path.stat().st_size for path in weight_files(folder))


def _indexed(folder: Path) -> set[str]:
    """Weight files that the index promises (empty without an index)."""
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return set()
    try:
        return {str(name) for name in json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ValueError("its model.safetensors.index.json cannot be read") from None


def whole(path: Path) -> bool:
    """Whether the file is as long as its safetensors header says. Raises OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            return False
        (length,) = struct.unpack("<Q", start)
        if length > min(size - 8, _HEADER_LIMIT):
            return False
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, IndexError, AttributeError, TypeError, RecursionError):
            return False
    return bool(size == 8 + length + max(ends, default=0))
