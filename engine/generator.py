"""THE loop: draft, verify, accept, commit, for every drafter, greedy and sampled.

Plain decoding is the drafter that drafts nothing. A round is: the drafter proposes a block after the
anchor; the target runs anchor and drafts in one forward; the drafts that stand and the bonus token are
committed; rejected rows leave the cache. Everything of a round is one lazy graph with one wait at its end.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from dspark_tui.engine import verify
from dspark_tui.engine.drafters.base import NOTHING, Drafter, Proposal
from dspark_tui.engine.pilot import PLAIN, Choice
from dspark_tui.engine.precision import on_cpu
from dspark_tui.engine.protocol import RoundStat, SwitchDrafter
from dspark_tui.engine.reply import Reply
from dspark_tui.engine.sampling import Sampler
from dspark_tui.engine.session import Session
from dspark_tui.engine.switching import LoadStep, Switching, SwitchStep
from dspark_tui.engine.target import Forward
from dspark_tui.engine.turns import chunk_end, snapshot_stops

_CLEAR_EVERY = 256
"""Rounds between returning MLX's unused buffers, as mlx-lm does."""

_FAULTS = (RuntimeError, ValueError, MemoryError)
"""What a drafter may raise: MLX's own errors, and ours."""


class Commands(Protocol):
    """What the user wants while an answer runs (see `backend.Control`)."""

    @property
    def stop_requested(self) -> bool:
        """End now, keeping the text."""
        ...

    @property
    def waiting(self) -> bool:
        """Whether there is anything to look at."""
        ...

    def take_switch(self) -> SwitchDrafter | None:
        """The newest request to change the drafter, once."""
        ...


@dataclass(frozen=True)
class PrefillStep:
    """`done` of the prompt's tokens are in the cache."""

    done: int


@dataclass(frozen=True)
class RoundStep:
    """Tokens were committed. `stat` is None for the first token, which prefill gives."""

    stat: RoundStat | None


Step = PrefillStep | RoundStep | SwitchStep | LoadStep


def generate(
    session: Session,
    reply: Reply,
    sampler: Sampler,
    commands: Commands,
    switching: Switching | None = None,
) -> Generator[Step, None, None]:
    """Answer `reply.prompt`, filling `reply`, until it says a reason to end.

    Also when the iterator is closed early, the session is left consistent: the cache holds committed
    tokens only. A drafter that is still being loaded at the end waits in `switching`.
    """
    loop = _Loop(session, reply, sampler, commands, switching)
    try:
        yield from loop.prefill()
        while reply.reason is None:
            yield from loop.obey()
            if reply.reason is None:
                yield from loop.round()
    finally:
        loop.settle()
        reply.text.finish()


@dataclass
class _Pending:
    """A verify forward on its way."""

    choice: Choice
    proposal: Proposal
    forward: Forward
    outcome: verify.Outcome
    started: bool = False

    def start(self) -> None:
        """Have it computed."""
        rows = () if self.forward.rows is None else (self.forward.rows,)
        mx.async_eval(self.outcome.accepted, self.outcome.bonus, *rows)
        self.started = True

    def wait_for_draft(self, begun: float) -> tuple[list[int], float]:
        """The drafts, and when they were there (`begun` without any); the forward is on its way then."""
        # An array that is being computed is waited for by reading it; mx.eval would wait for what was
        # queued behind it as well.
        drafts: list[int] = self.proposal.tokens.tolist()  # type: ignore[assignment]
        drafted_at = time.perf_counter() if drafts else begun
        if not self.started:
            self.start()
        return drafts, drafted_at


class _Loop:
    def __init__(
        self,
        session: Session,
        reply: Reply,
        sampler: Sampler,
        commands: Commands,
        switching: Switching | None = None,
    ) -> None:
        self.session, self.reply, self.sampler, self.commands = session, reply, sampler, commands
        self.switching = switching or Switching(session)
        self.target = session.target
        sampler.begin(self.target.vocabulary, reply.prompt, reply.tokens)
        # A seed promises the same text again, so what is drafted may not depend on the clock then, nor the
        # sizes of chunks, which round differently.
        self.fixed = not session.adaptive or sampler.seeded
        # Plain decoding keeps one step in flight: that of a token which the host has not seen yet.
        self.ahead: _Pending | None = None

    def obey(self) -> Iterator[Step]:
        """Look at what the user wants."""
        if self.commands.stop_requested:
            self.reply.reason = "stopped"
        while self.reply.reason is None and (command := self.commands.take_switch()) is not None:
            yield from self.switching.ask(command)
        if self.reply.reason is None:
            yield from self.switching.arrive()

    def settle(self) -> None:
        """Leave committed tokens only in the cache."""
        # A step that ran ahead took the last token, which is known by now: kept, it is one row less to
        # compute in the next turn, and a cache that cannot be cut stays whole.
        if self.ahead is not None and self.target.length == len(self.target.tokens) + 1:
            self.target.commit([self.reply.anchor])
            self.session.remember(self.ahead.forward, 1)
        self.ahead = None
        self.target.roll_back()

    # ------------------------------------------------------------------ prefill

    def prefill(self) -> Iterator[Step]:
        """Compute what the cache does not hold of the prompt, and draw the first token."""
        reply, prompt = self.reply, self.reply.prompt
        done = reply.reused = self.session.reuse(prompt)
        yield PrefillStep(done)
        chunks, stops = self.session.chunks, snapshot_stops(reply.boundaries, done)
        while done < len(prompt):
            yield from self.obey()
            if reply.reason is not None:
                return
            begun = time.perf_counter()
            size = chunks.first if self.fixed else chunks.size(self.commands.waiting)
            end = chunk_end(done, size, len(prompt), stops)
            chunk = prompt[done:end]
            forward = self.target.forward(mx.array(list(chunk), dtype=mx.uint32), last_only=True)
            self.session.remember(forward, len(chunk))
            yield from self._extend()
            done += len(chunk)
            contexts = [arm.drafter.state() for arm in self.session.pilot.arms]
            pending = [self.target.state(), contexts, forward.rows]
            # Only the last chunk's logits are wanted; the others are never computed.
            last = done == len(prompt)
            token = self.sampler.pick(forward.logits) if last else None
            broken = mx.isnan(forward.logits).any() if last else None
            mx.eval([a for a in (*pending, token, broken) if a is not None])
            if broken is not None and broken.item():
                raise ArithmeticError("the model's numbers overflowed (NaN); choose another model")
            self.target.commit(chunk)
            chunks.took(len(chunk), time.perf_counter() - begun)
            if done in stops:
                self.session.snapshots.take(self.target)
            yield PrefillStep(done)
        reply.prefilled_at = time.perf_counter()
        assert token is not None
        reply.take([_number(token)])
        self.sampler.observe(reply.tokens[-1:])
        mx.clear_cache()
        yield RoundStep(None)

    # ------------------------------------------------------------------ a round

    def round(self) -> Iterator[Step]:
        """Draft, verify, accept, commit."""
        begun = time.perf_counter()
        reply, fault = self.reply, None
        if self.ahead is not None:
            step, self.ahead = self.ahead, None
        else:
            choice = self._choose()
            proposal, fault = self._draft(choice)
            step = self._verify(choice, proposal)
        if step.choice.arm is None:
            self._run_ahead(step.outcome.bonus)
        choice, proposal, forward, outcome = step.choice, step.proposal, step.forward, step.outcome
        depth = len(self.target.tokens)
        drafts, drafted_at = step.wait_for_draft(begun)
        accepted, bonus = _number(outcome.accepted), _number(outcome.bonus)
        verified_at = time.perf_counter()
        if proposal.finite is not None and not proposal.finite.item():
            fault, accepted = "its numbers overflowed", 0
            bonus = _number(self.sampler.pick(forward.logits[:1]))
        anchor = reply.anchor
        taken = reply.take([*drafts[:accepted], bonus])
        self.sampler.observe(reply.tokens[-taken:])
        kept = min(accepted, taken)
        self._commit(forward, [anchor, *drafts[:kept]])
        stat = RoundStat(
            source=choice.arm.drafter.name if choice.arm is not None and proposal.k else "none",
            drafted=proposal.k,
            accepted=kept,
            committed=taken,
            draft_ms=(drafted_at - begun) * 1e3,
            verify_ms=(verified_at - drafted_at) * 1e3,
            other_ms=(time.perf_counter() - verified_at) * 1e3,
        )
        reply.rounds.append(stat)
        if len(reply.rounds) % _CLEAR_EVERY == 0:
            mx.clear_cache()
        yield RoundStep(stat)
        if fault is not None and choice.arm is not None:
            yield self._fall_back(choice.arm.drafter, fault)
        elif reply.reason is None and not self.fixed and self._learn(choice, proposal, stat, depth):
            yield SwitchStep(None, self.session.piloted())

    def _choose(self) -> Choice:
        """Which drafter drafts, and how much of what may still be committed."""
        # The bonus token takes one place of what remains.
        most, anchor = self.reply.remaining - 1, self.reply.anchor
        if self.fixed:
            return self.session.pilot.whole(most, anchor)
        return self.session.pilot.choose(most, self.target.length, anchor)

    def _learn(self, choice: Choice, proposal: Proposal, stat: RoundStat, depth: int) -> bool:
        """Let the pilot know how the round went. Returns whether it parked the drafter or brought it back."""
        confidence: list[float] = [] if proposal.confidence is None else proposal.confidence.tolist()  # type: ignore[assignment]
        return self.session.pilot.learn(
            choice,
            depth=depth,
            drafted=stat.drafted,
            accepted=stat.accepted,
            committed=stat.committed,
            draft_seconds=stat.draft_ms / 1e3,
            other_seconds=(stat.verify_ms + stat.other_ms) / 1e3,
            confidence=confidence,
        )

    def _fall_back(self, drafter: Drafter, fault: str) -> SwitchStep:
        """Go on without the drafter: its faults never cost the answer."""
        reason = f"{drafter.name} failed ({fault}); decoding goes on without it"
        return SwitchStep(None, self.session.fall_back(drafter, reason))

    def _extend(self) -> Iterator[Step]:
        """Let the drafters take in the context so far."""
        for arm in self.session.pilot.arms:
            try:
                self.session.catch_up(arm.drafter)
            except _FAULTS as error:
                yield self._fall_back(arm.drafter, _words(error))

    def _draft(self, choice: Choice) -> tuple[Proposal, str | None]:
        """The drafter's proposal, or nothing and what went wrong."""
        if choice.arm is None:
            return NOTHING, None
        drafter = choice.arm.drafter
        try:
            self.session.catch_up(drafter)
            proposal = drafter.propose(self.reply.anchor, choice.k, self.sampler)
            mx.async_eval(
                [a for a in (proposal.tokens, proposal.finite, proposal.confidence) if a is not None]
            )
            if choice.weigh and proposal.confidence is not None:
                confidence: list[float] = proposal.confidence.tolist()  # type: ignore[assignment]
                return proposal.head(self.session.pilot.trim(choice, confidence, self.target.length)), None
            return proposal, None
        except _FAULTS as error:
            return NOTHING, _words(error)

    def _verify(self, choice: Choice, proposal: Proposal) -> _Pending:
        """The target's verdict on the drafts after the anchor."""
        block = mx.array([self.reply.anchor], dtype=mx.uint32)
        if proposal.k:
            block = mx.concatenate([block, proposal.tokens.astype(mx.uint32)])
        step = self._judge(choice, block, proposal, proposal.tokens)
        # A GPU gets the forward before the draft is read, so it never idles. On the CPU async_eval itself
        # waits for most of what it is given, and would hide when the draft was ready.
        if proposal.k == 0 or not on_cpu():
            step.start()
        return step

    def _run_ahead(self, bonus: mx.array) -> None:
        """Start the next plain step before this one's token is known to the host."""
        if self.reply.remaining > 1 and not self.commands.waiting and self._choose() == PLAIN:
            self.ahead = self._judge(PLAIN, bonus, NOTHING, bonus)
            self.ahead.start()

    def _judge(self, choice: Choice, block: mx.array, proposal: Proposal, unknown: mx.array) -> _Pending:
        """Run the block, and say which drafts stand and what the bonus token is. `unknown` are the tokens
        of the block that are not committed yet: penalties count them row by row. Lazy."""
        forward = self.target.forward(block)
        logits = self.sampler.rows(forward.logits, unknown)
        if self.sampler.greedy:
            outcome = verify.greedy(logits, proposal.tokens)
        else:
            p = self.sampler.probabilities(logits)
            outcome = verify.sampled(p, proposal.tokens, proposal.q, self.sampler.draws)
        return _Pending(choice, proposal, forward, outcome)

    def _commit(self, forward: Forward, tokens: list[int]) -> None:
        """Keep the rows of `tokens` (anchor and accepted drafts); the rest of the block leaves the cache."""
        self.target.commit(tokens)
        self.session.remember(forward, len(tokens))
        if self.ahead is None:
            self.target.roll_back()
            if not self.target.tokens:
                raise RuntimeError("the model's cache did not give rejected tokens back")


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _number(array: mx.array) -> int:
    """The one number of `array`, once it is computed."""
    return int(array.item())  # type: ignore[arg-type]
