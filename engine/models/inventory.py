"""The targets that are on this machine, found without reading weights."""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path
from typing import Any

from dspark_tui.engine.models import demo
from dspark_tui.engine.models.folder import problem, read_config, weight_bytes
from dspark_tui.engine.models.hub import CachedRepo, cached_models
from dspark_tui.engine.protocol import ModelRow

_DRAFTER_MARKS = ("dflash", "dspark", "eagle")


def list_models() -> list[ModelRow]:
    """The demo target first (also when it has to be fetched), then the Hugging Face cache by name.

    A repository that is no usable target is listed with the reason. Never raises for a single broken one.
    """
    return [_demo_row(), *(_hub_row(repo) for repo in cached_models())]


def _demo_row() -> ModelRow:
    path = demo.locate()
    if path is None:
        return ModelRow(
            name=demo.NAME,
            where="demo",
            size_bytes=None,
            detail=f"SmolLM2-135M-Instruct, 4-bit; {demo.WHEEL_BYTES / 1e6:.0f} MB to fetch",
        )
    return ModelRow(
        name=demo.NAME,
        where="demo",
        size_bytes=weight_bytes(path),
        detail=f"SmolLM2-135M-Instruct, {describe(read_config(path))}",
    )


def _hub_row(repo: CachedRepo) -> ModelRow:
    detail, size, reason = "", None, problem(repo.snapshot)
    try:
        config = read_config(repo.snapshot)
        detail = describe(config)
        size = weight_bytes(repo.snapshot) or None
        reason = reason or not_a_target(config)
    except (OSError, ValueError):
        pass  # `problem` has said it
    return ModelRow(
        name=repo.repo_id,
        where="hub cache",
        size_bytes=size,
        detail=detail,
        usable=reason is None,
        reason=reason or "",
    )


def describe(config: dict[str, Any]) -> str:
    """Architecture and quantisation in a few words, such as `llama, 4-bit`."""
    kind = str(config.get("model_type", "unknown"))
    quantization = config.get("quantization")
    if isinstance(quantization, dict) and isinstance(quantization.get("bits"), int):
        return f"{kind}, {quantization['bits']}-bit"
    text = config.get("text_config")
    fallback = text if isinstance(text, dict) else {}
    for key in ("torch_dtype", "dtype"):
        dtype = config.get(key) or fallback.get(key)
        if isinstance(dtype, str):
            return f"{kind}, {dtype}"
    return kind


def not_a_target(config: dict[str, Any]) -> str | None:
    """Why the model that `config` describes cannot be a target, or None as far as its config tells."""
    named = config.get("architectures")
    architectures = [str(name).lower() for name in named] if isinstance(named, list) else []
    if any(mark in name for name in architectures for mark in _DRAFTER_MARKS):
        return "it is a drafter, not a target"
    known = _architectures()
    kind = config.get("model_type")
    if known and kind not in known:
        return f"mlx-lm has no architecture {kind!r}"
    return None


@functools.cache
def _architectures() -> frozenset[str]:
    """Every `model_type` that the installed mlx-lm loads; empty when that cannot be told.

    Read from its files, since importing it takes most of a second and brings MLX up.
    """
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or spec.origin is None:
        return frozenset()
    package = Path(spec.origin).parent
    modules = {path.stem for path in (package / "models").glob("*.py")}
    try:
        tree = ast.parse((package / "utils.py").read_text(encoding="utf-8"))
        aliases = next(
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
            and any(
                isinstance(target, ast.Name) and target.id == "MODEL_REMAPPING" for target in node.targets
            )
        )
    except (OSError, SyntaxError, ValueError, StopIteration):
        return frozenset()
    return frozenset(modules | set(aliases))
