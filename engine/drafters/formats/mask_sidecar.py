"""A mask token's embedding that comes in a file of its own, `mask_embedding.pt` or `.safetensors`.

torch's files are pickles, which can run any code. This reads the few instructions that one saved tensor
needs, and refuses everything else: no instruction is ever carried out as Python.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from dspark_tui.engine.drafters.formats.errors import CheckpointError
from dspark_tui.engine.drafters.formats.stored import MASK_SIDECAR, read_header

PICKLE_SIDECAR = "mask_embedding.pt"
_PICKLE_LIMIT = 64 * 1024
_NUMBERS_LIMIT = 1 << 20
"""Most numbers that a mask embedding may have; hidden sizes end far below."""
_STORAGES = {"FloatStorage": "<f4", "HalfStorage": "<f2", "BFloat16Storage": "<u2"}


class _Refused(Exception):
    """Not a single plain tensor."""


@dataclass(frozen=True)
class _Name:
    """A global that the pickle names; never looked up."""

    module: str
    name: str


@dataclass(frozen=True)
class _Storage:
    kind: str
    key: str


@dataclass(frozen=True)
class _SavedTensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_mask_embedding(folder: Path, hidden: int) -> tuple[mx.array, int | None] | None:
    """The mask's embedding `[hidden]` (float32) and its token id where the file says one; None without a
    sidecar. Raises `CheckpointError` when the file is anything but one tensor of that size."""
    if (folder / MASK_SIDECAR).is_file():
        file, (values, token) = folder / MASK_SIDECAR, (_from_safetensors(folder / MASK_SIDECAR), None)
    elif (folder / PICKLE_SIDECAR).is_file():
        file = folder / PICKLE_SIDECAR
        try:
            values, token = _from_torch(file)
        except (
            _Refused,
            OSError,
            ValueError,
            LookupError,
            TypeError,
            zipfile.BadZipFile,
            RuntimeError,
            NotImplementedError,
            RecursionError,
            EOFError,
        ) as error:
            raise CheckpointError(
                f"{file} is not one plain tensor (or a dict of embedding and mask_token_id) as torch saves "
                "it, so it is not read."
            ) from error
    else:
        return None
    if values.size != hidden:
        raise CheckpointError(
            f"{file} holds {values.size} numbers, {hidden} were expected (the hidden size)."
        )
    if not np.isfinite(values).all():
        raise CheckpointError(f"{file} holds numbers that are not finite; fetch it again.")
    return mx.array(values.reshape(-1)), token


def _from_safetensors(file: Path) -> Any:
    tensors = read_header(file)
    wanted = [name for name in tensors if name in ("embedding", "mask_embedding")] or list(tensors)
    if len(wanted) != 1 or math.prod(tensors[wanted[0]].shape) > _NUMBERS_LIMIT:
        raise CheckpointError(f"{file} does not hold one mask embedding.")
    try:
        stored = cast(dict[str, mx.array], mx.load(str(file)))[wanted[0]]
        return np.array(stored.astype(mx.float32))
    except (RuntimeError, ValueError, LookupError) as error:
        raise CheckpointError(f"{file} cannot be read; fetch it again.") from error


def _from_torch(file: Path) -> tuple[Any, int | None]:
    with zipfile.ZipFile(file) as archive:
        pickles = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > _PICKLE_LIMIT:
            raise _Refused
        top = pickles[0].filename.removesuffix("data.pkl")
        value, token = _interpret(archive.read(pickles[0])), None
        if isinstance(value, dict):
            token = value.get("mask_token_id")
            value = value.get("embedding")
            if token is not None and (type(token) is not int or token < 0):
                raise _Refused
        if not isinstance(value, _SavedTensor):
            raise _Refused
        if f"{top}byteorder" in archive.namelist() and archive.read(f"{top}byteorder") != b"little":
            raise _Refused
        info = archive.getinfo(f"{top}data/{value.storage.key}")
        if info.file_size > 4 * _NUMBERS_LIMIT:
            raise _Refused
        numbers = np.frombuffer(archive.read(info), dtype=_STORAGES[value.storage.kind])
    return _view(numbers, value), token


def _view(numbers: Any, tensor: _SavedTensor) -> Any:
    """The tensor's numbers in float32; a contiguous view only."""
    size, expected = math.prod(tensor.shape), 1
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if length != 1 and stride != expected:
            raise _Refused
        expected *= length
    if tensor.offset + size > len(numbers):
        raise _Refused
    part = numbers[tensor.offset : tensor.offset + size]
    if tensor.storage.kind == "BFloat16Storage":
        return (part.astype(np.uint32) << 16).view(np.float32)
    return part.astype(np.float32)


# ---------------------------------------------------------------------------- the pickle

_MARK = object()
_PUT = ("BINPUT", "LONG_BINPUT", "PUT")
_GET = ("BINGET", "LONG_BINGET", "GET")
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1")


def _interpret(data: bytes) -> Any:
    """The value of a pickle that builds numbers, strings, tuples, dicts and torch tensors."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in ("PROTO", "FRAME"):
            continue
        if name == "STOP":
            break
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _PUT:
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in _GET:
            stack.append(memo[argument])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name in _TUPLES:
            stack.append(_take(stack, _TUPLES[name]))
        elif name == "TUPLE":
            stack.append(_since_mark(stack))
        elif name in ("SETITEM", "SETITEMS"):
            pairs = _take(stack, 2) if name == "SETITEM" else _since_mark(stack)
            stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))
        elif name == "GLOBAL":
            module, _, attribute = str(argument).partition(" ")
            stack.append(_Name(module, attribute))
        elif name == "STACK_GLOBAL":
            stack.append(_Name(*_take(stack, 2)))
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "REDUCE":
            function, arguments = _take(stack, 2)
            stack.append(_rebuilt(function, arguments))
        else:
            raise _Refused
    return _take(stack, 1)[0]


def _take(stack: list[Any], count: int) -> tuple[Any, ...]:
    """The last `count` values, taken off."""
    if len(stack) < count:
        raise _Refused
    taken = tuple(stack[len(stack) - count :])
    del stack[len(stack) - count :]
    return taken


def _since_mark(stack: list[Any]) -> tuple[Any, ...]:
    """The values above the last mark, taken off with it."""
    at = max(i for i, value in enumerate(stack) if value is _MARK)
    taken = tuple(stack[at + 1 :])
    del stack[at:]
    return taken


def _storage(identifier: Any) -> _Storage:
    match identifier:
        case ("storage", _Name("torch", kind), str(key), str(), int()) if kind in _STORAGES and key.isalnum():
            return _Storage(kind, key)
    raise _Refused


def _rebuilt(function: Any, arguments: Any) -> Any:
    match function, arguments:
        case _Name("collections", "OrderedDict"), ():
            return {}
        case _Name("torch._utils", "_rebuild_parameter"), (_SavedTensor() as tensor, *_):
            return tensor
        case _Name("torch._utils", "_rebuild_tensor_v2"), (_Storage() as storage, offset, shape, strides, *_):
            numbers = (offset, *shape, *strides)
            small = all(type(n) is int and 0 <= n <= _NUMBERS_LIMIT for n in numbers)
            if small and len(shape) == len(strides) and math.prod(shape) <= _NUMBERS_LIMIT:
                return _SavedTensor(storage, offset, tuple(shape), tuple(strides))
    raise _Refused
