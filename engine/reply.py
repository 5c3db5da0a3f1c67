"""The growing answer: its tokens, its text, its rounds, and when it is over."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from dspark_tui.engine.answer_text import AnswerText
from dspark_tui.engine.protocol import FinishReason, RoundStat


@dataclass
class Reply:
    """`limit`: tokens that may be generated, exactly. `ends`: end-of-turn tokens, kept in `tokens` but not
    in the text. `boundaries`: where later prompts may part from this one (see `turns`). Counts and rates are
    derived; times are of `time.perf_counter`."""

    prompt: Sequence[int]
    limit: int
    ends: Collection[int]
    text: AnswerText
    boundaries: Sequence[int] = ()
    tokens: list[int] = field(default_factory=list)
    rounds: list[RoundStat] = field(default_factory=list)
    reason: FinishReason | None = None
    reused: int = 0
    started: float = field(default_factory=time.perf_counter)
    prefilled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    def take(self, tokens: Sequence[int]) -> int:
        """Add committed tokens until the answer is over. Returns how many were taken."""
        before = len(self.tokens)
        for token in tokens:
            self.tokens.append(token)
            if token in self.ends:
                self.reason = "stop"
            else:
                self.text.push(token)
                if self.text.stopped:
                    self.reason = "stop"
                elif self.remaining == 0:
                    self.reason = "length"
            if self.reason is not None:
                break
        self.last_token_at = time.perf_counter()
        if self.first_token_at is None:
            self.first_token_at = self.last_token_at
        return len(self.tokens) - before

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.limit - len(self.tokens)

    @property
    def anchor(self) -> int:
        """The newest committed token, which the target has not seen yet."""
        return self.tokens[-1]

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        if self.first_token_at is None or self.last_token_at is None:
            return 0.0
        return self.last_token_at - self.first_token_at

    @property
    def tokens_per_second(self) -> float | None:
        """Decode only; None before the second token."""
        if len(self.tokens) < 2 or self.decode_seconds <= 0:
            return None
        return (len(self.tokens) - 1) / self.decode_seconds

    @property
    def accept_length(self) -> float | None:
        """Tokens committed a round, bonus included; None before the first round."""
        if not self.rounds:
            return None
        return sum(stat.committed for stat in self.rounds) / len(self.rounds)
