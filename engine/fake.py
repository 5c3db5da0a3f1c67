"""A backend that follows a script instead of running models (format: docs/fake-engine.md).

It says what it is: the model's name always begins with "fake". With `clock = "fixed"` every number it
reports comes from the script, so that two runs are equal byte for byte.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from msgspec.structs import replace

from dspark_tui.engine.backend import BackendError, Control, Emit
from dspark_tui.engine.fake_answer import FakeAnswer, say, tokens
from dspark_tui.engine.fake_script import Drafter, Step, read_script
from dspark_tui.engine.protocol import (
    Chat,
    ContextRestored,
    ContextSaved,
    DrafterChanged,
    DrafterInfo,
    ListModels,
    Load,
    Loaded,
    ModelInfo,
    ModelRow,
    Models,
    Progress,
    Pull,
    Pulled,
    RestoreContext,
    SaveContext,
    SwitchDrafter,
)

NONE = DrafterInfo(name="none", method="none", state="none", loaded=True)
"""Plain decoding."""


class FakeBackend:
    """See `backend.Backend`. Raises BackendError when the script cannot be read."""

    def __init__(self, path: Path) -> None:
        self._script = read_script(path)
        self._replies = itertools.cycle([reply for reply in self._script.reply if not reply.when])
        self._model: ModelInfo | None = None
        self.drafter = NONE
        """The present one."""
        self._warm: set[str] = set()
        self._load_seconds = 0.0
        self._held, self._kept = 0, dict[str, int]()
        say(self._script.stdout, self._script.stderr)

    # ------------------------------------------------------------------ commands

    def load(self, command: Load, emit: Emit) -> None:
        """Go through the script's load steps, then be the model asked for."""
        script = self._script
        row = next((row for row in self._rows() if command.model in (row.name, "demo")), None)
        if row is None:
            names = ", ".join(row.name for row in self._rows())
            raise BackendError(
                f"The fake engine has no model {command.model!r}; it has {names}, and demo for the first.",
                "usage",
            )
        if not row.usable:
            raise BackendError(f"The model {row.name} cannot be used: {row.reason or 'the script says so'}.")
        drafter = self._find(command.drafter)
        started = time.monotonic()
        for step in script.load.step:
            _progress(command.id, step, emit)
        say(script.load.stdout, script.load.stderr)
        if script.load.fail:
            raise BackendError(script.load.fail)
        passed = time.monotonic() - started
        self._load_seconds = script.load.seconds if script.clock == "fixed" else passed
        self._warm = {drafter.name}
        self.drafter = self._active(drafter)
        self._model = ModelInfo(
            name=row.name,
            path="",
            architecture="script",
            precision="none (fake)",
            context=script.context,
            weight_bytes=row.size_bytes or 0,
            thinks=script.thinks,
            efforts=script.efforts(row.name),
        )
        emit(
            Loaded(
                command.id, self._model, self.drafter, self._listed(), self._load_seconds, script.load.notes
            )
        )

    def pull(self, command: Pull, emit: Emit) -> None:
        """Pretend to fetch."""
        pull = self._script.pull
        _progress(command.id, Step("fetch", pull.total, "bytes", pull.parts, pull.delay), emit)
        if pull.fail:
            raise BackendError(pull.fail)
        emit(Pulled(command.id, model=command.model, path="(fake)", fetched_bytes=pull.total))

    def list_models(self, command: ListModels, emit: Emit) -> None:
        """The rows of the script."""
        emit(Models(command.id, self._rows()))

    def switch_drafter(self, command: SwitchDrafter, emit: Emit) -> None:
        """Be another drafter from now on."""
        emit(DrafterChanged(command.id, self.change(command, emit)))

    def chat(self, command: Chat, emit: Emit, control: Control) -> None:
        """Give the next reply of the script."""
        if self._model is None:
            raise BackendError("No model is loaded; load one first.", "usage")
        script = self._script
        if problem := self._wish(command, self._model):
            raise BackendError(f"{self._model.name} {problem}.", "usage")
        last = next((m.content for m in reversed(command.messages) if m.role == "user"), "")
        reply = next((r for r in script.reply if r.when and r.when in last), None) or next(self._replies)
        prompt = sum(len(tokens(message.content)) for message in command.messages)
        if prompt >= self._model.context:
            raise BackendError(
                f"The conversation has {prompt} tokens, the model takes {self._model.context} with the "
                "reply; shorten it.",
                "usage",
            )
        answer = FakeAnswer(script, reply, command, emit, prompt, self._model.name, self._load_seconds)
        self._load_seconds = 0.0
        self._held = prompt
        answer.run(control, self)

    def _wish(self, command: Chat, model: ModelInfo) -> str | None:
        """Why a wish about thinking cannot be honoured, as the end of a sentence."""
        if command.thinking and not model.thinks:
            return "does not think; leave thinking out"
        if command.effort is not None and command.effort not in model.efforts:
            if not model.efforts:
                return "knows no levels of effort; leave the effort out"
            return f"knows the levels of effort {', '.join(model.efforts)}, not {command.effort!r}"
        return None

    def save_context(self, command: SaveContext, emit: Emit) -> None:
        """Remember how many tokens the last prompt had; nothing is written."""
        if self._model is None:
            raise BackendError("No model is loaded; load one first.", "usage")
        self._kept[command.chat] = self._held
        emit(ContextSaved(command.id, command.chat, self._held, 0))

    def restore_context(self, command: RestoreContext, emit: Emit) -> None:
        """Say how many tokens were remembered."""
        if self._model is None:
            raise BackendError("No model is loaded; load one first.", "usage")
        kept = self._kept.get(command.chat, 0)
        reason = "" if kept else "nothing is kept for this chat and model"
        emit(ContextRestored(command.id, command.chat, kept, reason))

    # ------------------------------------------------------------------ drafters and models

    def _rows(self) -> list[ModelRow]:
        return self._script.rows()

    def _find(self, name: str | None) -> DrafterInfo:
        """The drafter of that name or method. Raises BackendError for anything else."""
        drafters = [drafter.info() for drafter in self._script.drafter]
        if name is None:
            return next((info for info in drafters if info.usable), NONE)
        if name == "none":
            return NONE
        for info in drafters:
            if name in (info.name, info.method):
                if not info.usable:
                    raise BackendError(f"The drafter {info.name} cannot be used: {info.reason}.")
                return info
        names = ", ".join(["none", *(info.name for info in drafters)])
        raise BackendError(f"There is no drafter {name!r}; this model knows {names}.", "usage")

    def change(self, command: SwitchDrafter, emit: Emit) -> DrafterInfo:
        """Be another drafter, or raise BackendError and stay."""
        if self._model is None:
            raise BackendError("No model is loaded; load one first.", "usage")
        info = self._find(command.drafter)
        scripted = self.scripted(info.name)
        if scripted and scripted.refuse:
            raise BackendError(f"The drafter {info.name} was refused: {scripted.refuse}.")
        if scripted and scripted.load_seconds and info.name not in self._warm:
            _progress(command.id, Step("drafter", 1, "steps", 1, scripted.load_seconds), emit)
        self._warm.add(info.name)
        self.drafter = self._active(info)
        return self.drafter

    def scripted(self, name: str) -> Drafter | None:
        """What the script says of a drafter; None for plain decoding."""
        return next((drafter for drafter in self._script.drafter if drafter.name == name), None)

    def _active(self, info: DrafterInfo) -> DrafterInfo:
        return info if info.method == "none" else replace(info, state="active", loaded=True)

    def _listed(self) -> list[DrafterInfo]:
        return [NONE, *(replace(d.info(), loaded=d.name in self._warm) for d in self._script.drafter)]


def _progress(serial: int, step: Step, emit: Emit) -> None:
    for part in range(step.parts + 1):
        emit(Progress(serial, step.stage, step.total * part // step.parts, step.total, step.unit))
        if part < step.parts:
            time.sleep(step.delay)
