"""The tensors of a checkpoint as its safetensors headers list them. Nothing large is read."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_tui.engine.drafters.formats.errors import CheckpointError

HEADER_LIMIT = 100 * 1024 * 1024
MASK_SIDECAR = "mask_embedding.safetensors"
_ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """A stored tensor: the file and the name it stands under, its shape, its safetensors dtype and size."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, from its header alone.

    Raises `CheckpointError` when the file is no safetensors file or is shorter than its header says.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size, HEADER_LIMIT):
                raise ValueError
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        found = {name: _tensor(file, name, entry) for name, entry in header.items()}
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}).") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise CheckpointError(f"{file} is not a safetensors file; fetch the drafter again.") from error
    if 8 + length + end > size:
        raise CheckpointError(f"{file} is cut off ({size} of {8 + length + end} bytes); fetch it again.")
    return found


def _tensor(file: Path, name: str, entry: dict[str, Any]) -> Tensor:
    """One entry of a header. Raises ValueError and the like when shape and bytes contradict each other."""
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    begin, end = entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError
    if dtype in _ITEM_BYTES and math.prod(shape) * _ITEM_BYTES[dtype] != end - begin:
        raise ValueError
    return Tensor(file, name, shape, str(dtype), end - begin)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: those that the index names, else every safetensors file.

    Raises `CheckpointError` when there is none, or when a file of the index is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(
                {str(n) for n in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{index} cannot be read; fetch the drafter again.") from error
        # A name that leads out of the folder is no shard of this checkpoint.
        missing = [n for n in names if Path(n).name != n or "\0" in n or not (folder / n).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {missing[0][:80]!r}, which its index names; fetch it again."
            )
        files = [folder / name for name in names]
    else:
        files = sorted(file for file in folder.glob("*.safetensors") if file.name != MASK_SIDECAR)
    if not files and any(folder.glob("*.gguf")):
        raise CheckpointError(
            f"{folder.name} cannot be used: it holds a GGUF file only; fetch the drafter as safetensors."
        )
    if not files:
        raise CheckpointError(f"{folder} has no .safetensors file, so the drafter's weights are missing.")
    return files


# ---------------------------------------------------------------------------- names

_RENAMED = (
    (re.compile(r"^logit_head\.(?=markov_head\.|confidence_head\.)"), ""),  # an older SpecForge
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^encoder\.fc\."), "fc."),
    (re.compile(r"^encoder\.output_norm_enc\."), "hidden_norm."),
    # Published codebooks have no suffix; in the engine every table is `.weight`.
    (re.compile(r"(_codebook|\.kernel_projection)$"), r"\1.weight"),
)
_BACKBONE = ("layers.", "fc.", "hidden_norm.", "norm.", "midlayer.", "encoder.")
_PREFIX = "model."


def canonical(names: Iterable[str]) -> dict[str, str]:
    """Stored name to the engine's name. A `model.` in front goes when the whole backbone carries it."""
    names = list(names)
    prefixed = any(n.startswith(tuple(_PREFIX + part for part in _BACKBONE)) for n in names)
    strip = prefixed and not any(n.startswith(_BACKBONE) for n in names)
    renamed = {}
    for name in names:
        fresh = name.removeprefix(_PREFIX) if strip else name
        for pattern, new in _RENAMED:
            fresh = pattern.sub(new, fresh)
        renamed[name] = fresh
    return renamed


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every stored tensor of a checkpoint by the engine's name. Raises `CheckpointError`."""
    stored: dict[str, Tensor] = {}
    for file in weight_files(folder):
        for name, tensor in read_header(file).items():
            if name in stored:
                raise CheckpointError(f"{folder.name} cannot be used: two of its files hold {name[:80]}.")
            stored[name] = tensor
    found: dict[str, Tensor] = {}
    for name, fresh in canonical(stored).items():
        if fresh in found:
            raise CheckpointError(f"{folder.name} cannot be used: it holds {fresh[:80]} twice.")
        found[fresh] = stored[name]
    return found
