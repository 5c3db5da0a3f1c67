"""`dspark-tui run`: one prompt, one answer. stdout carries data only, stderr narration only."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

from dspark_tui.cli import DONE, FAILED, STOPPED, USAGE
from dspark_tui.engine.client import Engine, EngineError, EngineFailure
from dspark_tui.engine.protocol import (
    AnyEvent,
    DrafterChanged,
    DrafterInfo,
    Finished,
    Loaded,
    Message,
    Notice,
    Prefill,
    Result,
    Sampling,
    Text,
)
from dspark_tui.interrupts import Interrupts, Stopped
from dspark_tui.narration import Narrator
from dspark_tui.output import Output, OutputGone
from dspark_tui.report import Seen, result_json, rounds_table, summary
from dspark_tui.text.format import plural


@dataclass(frozen=True)
class Request:
    """A checked `run` command."""

    model: str
    drafter: str | None
    messages: list[Message]
    sampling: Sampling
    max_tokens: int | None
    as_json: bool
    rounds: bool
    fake: Path | None
    stop: tuple[str, ...] = ()
    thinking: bool | None = None
    effort: str | None = None
    drafter_bits: int | None = None
    kv_bits: int | None = None
    lookup: bool | None = None


def read_prompt() -> str:
    """The prompt from stdin, without its last newline. Bytes that are not UTF-8 are replaced; it says so."""
    data = sys.stdin.buffer.read() if sys.stdin is not None else b""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
        Narrator().say("The prompt has bytes that are not UTF-8; they were replaced.")
    return text.removesuffix("\n")


def run(request: Request) -> int:
    """Answer the prompt. Returns the exit code."""
    return asyncio.run(_Run(request).run())


class _Run:
    def __init__(self, request: Request) -> None:
        self._request = request
        self._narrator = Narrator()
        self._output = Output()
        self._thought = 0
        """Characters of thinking so far."""

    async def run(self) -> int:
        with Interrupts() as interrupts:
            try:
                self._narrator.status("starting the engine")
                engine = await interrupts.unless_asked(Engine.start(self._request.fake))
                try:
                    engine.on_event = self._news
                    loaded = await interrupts.unless_asked(self._load(engine))
                    return await self._answer(engine, loaded, interrupts)
                finally:
                    self._narrator.clear()
                    await engine.close()
            except Stopped:
                self._narrator.say("Stopped before the answer began.")
                return STOPPED
            except OutputGone:
                # Whoever read the answer had enough: that is no failure.
                return DONE
            except OSError as error:
                self._narrator.say(f"The answer cannot be written: {error.strerror or error}.")
                return FAILED
            except EngineError as error:
                self._narrator.say(error.message)
                return _exit_code(error)

    async def _load(self, engine: Engine) -> Loaded:
        request = self._request
        loaded = await engine.load(
            request.model,
            request.drafter,
            lambda event: self._narrator.progress(request.model, event),
            drafter_bits=request.drafter_bits,
            kv_bits=request.kv_bits,
            lookup=request.lookup,
        )
        for note in loaded.notes:
            self._narrator.say(note)
        self._fallback(loaded.drafter)
        return loaded

    async def _answer(self, engine: Engine, loaded: Loaded, interrupts: Interrupts) -> int:
        """Ask, print, and tell how it ended."""
        request, seen, answer = self._request, Seen(loaded), uuid.uuid4().hex
        stopper = asyncio.create_task(_stop_when_asked(engine, answer, interrupts))
        result: Result | None = None
        chat = engine.chat(
            request.messages,
            sampling=request.sampling,
            max_tokens=request.max_tokens,
            stop=request.stop,
            rounds=request.rounds,
            answer=answer,
            thinking=request.thinking,
            effort=request.effort,
        )
        try:
            async with contextlib.aclosing(chat) as events:
                async for event in events:
                    seen.note(event)
                    self._show(event)
                    if isinstance(event, Finished):
                        result = event.result
        except EngineError as error:
            return self._broken(error, seen)
        finally:
            stopper.cancel()
        assert result is not None
        self._close_answer(result, result_json(result) if request.as_json else None)
        return STOPPED if result.finish_reason == "stopped" else DONE

    def _show(self, event: AnyEvent) -> None:
        match event:
            case Text(thinking=True):
                self._thought += len(event.text)
                self._narrator.status(f"thinking ({plural(self._thought, 'character')})")
            case Text():
                self._narrator.clear()
                if not self._request.as_json:
                    self._output.text(event.text)
            case Prefill() if event.done < event.total:
                self._narrator.status(f"prefill {event.done} of {event.total} tokens")
            case DrafterChanged():
                self._fallback(event.drafter)

    def _broken(self, error: EngineError, seen: Seen) -> int:
        """The answer broke off: what there is stays."""
        result = error.result if isinstance(error, EngineFailure) else None
        value = None
        if self._request.as_json and result is not None:
            value = result_json(result, error.message)
        elif self._request.as_json and seen.begun:
            value = seen.as_json(error.message, self._request.rounds)
        self._close_answer(result, value)
        self._narrator.say(error.message)
        return _exit_code(error)

    def _close_answer(self, result: Result | None, value: dict[str, object] | None) -> None:
        self._narrator.clear()
        if value is not None:
            self._output.json(value)
        elif not self._request.as_json:
            self._output.end_line()
        if result is None:
            return
        if self._request.rounds and not self._request.as_json:
            self._narrator.lines(rounds_table(result.rounds or []))
        if result.thinking and not result.text and not self._request.as_json:
            self._narrator.say(
                "It ended while it was thinking, so there is no answer; --json shows the thinking."
            )
        if result.finish_reason == "stopped":
            self._narrator.say("Stopped.")
        if self._narrator.on_terminal and not self._request.as_json:
            self._narrator.say(summary(result))

    def _news(self, event: AnyEvent) -> None:
        if isinstance(event, Notice):
            self._narrator.say(event.message)

    def _fallback(self, drafter: DrafterInfo) -> None:
        if drafter.state == "fell_back":
            reason = drafter.reason.rstrip(".")
            self._narrator.say(f"The drafter {drafter.name} fell back to plain decoding: {reason}.")


async def _stop_when_asked(engine: Engine, answer: str, interrupts: Interrupts) -> None:
    await interrupts.wait()
    with contextlib.suppress(EngineError):
        await engine.stop(answer)


def _exit_code(error: EngineError) -> int:
    return USAGE if isinstance(error, EngineFailure) and error.kind == "usage" else FAILED
