"""Reading a drafter's checkpoint: what it is, whether it fits the target, and loading it.

The readers of `formats` recognise the published packagings. Whatever is not certain to work is refused in one
sentence. Code that a checkpoint carries is never run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dspark_tui.engine.drafters import quantise
from dspark_tui.engine.drafters.base import Tables
from dspark_tui.engine.drafters.block import BlockDrafter
from dspark_tui.engine.drafters.config import BackboneConfig, HeadConfig
from dspark_tui.engine.drafters.formats import describe
from dspark_tui.engine.drafters.formats.description import Packaging
from dspark_tui.engine.drafters.formats.errors import CheckpointError
from dspark_tui.engine.drafters.formats.layout import check, layout, quantization_of
from dspark_tui.engine.drafters.formats.mask_sidecar import read_mask_embedding
from dspark_tui.engine.drafters.formats.settings import Settings, read_config
from dspark_tui.engine.drafters.formats.stored import Tensor, read_tensors
from dspark_tui.engine.drafters.heads import DrafterModel
from dspark_tui.engine.drafters.modules import bind, build
from dspark_tui.engine.precision import drafter_dtype, on_cpu, to_float32, weight_bytes
from dspark_tui.engine.protocol import Method

__all__ = ["Checkpoint", "CheckpointError", "inspect", "load", "memory_bytes", "misfit"]

TRAINED_CONTEXT = 4096
"""Newest rows that a drafter sees. Published heads were trained on at most that many, and draft better when
they see no more; those with stretched (YaRN) positions were trained on longer ones."""
_DAMAGE = (ValueError, RuntimeError, TypeError, KeyError, OSError)
"""What MLX and the modules raise over weights that are not what the headers said."""
_AS_GOOD = 8
"""Bits from which on the target's own table serves as well as the copy that a drafter carries."""


@dataclass(frozen=True)
class Checkpoint:
    """A drafter on disk that was recognised. `tensors` are the stored ones by the engine's names; `notes` are
    sentences on what was found and left aside."""

    path: Path
    method: Method
    packaging: Packaging
    config: BackboneConfig
    head: HeadConfig
    target_layers: int | None
    scaled_by_target: bool
    quantization: Mapping[str, Any] | None
    tensors: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()

    @property
    def drafts(self) -> int:
        """Tokens proposed a round."""
        return self.config.block_size - self.head.first_row


def inspect(path: Path) -> Checkpoint:
    """Recognise the drafter in folder `path` from its configuration and its tensors' headers.

    Nothing large is read. Raises `CheckpointError`.
    """
    name, values = path.name, read_config(path)
    tensors = read_tensors(path)
    found = describe(name, values, tensors)
    config, quantization = found.config, _quantization(Settings(name, values), tensors)
    extras = check(name, config, found.head, tensors, quantization)
    sidecar = read_mask_embedding(path, config.hidden_size)
    if sidecar is not None and sidecar[1] is not None:
        if sidecar[1] >= config.vocabulary:
            raise CheckpointError(
                f"{name} cannot be used: its mask embedding is for token {sidecar[1]}, but its vocabulary "
                f"has {config.vocabulary}."
            )
        config = replace(config, mask_token=sidecar[1])
    notes = [f"{name} holds tensors that are not used: {', '.join(extras)[:200]}."] if extras else []
    return Checkpoint(
        path=path,
        method=found.method,
        packaging=found.packaging,
        config=replace(config, context_limit=TRAINED_CONTEXT if config.rope.yarn is None else None),
        head=found.head,
        target_layers=found.target_layers,
        scaled_by_target=found.scaled_by_target,
        quantization=quantization,
        tensors=tensors,
        notes=tuple(notes),
    )


def _quantization(settings: Settings, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """MLX's `quantization`, None when no tensor is stored so."""
    if not any(name.endswith(".scales") for name in tensors):
        return None
    found = settings.object("quantization") or settings.object("quantization_config")
    if not (type(found.get("group_size")) is int and type(found.get("bits")) is int):
        raise settings.refusal("its config.json gives quantization without group_size and bits")
    return found


# ---------------------------------------------------------------------------- fit


class Dimensions(Protocol):
    """Of a target's embedding."""

    @property
    def hidden_size(self) -> int:
        """Columns."""
        ...

    @property
    def vocabulary(self) -> int:
        """Rows."""
        ...


def misfit(checkpoint: Checkpoint, tables: Dimensions, layers: int, tokenizer: Any = None) -> str | None:
    """Why this drafter does not fit a target of `layers` layers, in words, or None when it does.

    When the checkpoint carries a tokenizer, it has to give every token the id that `tokenizer` gives.
    """
    config, head = checkpoint.config, checkpoint.head
    borrows = not (head.own_embedding and head.own_head)
    for hidden in (config.tap_width, config.hidden_size if borrows else config.tap_width):
        if hidden != tables.hidden_size:
            return f"drafter is for another target (hidden size {hidden}, not {tables.hidden_size})"
    if config.vocabulary != tables.vocabulary:
        return f"drafter is for another target (vocabulary {config.vocabulary}, not {tables.vocabulary})"
    if checkpoint.target_layers not in (None, layers) or max(config.taps) >= layers:
        wanted = checkpoint.target_layers or max(config.taps) + 1
        return f"drafter is for another target ({wanted} layers, not {layers})"
    return _other_tokenizer(checkpoint.path / "tokenizer.json", tokenizer)


def _other_tokenizer(file: Path, tokenizer: Any) -> str | None:
    """How the tokenizer in `file` differs. Added tokens may: some drafters name their mask token so."""
    if tokenizer is None or not file.is_file():
        return None
    try:
        vocabulary = json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
        if isinstance(vocabulary, list):  # the Unigram kind lists pairs of piece and score
            vocabulary = {piece: i for i, (piece, _) in enumerate(vocabulary)}
        ours = tokenizer.get_vocab()
        differing = [(number, token) for token, number in vocabulary.items() if ours.get(token) != number]
        if differing:
            number, token = min(differing)
            return f"drafter is for another target (its tokenizer gives token {number} to {token[:40]!r})"
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "its tokenizer.json cannot be read, so it is not certain that it is for this target"
    return None


def _fitted(checkpoint: Checkpoint, tables: Tables, table_bits: int) -> tuple[BackboneConfig, HeadConfig]:
    """The drafter's configuration with this target: whose tables serve, and how embeddings are scaled.

    Tables of the drafter's own serve unless the target's have the same shape and `table_bits` are enough;
    a head over a reduced vocabulary always does.
    """
    config, head = checkpoint.config, checkpoint.head
    same = (tables.vocabulary, tables.hidden_size) == (config.vocabulary, config.hidden_size)
    borrow = same and table_bits >= _AS_GOOD
    head = replace(
        head,
        own_embedding=head.own_embedding and not borrow,
        own_head=head.own_head and (head.draft_vocabulary is not None or not borrow),
    )
    if checkpoint.scaled_by_target:
        config = replace(config, embedding_scale=tables.embedding_scale)
    return config, head


# ---------------------------------------------------------------------------- loading


def load(
    checkpoint: Checkpoint, name: str, tables: Tables, bits: int | None = None, table_bits: int = 16
) -> BlockDrafter:
    """Load the weights and bind the target's tables.

    `bits` 8 or 4 quantises the layers' products, 0 keeps them as stored, None is 8 on a GPU (as stored when
    that is quantised already) and 0 on the CPU, where everything ends up in float32, rounded or not.
    `table_bits`: the precision of the target's embedding and head, 16 when they are not quantised.

    Raises `CheckpointError` when tensors are damaged, do not fit the configuration or are not finite.
    """
    config, head = _fitted(checkpoint, tables, table_bits)
    try:
        model = _assembled(checkpoint, config, head, bits)
        dtype = drafter_dtype()
        if on_cpu():
            to_float32(model)
        else:
            model.set_dtype(dtype)
            mx.eval(model.parameters())
        if not _all_finite(model):
            raise CheckpointError(
                f"{checkpoint.path.name} holds numbers that are not finite; fetch it again."
            )
        sidecar = read_mask_embedding(checkpoint.path, config.hidden_size)
        mask = None if sidecar is None else sidecar[0].astype(dtype)
        return bind(
            name, checkpoint.method, config, head, model, tables, dtype,
            d2t=_draft_to_target(checkpoint, head), mask_embedding=mask,
        )  # fmt: skip
    except _DAMAGE as error:
        raise _contradicted(checkpoint, error) from error


def memory_bytes(
    checkpoint: Checkpoint, tables: Tables, bits: int | None = None, table_bits: int = 16
) -> int:
    """Bytes that the weights will take in memory, as `load` would place them. Nothing large is read.

    Raises `CheckpointError` as `load` does where the headers alone tell.
    """
    config, head = _fitted(checkpoint, tables, table_bits)
    if on_cpu():
        return 4 * sum(math.prod(shape) for shape in layout(config, head).values())
    try:
        model = _assembled(checkpoint, config, head, bits)
    except _DAMAGE as error:
        raise _contradicted(checkpoint, error) from error
    model.set_dtype(drafter_dtype())
    return weight_bytes(model)


def _contradicted(checkpoint: Checkpoint, error: Exception) -> CheckpointError:
    detail = " ".join(str(error).split())[:200]
    return CheckpointError(f"{checkpoint.path.name} does not hold what its config.json says ({detail}).")


def _assembled(
    checkpoint: Checkpoint, config: BackboneConfig, head: HeadConfig, bits: int | None
) -> DrafterModel:
    """The modules with the stored weights, quantised as asked for. Lazy."""
    model = build(config, head)
    # Its first parameters are drawn, lazily, and never looked at: without this MLX's random state would grow
    # with every drafter that is loaded.
    mx.eval(mx.random.uniform())
    weights = _read_weights(checkpoint, layout(config, head))
    if checkpoint.quantization is not None:
        _as_stored(model, checkpoint.quantization, weights)
    model.load_weights(list(weights.items()), strict=True)
    if bits is None:
        bits = 0 if on_cpu() or checkpoint.quantization is not None else 8
    if bits:
        quantise.requantise(model, bits)
    return model


def _read_weights(checkpoint: Checkpoint, wanted: Mapping[str, Any]) -> dict[str, mx.array]:
    """The stored arrays that make up the `wanted` parameters. Lazy."""
    parts = {name.removesuffix("weight") + part for name in wanted for part in ("scales", "biases")}
    names = [name for name in checkpoint.tensors if name in wanted or name in parts]
    files = {checkpoint.tensors[name].file for name in names}
    loaded = {file: cast(dict[str, mx.array], mx.load(str(file))) for file in files}
    return {name: loaded[tensor.file][tensor.name] for name in names if (tensor := checkpoint.tensors[name])}


def _as_stored(model: nn.Module, quantization: Mapping[str, Any], weights: Mapping[str, mx.array]) -> None:
    """Give the modules that are stored quantised their quantised form."""

    def how(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        found = quantization_of(path, quantization)
        return {
            "group_size": found["group_size"], "bits": found["bits"], "mode": found.get("mode", "affine")
        }  # fmt: skip

    nn.quantize(model, class_predicate=how)


def _draft_to_target(checkpoint: Checkpoint, head: HeadConfig) -> mx.array | None:
    """Offsets from draft ids to target ids `[draft vocabulary]` (int32), None for a full vocabulary."""
    if head.draft_vocabulary is None:
        return None
    tensor = checkpoint.tensors["d2t"]
    offsets = cast(dict[str, mx.array], mx.load(str(tensor.file)))[tensor.name].astype(mx.int64)
    ids = offsets + mx.arange(head.draft_vocabulary, dtype=mx.int64)
    # An id outside the vocabulary would be written outside of tables.
    if bool(((ids < 0) | (ids >= checkpoint.config.vocabulary)).any().item()):
        raise CheckpointError(
            f"{checkpoint.path.name} cannot be used: its d2t leads outside the vocabulary of "
            f"{checkpoint.config.vocabulary} tokens."
        )
    return offsets.astype(mx.int32)


def _all_finite(model: nn.Module) -> bool:
    values = [value for _, value in cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))]
    floats = [mx.isfinite(value).all() for value in values if mx.issubdtype(value.dtype, mx.floating)]
    return bool(mx.stack(floats).all().item())
