"""The outcome of `dspark-tui run`: its JSON object (a contract), its table of rounds, its summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark_tui.engine.protocol import (
    JSON_SCHEMA_VERSION,
    AnyEvent,
    DrafterChanged,
    DrafterInfo,
    FinishReason,
    Loaded,
    Prefill,
    Result,
    Rounds,
    RoundStat,
    Text,
)

ROUND_KEYS = ("source", "drafted", "accepted", "committed", "draft_ms", "verify_ms", "other_ms")


class Seen:
    """What was seen of an answer, for the case that no result comes: the engine may die in mid-answer."""

    def __init__(self, loaded: Loaded) -> None:
        self._model = loaded.model.name
        self._load_seconds = loaded.seconds
        self.drafter = loaded.drafter
        self.prompt_tokens: int | None = None
        self.reused_tokens: int | None = None
        self.text: list[str] = []
        self.thinking: list[str] = []
        self.rounds: list[RoundStat] = []

    def note(self, event: AnyEvent) -> None:
        """Take in an event of the answer."""
        match event:
            case Prefill():
                self.prompt_tokens, self.reused_tokens = event.total, event.reused
            case Text():
                (self.thinking if event.thinking else self.text).append(event.text)
            case Rounds():
                self.rounds.extend(event.rounds)
            case DrafterChanged():
                self.drafter = event.drafter

    @property
    def begun(self) -> bool:
        """Whether the engine began to answer."""
        return self.prompt_tokens is not None

    def as_json(self, error: str, rounds: bool) -> dict[str, Any]:
        """The JSON object of an answer that broke off without a result: what nobody counted is null."""
        value = _object(
            text="".join(self.text),
            thinking="".join(self.thinking),
            token_ids=None,
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.reused_tokens,
            generated_tokens=None,
            finish_reason="error",
            model=self._model,
            drafter=self.drafter,
            accept_length=None,
            tokens_per_second=None,
            seconds={"load": self._load_seconds, "prefill": None, "first_token": None, "decode": None},
            error=error,
        )
        if rounds:
            value["rounds"] = _rounds(self.rounds)
        return value


def result_json(result: Result, error: str | None = None) -> dict[str, Any]:
    """The JSON object of a result. `rounds` is there when the result has them."""
    seconds = result.seconds
    value = _object(
        text=result.text,
        thinking=result.thinking,
        token_ids=result.token_ids,
        prompt_tokens=result.prompt_tokens,
        reused_tokens=result.reused_tokens,
        generated_tokens=result.generated_tokens,
        finish_reason=result.finish_reason,
        model=result.model,
        drafter=result.drafter,
        accept_length=result.accept_length,
        tokens_per_second=result.tokens_per_second,
        seconds={
            "load": seconds.load,
            "prefill": seconds.prefill,
            "first_token": seconds.first_token,
            "decode": seconds.decode,
        },
        error=error,
    )
    if result.rounds is not None:
        value["rounds"] = _rounds(result.rounds)
    return value


def _object(
    *,
    text: str,
    thinking: str,
    token_ids: list[int] | None,
    prompt_tokens: int | None,
    reused_tokens: int | None,
    generated_tokens: int | None,
    finish_reason: FinishReason,
    model: str,
    drafter: DrafterInfo,
    accept_length: float | None,
    tokens_per_second: float | None,
    seconds: dict[str, float | None],
    error: str | None,
) -> dict[str, Any]:
    """The one place where the keys of the contract are spelled."""
    return {
        "schema": JSON_SCHEMA_VERSION,
        "text": text,
        "thinking": thinking,
        "token_ids": token_ids,
        "prompt_tokens": prompt_tokens,
        "reused_tokens": reused_tokens,
        "generated_tokens": generated_tokens,
        "finish_reason": finish_reason,
        "model": model,
        "drafter": {
            "name": drafter.name,
            "method": drafter.method,
            "state": drafter.state,
            "reason": drafter.reason,
        },
        "accept_length": accept_length,
        "tokens_per_second": tokens_per_second,
        "seconds": seconds,
        "error": error,
    }


def _rounds(rounds: Sequence[RoundStat]) -> list[dict[str, Any]]:
    return [{key: getattr(stat, key) for key in ROUND_KEYS} for stat in rounds]


def rounds_table(rounds: Sequence[RoundStat]) -> str:
    """One line a round, in columns."""
    width = max([6, *(len(stat.source) for stat in rounds)])
    lines = [
        f"{'round':>5}  {'source':<{width}}  {'drafted':>7}  {'accepted':>8}  {'committed':>9}"
        f"  {'draft ms':>9}  {'verify ms':>9}  {'other ms':>9}"
    ]
    lines += [
        f"{number:>5}  {stat.source:<{width}}  {stat.drafted:>7}  {stat.accepted:>8}  {stat.committed:>9}"
        f"  {stat.draft_ms:>9.2f}  {stat.verify_ms:>9.2f}  {stat.other_ms:>9.2f}"
        for number, stat in enumerate(rounds, 1)
    ]
    return "\n".join(lines) + "\n"


def summary(result: Result) -> str:
    """One line about the speed."""
    speed = "n/a" if result.tokens_per_second is None else f"{result.tokens_per_second:.1f}"
    length = "n/a" if result.accept_length is None else f"{result.accept_length:.2f}"
    return (
        f"{result.generated_tokens} tokens, {speed} tok/s, "
        f"drafter {result.drafter.name}, accept length {length}"
    )
