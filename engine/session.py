"""A target with its drafters and their context: what lives on between answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, QuantizedKVCache

from dspark_tui.engine.context import ContextRows
from dspark_tui.engine.costs import CostCurve
from dspark_tui.engine.drafters.base import Drafter, NoDrafter
from dspark_tui.engine.drafters.lookup import DRAFTS as LOOKUP_DRAFTS
from dspark_tui.engine.drafters.lookup import Lookup
from dspark_tui.engine.loading import Loading
from dspark_tui.engine.pilot import Arm, Pilot
from dspark_tui.engine.precision import on_cpu
from dspark_tui.engine.prefill_chunks import PrefillChunks
from dspark_tui.engine.protocol import DrafterInfo
from dspark_tui.engine.rollback.parts import leaves
from dspark_tui.engine.target import Forward, Target
from dspark_tui.engine.turns import Snapshots, shared_length

CHUNK_CPU, CHUNK_GPU = 128, 512
"""Prompt tokens of the first prefill step, before anything is measured."""
CUT_ANYWHERE = {KVCache, QuantizedKVCache, ConcatenateKVCache}
"""Cache kinds that keep every row."""
NONE = DrafterInfo(name="none", method="none", state="none", loaded=True)
LOOKUP: Final = "lookup"
AUTO: Final = "auto"


@dataclass(frozen=True)
class Candidate:
    """A drafter that the target may use: `info` without a state, its taps, and how to load it. `source`: what
    it was recognised from; two that are equal there are loaded alike."""

    info: DrafterInfo
    taps: tuple[int, ...]
    load: Callable[[], Drafter]
    source: object = None


class UnknownDrafter(Exception):
    """A drafter that cannot be chosen; the text is one sentence for the user."""


def no_such_drafter(target: str, wanted: str, known: Sequence[str]) -> UnknownDrafter:
    """Says that `wanted` is none of the `known` drafters of `target`."""
    return UnknownDrafter(
        f"{target} has no drafter called {wanted[:80]}; "
        f"choose {', '.join(['none', *known, LOOKUP])} or {AUTO}."
    )


class Session:
    """Owns the active drafter. The target's cache is never touched by a switch."""

    def __init__(self, target: Target, candidates: Sequence[Candidate], partner: bool = False) -> None:
        """`partner`: lookup may draft in place of the active drafter where the context repeats itself."""
        self.target = target
        self.rows = ContextRows()
        self.snapshots = Snapshots()
        self.chunks = PrefillChunks(CHUNK_CPU if on_cpu() else CHUNK_GPU)
        self.candidates = {candidate.info.name: candidate for candidate in candidates}
        self.discover: Callable[[str], Candidate | None] = lambda folder: None
        """Finds a drafter that is not known yet, such as a folder's; may raise words for the user."""
        self.partner = partner
        self.adaptive = True
        """Draft as much as pays. False: whole blocks always, which does not depend on the clock."""
        self.costs = CostCurve()
        self.pilot = Pilot(self.costs, ())
        self._state = NONE
        self._resident: dict[str, Drafter] = {}
        self._loadings: dict[str, Loading] = {}
        self._arms: dict[str, Arm] = {}
        self._problem = target.cannot_roll_back() or ""
        if not self._problem:
            self._keep(LOOKUP, Lookup(lambda: self.target.tokens))
        self._tap(candidates)

    @property
    def drafter(self) -> Drafter:
        """The active drafter, the first one of `auto`; one that drafts nothing for plain decoding."""
        arms = [*self.pilot.arms, self.pilot.lookup]
        return arms[0].drafter if arms[0] is not None else NoDrafter()

    @property
    def info(self) -> DrafterInfo:
        """The active drafter and its state."""
        return self._state

    def drafters(self) -> list[DrafterInfo]:
        """Every drafter the pair knows, `none` first."""
        resident = self._resident
        known = [candidate.info for candidate in self.candidates.values()]
        known = [msgspec.structs.replace(info, loaded=info.name in resident) for info in known]
        return [NONE, *known, *self._built_in()]

    def _built_in(self) -> list[DrafterInfo]:
        usable = not self._problem
        return [
            DrafterInfo(
                LOOKUP,
                LOOKUP,
                drafts=LOOKUP_DRAFTS,
                loaded=usable,
                usable=usable,
                reason=self._problem,
            ),
            DrafterInfo(
                AUTO,
                AUTO,
                drafts=max([LOOKUP_DRAFTS, *(c.info.drafts for c in self._usable())]),
                loaded=usable,
                usable=usable,
                reason=self._problem,
            ),
        ]

    def _usable(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates.values() if candidate.info.usable]

    def find(self, wanted: str) -> str:
        """The name of the drafter that `wanted` (a name, a method, a folder) means. Raises
        `UnknownDrafter`."""
        if wanted in ("none", LOOKUP, AUTO, *self.candidates):
            return wanted
        named = [name for name, c in self.candidates.items() if c.info.method == wanted]
        usable = [name for name in named if self.candidates[name].info.usable]
        if usable or named:
            return (usable or named)[0]
        if (found := self.discover(wanted)) is not None:
            self.add(found)
            return found.info.name
        raise no_such_drafter(self.target.info.name, wanted, [c.info.name for c in self._usable()])

    def add(self, candidate: Candidate) -> None:
        """Know one more drafter. Layers that it taps and nobody did are recorded from now on, so it begins
        without the context before."""
        name, before = candidate.info.name, self.candidates.get(candidate.info.name)
        self.candidates[name] = candidate
        self._resident.pop(name, None)
        self._arms.pop(name, None)
        loading = self._loadings.get(name)
        same = before is not None and before.source is not None and before.source == candidate.source
        if loading is not None and (loading.ready or not same):
            del self._loadings[name]
        self._tap(list(self.candidates.values()))

    def _tap(self, candidates: Sequence[Candidate]) -> None:
        taps: list[int] = sorted({t for c in candidates if c.info.usable for t in c.taps})
        if tuple(taps) != self.target.taps:
            self.target.tap(taps)
            self.rows.reset(self.target.length)

    # ------------------------------------------------------------------ choosing

    def missing(self, name: str) -> str | None:
        """The drafter that has to be loaded before `name` can be active, or None. Raises `UnknownDrafter`
        when it cannot be used."""
        for info in self.drafters():
            if info.name == name and not info.usable:
                raise UnknownDrafter(f"{name} is not usable here: {info.reason}.")
        if name == AUTO:
            trained = [c.info.name for c in self._usable()]
            return None if any(n in self._resident for n in trained) else next(iter(trained), None)
        return None if name == "none" or name in self._resident else name

    def load(self, name: str) -> Loading:
        """Begin to load a drafter beside whatever runs. A load that has begun is gone on with, also when
        its drafter was not wanted meanwhile: hasty switching must not fill the memory with copies."""
        loading = self._loadings.get(name)
        if loading is None or loading.failed:
            loading = self._loadings[name] = Loading(name, self.candidates[name].load)
        return loading

    def keep(self, loading: Loading) -> None:
        """Make a drafter resident, once it is loaded. Raises what its loading raised."""
        if self._loadings.get(loading.name) is loading:
            del self._loadings[loading.name]
        self._keep(loading.name, loading.result())

    def _keep(self, name: str, drafter: Drafter) -> None:
        self._resident[name] = drafter
        self._arms[name] = Arm.of(drafter)

    def select(self, wanted: str) -> DrafterInfo:
        """Make a drafter the active one, loading it when it is not resident. Raises `UnknownDrafter`, or
        whatever loading raises; the present one then stays."""
        name = self.find(wanted)
        if (missing := self.missing(name)) is not None:
            begun = self._loadings.get(missing)
            if begun is not None and not begun.failed:
                self.keep(begun)
            else:
                self._keep(missing, self.candidates[missing].load())
        lookup = self._arms.get(LOOKUP)
        if name == "none":
            self.pilot, self._state = Pilot(self.costs, ()), NONE
            return self._state
        trained = [self._arms[n] for n in self.candidates if n in self._arms]
        if name == AUTO:
            self.pilot = Pilot(self.costs, trained, lookup, auto=True)
        elif name == LOOKUP:
            self.pilot = Pilot(self.costs, (), lookup)
        else:
            self.pilot = Pilot(self.costs, [self._arms[name]], lookup if self.partner else None)
        (info,) = (info for info in self.drafters() if info.name == name)
        self._state = msgspec.structs.replace(info, state="active", loaded=True)
        return self._state

    def piloted(self) -> DrafterInfo:
        """Take over what the pilot decided about the active drafter."""
        self._state = msgspec.structs.replace(self._state, state=self.pilot.state, reason=self.pilot.reason)
        return self._state

    def give_up(self, name: str, reason: str) -> DrafterInfo:
        """Decode plainly in place of a drafter that cannot be loaded, keeping its name on show."""
        (info,) = (info for info in self.drafters() if info.name == name)
        self.pilot = Pilot(self.costs, ())
        self._state = msgspec.structs.replace(info, state="fell_back", reason=reason)
        return self._state

    def fall_back(self, drafter: Drafter, reason: str) -> DrafterInfo:
        """Go on without `drafter`, keeping the name of what was chosen on show with the reason."""
        self.pilot.drop(drafter)
        drafter.reset()  # it may have failed between two layers
        gone = not (self.pilot.arms or self.pilot.lookup)
        self._state = msgspec.structs.replace(
            self._state, state="fell_back" if gone else self._state.state, reason=reason
        )
        return self._state

    # ------------------------------------------------------------------ the sequence

    @property
    def needs_snapshots(self) -> bool:
        """Whether the target's cache cannot be cut everywhere."""
        return not {type(leaf) for leaf in leaves(self.target.cache)} <= CUT_ANYWHERE

    def reuse(self, prompt: Sequence[int]) -> int:
        """Cut everything back to what `prompt` shares with the last sequence; at least its last token is
        left to compute. Returns the number of positions kept."""
        target, prompt = self.target, list(prompt)
        target.roll_back()
        held = len(target.tokens)
        shared = min(shared_length(prompt, target.tokens), len(prompt) - 1)
        if not target.try_truncate(shared):
            # A window that has wrapped, or recurrent state: back to a moment that was kept.
            if (best := self.snapshots.best(prompt[:shared])) is not None:
                target.restore(best)
            else:
                target.reset()
        kept = len(target.tokens)
        self.snapshots.keep_to(target.tokens)
        if kept == held and self.needs_snapshots:
            # The end of an answer: free to keep, and what an edit of the next message comes back to.
            self.snapshots.take(target)
        self.rows.truncate(kept)
        for drafter in self._in_memory():
            drafter.truncate(kept)
        return kept

    def _in_memory(self) -> list[Drafter]:
        """Those that are resident, and active ones whose place another of their name is to take."""
        active = [arm.drafter for arm in self.pilot.arms]
        return list({id(d): d for d in (*self._resident.values(), *active)}.values())

    def remember(self, forward: Forward, count: int) -> None:
        """Keep the tap rows of the next `count` committed positions, the first ones of `forward`."""
        # Rows kept now begin behind a step that was on its way when other layers were tapped.
        if forward.rows is not None and forward.taps == self.target.taps:
            self.rows.append(forward.rows[:count])

    def catch_up(self, drafter: Drafter | None = None) -> None:
        """Give a drafter (without one the active one) the context rows that it lacks. Lazy."""
        drafter = drafter or self.drafter
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
        self.snapshots.clear()
        for drafter in self._in_memory():
            drafter.reset()
