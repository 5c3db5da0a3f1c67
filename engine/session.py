"""A target with its drafters and their context: what lives on between answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from dspark_tui.engine.context import ContextRows
from dspark_tui.engine.drafters.base import Drafter, NoDrafter
from dspark_tui.engine.protocol import DrafterInfo
from dspark_tui.engine.target import Target

NONE = DrafterInfo(name="none", method="none", state="none", loaded=True)


@dataclass(frozen=True)
class Candidate:
    """A drafter that the target may use: `info` without a state, its taps, and how to load it."""

    info: DrafterInfo
    taps: tuple[int, ...]
    load: Callable[[], Drafter]


class UnknownDrafter(Exception):
    """A drafter that cannot be chosen; the text is one sentence for the user."""


def no_such_drafter(target: str, wanted: str, known: Sequence[str]) -> UnknownDrafter:
    """Says that `wanted` is none of the `known` drafters of `target`."""
    return UnknownDrafter(
        f"{target} has no drafter called {wanted[:80]}; it has {', '.join(['none', *known])}."
    )


class Session:
    """Owns the active drafter. The target's cache is never touched by a switch."""

    def __init__(self, target: Target, candidates: Sequence[Candidate]) -> None:
        self.target = target
        self.rows = ContextRows()
        self.candidates = {candidate.info.name: candidate for candidate in candidates}
        self.drafter: Drafter = NoDrafter()
        self._state = NONE
        self._resident: dict[str, Drafter] = {}
        taps: list[int] = sorted({t for c in candidates if c.info.usable for t in c.taps})
        if taps:
            target.tap(taps)

    @property
    def info(self) -> DrafterInfo:
        """The active drafter and its state."""
        return self._state

    def drafters(self) -> list[DrafterInfo]:
        """Every drafter the pair knows, `none` first."""
        resident = self._resident
        known = (candidate.info for candidate in self.candidates.values())
        listed = [msgspec.structs.replace(info, loaded=info.name in resident) for info in known]
        return [NONE, *listed]

    def find(self, wanted: str) -> str:
        """The name of the drafter that `wanted` (a name or a method) means. Raises `UnknownDrafter`."""
        if wanted in ("none", *self.candidates):
            return wanted
        named = [name for name, c in self.candidates.items() if c.info.method == wanted]
        usable = [name for name in named if self.candidates[name].info.usable]
        if usable or named:
            return (usable or named)[0]
        raise no_such_drafter(
            self.target.info.name, wanted, [name for name, c in self.candidates.items() if c.info.usable]
        )

    def select(self, wanted: str) -> DrafterInfo:
        """Make a drafter the active one, loading it when it is not resident. Raises `UnknownDrafter`, or
        whatever loading raises; the present one then stays."""
        name = self.find(wanted)
        if name == "none":
            self.drafter, self._state = NoDrafter(), NONE
            return self._state
        candidate = self.candidates[name]
        if not candidate.info.usable:
            raise UnknownDrafter(f"{name} is not usable here: {candidate.info.reason}.")
        if name not in self._resident:
            self._resident[name] = candidate.load()
        self.drafter = self._resident[name]
        self._state = msgspec.structs.replace(candidate.info, state="active", loaded=True)
        return self._state

    def fall_back(self, reason: str) -> DrafterInfo:
        """Go on without a drafter, keeping its name on show with the reason."""
        self.drafter = NoDrafter()
        self._state = msgspec.structs.replace(self._state, state="fell_back", reason=reason)
        return self._state

    # ------------------------------------------------------------------ the sequence

    def reuse(self, prompt: Sequence[int]) -> int:
        """Cut everything back to what `prompt` shares with the last sequence; at least its last token is
        left to compute. Returns the number of positions kept."""
        shared = 0
        limit = min(len(prompt) - 1, len(self.target.tokens))
        while shared < limit and prompt[shared] == self.target.tokens[shared]:
            shared += 1
        self.target.truncate(shared)
        kept = len(self.target.tokens)
        self.rows.truncate(kept)
        for drafter in self._resident.values():
            drafter.truncate(kept)
        return kept

    def catch_up(self) -> None:
        """Give the active drafter the context rows that it lacks. Lazy."""
        drafter = self.drafter
        if not drafter.taps:
            return
        start, rows = self.rows.since(drafter.length)
        if start != drafter.length:
            drafter.reset(start)
        if rows is not None:
            columns = self.target.columns(drafter.taps)
            drafter.extend(rows if columns is None else rows[:, columns], start)

    def reset(self) -> None:
        """Forget the sequence; the drafters stay loaded."""
        self.target.reset()
        self.rows.reset()
        for drafter in self._resident.values():
            drafter.reset()
