"""From the engine's events to the numbers on the screen: a meter that takes events and gives immutable
snapshots. A value that was not measured is None and is shown as such. Nothing here imports textual."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from dspark_tui.engine.protocol import Prefill, Result, Rounds, RoundStat

WINDOW_SECONDS = 2.0
SPARK_ROUNDS = 32
_BASELINE_TOKENS = 32
"""Shortest plain answer that counts as a measurement of plain speed."""


@dataclass(frozen=True, slots=True)
class RoundMeans:
    """Means over the rounds of an answer, in milliseconds and tokens."""

    total_ms: float
    draft_ms: float
    verify_ms: float
    other_ms: float
    committed: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is known about the present (or last) answer. Speeds in tokens a second, decode only."""

    running: bool = False
    speed: float | None = None
    """Over the last two seconds; None when nothing is being generated."""
    average: float | None = None
    first_token: float | None = None
    """Seconds from the request to the first token."""
    prefill_speed: float | None = None
    prompt_tokens: int | None = None
    prefill_done: int | None = None
    reused: int | None = None
    generated: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accept_length: float | None = None
    """Tokens committed a round, bonus included."""
    drafts: int | None = None
    """Most tokens drafted in one round so far."""
    spark: tuple[int, ...] = ()
    """Accepted tokens of the newest rounds, oldest first."""
    positions: tuple[float | None, ...] = ()
    """Share of drafts accepted at position 1, 2, ... of the block."""
    sources: tuple[tuple[str, int], ...] = ()
    """Who drafted how many of the rounds (`none`: nobody), most first."""
    means: RoundMeans | None = None
    context: int | None = None
    memory: int | None = None
    peak: int | None = None
    kept_for_drafters: int | None = None
    """Bytes of what the target computed and drafters may still need."""
    plain: float | None = None
    """Measured speed without a drafter, for this model and a context of this size."""

    @property
    def speedup(self) -> float | None:
        """Average over the measured plain speed."""
        return self.average / self.plain if self.average and self.plain else None


def context_bucket(tokens: int) -> int:
    """Plain speed depends on the context; it is compared within a power-of-four bucket (in 1,024s)."""
    bucket = 1024
    while tokens > bucket:
        bucket *= 4
    return bucket


class Baselines:
    """Plain speeds measured while this program runs, by model and context bucket."""

    def __init__(self) -> None:
        self._speeds: dict[tuple[str, int], float] = {}

    def learn(self, result: Result, all_plain: bool, context: int) -> None:
        """Take a finished answer as a measurement when it was long enough and nothing was drafted in it."""
        speed = result.tokens_per_second
        if all_plain and speed is not None and result.generated_tokens >= _BASELINE_TOKENS:
            self._speeds[result.model, context_bucket(context)] = speed

    def plain(self, model: str, context: int | None) -> float | None:
        """The measured plain speed, or None."""
        return self._speeds.get((model, context_bucket(context or 0)))


class Meter:
    """Collects the events of one answer."""

    def __init__(self, baselines: Baselines | None = None, model: str = "") -> None:
        self._baselines = baselines or Baselines()
        self._model = model
        self._running = True
        self._prefill: Prefill | None = None
        self._first_token: float | None = None
        self._points: deque[tuple[float, int]] = deque()
        self._last: Rounds | None = None
        self._spark: deque[int] = deque(maxlen=SPARK_ROUNDS)
        self._rounds = self._drafted = self._accepted = self._committed = 0
        self._widest = 0
        self._reached: list[int] = []
        self._kept: list[int] = []
        self._draft_ms = self._verify_ms = self._other_ms = 0.0
        self._result: Result | None = None
        self._sources: Counter[str] = Counter()

    def prefill(self, event: Prefill) -> None:
        """Progress of reading the prompt."""
        self._prefill = event

    def first_text(self, seconds: float) -> None:
        """The first piece of text came `seconds` after the request, as the screen saw it."""
        if self._first_token is None:
            self._first_token = seconds

    def rounds(self, event: Rounds) -> None:
        """The rounds since the last such event."""
        self._last = event
        self._points.append((event.elapsed, event.generated_tokens))
        while len(self._points) > 2 and event.elapsed - self._points[1][0] >= WINDOW_SECONDS:
            self._points.popleft()
        for stat in event.rounds:
            self._round(stat)

    def _round(self, stat: RoundStat) -> None:
        self._sources[stat.source] += 1
        self._rounds += 1
        self._drafted += stat.drafted
        self._accepted += stat.accepted
        self._committed += stat.committed
        self._draft_ms += stat.draft_ms
        self._verify_ms += stat.verify_ms
        self._other_ms += stat.other_ms
        if not stat.drafted:
            return
        self._widest = max(self._widest, stat.drafted)
        self._spark.append(stat.accepted)
        while len(self._reached) < stat.drafted:
            self._reached.append(0)
            self._kept.append(0)
        for position in range(stat.drafted):
            self._reached[position] += 1
            self._kept[position] += position < stat.accepted

    def finish(self, result: Result | None) -> None:
        """The answer ended; its result is exact and replaces what was observed on the way."""
        self._running = False
        self._result = result
        if result is not None:
            self._baselines.learn(result, self._rounds > 0 and not self._drafted, self._context() or 0)

    def _context(self) -> int | None:
        if self._result is not None:
            return self._result.prompt_tokens + self._result.generated_tokens
        if self._last is not None:
            return self._last.context_tokens
        return self._prefill.done if self._prefill else None

    def _speed(self) -> float | None:
        if not self._running or len(self._points) < 2:
            return None
        (start, before), (end, now) = self._points[0], self._points[-1]
        return (now - before) / (end - start) if end > start else None

    def _average(self) -> float | None:
        if self._result is not None:
            return self._result.tokens_per_second
        last = self._last
        if last is None or last.elapsed <= 0 or last.generated_tokens < 2:
            return None
        return (last.generated_tokens - 1) / last.elapsed

    def snapshot(self) -> Snapshot:
        """The numbers as they stand."""
        result, last, prefill = self._result, self._last, self._prefill
        prompt = result.prompt_tokens if result else prefill.total if prefill else None
        reused = result.reused_tokens if result else prefill.reused if prefill else None
        prefill_speed = None
        if result and result.seconds.prefill > 0:
            prefill_speed = (result.prompt_tokens - result.reused_tokens) / result.seconds.prefill
        context = self._context()
        rounds = self._rounds
        return Snapshot(
            running=self._running,
            speed=self._speed(),
            average=self._average(),
            first_token=result.seconds.first_token if result else self._first_token,
            prefill_speed=prefill_speed,
            prompt_tokens=prompt,
            prefill_done=prefill.done if prefill else None,
            reused=reused,
            generated=result.generated_tokens if result else last.generated_tokens if last else 0,
            rounds=rounds,
            drafted=self._drafted,
            accepted=self._accepted,
            accept_length=self._committed / rounds if rounds else None,
            drafts=self._widest or None,
            spark=tuple(self._spark),
            positions=tuple(
                kept / reached if reached else None
                for kept, reached in zip(self._kept, self._reached, strict=True)
            ),
            sources=tuple(self._sources.most_common()),
            means=RoundMeans(
                total_ms=(self._draft_ms + self._verify_ms + self._other_ms) / rounds,
                draft_ms=self._draft_ms / rounds,
                verify_ms=self._verify_ms / rounds,
                other_ms=self._other_ms / rounds,
                committed=self._committed / rounds,
            )
            if rounds
            else None,
            context=context,
            memory=last.memory_bytes if last else None,
            peak=last.peak_bytes if last else None,
            kept_for_drafters=last.context_rows_bytes if last else None,
            plain=self._baselines.plain(self._model, context),
        )
