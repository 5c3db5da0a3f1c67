"""Reading a drafter's checkpoint: what it is, whether it fits the target, and loading it.

Detection follows the published configurations (specs: drafters, II.2). Whatever is not certain to work is
refused in one sentence. Code that a checkpoint carries is never run.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dspark_tui.engine.drafters.backbone import Backbone, BackboneConfig, BlockDrafter
from dspark_tui.engine.drafters.base import Tables
from dspark_tui.engine.drafters.dflash import DFlash
from dspark_tui.engine.drafters.dflash2 import DFlash2, DFlash2Model
from dspark_tui.engine.drafters.dspark import DSpark, DSparkModel
from dspark_tui.engine.precision import drafter_dtype, on_cpu, to_float32
from dspark_tui.engine.protocol import Method

HEADER_LIMIT = 100 * 1024 * 1024
_METHODS: dict[str, Method] = {
    "DFlash2DraftModel": "dflash2",
    "DFlashDraftModel": "dflash",
    "Qwen3DSparkModel": "dspark",
}


class CheckpointError(Exception):
    """A checkpoint that cannot be used; the text is one sentence for the user."""


@dataclass(frozen=True)
class Checkpoint:
    """A drafter on disk that was recognised. `shapes` are those of the stored tensors."""

    path: Path
    method: Method
    config: BackboneConfig
    drafts: int
    selector_rank: int
    selector_top_k: int
    markov_rank: int
    confidence_with_markov: bool
    target_layers: int | None
    quantization: dict[str, Any] | None
    shapes: dict[str, tuple[int, ...]]
    weight_bytes: int


def read_header(file: Path) -> tuple[dict[str, tuple[int, ...]], int]:
    """Shapes by tensor name, and the bytes of all tensors, from a safetensors file's header alone.

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
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"{file} is not a safetensors file; fetch the drafter again.") from error
    if 8 + length + end > size:
        raise CheckpointError(f"{file} is cut off ({size} of {8 + length + end} bytes); fetch it again.")
    return shapes, end


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} has no config.json, so it is not a drafter's folder.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} holds no JSON object.")
    return config


def _detect(path: Path, config: dict[str, Any]) -> Method:
    architectures = config.get("architectures") or []
    for name in architectures:
        if name in _METHODS and "speculators_model_type" not in config:
            return _METHODS[name]
    kind = ", ".join(map(str, architectures)) or config.get("model_type") or "no architecture"
    raise CheckpointError(
        f"{path.name} is not a drafter that this version can load ({kind}); it loads DSpark "
        "(Qwen3DSparkModel), DFlash (DFlashDraftModel) and DFlash 2 (DFlash2DraftModel) checkpoints."
    )


def inspect(path: Path) -> Checkpoint:
    """Recognise the drafter in folder `path` from its configuration and its tensors' shapes.

    Nothing large is read. Raises `CheckpointError`.
    """
    config = _read_config(path)
    method = _detect(path, config)
    nested = config.get("dflash_config") or {}

    def refuse(what: str) -> CheckpointError:
        return CheckpointError(f"{path.name} cannot be used: {what}.")

    def number(key: str) -> int:
        value = nested.get(key, config.get(key))
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise refuse(f"its config.json gives {key} as {value!r}, a positive whole number was expected")
        return value

    if "qwen3" not in str(config.get("model_type")):
        raise refuse(f"its backbone is {config.get('model_type')}, only qwen3 is supported so far")
    if any(kind != "full_attention" for kind in config.get("layer_types") or []):
        raise refuse("it has sliding-window layers, which are not supported so far")
    if config.get("is_causal") or nested.get("causal") or nested.get("use_swa"):
        raise refuse("it asks for causal or windowed attention in the block, which is not supported so far")
    for key in ("output_multiplier", "input_embedding_scale"):
        if nested.get(key, 1.0) != 1.0:
            raise refuse(f"it sets {key}, which is not supported so far")
    if nested.get("final_logit_softcapping") or config.get("final_logit_softcapping"):
        raise refuse("it caps its logits, which is not supported so far")
    if config.get("rope_scaling"):
        raise refuse("it scales its rotary positions, which is not supported so far")
    if method == "dspark" and config.get("markov_head_type", "vanilla") != "vanilla":
        raise refuse(f"its Markov head is {config['markov_head_type']}, only vanilla is supported so far")
    if method == "dspark" and not config.get("enable_confidence_head"):
        raise refuse("it has no confidence head, which is not supported so far")

    taps = nested.get("target_layer_ids", config.get("target_layer_ids"))
    if not isinstance(taps, list) or not taps or not all(isinstance(t, int) and t >= 0 for t in taps):
        raise refuse(f"its config.json gives target_layer_ids as {taps!r}, a list of layers was expected")
    rope = config.get("rope_parameters") or {}
    block = number("block_size")
    backbone = BackboneConfig(
        hidden_size=number("hidden_size"),
        intermediate_size=number("intermediate_size"),
        layers=number("num_hidden_layers"),
        heads=number("num_attention_heads"),
        kv_heads=number("num_key_value_heads"),
        head_dim=number("head_dim"),
        vocabulary=number("vocab_size"),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 1e6),
        block_size=block,
        mask_token=number("mask_token_id"),
        taps=tuple(taps),
        conv_taps=number("conv_kernel_size") if method == "dflash2" else 0,
        conv_group=number("conv_group_size") if method == "dflash2" else 16,
    )
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} has no .safetensors file, so the drafter's weights are missing.")
    shapes: dict[str, tuple[int, ...]] = {}
    weight_bytes = 0
    for file in files:
        found, size = read_header(file)
        shapes.update(found)
        weight_bytes += size
    return Checkpoint(
        path=path,
        method=method,
        config=backbone,
        drafts=block if method == "dspark" else block - 1,
        selector_rank=number("selector_rank") if method == "dflash2" else 0,
        selector_top_k=number("selector_top_k") if method == "dflash2" else 0,
        markov_rank=number("markov_rank") if method == "dspark" else 0,
        confidence_with_markov=bool(config.get("confidence_head_with_markov", True)),
        target_layers=config.get("num_target_layers"),
        quantization=config.get("quantization"),
        shapes=shapes,
        weight_bytes=weight_bytes,
    )


def misfit(checkpoint: Checkpoint, tables: Tables, layers: int) -> str | None:
    """Why this drafter does not fit a target of `layers` layers, in words, or None when it does."""
    config = checkpoint.config
    if config.hidden_size != tables.hidden_size:
        return f"drafter is for another target (hidden size {config.hidden_size}, not {tables.hidden_size})"
    if config.vocabulary != tables.vocabulary:
        return f"drafter is for another target (vocabulary {config.vocabulary}, not {tables.vocabulary})"
    if checkpoint.target_layers not in (None, layers) or max(config.taps) >= layers:
        wanted = checkpoint.target_layers or max(config.taps) + 1
        return f"drafter is for another target ({wanted} layers, not {layers})"
    return None


def _modules(checkpoint: Checkpoint) -> Backbone:
    if checkpoint.method == "dspark":
        return DSparkModel(checkpoint.config, checkpoint.markov_rank, checkpoint.confidence_with_markov)
    if checkpoint.method == "dflash2":
        return DFlash2Model(checkpoint.config, checkpoint.selector_rank)
    return Backbone(checkpoint.config)


def _rename(name: str) -> str:
    """Published codebooks have no suffix; here every table is `.weight`."""
    return f"{name}.weight" if name.endswith("_codebook") else name


def load(checkpoint: Checkpoint, name: str, tables: Tables) -> BlockDrafter:
    """Load the weights and bind the target's tables: float32 on the CPU, else as stored (bf16 at least).

    Raises `CheckpointError` when tensors are missing, do not fit the configuration or are not finite.
    """
    model = _modules(checkpoint)
    weights: dict[str, mx.array] = {}
    for file in sorted(checkpoint.path.glob("*.safetensors")):
        weights.update({_rename(key): value for key, value in mx.load(str(file)).items()})
    quantization = checkpoint.quantization
    if quantization is not None:
        nn.quantize(
            model,
            group_size=quantization["group_size"],
            bits=quantization["bits"],
            mode=quantization.get("mode", "affine"),
            class_predicate=lambda path, module: (
                hasattr(module, "to_quantized") and f"{path}.scales" in weights
            ),
        )
    try:
        model.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        detail = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{checkpoint.path.name} does not hold what its config.json says ({detail})."
        ) from error
    dtype = drafter_dtype()
    if on_cpu():
        to_float32(model)
    else:
        model.set_dtype(dtype)
        mx.eval(model.parameters())
    for norm in (model.norm.weight, model.hidden_norm.weight):
        if not mx.isfinite(norm).all().item():
            raise CheckpointError(
                f"{checkpoint.path.name} holds numbers that are not finite; fetch it again."
            )
    config, drafts = checkpoint.config, checkpoint.drafts
    if isinstance(model, DSparkModel):
        return DSpark(name, config, model, tables, drafts, dtype)
    if isinstance(model, DFlash2Model):
        return DFlash2(name, config, model, tables, drafts, dtype, checkpoint.selector_top_k)
    return DFlash(name, config, model, tables, drafts, dtype)
