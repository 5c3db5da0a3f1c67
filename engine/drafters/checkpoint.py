"""Reading a drafter's checkpoint: what it is, whether it fits the target, and loading it.

Detection follows the published configurations. Whatever is not certain to work is
refused in one sentence. Code that a checkpoint carries is never run.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dspark_tui.engine.drafters.backbone import Backbone, BackboneConfig, BlockDrafter
from dspark_tui.engine.drafters.base import Tables
from dspark_tui.engine.drafters.dflash import DFlash
from dspark_tui.engine.drafters.dflash2 import DFlash2, DFlash2Model
from dspark_tui.engine.drafters.dspark import DSpark, DSparkModel
from dspark_tui.engine.precision import drafter_dtype, on_cpu, to_float32
from dspark_tui.engine.protocol import Method

HEADER_LIMIT = 100 * 1024 * 1024
BLOCK_LIMIT = 256
"""Longest block that is taken; published ones have up to 16 tokens. Attention is quadratic in it, and MLX
crashes where that does not fit."""
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
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}).") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error) as error:
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
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} holds no JSON object.")
    return config


class _Settings:
    """A drafter's config.json: what `dflash_config` says counts before what stands at the top."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self._path, self._config = path, config
        self._nested: dict[str, Any] = {}
        self._nested = self.object("dflash_config")

    def refusal(self, what: str) -> CheckpointError:
        """The refusal that says `what`."""
        return CheckpointError(f"{self._path.name} cannot be used: {what}.")

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """The refusal of the value of `key`."""
        value = repr(self.get(key))[:80]
        return self.refusal(f"its config.json gives {key} as {value}, {expected} was expected")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`; `default` when it is absent or null."""
        for place in (self._nested, self._config):
            if place.get(key) is not None:
                return place[key]
        return default

    def object(self, key: str) -> dict[str, Any]:
        """An object of the top level, empty when it is absent."""
        value = self._config.get(key) or {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return value

    def whole(self, key: str, least: int = 1, below: int | None = None) -> int:
        """A whole number from `least`, and below `below`."""
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(key, f"a whole number from {least}")
        if below is not None and value >= below:
            raise self.wrong(key, f"a whole number below {below}")
        return value

    def positive(self, key: str, value: Any) -> float:
        """`value`, which `key` gives, as a number above 0."""
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.wrong(key, "a number above 0")
        return float(value)

    def layers(self, key: str) -> tuple[int, ...]:
        """A list of layer numbers."""
        value = self.get(key)
        if not isinstance(value, list) or not value or not all(type(t) is int and t >= 0 for t in value):
            raise self.wrong(key, "a list of layers")
        return tuple(value)


def _detect(path: Path, config: dict[str, Any]) -> Method:
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    for name in names:
        if isinstance(name, str) and name in _METHODS and "speculators_model_type" not in config:
            return _METHODS[name]
    kind = ", ".join(map(str, names)) or config.get("model_type") or "no architecture"
    raise CheckpointError(
        f"{path.name} is not a drafter that this version can load ({str(kind)[:80]}); it loads DSpark "
        "(Qwen3DSparkModel), DFlash (DFlashDraftModel) and DFlash 2 (DFlash2DraftModel) checkpoints."
    )


def _unsupported(settings: _Settings, method: Method) -> str | None:
    """What the checkpoint asks for that this version cannot do, in words, or None."""
    get = settings.get
    if "qwen3" not in str(get("model_type")):
        return f"its backbone is {str(get('model_type'))[:80]}, only qwen3 is supported so far"
    kinds = get("layer_types", [])
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        return "it has sliding-window layers, which are not supported so far"
    if get("is_causal") or get("causal") or get("use_swa"):
        return "it asks for causal or windowed attention in the block, which is not supported so far"
    for key in ("output_multiplier", "input_embedding_scale"):
        if get(key, 1.0) != 1.0:
            return f"it sets {key}, which is not supported so far"
    if get("final_logit_softcapping"):
        return "it caps its logits, which is not supported so far"
    if get("rope_scaling") or settings.object("rope_parameters").get("rope_type", "default") != "default":
        return "it scales its rotary positions, which is not supported so far"
    if get("attention_bias"):
        return "its attention has biases, which are not supported so far"
    if get("hidden_act", "silu") != "silu":
        return f"its activation is {str(get('hidden_act'))[:80]}, only silu is supported so far"
    if get("draft_vocab_size", get("vocab_size")) != get("vocab_size"):
        return "it drafts from a reduced vocabulary (draft_vocab_size), which is not supported so far"
    if method == "dspark" and get("markov_head_type", "vanilla") != "vanilla":
        return f"its Markov head is {str(get('markov_head_type'))[:80]}, only vanilla is supported so far"
    if method == "dspark" and not get("enable_confidence_head"):
        return "it has no confidence head, which is not supported so far"
    return None


def _backbone(settings: _Settings, method: Method) -> BackboneConfig:
    """The dimensions, checked against each other."""
    whole = settings.whole
    convolved = method == "dflash2"
    vocabulary, hidden = whole("vocab_size"), whole("hidden_size")
    # A block that is all anchor proposes nothing, unless the anchor's row does.
    block = whole("block_size", least=1 if method == "dspark" else 2, below=BLOCK_LIMIT + 1)
    config = BackboneConfig(
        hidden_size=hidden,
        intermediate_size=whole("intermediate_size"),
        layers=whole("num_hidden_layers"),
        heads=whole("num_attention_heads"),
        kv_heads=whole("num_key_value_heads"),
        head_dim=whole("head_dim"),
        vocabulary=vocabulary,
        eps=settings.positive("rms_norm_eps", settings.get("rms_norm_eps", 1e-6)),
        rope_theta=settings.positive(
            "rope_theta",
            settings.object("rope_parameters").get("rope_theta") or settings.get("rope_theta", 1e6),
        ),
        block_size=block,
        mask_token=whole("mask_token_id", least=0, below=vocabulary),
        taps=settings.layers("target_layer_ids"),
        conv_taps=whole("conv_kernel_size", below=block + 1) if convolved else 0,
        conv_group=whole("conv_group_size") if convolved else 16,
    )
    if config.heads % config.kv_heads:
        raise settings.wrong("num_key_value_heads", f"a divisor of {config.heads} heads")
    if config.head_dim % 2:
        raise settings.wrong("head_dim", "an even number")
    if convolved and hidden % config.conv_group:
        raise settings.wrong("conv_group_size", f"a divisor of the hidden size {hidden}")
    return config


def _quantization(settings: _Settings) -> dict[str, Any] | None:
    found = settings.object("quantization")
    if found and not (type(found.get("group_size")) is int and type(found.get("bits")) is int):
        raise settings.refusal("its config.json gives quantization without group_size and bits")
    return found or None


def inspect(path: Path) -> Checkpoint:
    """Recognise the drafter in folder `path` from its configuration and its tensors' shapes.

    Nothing large is read. Raises `CheckpointError`.
    """
    config = _read_config(path)
    method = _detect(path, config)
    settings = _Settings(path, config)
    if unsupported := _unsupported(settings, method):
        raise settings.refusal(unsupported)
    backbone = _backbone(settings, method)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} has no .safetensors file, so the drafter's weights are missing.")
    shapes: dict[str, tuple[int, ...]] = {}
    weight_bytes = 0
    for file in files:
        found, size = read_header(file)
        shapes.update(found)
        weight_bytes += size
    if backbone.layers > len(shapes):
        raise settings.wrong("num_hidden_layers", f"no more layers than its {len(shapes)} tensors hold")
    block, top = backbone.block_size, backbone.vocabulary + 1
    return Checkpoint(
        path=path,
        method=method,
        config=backbone,
        drafts=block if method == "dspark" else block - 1,
        selector_rank=settings.whole("selector_rank") if method == "dflash2" else 0,
        selector_top_k=settings.whole("selector_top_k", below=top) if method == "dflash2" else 0,
        markov_rank=settings.whole("markov_rank") if method == "dspark" else 0,
        confidence_with_markov=bool(settings.get("confidence_head_with_markov", True)),
        target_layers=settings.whole("num_target_layers") if settings.get("num_target_layers") else None,
        quantization=_quantization(settings),
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


_BORROWED = ("embed_tokens.", "lm_head.")
"""Tables of the target that published DSpark checkpoints repeat; the target's own serve."""


def _rename(name: str) -> str:
    """Published codebooks have no suffix; here every table is `.weight`."""
    return f"{name}.weight" if name.endswith(("_codebook", ".kernel_projection")) else name


def _read_weights(checkpoint: Checkpoint) -> dict[str, mx.array]:
    weights: dict[str, mx.array] = {}
    for file in sorted(checkpoint.path.glob("*.safetensors")):
        weights.update(cast(dict[str, mx.array], mx.load(str(file))))
    return {_rename(name): value for name, value in weights.items() if not name.startswith(_BORROWED)}


def _quantise(model: Backbone, quantization: dict[str, Any], weights: dict[str, mx.array]) -> None:
    """Give the modules that are stored quantised their quantised form."""
    nn.quantize(
        model,
        group_size=quantization["group_size"],
        bits=quantization["bits"],
        mode=quantization.get("mode", "affine"),
        class_predicate=lambda path, module: hasattr(module, "to_quantized") and f"{path}.scales" in weights,
    )


def _all_finite(model: nn.Module) -> bool:
    values = [value for _, value in cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))]
    floats = [mx.isfinite(value).all() for value in values if mx.issubdtype(value.dtype, mx.floating)]
    return bool(mx.stack(floats).all().item())


def load(checkpoint: Checkpoint, name: str, tables: Tables) -> BlockDrafter:
    """Load the weights and bind the target's tables: float32 on the CPU, else as stored (bf16 at least).

    Raises `CheckpointError` when tensors are missing, do not fit the configuration or are not finite.
    """
    try:
        model = _modules(checkpoint)
        weights = _read_weights(checkpoint)
        if checkpoint.quantization is not None:
            _quantise(model, checkpoint.quantization, weights)
        model.load_weights(list(weights.items()), strict=True)
    except (ValueError, RuntimeError, TypeError) as error:
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
    if not _all_finite(model):
        raise CheckpointError(f"{checkpoint.path.name} holds numbers that are not finite; fetch it again.")
    config, drafts = checkpoint.config, checkpoint.drafts
    if isinstance(model, DSparkModel):
        return DSpark(name, config, model, tables, drafts, dtype)
    if isinstance(model, DFlash2Model):
        return DFlash2(name, config, model, tables, drafts, dtype, checkpoint.selector_top_k)
    return DFlash(name, config, model, tables, drafts, dtype)
