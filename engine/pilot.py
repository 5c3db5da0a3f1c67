"""What the next round does: which drafter drafts, and how many tokens are verified.

Every choice rests on what was measured: seconds of a forward by width and context, seconds of a draft, and
how the drafts fared. Where drafting does not pay the pilot parks: plain steps, and now and then a probe
whose cost is kept to a small part of the time. `auto` chooses among all drafters by committed tokens per
second, a bandit whose exploration has the same bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, median, stdev
from typing import Literal

from dspark_tui.engine.costs import CostCurve, DraftCost
from dspark_tui.engine.draft_length import Acceptance, best_length, confident_length
from dspark_tui.engine.drafters.base import Drafter
from dspark_tui.engine.drafters.lookup import LONG, SHORT, Lookup

State = Literal["active", "parked"]

PROBING = 0.02
"""Part of the time that probes aim to cost. After the first losses they come sooner, since kernels that were
compiled say nothing, and none waits longer than `_MOST_WAIT`."""

_PARK_BELOW, _RETURN_ABOVE = 0.97, 1.03
"""Of the plain speed: two figures, so that noise does not flip the state."""

_SOON, _SURE = 3, 8
"""Rounds after which a forecast may park a drafter, and after which its measured speed may."""

_EXPLORE_EVERY = 16
"""Rounds between two that draft the whole block, so that later positions are not forgotten, or a block whose
cost is not known yet."""

_BENEFIT = 0.7
"""Standard errors of its measured speed that a drafter is given before it is parked."""

_LEAST_WAIT, _MOST_WAIT = 8, 512
"""Tokens between two probes."""

_CLOSE, _LOOK_BACK = 1.3, 32
"""Below this multiple of the plain speed, one in so many rounds is plain: to know what a plain step costs."""

_NEWEST, _OUTLIER = 24, 3.0
"""Rounds that a drafter's speed is taken from; one that took so many times the median is left out: kernels
were compiled, or something else had the processor."""

_STEEP = 1.15
"""Cost of a round with the whole block against one with a single draft, from which it pays to wait for the
drafter's confidence before the forward is begun."""


@dataclass
class Arm:
    """A drafter with everything measured about it."""

    drafter: Drafter
    acceptance: Acceptance
    draft: DraftCost = field(default_factory=DraftCost)
    newest: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_NEWEST))
    """Tokens and seconds of its newest rounds."""
    rounds: int = 0
    confident: bool = False
    """Whether its drafts come with its own estimate of acceptance."""
    losses: int = 0
    """Rounds in a row that were slower than what else could have been done."""
    due: int = 0
    """Tokens after which it may be tried again while something else is thought better."""

    @classmethod
    def of(cls, drafter: Drafter) -> Arm:
        """A drafter of which nothing is known yet."""
        return cls(drafter, Acceptance(drafter.drafts))

    @property
    def speed(self) -> float | None:
        """Measured tokens per second of its newest rounds; None before there are some."""
        if not self.newest:
            return None
        usual = median(seconds for _, seconds in self.newest)
        kept = [(tokens, seconds) for tokens, seconds in self.newest if seconds <= _OUTLIER * usual]
        spent = sum(seconds for _, seconds in kept)
        return sum(tokens for tokens, _ in kept) / spent if spent > 0 else None

    @property
    def doubt(self) -> float:
        """Relative standard error of the tokens that its newest rounds committed."""
        tokens = [tokens for tokens, _ in self.newest]
        return stdev(tokens) / len(tokens) ** 0.5 / mean(tokens) if len(tokens) > 1 else 0.0

    def learn(self, committed: int, seconds: float) -> None:
        """Take in one of its rounds."""
        self.newest.append((committed, seconds))
        self.rounds += 1


@dataclass(frozen=True)
class Choice:
    """`k` tokens from the drafter of `arm` (None: a plain step). `weigh`: its confidence may cut the draft
    further. `rival`: expected tokens per second of the best thing to do instead; None when not known."""

    arm: Arm | None
    k: int
    weigh: bool = False
    rival: float | None = None


PLAIN = Choice(None, 0)


class Pilot:
    """Chooses round by round: for one drafter (with lookup as its partner), or with `auto` among several."""

    def __init__(
        self,
        costs: CostCurve,
        arms: Sequence[Arm],
        lookup: Arm | None = None,
        *,
        auto: bool = False,
    ) -> None:
        """`arms`: the trained drafters in play. `lookup`: drafts where the context repeats itself, as an
        equal of the others with `auto`, in place of a single drafter where a match is long. Without either
        every step is plain."""
        self.costs, self.arms, self.lookup, self.auto = costs, list(arms), lookup, auto
        self.state: State = "active"
        self.reason = ""
        for arm in (*arms, lookup):
            if arm is not None:
                arm.due = 0
        self._tokens = 0
        self._rounds = 0

    # ------------------------------------------------------------------ choosing

    def choose(self, most: int, depth: int, anchor: int) -> Choice:
        """For the round after `anchor`, at `depth` positions, where up to `most` drafts may be committed."""
        if most < 1 or not (self.arms or self.lookup):
            return PLAIN
        if not self.costs.measured:
            return self.whole(most, anchor)
        plain = 1.0 / self.costs.seconds(1, depth)
        arms = self._open(anchor)
        best, speed = self._best(arms, most, depth, plain)
        if best.arm is not None and speed < _CLOSE * plain and self._rounds % _LOOK_BACK == _LOOK_BACK - 1:
            return PLAIN
        for arm in arms:
            # A single drafter that only yields to a long match is known well enough.
            known = not self.auto and arm in self.arms and self.state == "active"
            if arm is not best.arm and not known and (arm.rounds < _SOON or self._tokens >= arm.due):
                return Choice(arm, self._plan(arm, most, depth)[0].k, rival=speed)
        return best

    def whole(self, most: int, anchor: int) -> Choice:
        """The first drafter's whole block, whatever it costs: a choice that does not depend on the clock."""
        arm = next(iter(self.arms or self._open(anchor)), None)
        return PLAIN if arm is None or most < 1 else Choice(arm, min(arm.drafter.drafts, most))

    def trim(self, choice: Choice, confidence: Sequence[float], depth: int) -> int:
        """How many of the drafts to verify, given the drafter's own estimates."""
        if choice.arm is None:
            return choice.k
        draft = choice.arm.draft.seconds or 0.0
        return confident_length(
            confidence[: choice.k],
            choice.arm.acceptance,
            lambda k: draft + self.costs.seconds(k + 1, depth),
        )

    def _open(self, anchor: int) -> list[Arm]:
        """The arms that have something to say now."""
        if self.lookup is not None:
            assert isinstance(self.lookup.drafter, Lookup)
            if self.lookup.drafter.match(anchor) >= (LONG if self.arms and not self.auto else SHORT):
                return [*self.arms, self.lookup]
        return self.arms

    def _best(self, arms: Sequence[Arm], most: int, depth: int, plain: float) -> tuple[Choice, float]:
        """The arm that is expected to be fastest, with its tokens per second; PLAIN where none is faster."""
        best, best_speed = PLAIN, plain
        for arm in arms:
            choice, speed = self._plan(arm, most, depth)
            if not self.auto and arm in self.arms:
                # Its own state says whether it is used; small swings do not.
                if self.state == "parked":
                    continue
                speed = max(speed, plain)
            if speed > best_speed or (best is PLAIN and speed == best_speed):
                best, best_speed = choice, speed
        rival = plain if best is not PLAIN else None
        return Choice(best.arm, best.k, best.weigh, rival), best_speed

    def _plan(self, arm: Arm, most: int, depth: int) -> tuple[Choice, float]:
        """The best that this arm can do, and its expected tokens per second."""
        draft = arm.draft.seconds or 0.0
        whole = min(arm.drafter.drafts, most)

        def cost(k: int) -> float:
            return draft + self.costs.seconds(k + 1, depth)

        k, speed = best_length(arm.acceptance.survival(whole), cost)
        if arm.rounds >= _SURE and arm.speed is not None:
            speed = arm.speed
        if arm.rounds % _EXPLORE_EVERY == _EXPLORE_EVERY - 1:
            unknown = [j for j in (k + 1, k - 1) if 1 <= j <= whole and not self.costs.knows(j + 1)]
            return Choice(arm, unknown[0] if unknown else whole), speed
        if arm.confident and cost(whole) > _STEEP * cost(1):
            return Choice(arm, whole, weigh=True), speed
        return Choice(arm, k), speed

    def drop(self, drafter: Drafter) -> None:
        """Never choose this one again."""
        self.arms = [arm for arm in self.arms if arm.drafter is not drafter]
        if self.lookup is not None and (self.lookup.drafter is drafter or not (self.arms or self.auto)):
            self.lookup = None

    # ------------------------------------------------------------------ learning

    def learn(
        self,
        choice: Choice,
        *,
        depth: int,
        drafted: int,
        accepted: int,
        committed: int,
        draft_seconds: float,
        other_seconds: float,
        confidence: Sequence[float] = (),
    ) -> bool:
        """Take in a finished round that `choice` began at `depth` positions. Returns whether `state`
        changed."""
        self._tokens += committed
        self._rounds += 1
        self.costs.observe(drafted + 1, depth, other_seconds)
        arm = choice.arm
        if arm is None:
            return False
        seconds = draft_seconds + other_seconds
        arm.draft.observe(draft_seconds)
        arm.confident = arm.confident or bool(confidence)
        arm.acceptance.observe(drafted, accepted, confidence)
        arm.learn(committed, seconds)
        rival = choice.rival or 1.0 / self.costs.seconds(1, depth)
        # What a try cost has to be earned back before the next one; one that cost nothing may be repeated.
        lost = max(0.0, seconds - committed / rival)
        arm.losses = arm.losses + 1 if lost else 0
        wait = max(_LEAST_WAIT, round(lost * rival / PROBING)) if lost else 0
        # However much the first tries cost: if kernels were compiled, that was once.
        arm.due = self._tokens + min(wait, _MOST_WAIT, _LEAST_WAIT << min(arm.losses, 16))
        return not self.auto and arm in self.arms and self._judge(arm, depth)

    def _judge(self, arm: Arm, depth: int) -> bool:
        """Park the drafter or bring it back. Returns whether that changed anything."""
        if arm.rounds < _SOON:
            return False
        _, speed = self._plan(arm, arm.drafter.drafts, depth)
        share = speed * self.costs.seconds(1, depth)
        # A few rounds that were less lucky than others do not park it.
        doubt = arm.doubt if arm.rounds >= _SURE else 0.0
        if self.state == "active" and share * (1 + _BENEFIT * doubt) < _PARK_BELOW:
            self.state = "parked"
            self.reason = f"drafting gives about {share:.2f} of the plain speed here; tried now and then"
            return True
        if self.state == "parked" and share > _RETURN_ABOVE:
            self.state, self.reason = "active", ""
            return True
        return False
