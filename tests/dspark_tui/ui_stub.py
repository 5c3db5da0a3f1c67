"""An engine without a process for tests of the screens: fixed facts, events when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from dspark_tui.app import DsparkApp
from dspark_tui.engine.client import EngineFailure, EngineGone
from dspark_tui.engine.protocol import (
    AnyEvent,
    DrafterChanged,
    DrafterInfo,
    Finished,
    FinishReason,
    Loaded,
    Message,
    ModelInfo,
    ModelRow,
    Prefill,
    Progress,
    Result,
    Rounds,
    RoundStat,
    Sampling,
    Seconds,
    Text,
)
from dspark_tui.ports import AS_IT_COMES, LoadOptions

MODEL = ModelInfo("demo", "/models/demo", "llama", "4-bit", 8192, 75_000_000)
NONE = DrafterInfo("none", "none", loaded=True)
DSPARK = DrafterInfo("dspark", "dspark", "active", "", 7, 11_600_000, True)
DFLASH = DrafterInfo("dflash", "dflash", "active", "", 7, 11_200_000)
OTHER = DrafterInfo(
    "dflash-qwen3", "dflash", reason="it is for a target of hidden size 2560, this one has 576", usable=False
)
DRAFTERS = [NONE, DSPARK, DFLASH, OTHER]
MODELS = [
    ModelRow("demo", "demo", 75_000_000, "llama, 4-bit"),
    ModelRow("mlx-community/Qwen3-8B-4bit", "hub cache", 4_600_000_000, "qwen3, 4-bit"),
    ModelRow("broken", "hub cache", None, "", False, "config.json is missing"),
]


class Clock:
    """A clock that moves when the test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class StubEngine:
    """Implements `controller.EngineLike`."""

    def __init__(
        self,
        *,
        loaded: bool = True,
        failure: str = "",
        drafters: Sequence[DrafterInfo] = DRAFTERS,
        model: ModelInfo = MODEL,
        notes: Sequence[str] = (),
        models: Sequence[ModelRow] = MODELS,
    ) -> None:
        self.on_event: Callable[[AnyEvent], None] | None = None
        self.on_gone: Callable[[str], None] | None = None
        self.may_load = asyncio.Event()
        if loaded:
            self.may_load.set()
        self.failure = failure
        self.drafters = list(drafters)
        self.model = model
        self.notes = list(notes)
        self.rows = list(models)
        self.loads: list[tuple[str, str | None]] = []
        self.load_options = AS_IT_COMES
        self.chats: list[list[Message]] = []
        self.sampling: Sampling | None = None
        self.switches: list[str] = []
        self.stops: list[str] = []
        self.closed = False
        self.steps: list[Progress] = []
        self.switch_steps: list[Progress] = []
        self.may_switch = asyncio.Event()
        self.may_switch.set()
        self._events: asyncio.Queue[AnyEvent | Exception] = asyncio.Queue()
        self._seq = 0

    # ------------------------------------------------------------------ what the controller calls

    async def load(
        self,
        model: str,
        drafter: str | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        *,
        drafter_bits: int | None = None,
        kv_bits: int | None = None,
        lookup: bool | None = None,
    ) -> Loaded:
        self.loads.append((model, drafter))
        self.load_options = LoadOptions(drafter_bits, kv_bits, lookup)
        for step in self.steps:
            if on_progress is not None:
                on_progress(step)
        await self.may_load.wait()
        if self.failure:
            raise EngineFailure(self.failure)
        active = next((row for row in self.drafters if row.name == (drafter or "dspark")), NONE)
        return Loaded(1, self.model, active, self.drafters, 1.4, self.notes)

    async def models(self) -> list[ModelRow]:
        return self.rows

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        rounds: bool = False,
        answer: str | None = None,
    ) -> AsyncIterator[AnyEvent]:
        self.chats.append(list(messages))
        self.sampling = sampling
        self.answer = answer or ""
        while True:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            yield event
            if isinstance(event, Finished):
                return

    async def switch_drafter(
        self, drafter: str, on_progress: Callable[[Progress], None] | None = None
    ) -> DrafterInfo:
        self.switches.append(drafter)
        for step in self.switch_steps:
            if on_progress is not None:
                on_progress(step)
        await self.may_switch.wait()
        found = next(row for row in self.drafters if row.name == drafter)
        if not found.usable:
            raise EngineFailure(f"The drafter {drafter} cannot be used: {found.reason}.", "usage")
        return found

    async def stop(self, answer: str) -> None:
        self.stops.append(answer)

    async def close(self) -> None:
        self.closed = True

    # ------------------------------------------------------------------ what the test calls

    def send(self, event: AnyEvent | Exception) -> None:
        self._events.put_nowait(event)

    def prefill(self, done: int, total: int, reused: int = 0) -> None:
        self.send(Prefill(2, self.answer, done, total, reused))

    def text(self, text: str, *, thinking: bool = False) -> None:
        self.send(Text(2, self.answer, self._seq, text, thinking))
        self._seq += 1

    def rounds(self, accepted: Sequence[int], generated: int, elapsed: float, source: str = "dspark") -> None:
        drafted = 0 if source == "none" else 7
        stats = [RoundStat(source, drafted, n, n + 1, 2.0, 20.0, 0.5) for n in accepted]
        self.send(Rounds(2, self.answer, stats, generated, 60 + generated, elapsed, 412_000_000, 498_000_000))

    def changed(self, drafter: DrafterInfo) -> None:
        self.send(DrafterChanged(0, drafter))

    def finish(self, reason: FinishReason = "stop", generated: int = 120, **changes: Any) -> None:
        facts: dict[str, Any] = {
            "text": "",
            "thinking": "",
            "token_ids": [],
            "prompt_tokens": 60,
            "reused_tokens": 36,
            "generated_tokens": generated,
            "finish_reason": reason,
            "model": self.model.name,
            "drafter": DSPARK,
            "accept_length": 4.86,
            "tokens_per_second": 128.9,
            "seconds": Seconds(0.0, 0.2, 0.25, 1.5),
        }
        self.send(Finished(2, self.answer, Result(**{**facts, **changes})))

    def die(
        self, message: str = "The engine was killed by signal 9 (SIGKILL); its log is engine.log."
    ) -> None:
        self.send(EngineGone(message))
        assert self.on_gone is not None
        self.on_gone(message)


def make_app(engine: StubEngine, model: str | None = "demo", **options: Any) -> DsparkApp:
    async def start() -> StubEngine:
        return engine

    return DsparkApp(start, model=model, clock=options.pop("clock", Clock()), **options)


async def until(condition: Callable[[], bool], pilot: Any, seconds: float = 5.0) -> None:
    """Let the app work until `condition` holds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        assert loop.time() < deadline, "the awaited condition did not come about"
        await pilot.pause(0.01)
    await pilot.pause()


ANSWER = """\
The idea is to let every simdgroup reduce its own **32 values** in registers and only then touch \
threadgroup memory:

```metal
kernel void sum(device const float *x [[buffer(0)]],
                device float *out     [[buffer(1)]]) {
    float v = simd_sum(x[tid]);
}
```

Three things to check before you time it:

1. the grid is a multiple of 32, or the tail is masked
2. the `threadgroup` memory is cleared
3. a second pass adds the partial sums
"""
