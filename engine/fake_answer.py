"""One answer of the fake engine: its rounds, and what the script makes happen between them."""

from __future__ import annotations

import os
import re
import sys
import time
from typing import Protocol

from msgspec.structs import replace

from dspark_tui.engine.backend import BackendError, Control, Emit
from dspark_tui.engine.fake_script import Act, Drafter, Reply, Script
from dspark_tui.engine.protocol import (
    Chat,
    DrafterChanged,
    DrafterInfo,
    Failed,
    Finished,
    FinishReason,
    Notice,
    Prefill,
    Result,
    Rounds,
    RoundStat,
    Seconds,
    SwitchDrafter,
    Text,
)


class HasDrafter(Protocol):
    """What an answer needs of the backend."""

    drafter: DrafterInfo

    def change(self, command: SwitchDrafter, emit: Emit) -> DrafterInfo:
        """Be another drafter, or raise BackendError and stay."""
        ...

    def scripted(self, name: str) -> Drafter | None:
        """What the script says of a drafter; None for plain decoding."""
        ...


def tokens(text: str) -> list[str]:
    """The fake engine's tokens: up to eight characters of a word, with the space before it."""
    return re.findall(r"\s*\S{1,8}|\s+", text)


def say(stdout: str, stderr: str) -> None:
    """Noise on the process's own streams, as libraries make it."""
    for text, stream in ((stdout, sys.stdout), (stderr, sys.stderr)):
        if text:
            stream.write(text)
            stream.flush()


class FakeAnswer:
    """Plays one reply. `prompt` is the prompt's length in tokens."""

    def __init__(
        self,
        script: Script,
        reply: Reply,
        command: Chat,
        emit: Emit,
        prompt: int,
        model: str,
        load_seconds: float,
    ) -> None:
        self._script, self._command, self._emit = script, command, emit
        self._prompt, self._model, self._load_seconds = prompt, model, load_seconds
        self._acts = sorted(reply.act, key=lambda act: act.at)
        text, self._reason = _cut(reply.text, command.stop)
        thinking = [] if command.thinking is False else tokens(reply.thinking)
        self._pieces = [(piece, True) for piece in thinking] + [(piece, False) for piece in tokens(text)]
        limit = script.context - prompt
        if command.max_tokens is not None:
            limit = min(limit, command.max_tokens)
        if len(self._pieces) > limit:
            self._pieces, self._reason = self._pieces[:limit], "length"
        self._position = 0
        self._seq = 0
        self._rounds: list[RoundStat] = []
        self._started = time.monotonic()
        self._first_token = self._prefill_seconds = self._decode = 0.0
        self._backend: HasDrafter

    def run(self, control: Control, backend: HasDrafter) -> None:
        """Play it to its end. Raises BackendError when the script says so."""
        self._backend = backend
        if not self._prefill(control):
            self._finish("stopped")
            return
        self._first_token = time.monotonic() - self._started
        while True:
            self._play_acts()
            if control.stop_requested:
                self._finish("stopped")
                return
            if switch := control.take_switch():
                try:
                    self._emit(DrafterChanged(switch.id, backend.change(switch, self._emit)))
                except BackendError as error:
                    self._emit(Failed(switch.id, error.message, error.kind))
            if self._position >= len(self._pieces):
                self._finish(self._reason)
                return
            self._round(control)

    # ------------------------------------------------------------------ steps

    def _prefill(self, control: Control) -> bool:
        """Go through the prompt. False when stopped on the way."""
        prefill = self._script.prefill
        reused = min(prefill.reused, self._prompt)
        for step in range(prefill.steps + 1):
            done = reused + (self._prompt - reused) * step // prefill.steps
            self._emit(Prefill(self._command.id, self._command.answer, done, self._prompt, reused))
            if step < prefill.steps and control.wait_stop(prefill.delay):
                return False
        fixed = prefill.steps * prefill.delay
        self._prefill_seconds = fixed if self._fixed else time.monotonic() - self._started
        return True

    def _round(self, control: Control) -> None:
        began = time.monotonic()
        drafter = self._backend.drafter
        drafted = accepted = 0
        if drafter.state == "active" and (scripted := self._backend.scripted(drafter.name)):
            drafted = scripted.drafts
            accepted = min(scripted.accept[len(self._rounds) % len(scripted.accept)], drafted)
        # A round ends where something is to happen, so that it happens after exactly that many tokens.
        end = min([len(self._pieces), *(act.at for act in self._acts)])
        committed = min(accepted + 1, end - self._position)
        self._send(self._pieces[self._position : self._position + committed])
        self._position += committed
        self._pace(control)
        timing = self._script.round
        passed = time.monotonic() - began
        if self._fixed:
            stat = RoundStat(
                drafter.name if drafted else "none",
                drafted,
                accepted,
                committed,
                timing.draft_ms if drafted else 0.0,
                timing.verify_ms,
                timing.other_ms,
            )
            passed = (stat.draft_ms + stat.verify_ms + stat.other_ms) / 1000
        else:
            source = drafter.name if drafted else "none"
            stat = RoundStat(source, drafted, accepted, committed, 0.0, passed * 1000, 0.0)
        if self._rounds:
            self._decode += passed
        elif self._fixed:
            self._first_token = self._prefill_seconds + passed
        self._rounds.append(stat)
        self._emit(
            Rounds(
                self._command.id,
                self._command.answer,
                [stat],
                generated_tokens=self._position,
                context_tokens=self._prompt + self._position,
                elapsed=self._decode,
                memory_bytes=self._script.memory_bytes,
                peak_bytes=self._script.memory_bytes,
            )
        )

    def _send(self, pieces: list[tuple[str, bool]]) -> None:
        for thinking in (True, False):
            text = "".join(piece for piece, is_thinking in pieces if is_thinking == thinking)
            size = self._script.chunk or len(text)
            for start in range(0, len(text), size or 1):
                part = text[start : start + size]
                self._emit(Text(self._command.id, self._command.answer, self._seq, part, thinking))
                self._seq += 1

    def _pace(self, control: Control) -> None:
        """Wait until as much time has passed as the tokens so far take at the script's rate."""
        if self._script.rate:
            due = self._started + self._prefill_seconds + self._position / self._script.rate
            control.wait_stop(max(0.0, due - time.monotonic()))

    def _play_acts(self) -> None:
        while self._acts and self._acts[0].at <= self._position:
            self._play(self._acts.pop(0))

    def _play(self, act: Act) -> None:
        say(act.stdout, act.stderr)
        match act.do:
            case "fail":
                words = act.message or f"The model failed after {self._position} tokens."
                raise BackendError(words, "failed", self._result("error"))
            case "raise":
                raise RuntimeError(act.message or "the script raises")
            case "crash":
                self._flush()
                os.kill(os.getpid(), act.signal)
                time.sleep(60)
            case "exit":
                self._flush()
                os._exit(act.code)
            case "stall":
                time.sleep(act.seconds)
            case "drafter":
                changed = replace(self._backend.drafter, state=act.state, reason=act.message)
                self._backend.drafter = changed
                self._emit(DrafterChanged(0, changed))
            case "notice":
                self._emit(Notice(0, act.message))
            case "noise":
                pass

    def _flush(self) -> None:
        """Let the text that comes before a crash reach the client, so that scripts are repeatable."""
        time.sleep(0.2)

    # ------------------------------------------------------------------ the end

    @property
    def _fixed(self) -> bool:
        return self._script.clock == "fixed"

    def _finish(self, reason: FinishReason) -> None:
        self._emit(Finished(self._command.id, self._command.answer, self._result(reason)))

    def _result(self, reason: FinishReason) -> Result:
        done = self._pieces[: self._position]
        later = self._position - (self._rounds[0].committed if self._rounds else 0)
        return Result(
            text="".join(piece for piece, thinking in done if not thinking),
            thinking="".join(piece for piece, thinking in done if thinking),
            token_ids=list(range(self._position)),
            prompt_tokens=self._prompt,
            reused_tokens=min(self._script.prefill.reused, self._prompt),
            generated_tokens=self._position,
            finish_reason=reason,
            model=self._model,
            drafter=self._backend.drafter,
            accept_length=self._position / len(self._rounds) if self._rounds else None,
            tokens_per_second=later / self._decode if later and self._decode else None,
            seconds=Seconds(self._load_seconds, self._prefill_seconds, self._first_token, self._decode),
            rounds=self._rounds if self._command.rounds else None,
        )


def _cut(text: str, stops: list[str]) -> tuple[str, FinishReason]:
    """`text` up to the first stop string in it."""
    found = [position for stop in stops if stop and (position := text.find(stop)) >= 0]
    return (text[: min(found)] if found else text), "stop"
