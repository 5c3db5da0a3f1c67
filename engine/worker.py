"""The backend that runs models: commands to the session, the loop's steps to events.

Made and called on one thread, which owns MLX: streams, lazy arrays and random state belong to a thread.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Literal, cast

from dspark_tui.engine.blas import use_fast_blas

BLAS = use_fast_blas()  # before anything imports mlx

import mlx.core as mx  # noqa: E402

from dspark_tui.engine import kv_bits, saved_context  # noqa: E402
from dspark_tui.engine.answer_text import AnswerText  # noqa: E402
from dspark_tui.engine.backend import BackendError, Control, Emit  # noqa: E402
from dspark_tui.engine.calibration import calibrate, warm_up  # noqa: E402
from dspark_tui.engine.chat_template import TemplateError, chat_template  # noqa: E402
from dspark_tui.engine.drafters.checkpoint import CheckpointError  # noqa: E402
from dspark_tui.engine.generator import PrefillStep, RoundStep, Step, generate  # noqa: E402
from dspark_tui.engine.kv_store import CannotKeep, ContextStore, NothingKept  # noqa: E402
from dspark_tui.engine.loader import Report, check_drafter, load_target, make_session  # noqa: E402
from dspark_tui.engine.models import demo  # noqa: E402
from dspark_tui.engine.models.errors import ModelError  # noqa: E402
from dspark_tui.engine.models.inventory import list_models  # noqa: E402
from dspark_tui.engine.models.resolve import ResolvedModel, pull, resolve  # noqa: E402
from dspark_tui.engine.penalties import unknown_biased_token  # noqa: E402
from dspark_tui.engine.precision import on_cpu  # noqa: E402
from dspark_tui.engine.protocol import (  # noqa: E402
    Chat,
    ContextRestored,
    ContextSaved,
    DrafterChanged,
    Failed,
    FailureKind,
    Finished,
    ListModels,
    Load,
    Loaded,
    Message,
    Models,
    Prefill,
    Progress,
    Pull,
    Pulled,
    RestoreContext,
    Result,
    Rounds,
    RoundStat,
    SaveContext,
    Seconds,
    Stage,
    SwitchDrafter,
    Text,
)
from dspark_tui.engine.reply import Reply  # noqa: E402
from dspark_tui.engine.sampling import Sampler  # noqa: E402
from dspark_tui.engine.session import Session, UnknownDrafter  # noqa: E402
from dspark_tui.engine.switching import LoadStep, Switching, SwitchStep  # noqa: E402
from dspark_tui.engine.turns import boundaries  # noqa: E402

METRICS_EVERY = 0.1
"""Seconds between two `Rounds` events, at least."""


class MlxBackend:
    """See `backend.Backend`."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self._opened: tuple[ResolvedModel, Load] | None = None
        self._load_seconds = 0.0

    # ------------------------------------------------------------------ models

    def load(self, command: Load, emit: Emit) -> None:
        """Load a target and a drafter. The present pair stays when the request itself is wrong. It is given
        up before the new weights are read, since two targets may not fit, and loaded again when the new
        ones turn out to be damaged. A target whose drafter is damaged decodes without it."""
        begun = time.perf_counter()
        if problem := kv_bits.problem(command.kv_bits):
            raise BackendError(problem, "usage")
        report = _reporter(command.id, emit)
        try:
            if command.model == demo.NAME:
                model, _ = pull(command.model, report)
            else:
                model = resolve(command.model)
            check_drafter(model, command.drafter, command.drafter_bits)
            before, self._opened = self._opened, None
            try:
                self._open(model, command, report)
            except (ModelError, UnknownDrafter, CheckpointError):
                if before is not None:
                    self._open(*before, report)
                raise
        except (ModelError, UnknownDrafter, CheckpointError) as error:
            raise _sentence(error) from error
        session, self._load_seconds = self._loaded(), time.perf_counter() - begun
        notes = [BLAS.note] if BLAS.note and on_cpu() else []
        if why := session.target.cannot_roll_back():
            notes.append(f"{session.target.info.name} answers without drafts: {why}.")
        emit(
            Loaded(
                command.id,
                session.target.info,
                session.info,
                session.drafters(),
                self._load_seconds,
                notes,
            )
        )

    def _open(self, model: ResolvedModel, command: Load, report: Report) -> None:
        """Put a pair in the place of the present one."""
        self.session = None
        mx.clear_cache()
        try:
            session = self._prepared(model, command, report)
        except (ModelError, UnknownDrafter, CheckpointError):
            raise
        except Exception as error:  # a model's own code raises anything at all
            raise ModelError(f"{model.name} could not be used: {_sentence(error).message[:300]}") from error
        _wire_memory()
        mx.reset_peak_memory()
        self.session, self._opened = session, (model, command)

    @staticmethod
    def _prepared(model: ResolvedModel, command: Load, report: Report) -> Session:
        """The pair that `command` asks for, tried and measured."""
        target, config = load_target(model, report, command.kv_bits)
        session, drafter = make_session(target, config, command.drafter, command.drafter_bits, command.lookup)
        report("drafter", 0, 1, "steps")
        try:
            session.select(drafter)
        except CheckpointError as error:
            session.give_up(drafter, str(error).rstrip("."))
        report("drafter", 1, 1, "steps")
        report("warm up", 0, 1, "steps")
        warm_up(session)
        calibrate(target, session.costs, max(d.drafts for d in session.drafters() if d.usable))
        report("warm up", 1, 1, "steps")
        return session

    def pull(self, command: Pull, emit: Emit) -> None:
        """Fetch a model."""
        try:
            model, fetched = pull(command.model, _reporter(command.id, emit))
        except ModelError as error:
            raise _sentence(error) from error
        emit(Pulled(command.id, model.name, str(model.path), fetched))

    def list_models(self, command: ListModels, emit: Emit) -> None:
        """What is on this machine."""
        emit(Models(command.id, list_models()))

    def switch_drafter(self, command: SwitchDrafter, emit: Emit) -> None:
        """Change the drafter between answers."""
        try:
            info = self._loaded().select(command.drafter)
        except (UnknownDrafter, CheckpointError) as error:
            raise _sentence(error) from error
        emit(DrafterChanged(command.id, info))

    # ------------------------------------------------------------------ contexts on disk

    def save_context(self, command: SaveContext, emit: Emit) -> None:
        """Keep the present sequence on disk."""
        try:
            tokens, size = saved_context.save(self._loaded(), ContextStore(), command.chat)
        except CannotKeep as error:
            raise BackendError(str(error)) from error
        emit(ContextSaved(command.id, command.chat, tokens, size))

    def restore_context(self, command: RestoreContext, emit: Emit) -> None:
        """Take a kept sequence back."""
        try:
            tokens, reason = saved_context.restore(self._loaded(), ContextStore(), command.chat), ""
        except NothingKept as error:
            tokens, reason = 0, str(error)
        emit(ContextRestored(command.id, command.chat, tokens, reason))

    def _loaded(self) -> Session:
        if self.session is None:
            raise BackendError("No model is loaded; load one first.", "usage")
        return self.session

    # ------------------------------------------------------------------ chat

    def chat(self, command: Chat, emit: Emit, control: Control) -> None:
        """Answer a conversation."""
        session = self._loaded()
        reply = self._reply(session, command)
        load_seconds, self._load_seconds = self._load_seconds, 0.0
        seed = secrets.randbits(63) if command.sampling.seed is None else command.sampling.seed
        teller = _Teller(session, reply, command, emit, load_seconds)
        try:
            switching = Switching(session)
            for step in generate(session, reply, Sampler(command.sampling, seed), control, switching):
                teller.tell(step)
        except Exception as error:
            reply.reason = "error"
            session.reset()
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise BackendError(
                f"The answer broke off after {len(reply.tokens)} tokens: {reason}",
                result=teller.result(),
            ) from error
        teller.finish()
        for step in switching.arrive(wait=True):
            teller.tell(step)

    def _reply(self, session: Session, command: Chat) -> Reply:
        """The reply to begin. Raises BackendError (usage) when the request cannot be answered."""
        name, context = session.target.info.name, session.target.info.context
        problem = command.sampling.problem()
        if problem := problem or unknown_biased_token(command.sampling, session.target.vocabulary):
            raise BackendError(problem, "usage")
        if command.max_tokens is not None and command.max_tokens < 1:
            raise BackendError(f"max-tokens is {command.max_tokens}; give 1 or more.", "usage")
        tokenizer = session.target.tokenizer
        if not tokenizer.has_chat_template:
            raise BackendError(
                f"{name} has no chat template, so it is not a chat model; choose an instruct model.", "usage"
            )
        template = chat_template(tokenizer)
        if problem := template.problem(command.thinking, command.effort):
            raise BackendError(f"{name} {problem}.", "usage")
        try:
            rendered = template.render(command.messages, command.thinking, command.effort)
        except TemplateError as error:
            raise BackendError(
                f"{name}'s chat template refuses this conversation: {error}", "usage"
            ) from error
        prompt = rendered.tokens
        if not prompt:
            raise BackendError(f"{name}'s chat template gives no prompt for this conversation.", "usage")
        room = context - len(prompt)
        if room < 1:
            raise BackendError(
                f"The prompt has {len(prompt)} tokens and {name} holds {context} with the reply; "
                "shorten it or start a new chat.",
                "usage",
            )
        limit = room if command.max_tokens is None else min(room, command.max_tokens)
        ends = frozenset(tokenizer.eos_token_ids)
        text = AnswerText(tokenizer, command.stop, template.markup, rendered.thinking)
        reply = Reply(prompt, limit, ends, text)
        if session.needs_snapshots:

            def render(messages: Sequence[Message]) -> list[int]:
                return template.render(messages, command.thinking, command.effort).tokens

            reply.boundaries = boundaries(render, command.messages, prompt)
        return reply


class _Teller:
    """Turns the steps of one answer into events."""

    def __init__(
        self, session: Session, reply: Reply, command: Chat, emit: Emit, load_seconds: float
    ) -> None:
        self.session, self.reply, self.command, self.emit = session, reply, command, emit
        self.load_seconds = load_seconds
        self._seq = 0
        self._unsaid: list[RoundStat] = []
        self._said_at = 0.0

    def tell(self, step: Step) -> None:
        """Say what happened."""
        answer, reply = self.command.answer, self.reply
        if isinstance(step, PrefillStep):
            self.emit(Prefill(self.command.id, answer, step.done, len(reply.prompt), reply.reused))
        elif isinstance(step, RoundStep):
            self._say_text(final=False)
            if step.stat is not None:
                self._unsaid.append(step.stat)
            self._say_rounds()
        elif isinstance(step, LoadStep):
            _reporter(step.command.id, self.emit)("drafter", int(step.done), 1, "steps")
        else:
            self._say_switch(step)

    def finish(self) -> None:
        """Say the rest, and that the answer is over."""
        self._say_text(final=True)
        self._say_rounds(now=True)
        self.emit(Finished(self.command.id, self.command.answer, self.result()))

    def _say_text(self, final: bool) -> None:
        for piece in self.reply.text.take(final):
            self.emit(Text(self.command.id, self.command.answer, self._seq, piece.text, piece.thinking))
            self._seq += 1

    def _say_rounds(self, now: bool = False) -> None:
        at = time.perf_counter()
        if not self._unsaid or not (now or at - self._said_at >= METRICS_EVERY):
            return
        self._said_at = at
        rounds, self._unsaid = self._unsaid, []
        self.emit(
            Rounds(
                self.command.id,
                self.command.answer,
                rounds,
                generated_tokens=len(self.reply.tokens),
                context_tokens=len(self.reply.prompt) + len(self.reply.tokens),
                elapsed=self.reply.decode_seconds,
                memory_bytes=mx.get_active_memory(),
                peak_bytes=mx.get_peak_memory(),
                context_rows_bytes=self.session.rows.bytes,
            )
        )

    def _say_switch(self, step: SwitchStep) -> None:
        # The rounds before it first, so that a client knows the place of the switch.
        self._say_rounds(now=True)
        command_id = step.command.id if step.command else 0
        if step.problem is not None:
            failure = _sentence(step.problem)
            self.emit(Failed(command_id, failure.message, failure.kind))
        else:
            self.emit(DrafterChanged(command_id, step.drafter))

    def result(self) -> Result:
        """The answer as it stands."""
        reply, started = self.reply, self.reply.started
        return Result(
            text=reply.text.text,
            thinking=reply.text.thinking,
            token_ids=list(reply.tokens),
            prompt_tokens=len(reply.prompt),
            reused_tokens=reply.reused,
            generated_tokens=len(reply.tokens),
            finish_reason=reply.reason or "error",
            model=self.session.target.info.name,
            drafter=self.session.info,
            accept_length=reply.accept_length,
            tokens_per_second=reply.tokens_per_second,
            seconds=Seconds(
                load=self.load_seconds,
                prefill=_since(started, reply.prefilled_at),
                first_token=_since(started, reply.first_token_at),
                decode=reply.decode_seconds,
            ),
            rounds=list(reply.rounds) if self.command.rounds else None,
        )


def _since(started: float, at: float | None) -> float:
    return 0.0 if at is None else at - started


def _reporter(command_id: int, emit: Emit) -> Callable[[Stage, int, int, str], None]:
    def report(stage: Stage, done: int, total: int, unit: str) -> None:
        emit(Progress(command_id, stage, done, total, cast(Literal["bytes", "tensors", "steps"], unit)))

    return report


def _sentence(error: Exception) -> BackendError:
    """The error as a sentence for the user."""
    kind: FailureKind = "failed"
    if isinstance(error, ModelError):
        kind = error.kind
    elif isinstance(error, UnknownDrafter | CheckpointError):
        kind = "usage"
    return BackendError(" ".join(str(error).split()) or type(error).__name__, kind)


def _wire_memory() -> None:
    """Let Metal keep the weights wired, once they are materialised (mlx-lm does it per answer)."""
    if mx.metal.is_available():
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
