"""Drafters that are loaded while an answer goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tiny_pair import Oracle, make_drafter, make_target, no_commands, plain_greedy

from dspark_tui.engine.answer_text import AnswerText
from dspark_tui.engine.drafters.base import Drafter
from dspark_tui.engine.drafters.config import HeadConfig, Rope, Yarn
from dspark_tui.engine.drafters.modules import bind, build
from dspark_tui.engine.generator import RoundStep, Step, generate
from dspark_tui.engine.loading import Loading, held_arrays
from dspark_tui.engine.protocol import DrafterInfo, Sampling, SwitchDrafter
from dspark_tui.engine.reply import Reply
from dspark_tui.engine.sampling import Sampler
from dspark_tui.engine.session import Candidate, Session, UnknownDrafter
from dspark_tui.engine.switching import LoadStep, Switching, SwitchStep

PROMPT = [1, 5, 9, 2]
COUNT = 60
TARGET = make_target()
KNOWN = plain_greedy(TARGET, PROMPT, COUNT)


class Gate:
    """A load that lasts until it is let through."""

    def __init__(self, load: Callable[[], Drafter]) -> None:
        self.open, self.begun = threading.Event(), 0
        self._load = load

    def __call__(self) -> Drafter:
        self.begun += 1
        assert self.open.wait(20)
        return self._load()


def oracle(name: str) -> Oracle:
    drafter = Oracle(PROMPT + KNOWN, lambda at: False, TARGET.vocabulary)
    drafter.name = name
    return drafter


def known(name: str, load: Callable[[], Drafter]) -> Candidate:
    return Candidate(DrafterInfo(name, "dflash", drafts=4), (1,), load)


def begin(*candidates: Candidate, active: str = "none") -> tuple[Session, Switching, Any]:
    TARGET.reset()
    session = Session(TARGET, candidates)
    session.adaptive = False
    session.select(active)
    return session, Switching(session), no_commands()


def steps_of(session: Session, switching: Switching, commands: Any) -> tuple[Reply, Iterator[Step]]:
    reply = Reply(PROMPT, COUNT, (), AnswerText(TARGET.tokenizer, ()))
    return reply, generate(session, reply, Sampler(Sampling(), 0), commands, switching)


def rounds(steps: Iterator[Step], count: int) -> list[Step]:
    seen: list[Step] = []
    while sum(isinstance(step, RoundStep) for step in seen) < count:
        seen.append(next(steps))
    return seen


def ask(commands: Any, *wanted: SwitchDrafter) -> None:
    queue = list(wanted)
    commands.take_switch = lambda: queue.pop(0) if queue else None


def test_the_present_drafter_goes_on_until_the_new_one_is_there() -> None:
    gate = Gate(lambda: make_drafter("dspark", TARGET))
    session, switching, commands = begin(
        known("present", lambda: oracle("present")),
        Candidate(DrafterInfo("late", "dspark", drafts=5), (0, 2), gate),
        active="present",
    )
    reply, steps = steps_of(session, switching, commands)
    rounds(steps, 2)
    command = SwitchDrafter(7, "late")
    ask(commands, command)
    seen = rounds(steps, 3)
    assert [s for s in seen if isinstance(s, LoadStep)] == [LoadStep(command, done=False)]
    assert [s.stat.source for s in seen if isinstance(s, RoundStep) and s.stat] == ["present"] * 3
    gate.open.set()
    rest = list(steps)
    rest += list(switching.arrive(wait=True))
    (loaded,) = [s for s in rest if isinstance(s, LoadStep)]
    (switched,) = [s for s in rest if isinstance(s, SwitchStep)]
    assert loaded == LoadStep(command, done=True)
    assert (switched.command, switched.drafter.name, switched.drafter.state, switched.problem) == (
        command,
        "late",
        "active",
        None,
    )
    assert reply.tokens == KNOWN


def test_what_was_loaded_drafts_from_the_next_round_on() -> None:
    late = make_drafter("dspark", TARGET)
    late.name = "late"
    gate = Gate(lambda: late)
    session, switching, commands = begin(Candidate(DrafterInfo("late", "dspark", drafts=5), (0, 2), gate))
    reply, steps = steps_of(session, switching, commands)
    ask(commands, SwitchDrafter(7, "late"))
    rounds(steps, 5)
    gate.open.set()
    session.load("late").result()  # goes on with the load that has begun
    # A plain step that ran ahead is finished first.
    after = [s.stat.source for s in rounds(steps, 3) if isinstance(s, RoundStep) and s.stat]
    assert after[1:] == ["late", "late"]
    assert session.drafter.length >= len(PROMPT) + 4
    list(steps)
    assert reply.tokens == KNOWN


def test_whatever_a_drafter_holds_crosses_the_threads() -> None:
    """Lazy arrays would not: reduced vocabularies and scaled rotary positions hold some of their own."""
    config = replace(make_drafter("dspark", TARGET).config, rope=Rope(1e4, yarn=Yarn(4.0, 64)))
    head = HeadConfig(
        first_row=0, markov="rnn", markov_rank=4, draft_vocabulary=6, own_head=True, own_embedding=True
    )

    def load() -> Drafter:
        shift = mx.arange(6) + 1
        return bind("late", "dspark", config, head, build(config, head), TARGET, mx.float32, d2t=shift)

    TARGET.reset()
    session = Session(TARGET, [Candidate(DrafterInfo("late", "dspark", drafts=5), (0, 2), load)])
    session.adaptive = False
    session.keep(session.load("late"))
    session.select("late")
    reply, steps = steps_of(session, Switching(session), no_commands())
    list(steps)
    assert reply.tokens == KNOWN
    assert session.info.state == "active"
    assert "late" in {stat.source for stat in reply.rounds}


def test_nothing_of_the_target_is_touched_while_a_drafter_is_loaded() -> None:
    """A forward is being built meanwhile: evaluated from two threads it gives wrong text, or crashes."""
    drafter = make_drafter("dspark", TARGET)
    touched = {id(array) for array in held_arrays(drafter)}
    own, others = (
        {id(array) for _, array in tree_flatten(model.parameters())}
        for model in (drafter.model, TARGET.model)
    )
    assert own <= touched
    assert not others & touched


def test_a_load_that_fails_costs_nothing() -> None:
    def broken() -> Drafter:
        raise ValueError("it is cut off.")

    session, switching, commands = begin(
        known("present", lambda: oracle("present")), known("bad", broken), active="present"
    )
    reply, steps = steps_of(session, switching, commands)
    command = SwitchDrafter(7, "bad")
    ask(commands, command)
    seen = [*steps, *switching.arrive(wait=True)]
    (refused,) = [s for s in seen if isinstance(s, SwitchStep)]
    assert (refused.command, str(refused.problem), refused.drafter.name) == (
        command,
        "it is cut off.",
        "present",
    )
    assert session.info.state == "active"
    assert reply.tokens == KNOWN


def test_a_newer_wish_displaces_the_one_that_is_loading() -> None:
    gate = Gate(lambda: oracle("slow"))
    session, switching, commands = begin(
        known("slow", gate), known("quick", lambda: oracle("quick")), active="quick"
    )
    session.select("none")
    reply, steps = steps_of(session, switching, commands)
    first, second = SwitchDrafter(1, "slow"), SwitchDrafter(2, "quick")
    ask(commands, first)
    rounds(steps, 2)
    ask(commands, second)
    seen = rounds(steps, 2)
    displaced, taken = [s for s in seen if isinstance(s, SwitchStep)]
    assert displaced.command == first
    assert isinstance(displaced.problem, UnknownDrafter)
    assert (taken.command, taken.drafter.name, taken.problem) == (second, "quick", None)
    gate.open.set()
    list(steps)
    assert session.info.name == "quick"
    assert reply.tokens == KNOWN


def test_asking_twice_loads_once() -> None:
    gate = Gate(lambda: oracle("slow"))
    session, switching, commands = begin(known("slow", gate))
    _, steps = steps_of(session, switching, commands)
    ask(commands, SwitchDrafter(1, "slow"))
    rounds(steps, 2)
    ask(commands, SwitchDrafter(2, "slow"))
    rounds(steps, 2)
    gate.open.set()
    list(steps)
    list(switching.arrive(wait=True))
    assert gate.begun == 1
    assert session.info.name == "slow"


def test_loads_one_after_the_other_share_a_thread() -> None:
    """MLX keeps something for every thread for good."""
    threads: list[threading.Thread] = []

    def load() -> Drafter:
        threads.append(threading.current_thread())
        return oracle("again")

    for _ in range(5):
        Loading("again", load).result()
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()


@pytest.mark.parametrize("folder", [False, True])
def test_hasty_switching_loads_each_drafter_once(folder: bool) -> None:
    """Copies of a large drafter, all being loaded, would fill the memory."""
    gates = {name: Gate(lambda name=name: oracle(name)) for name in ("one", "two")}  # type: ignore[misc]
    found = {name: replace(known(name, gate), source=name) for name, gate in gates.items()}
    session, switching, commands = begin(*([] if folder else found.values()))
    session.discover = found.get
    reply, steps = steps_of(session, switching, commands)
    for number in range(10):
        ask(commands, SwitchDrafter(number, ("one", "two")[number % 2]))
        rounds(steps, 2)
    assert [gate.begun for gate in gates.values()] == [1, 1]
    for gate in gates.values():
        gate.open.set()
    list(steps)
    list(switching.arrive(wait=True))
    assert session.info.name == "two"
    # The load that nobody waited for serves the next wish.
    assert session.select("one").loaded
    assert [gate.begun for gate in gates.values()] == [1, 1]
    assert reply.tokens == KNOWN


@pytest.mark.parametrize("active", ["present", "none"])
def test_a_drafter_in_a_folder_joins_in_mid_answer_and_taps_what_it_needs(active: str) -> None:
    session, switching, commands = begin(known("present", lambda: oracle("present")), active=active)
    late = make_drafter("dflash2", TARGET)
    late.name = "from-folder"
    found = Candidate(DrafterInfo("from-folder", "dflash2", drafts=4), late.taps, lambda: late)
    session.discover = lambda folder: found if folder == "/some/folder" else None
    reply, steps = steps_of(session, switching, commands)
    rounds(steps, 3)
    ask(commands, SwitchDrafter(3, "/some/folder"))
    list(steps)
    list(switching.arrive(wait=True))
    assert session.info.name == "from-folder"
    assert TARGET.taps == (0, 1, 3)
    assert reply.tokens == KNOWN
    # What it had not seen it begins without, at the right positions.
    again, more = steps_of(session, switching, no_commands())
    list(more)
    assert again.tokens == KNOWN
    with pytest.raises(UnknownDrafter):
        session.select("/another/folder")


@pytest.mark.parametrize("taps", [(2,), (0, 3)])
def test_rows_stand_at_their_positions_when_the_taps_change_under_a_step_that_ran_ahead(
    taps: tuple[int, ...],
) -> None:
    """Its rows are of the layers that were tapped before: also where they are as wide as the new ones."""
    session, switching, commands = begin(known("mine", lambda: oracle("mine")))
    late = oracle("mine")
    late.taps = taps  # type: ignore[assignment]
    found = Candidate(DrafterInfo("mine", "dflash", drafts=4), taps, lambda: late)
    session.discover = lambda folder: found
    _, steps = steps_of(session, switching, commands)
    rounds(steps, 3)
    ask(commands, SwitchDrafter(3, "/some/folder"))
    rounds(steps, 5)
    assert TARGET.taps == taps
    assert session.rows.length == len(TARGET.tokens)
    base, rows = session.rows.since(0)
    assert base <= len(PROMPT) + 5
    steps.close()  # type: ignore[attr-defined]
    tokens = TARGET.tokens[: len(PROMPT) + 7]
    TARGET.reset()
    wanted = TARGET.forward(mx.array(tokens)).rows
    assert rows is not None
    assert wanted is not None
    count = len(tokens) - base
    assert count > 0
    assert mx.allclose(rows[:count], wanted[base:], atol=1e-4).item()
