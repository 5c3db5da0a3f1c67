"""The mask embedding's own file: torch's format is read without running what is in it."""

from __future__ import annotations

import io
import os
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy_drafters import NumpyTables
from twins import HIDDEN, MASK, TWINS, VOCAB, write_twin

from dspark_tui.engine.drafters import checkpoint
from dspark_tui.engine.drafters.checkpoint import CheckpointError
from dspark_tui.engine.drafters.formats.mask_sidecar import read_mask_embedding

VALUES = np.random.default_rng(0).standard_normal(HIDDEN).astype(np.float32)


class Storage:
    def __init__(self, kind: str, key: str, numbers: int) -> None:
        self.identifier = ("storage", kind, key, "cpu", numbers)


class FakeTensor:
    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


def torch_names() -> dict[str, Any]:
    """Stand-ins for what a pickle of torch's names."""
    utils = types.ModuleType("torch._utils")

    def named(name: str) -> Callable[..., None]:
        def function(*_: Any) -> None: ...

        function.__module__, function.__qualname__, function.__name__ = "torch._utils", name, name
        return function

    utils._rebuild_tensor_v2 = named("_rebuild_tensor_v2")  # type: ignore[attr-defined]
    utils._rebuild_parameter = named("_rebuild_parameter")  # type: ignore[attr-defined]
    torch = types.ModuleType("torch")
    torch._utils = utils  # type: ignore[attr-defined]
    for kind in ("FloatStorage", "HalfStorage", "BFloat16Storage", "LongStorage"):
        setattr(torch, kind, type(kind, (), {"__module__": "torch"}))
    return {"torch": torch, "torch._utils": utils}


def save(
    file: Path,
    build: Callable[[Any, Callable[..., Any]], Any],
    numbers: dict[str, bytes],
    protocol: int = 2,
    top: str = "mask_embedding",
    byteorder: bytes = b"little",
) -> None:
    """Write `file` as torch.save does: a zip with a pickle and the raw numbers. `build` gets the names
    and a function that makes a tensor."""
    names = torch_names()
    torch, utils = names["torch"], names["torch._utils"]

    def tensor(
        kind: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, key: str = "0"
    ) -> Any:
        storage = Storage(kind, key, 0)
        return FakeTensor(utils._rebuild_tensor_v2, (storage, offset, shape, strides, False, OrderedDict()))

    class Pickler(pickle._Pickler):  # type: ignore[misc]
        def persistent_id(self, value: Any) -> Any:
            if isinstance(value, Storage):
                word, kind, key, device, count = value.identifier
                return (word, getattr(torch, kind), key, device, count)
            return None

        def reducer_override(self, value: Any) -> Any:
            return value.arguments if isinstance(value, FakeTensor) else NotImplemented

    stream = io.BytesIO()
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        Pickler(stream, protocol).dump(build(names, tensor))
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{top}/data.pkl", stream.getvalue())
        archive.writestr(f"{top}/byteorder", byteorder)
        for key, data in numbers.items():
            archive.writestr(f"{top}/data/{key}", data)
        archive.writestr(f"{top}/version", b"3\n")


def bf16(values: Any) -> bytes:
    """The upper halves of the floats."""
    raw: bytes = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return raw


FLOATS = {"0": VALUES.astype("<f4").tobytes()}
ROW = ("FloatStorage", (HIDDEN,), (1,))


@pytest.mark.parametrize("protocol", [2, 4])
def test_one_tensor(tmp_path: Path, protocol: int) -> None:
    save(tmp_path / "mask_embedding.pt", lambda _, tensor: tensor(*ROW), FLOATS, protocol)
    found = read_mask_embedding(tmp_path, HIDDEN)
    assert found is not None
    np.testing.assert_array_equal(np.array(found[0]), VALUES)
    assert found[1] is None


@pytest.mark.parametrize(
    ("kind", "data", "known"),
    [
        ("HalfStorage", VALUES.astype("<f2").tobytes(), VALUES.astype(np.float16).astype(np.float32)),
        ("BFloat16Storage", bf16(VALUES), (VALUES.view(np.uint32) >> 16 << 16).view(np.float32)),
    ],
)
def test_narrow_numbers(tmp_path: Path, kind: str, data: bytes, known: Any) -> None:
    shape, strides = (1, HIDDEN), (HIDDEN, 1)
    save(tmp_path / "mask_embedding.pt", lambda _, tensor: tensor(kind, shape, strides), {"0": data})
    found = read_mask_embedding(tmp_path, HIDDEN)
    assert found is not None
    np.testing.assert_array_equal(np.array(found[0]), known)


def test_part_of_a_storage(tmp_path: Path) -> None:
    longer = np.concatenate([np.full(5, 9, np.float32), VALUES]).astype("<f4").tobytes()
    save(tmp_path / "mask_embedding.pt", lambda _, tensor: tensor(*ROW, 5), {"0": longer})
    found = read_mask_embedding(tmp_path, HIDDEN)
    assert found is not None
    np.testing.assert_array_equal(np.array(found[0]), VALUES)


def test_dict_with_a_token_and_a_parameter(tmp_path: Path) -> None:
    def build(names: Any, tensor: Any) -> Any:
        rebuild = names["torch._utils"]._rebuild_parameter
        return {
            "embedding": FakeTensor(rebuild, (tensor(*ROW), False, OrderedDict())),
            "mask_token_id": 11,
        }

    twin = TWINS["dflash2"]
    write_twin(tmp_path, twin)
    save(tmp_path / "mask_embedding.pt", build, FLOATS)
    found = checkpoint.inspect(tmp_path)
    assert (twin.backbone.mask_token, found.config.mask_token) == (MASK, 11)
    checkpoint.load(found, "it", NumpyTables(VOCAB, HIDDEN))


def test_safetensors(tmp_path: Path) -> None:
    twin = TWINS["dflash"]
    write_twin(tmp_path, twin)
    mx.save_safetensors(str(tmp_path / "mask_embedding.safetensors"), {"embedding": mx.array(VALUES)})
    found = read_mask_embedding(tmp_path, HIDDEN)
    assert found is not None
    np.testing.assert_array_equal(np.array(found[0]), VALUES)
    # It is no part of the weights.
    assert checkpoint.inspect(tmp_path).notes == ()


def test_without_a_sidecar(tmp_path: Path) -> None:
    assert read_mask_embedding(tmp_path, HIDDEN) is None


def bomb(_: Any, __: Any) -> Any:
    return FakeTensor(os.system, ("touch /tmp/this-must-not-exist-after-the-test",))


def sentence(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_mask_embedding(folder, HIDDEN)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("build", "numbers"),
    [
        (bomb, FLOATS),
        (lambda _, tensor: {"embedding": tensor(*ROW), "x": FakeTensor(eval, ("1",))}, FLOATS),
        (lambda _, tensor: [tensor(*ROW)], FLOATS),
        (lambda _, tensor: {"other": tensor(*ROW)}, FLOATS),
        (lambda _, tensor: {"embedding": tensor(*ROW), "mask_token_id": -3}, FLOATS),
        (lambda _, tensor: {"embedding": tensor(*ROW), "mask_token_id": "3"}, FLOATS),
        (lambda _, tensor: tensor("LongStorage", (HIDDEN,), (1,)), FLOATS),
        (lambda _, tensor: tensor("FloatStorage", (HIDDEN,), (2,)), FLOATS),
        (lambda _, tensor: tensor("FloatStorage", (HIDDEN,), (0,)), FLOATS),
        (lambda _, tensor: tensor("FloatStorage", (1 << 40,), (1,)), FLOATS),
        (lambda _, tensor: tensor("FloatStorage", (HIDDEN,), (1,), 7), FLOATS),
        (lambda _, tensor: tensor("FloatStorage", (HIDDEN,), (1,), 0, "../0"), FLOATS),
        (lambda _, tensor: tensor(*ROW), {}),
        (lambda _, tensor: tensor(*ROW), {"0": b"\0" * 6}),
        (lambda *_: 3, FLOATS),
    ],
)
def test_anything_else_is_refused_and_nothing_is_run(tmp_path: Path, build: Any, numbers: Any) -> None:
    save(tmp_path / "mask_embedding.pt", build, numbers)
    assert "is not one plain tensor" in sentence(tmp_path)
    assert not Path("/tmp/this-must-not-exist-after-the-test").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04 and no more",
        pickle.dumps({"embedding": [1.0]}),
        b"\x80\x02c__builtin__\neval\n(X\x01\x00\x00\x001tR.",
    ],
)
def test_files_that_are_no_zip(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "mask_embedding.pt").write_bytes(data)
    assert "is not one plain tensor" in sentence(tmp_path)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80\x02", b"\x80\x02R.", b"\x80\x02t.", b"\x80\x02h\x05.", b"\x80\x02}K\x01s.", b"\xff\xff"],
)
def test_pickles_that_make_no_sense(tmp_path: Path, data: bytes) -> None:
    with zipfile.ZipFile(tmp_path / "mask_embedding.pt", "w") as archive:
        archive.writestr("x/data.pkl", data)
    assert "is not one plain tensor" in sentence(tmp_path)


def test_big_endian_numbers_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "mask_embedding.pt", lambda _, tensor: tensor(*ROW), FLOATS, byteorder=b"big")
    assert "is not one plain tensor" in sentence(tmp_path)


def test_wrong_size_and_wrong_numbers(tmp_path: Path) -> None:
    file = tmp_path / "mask_embedding.pt"
    save(file, lambda _, tensor: tensor("FloatStorage", (8,), (1,)), FLOATS)
    assert f"holds 8 numbers, {HIDDEN} were expected" in sentence(tmp_path)
    spoilt = VALUES.copy()
    spoilt[3] = np.nan
    save(file, lambda _, tensor: tensor(*ROW), {"0": spoilt.astype("<f4").tobytes()})
    assert "not finite" in sentence(tmp_path)


def test_token_outside_the_vocabulary(tmp_path: Path) -> None:
    write_twin(tmp_path, TWINS["dflash"])
    file = tmp_path / "mask_embedding.pt"
    save(file, lambda _, tensor: {"embedding": tensor(*ROW), "mask_token_id": VOCAB}, FLOATS)
    with pytest.raises(
        CheckpointError, match="its mask embedding is for token 80, but its vocabulary has 80"
    ):
        checkpoint.inspect(tmp_path)
