"""The script of the fake engine: what a TOML file may say (docs/fake-engine.md), read and checked."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from dspark_tui.engine.backend import BackendError
from dspark_tui.engine.protocol import DrafterInfo, DrafterState, Method, ModelRow, Stage

FAKE = "fake"
Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0)]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the script; a key that does not exist is an error."""


class Step(_Table, frozen=True):
    """One stage of loading: `parts` progress events, `delay` seconds apart."""

    stage: Stage = "read"
    total: Count = 100
    unit: Literal["bytes", "tensors", "steps"] = "bytes"
    parts: Annotated[int, msgspec.Meta(ge=1)] = 1
    delay: Amount = 0.0


class Loading(_Table, frozen=True):
    """What loading a model is like. `fail`: the sentence with which it ends instead."""

    step: list[Step] = []
    seconds: Amount = 0.0
    notes: list[str] = []
    fail: str = ""
    stdout: str = ""
    stderr: str = ""


class Pulling(_Table, frozen=True):
    """What fetching a model is like."""

    total: Count = 1_000_000
    parts: Annotated[int, msgspec.Meta(ge=1)] = 10
    delay: Amount = 0.0
    fail: str = ""


class Prefilling(_Table, frozen=True):
    """`steps` chunks, `delay` seconds each; `reused` tokens of the prompt are said to be there already."""

    steps: Annotated[int, msgspec.Meta(ge=1)] = 1
    delay: Amount = 0.0
    reused: Count = 0


class Timing(_Table, frozen=True):
    """What the fixed clock says of every round, in milliseconds."""

    draft_ms: Amount = 2.0
    verify_ms: Amount = 20.0
    other_ms: Amount = 0.5


class Model(_Table, frozen=True):
    """A model that the fake engine has. `efforts`: levels of effort that it knows."""

    name: str
    where: str = "script"
    size_bytes: int | None = None
    detail: str = "fake"
    usable: bool = True
    reason: str = ""
    efforts: list[str] = []


class Drafter(_Table, frozen=True):
    """A drafter. `accept` is the number of accepted tokens round by round, over and over. `refuse` is the
    reason for which every switch to it fails; `load_seconds` passes at the first switch."""

    name: str
    method: Method
    drafts: Annotated[int, msgspec.Meta(ge=1)] = 7
    accept: Annotated[list[Count], msgspec.Meta(min_length=1)] = msgspec.field(default_factory=lambda: [3])
    weight_bytes: Count = 0
    usable: bool = True
    reason: str = ""
    refuse: str = ""
    load_seconds: Amount = 0.0

    def info(self) -> DrafterInfo:
        """As it stands before anybody chose it."""
        return DrafterInfo(
            name=self.name,
            method=self.method,
            state="none",
            reason=self.reason,
            drafts=self.drafts,
            weight_bytes=self.weight_bytes,
            usable=self.usable,
        )


class Act(_Table, frozen=True):
    """Something that happens after `at` tokens of an answer."""

    at: Count
    do: Literal["fail", "raise", "crash", "exit", "stall", "drafter", "notice", "noise"]
    message: str = ""
    seconds: Amount = 0.0
    signal: int = int(signal.SIGKILL)
    code: int = 3
    state: DrafterState = "fell_back"
    stdout: str = ""
    stderr: str = ""


class Reply(_Table, frozen=True):
    """An answer. Given as `text` or as a `file` beside the script, `repeat` times over. `when`: only for
    messages that contain it; replies without `when` are given in turn."""

    text: str = ""
    file: str = ""
    repeat: Annotated[int, msgspec.Meta(ge=1)] = 1
    thinking: str = ""
    when: str = ""
    act: list[Act] = []


class Script(_Table, frozen=True):
    """The whole file. `rate` is tokens a second (0: as fast as possible), `chunk` the characters of one
    Text event (0: one event a round)."""

    reply: Annotated[list[Reply], msgspec.Meta(min_length=1)]
    clock: Literal["fixed", "wall"] = "fixed"
    rate: Amount = 0.0
    chunk: Count = 0
    context: Annotated[int, msgspec.Meta(ge=1)] = 8192
    memory_bytes: int | None = None
    stdout: str = ""
    stderr: str = ""
    load: Loading = Loading()
    pull: Pulling = Pulling()
    prefill: Prefilling = Prefilling()
    round: Timing = Timing()
    model: Annotated[list[Model], msgspec.Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: [Model(FAKE)]
    )
    drafter: list[Drafter] = []

    @property
    def thinks(self) -> bool:
        """Whether any reply has a thinking part."""
        return any(reply.thinking for reply in self.reply)

    def efforts(self, name: str) -> list[str]:
        """Levels of effort of the model called `name` in `rows`."""
        return next(m.efforts for m, row in zip(self.model, self.rows(), strict=True) if row.name == name)

    def rows(self) -> list[ModelRow]:
        """The models, each with a name that says that it is fake."""
        return [
            ModelRow(
                name=m.name if m.name.startswith(FAKE) else f"{FAKE} {m.name}",
                where=m.where,
                size_bytes=m.size_bytes,
                detail=m.detail,
                usable=m.usable,
                reason=m.reason,
            )
            for m in self.model
        ]


def read_script(path: Path) -> Script:
    """Read and check a script; replies from files are taken in. Raises BackendError with a sentence."""
    try:
        script = msgspec.toml.decode(path.read_bytes(), type=Script)
        replies = [_with_text(reply, path.parent) for reply in script.reply]
    except OSError as error:
        raise BackendError(
            f"The script {path} cannot be read: {error.strerror or error}.", "usage"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BackendError(f"The script {path} is not right: {error}.", "usage") from error
    if all(reply.when for reply in replies):
        raise BackendError(f"The script {path} needs a reply without `when`.", "usage")
    return msgspec.structs.replace(script, reply=replies)


def _with_text(reply: Reply, folder: Path) -> Reply:
    text = (folder / reply.file).read_text(encoding="utf-8") if reply.file else reply.text
    return msgspec.structs.replace(reply, text=text * reply.repeat, file="", repeat=1)
