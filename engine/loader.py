"""From a model folder to a session: target, taps, and the drafters that fit it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import mlx_lm
from mlx_lm.utils import load_model, load_tokenizer

from dspark_tui.engine.chat_template import chat_template
from dspark_tui.engine.drafters import checkpoint, quantise
from dspark_tui.engine.drafters.base import Drafter
from dspark_tui.engine.drafters.checkpoint import Checkpoint, CheckpointError
from dspark_tui.engine.end_tokens import end_tokens
from dspark_tui.engine.models.errors import ModelError
from dspark_tui.engine.models.folder import read_config, text_config
from dspark_tui.engine.models.folder import weight_bytes as stored_bytes
from dspark_tui.engine.models.pairs import KnownDrafter, known_drafters
from dspark_tui.engine.models.resolve import ResolvedModel
from dspark_tui.engine.paths import expanded
from dspark_tui.engine.precision import on_cpu, to_float32, weight_bytes
from dspark_tui.engine.probe import probe
from dspark_tui.engine.protocol import DrafterInfo, Method, ModelInfo, Stage
from dspark_tui.engine.session import AUTO, LOOKUP, Candidate, Session, UnknownDrafter, no_such_drafter
from dspark_tui.engine.target import Target

Report = Callable[[Stage, int, int, str], None]
CONTEXT_IF_UNSAID = 4096
"""Context of a model whose config.json names none."""
MOST_LAYERS = 10_000
"""More of them are a damaged config.json: they would be built before anything is compared."""


def load_target(
    model: ResolvedModel, report: Report, kv_bits: int | None = None
) -> tuple[Target, dict[str, Any]]:
    """Load the target in folder `model.path` and its config. Float32 on the CPU, else as stored. `kv_bits`
    8 or 4: with quantised keys and values.

    Raises ModelError with one sentence. Code that the folder carries is never run.
    """
    total = stored_bytes(model.path)
    report("read", 0, total, "bytes")
    try:
        _check_layers(model)
        module, config = load_model(model.path, lazy=True)
        stored = _stored_precision(config)
        if on_cpu():
            to_float32(module)
        else:
            mx.eval(module.parameters())
        tokenizer = load_tokenizer(model.path, eos_token_ids=end_tokens(model.path))
        template = chat_template(tokenizer)
        info = ModelInfo(
            name=model.name,
            path=str(model.path),
            architecture=str(config.get("model_type", "unknown")),
            precision=f"float32 (from {stored})" if on_cpu() and stored != "float32" else stored,
            context=_context(config),
            weight_bytes=weight_bytes(module),
            thinks=template.thinks,
            efforts=template.efforts,
        )
        target = Target(module, tokenizer, info, kv_bits)
    except Exception as error:  # mlx-lm, tokenizers and broken files raise anything at all
        raise ModelError(_why_not(model, error)) from error
    report("read", total, total, "bytes")
    return target, config


def _check_layers(model: ResolvedModel) -> None:
    """Raises ValueError when config.json asks for more layers than any model has."""
    config = read_config(model.path)
    for place in (config, text_config(config)):
        layers = place.get("num_hidden_layers")
        if isinstance(layers, int) and layers > MOST_LAYERS:
            raise ValueError(f"its config.json gives num_hidden_layers as {str(layers)[:20]}")


def _why_not(model: ResolvedModel, error: Exception) -> str:
    """The sentence for whatever went wrong while a target was loaded."""
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    if re.fullmatch(r"Model type \S+ not supported\.", reason):
        # Also when the architecture is known and a module that it imports is missing: as mlx-lm tells it.
        kind = read_config(model.path).get("model_type")
        return (
            f"{model.name} could not be loaded: mlx-lm {mlx_lm.__version__} does not know the architecture "
            f"{kind}; choose another model."
        )
    return f"{model.name} could not be loaded: {reason}"


def _context(config: dict[str, Any]) -> int:
    for place in (config, text_config(config)):
        if isinstance(value := place.get("max_position_embeddings"), int) and value > 0:
            return value
    return CONTEXT_IF_UNSAID


def _stored_precision(config: dict[str, Any]) -> str:
    quantization = config.get("quantization")
    if isinstance(quantization, dict) and "bits" in quantization:
        return f"{quantization['bits']}-bit"
    text = text_config(config)
    return str(config.get("torch_dtype") or config.get("dtype") or text.get("dtype") or "unknown precision")


def check_drafter(model: ResolvedModel, wanted: str | None, drafter_bits: int | None = None) -> None:
    """Say before anything is read that no drafter of that name exists, or that it cannot be loaded in so
    many bits: raises what `make_session` would, or ModelError."""
    if drafter_bits not in (None, *quantise.CHOICES):
        raise ModelError(
            f"drafter-bits is {drafter_bits}; give 8, 4, or 0 (drafters as they are stored).", "usage"
        )
    config = read_config(model.path)
    known, name = _known(config, wanted)
    taken = (None, "none", LOOKUP, AUTO)
    if name not in taken and not any(name in (drafter.name, drafter.method) for drafter in known):
        raise no_such_drafter(model.name, str(name), [drafter.name for drafter in known])
    for drafter in known:
        if drafter.name == name and (reason := _misfit_on_paper(drafter.path, config)):
            raise UnknownDrafter(f"{name} is not usable here: {reason}.")


def _misfit_on_paper(folder: Path, config: dict[str, Any]) -> str | None:
    """Why the drafter in `folder` does not fit a target as its config.json describes it, so that the present
    pair is not given up for it; None when it fits as far as that tells."""
    text = config if "hidden_size" in config else text_config(config)
    hidden, layers = text.get("hidden_size"), text.get("num_hidden_layers")
    if not isinstance(hidden, int) or not isinstance(layers, int):
        return None
    try:
        found = checkpoint.inspect(folder)
    except CheckpointError:
        return None  # said when it is listed or chosen
    return checkpoint.misfit(found, _Dimensions(hidden, found.config.vocabulary), layers)


@dataclass(frozen=True)
class _Dimensions:
    """Of a target that is not loaded."""

    hidden_size: int
    vocabulary: int


def _known(config: dict[str, Any], wanted: str | None) -> tuple[list[KnownDrafter], str | None]:
    """The drafters for a target, with the one in the folder `wanted` if it is one, and its name."""
    known = known_drafters(config)
    taken = ("", *get_args(Method), *(drafter.name for drafter in known))
    folder = None if wanted is None or wanted in taken else _folder(wanted)
    if folder is None:
        return known, wanted
    try:
        found = checkpoint.inspect(folder)
    except CheckpointError as error:
        raise ModelError(str(error), "usage") from error
    name = folder.absolute().name
    if name in ("none", LOOKUP, AUTO):
        name += "/"  # the folder's, not the built-in one's
    # A folder that is called as a known drafter stands in for it.
    others = [drafter for drafter in known if drafter.name != name]
    return [KnownDrafter(name, found.method, folder), *others], name


def _folder(text: str) -> Path | None:
    try:
        folder = expanded(text)
        return folder if folder.is_dir() else None
    except (OSError, ValueError):  # a name too long, a NUL byte
        return None


def make_session(
    target: Target,
    config: dict[str, Any],
    wanted: str | None,
    drafter_bits: int | None = None,
    lookup: bool | None = None,
) -> tuple[Session, str]:
    """A session with every drafter known for the target, and the name of the one to start with.

    `wanted` None means the best usable one, lookup where there is none; it may be a folder.
    `drafter_bits` and `lookup` as in `Load`. Raises `UnknownDrafter` or ModelError.
    """
    known, wanted = _known(config, wanted)
    precision = (drafter_bits, table_bits(config))
    probe(target)
    partner = lookup if lookup is not None else not has_experts(config)
    session = Session(target, [_candidate(drafter, target, precision) for drafter in known], partner)

    def discover(text: str) -> Candidate | None:
        found, name = _known(config, text)
        return next((_candidate(d, target, precision) for d in found if d.name == name), None)

    session.discover = discover
    if wanted is not None:
        return session, session.find(wanted)
    usable = [info.name for info in session.drafters() if info.usable and info.method not in ("none", AUTO)]
    if not partner:
        usable = [name for name in usable if name != LOOKUP]
    return session, usable[0] if usable else "none"


def has_experts(config: dict[str, Any]) -> bool:
    """Whether the target with this config.json is a mixture of experts: every row of a verify may read
    other weights then."""
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    places = (config, text_config(config))
    return any(isinstance(n := place.get(key), int) and n > 1 for place in places for key in counts)


def table_bits(config: dict[str, Any]) -> int:
    """Bits in which the target with this config.json stores its embedding and head, whichever is fewer; 16
    when they are not quantised."""
    quantization = config.get("quantization")
    if not isinstance(quantization, dict):
        return 16
    found = []
    for name in ("embed_tokens", "lm_head"):
        own = [how for path, how in quantization.items() if path.split(".")[-1] == name]
        how = quantization if own in ([], [True]) else own[0]
        bits = how.get("bits") if isinstance(how, dict) else None
        found.append(bits if isinstance(bits, int) else 16)
    return min(found)


def _candidate(known: KnownDrafter, target: Target, precision: tuple[int | None, int]) -> Candidate:
    """`precision`: what `checkpoint.load` takes as `bits` and `table_bits`."""
    reason = target.cannot_roll_back()
    try:
        found = checkpoint.inspect(known.path)
        reason = reason or checkpoint.misfit(found, target, len(target.layers), target.tokenizer)
        size = checkpoint.memory_bytes(found, target, *precision) if reason is None else 0
    except CheckpointError as error:
        info = DrafterInfo(known.name, known.method, usable=False, reason=str(error).rstrip("."))
        return Candidate(info, (), _refuse(str(error)))
    info = DrafterInfo(
        name=known.name,
        method=found.method,
        drafts=found.drafts,
        weight_bytes=size,
        usable=reason is None,
        reason=reason or "",
    )
    return Candidate(info, found.config.taps, _load(found, known.name, target, precision), found)


def _load(
    found: Checkpoint, name: str, target: Target, precision: tuple[int | None, int]
) -> Callable[[], Drafter]:
    return lambda: checkpoint.load(found, name, target, *precision)


def _refuse(reason: str) -> Callable[[], Drafter]:
    def refuse() -> Drafter:
        raise CheckpointError(reason)

    return refuse
