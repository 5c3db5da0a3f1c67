"""What happens between the screen and the engine: loading, the queue of prompts, answers, drafters, loss.

The controller owns the conversation and an immutable `Facts`; a `View` is told what changed and draws it.
Everything runs on one event loop. Nothing here imports textual.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import msgspec

from dspark_tui.answering import Answering
from dspark_tui.conversation import Answer, AnswerState, Conversation, Exchange, Facts, LoadFacts, Phase
from dspark_tui.engine.client import EngineError, EngineFailure, EngineGone
from dspark_tui.engine.protocol import (
    AnyEvent,
    DrafterChanged,
    DrafterInfo,
    Finished,
    ModelRow,
    Notice,
    Prefill,
    Progress,
    Rounds,
    Sampling,
    Text,
)
from dspark_tui.metrics import Baselines, Meter, Snapshot
from dspark_tui.ports import AS_IT_COMES, EngineLike, LoadOptions, Severity, StartEngine, View

DEMO = "demo"
GET_DEMO = (
    "The demo model is not on this machine. F3 lists what there is and fetches the demo;"
    " `dspark-tui models pull demo` does it beforehand."
)


class Controller:
    """See the module. `clock` gives seconds that only grow."""

    def __init__(
        self,
        view: View,
        start_engine: StartEngine,
        clock: Callable[[], float],
        *,
        temperature: float = 0.0,
        loading: LoadOptions = AS_IT_COMES,
    ) -> None:
        self._view = view
        self._start_engine = start_engine
        self._clock = clock
        self._engine: EngineLike | None = None
        self._wish: tuple[str | None, str | None] = (None, None)
        self._sampling = Sampling(temperature=temperature)
        self._loading = loading
        self._answering: Answering | None = None
        self._waiting: list[Exchange] = []
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._baselines = Baselines()
        self._meter: Meter | None = None
        self._choice: list[str] = []
        self._closing = False
        self.conversation = Conversation()
        self.facts = Facts(temperature=temperature)

    # ------------------------------------------------------------------ what the screen reads

    @property
    def current(self) -> Exchange | None:
        """The exchange that is being answered."""
        return self._answering.exchange if self._answering else None

    def metrics(self) -> Snapshot:
        """Numbers of the running answer, or of the last one."""
        return self._meter.snapshot() if self._meter else Snapshot()

    async def models(self) -> list[ModelRow]:
        """The targets on this machine. Raises EngineError."""
        if self._engine is None:
            raise EngineGone("The engine is not running; restart it first.")
        return await self._engine.models()

    # ------------------------------------------------------------------ life

    async def start(self, model: str | None, drafter: str | None) -> None:
        """Start the engine and load `model` (None: the demo when it is on this machine)."""
        self._wish = (model, drafter)
        self._set(phase=Phase.STARTING, problem="")
        try:
            engine = await self._start_engine()
        except EngineError as error:
            self._gone(error.message)
            return
        if self._closing:
            await engine.close()
            return
        engine.on_event = self._unasked
        engine.on_gone = self._gone
        self._engine = engine
        if model is None and not await self._demo_is_here():
            return
        await self.load(model or DEMO, drafter)

    async def _demo_is_here(self) -> bool:
        try:
            rows = await self.models()
        except EngineError as error:
            self._set(phase=Phase.NO_MODEL, problem=error.message)
            return False
        # A row without a size is an offer to fetch it.
        if any(row.name == DEMO and row.usable and row.size_bytes is not None for row in rows):
            return True
        self._set(phase=Phase.NO_MODEL, problem=GET_DEMO)
        self._view.model_wanted()
        return False

    async def load(self, model: str, drafter: str | None = None) -> None:
        """Load another model. The conversation stays; what failed is said in `facts.problem`."""
        engine = self._engine
        if engine is None or self.facts.busy or self.facts.phase is Phase.LOADING:
            self._view.say(
                "The model was not changed: wait until the engine is free, then choose again.", "warning"
            )
            return
        before = self.facts
        self._wish = (model, drafter)
        self._set(phase=Phase.LOADING, load=LoadFacts(model, started=self._clock()), problem="")
        try:
            how = self._loading
            loaded = await engine.load(
                model,
                drafter,
                self._progress,
                drafter_bits=how.drafter_bits,
                kv_bits=how.kv_bits,
                lookup=how.lookup,
            )
        except EngineFailure as failure:
            if before.model is None:
                self._set(phase=Phase.NO_MODEL, load=None, problem=failure.message)
            else:
                self._set(phase=Phase.READY, load=None, problem="")
                self._view.say(f"{failure.message} The model stays {before.model.name}.", "error")
            return
        except EngineGone as gone:
            self._gone(gone.message)
            return
        self._wish = (model, loaded.drafter.name)
        self._set(
            phase=Phase.READY,
            load=None,
            model=loaded.model,
            drafter=loaded.drafter,
            drafters=tuple(loaded.drafters),
            problem="",
        )
        for note in loaded.notes:
            self._view.say(note)
        self._next()

    async def restart(self) -> None:
        """Start a lost engine again and load what was loaded."""
        if self.facts.phase is Phase.GONE:
            await self.start(*self._wish)

    async def close(self) -> None:
        """End the engine."""
        self._closing = True
        self.drop()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.on_gone = None
            await engine.close()

    def drop(self) -> None:
        """Give up what runs on this side; the engine is not told."""
        for task in self._tasks:
            task.cancel()

    # ------------------------------------------------------------------ prompts and answers

    def submit(self, prompt: str) -> None:
        """Answer `prompt` now, or when what is before it is done."""
        exchange = Exchange(prompt, Answer(f"a{next(self._ids)}"))
        self.conversation.exchanges.append(exchange)
        self._waiting.append(exchange)
        self._view.exchange_added(exchange)
        self._next()

    def stop(self) -> bool:
        """Stop the running answer; False when none runs. Prompts that wait go back to the editor."""
        exchange, engine = self.current, self._engine
        if exchange is None or engine is None or self.facts.phase is not Phase.ANSWERING:
            return False
        self._set(phase=Phase.STOPPING)
        self._spawn(self._send_stop(engine, exchange.answer.id))
        self.return_queue()
        return True

    def new_chat(self) -> bool:
        """Begin an empty conversation; False while an answer runs."""
        if self.facts.busy:
            return False
        self.return_queue()
        self.conversation = Conversation()
        self._meter = None
        self._view.conversation_cleared()
        self._view.facts_changed()
        return True

    async def _send_stop(self, engine: EngineLike, answer: str) -> None:
        with contextlib.suppress(EngineGone):
            await engine.stop(answer)

    def return_queue(self) -> bool:
        """Take the waiting prompts back into the editor; False when none waits."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return False
        for exchange in waiting:
            self.conversation.exchanges.remove(exchange)
        self._set(queued=0)
        self._view.prompts_returned(waiting)
        return True

    def _next(self) -> None:
        """Begin the next waiting answer when the engine is free."""
        engine = self._engine
        if self._waiting and self.facts.phase is Phase.READY and engine is not None:
            exchange = self._waiting.pop(0)
            self._spawn(self._answer(engine, exchange))
        self._set(queued=len(self._waiting))

    async def _answer(self, engine: EngineLike, exchange: Exchange) -> None:
        answer, facts = exchange.answer, self.facts
        assert facts.model is not None
        model, drafter = facts.model.name, facts.drafter.name if facts.drafter else "none"
        self._meter = Meter(self._baselines, model)
        running = self._answering = Answering(exchange, self._meter, self._clock, model, drafter)
        self._set(phase=Phase.ANSWERING, answer_started=answer.started)
        self._state(exchange, AnswerState.PREFILL)
        messages = self.conversation.messages(exchange)
        try:
            async with contextlib.aclosing(
                engine.chat(messages, sampling=self._sampling, answer=answer.id)  # type: ignore[type-var]
            ) as events:
                async for event in events:
                    self._event(running, event)
        except EngineFailure as failure:
            answer.failure = failure.message
            answer.result = failure.result
        except EngineGone as gone:
            answer.failure = gone.message
            self._gone(gone.message)
        self._end(running)

    def _event(self, running: Answering, event: AnyEvent) -> None:
        exchange = running.exchange
        if isinstance(event, Text):
            state = running.text(event)
            if exchange.answer.state is not state:
                self._state(exchange, state)
            self._view.text_arrived(exchange)
        elif isinstance(event, Rounds):
            if running.rounds(event):
                self._view.answer_changed(exchange)
        elif isinstance(event, Prefill):
            running.meter.prefill(event)
        elif isinstance(event, DrafterChanged):
            self._drafter_changed(event.drafter)
        elif isinstance(event, Finished):
            exchange.answer.result = event.result

    def _end(self, running: Answering) -> None:
        exchange, state = running.exchange, running.end()
        self._answering = None
        phase = Phase.GONE if self.facts.phase is Phase.GONE else Phase.READY
        self._set(phase=phase, answer_started=None)
        result = exchange.answer.result
        if result is not None and phase is Phase.READY:
            self._set(drafter=result.drafter)
        self._state(exchange, state)
        self._next()

    def _state(self, exchange: Exchange, state: AnswerState) -> None:
        exchange.answer.state = state
        self._set(answer_state=state)
        self._view.answer_changed(exchange)

    # ------------------------------------------------------------------ drafters

    async def switch_drafter(self, name: str) -> None:
        """Use another drafter from the next round on; a refusal is told and changes nothing."""
        engine = self._engine
        if engine is None or self.facts.model is None:
            self._view.say("There is no model yet, so there is nothing to draft for.", "warning")
            return
        choice = self._choice = [name]
        severity: Severity = "information"
        try:
            drafter = await engine.switch_drafter(name, lambda event: self._joins(name, choice, event))
        except EngineFailure as failure:
            message, severity = failure.message, "error"
        except EngineGone:
            self._choice = []
            self._set(joining="")
            return
        else:
            self._drafter_changed(drafter)
            where = "from the next round on" if self.facts.busy else "from the next answer on"
            message = f"Drafter {drafter.name}, {where}."
        # Whoever has chosen again meanwhile hears of the last choice only.
        if self._choice is choice:
            self._choice = []
            self._set(joining="")
            self._view.say(message, severity)

    def _joins(self, name: str, choice: list[str], event: Progress) -> None:
        """A drafter that is not resident is loaded beside the answer."""
        if self._choice is choice:
            self._set(joining=name if event.done < event.total or not event.total else "")

    async def next_drafter(self) -> None:
        """Switch to the next usable drafter in the list, after the one that was chosen last."""
        usable = [drafter.name for drafter in self.facts.drafters if drafter.usable]
        if len(usable) < 2:
            self._view.say("This model has no other usable drafter; F2 says why.", "warning")
            return
        present = self.facts.drafter.name if self.facts.drafter else ""
        present = self._choice[0] if self._choice else present
        after = usable.index(present) + 1 if present in usable else 0
        await self.switch_drafter(usable[after % len(usable)])

    def _drafter_changed(self, drafter: DrafterInfo) -> None:
        before = self.facts.drafter
        if drafter == before:
            return
        drafters = tuple(
            drafter if drafter.name == row.name else _at_rest(row) for row in self.facts.drafters
        )
        self._set(drafter=drafter, drafters=drafters)
        if before is not None and drafter.name == before.name:
            if drafter.reason and drafter.state in ("parked", "fell_back"):
                word = "is parked" if drafter.state == "parked" else "fell back"
                self._view.say(f"Drafter {drafter.name} {word}: {drafter.reason}", "warning")
            return
        if self._answering is not None:
            self._answering.switched(drafter)
        self._wish = (self._wish[0], drafter.name)

    # ------------------------------------------------------------------ inside

    def _unasked(self, event: AnyEvent) -> None:
        if isinstance(event, DrafterChanged):
            self._drafter_changed(event.drafter)
        elif isinstance(event, Notice):
            self._view.say(event.message)

    def _progress(self, event: Progress) -> None:
        if self.facts.load is not None:
            load = dataclasses.replace(
                self.facts.load, stage=event.stage, done=event.done, total=event.total, unit=event.unit
            )
            self._set(load=load)

    def _gone(self, message: str) -> None:
        if self._closing:
            return
        self._engine = None
        self._set(phase=Phase.GONE, load=None, joining="", problem=message)

    def _set(self, **changes: Any) -> None:
        facts = dataclasses.replace(self.facts, **changes)
        if facts != self.facts:
            self.facts = facts
            self._view.facts_changed()

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _at_rest(drafter: DrafterInfo) -> DrafterInfo:
    """A drafter that is not the present one; why it was parked is not known to hold any more."""
    if drafter.state not in ("active", "parked"):
        return drafter
    return msgspec.structs.replace(drafter, state="none", reason="")
