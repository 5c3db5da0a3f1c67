"""From what the user calls a model to the folder that holds it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dspark_tui.engine.models import demo, fetch, hub
from dspark_tui.engine.models.errors import ModelError
from dspark_tui.engine.models.folder import problem, read_config
from dspark_tui.engine.models.inventory import not_a_target
from dspark_tui.engine.paths import expanded

_PATTERNS = ["*.json", "model*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class ResolvedModel:
    """A target on this machine: `name` for people, `path` of its folder."""

    name: str
    path: Path


def resolve(model: str) -> ResolvedModel:
    """The target called `model`: `demo`, a folder, or `ORG/NAME` in the Hugging Face cache.

    Fetches nothing. A relative folder is taken from the working directory. Raises ModelError of kind
    `usage` with what is wrong, what was expected and what to do.
    """
    if model == demo.NAME:
        path = demo.locate()
        if path is None:
            raise ModelError(
                "The demo model is not on this machine yet: dspark-tui models pull demo fetches it.", "usage"
            )
        return ResolvedModel(demo.NAME, path)
    folder = expanded(model)
    if _means_a_path(model, folder):
        return ResolvedModel(
            folder.absolute().name, _usable(folder.absolute(), f"{folder} is not a usable model folder")
        )
    snapshot = hub.snapshot(model)
    if snapshot is None:
        raise ModelError(
            f"{model} is not on this machine: fetch it with hf download {model}.",
            "usage",
        )
    return ResolvedModel(model, _usable(snapshot, f"{model} in the Hugging Face cache is not usable"))


def pull(model: str, progress: demo.Report) -> tuple[ResolvedModel, int]:
    """Bring `demo` or `ORG/NAME` to this machine; returns it and the bytes that came over the network.

    Raises ModelError.
    """
    if model == demo.NAME:
        path, fetched = demo.ensure(progress)
        return ResolvedModel(demo.NAME, path), fetched
    if not hub.REPO_ID.fullmatch(model):
        raise ModelError(
            f"{model[:80]!r} cannot be fetched: give demo or ORG/NAME of a Hugging Face repository.", "usage"
        )
    folder, fetched = fetch.download_snapshot(
        model, _PATTERNS, lambda done, total: progress("fetch", done, total, "bytes")
    )
    return ResolvedModel(model, _usable(folder, f"{model} was fetched but is not usable")), fetched


def _means_a_path(model: str, folder: Path) -> bool:
    if not model.strip():
        raise ModelError(
            "No model was named: give demo, a folder, or ORG/NAME from the Hugging Face cache.", "usage"
        )
    try:
        if folder.exists() or model.startswith(("/", "./", "../", "~", ".")):
            return True
    except (OSError, ValueError):  # a name too long, a NUL byte
        pass
    if hub.REPO_ID.fullmatch(model):
        return False
    raise ModelError(
        f"There is no model {model[:80]!r}: give demo, a folder, or ORG/NAME in the Hugging Face cache.",
        "usage",
    )


def _usable(folder: Path, sentence: str) -> Path:
    wrong = problem(folder)
    if wrong is None:
        wrong = not_a_target(read_config(folder))
    if wrong is not None:
        raise ModelError(
            f"{sentence}: {wrong}. A model folder holds config.json, model*.safetensors and a tokenizer.",
            "usage",
        )
    return folder
