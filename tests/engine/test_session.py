"""What lives on between answers: the active drafter, and the sequence with its context."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from numpy_drafters import Shape, write_drafter
from tiny import load_tiny, tiny_llama

from dspark_tui.engine.context import ContextRows
from dspark_tui.engine.drafters import checkpoint
from dspark_tui.engine.drafters.base import Drafter, NoDrafter
from dspark_tui.engine.drafters.block import BlockDrafter
from dspark_tui.engine.protocol import DrafterInfo
from dspark_tui.engine.session import NONE, Candidate, Session, UnknownDrafter
from dspark_tui.engine.target import Target

TAPS = {"dspark": (0, 2), "dflash": (1,), "dflash2": (2, 3)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("session")
    tiny_llama(top / "target", layers=4)
    for method, taps in TAPS.items():
        shape = Shape(vocabulary=64, target_layers=4, taps=taps, layers=1)
        write_drafter(top / method, method, shape)
    return top


@pytest.fixture
def target(folders: Path) -> Target:
    return load_tiny(folders / "target")[0]


def candidate(
    target: Target, folder: Path, name: str, loads: list[str] | None = None, **info: object
) -> Candidate:
    found = checkpoint.inspect(folder)

    def load() -> Drafter:
        if loads is not None:
            loads.append(name)
        return checkpoint.load(found, name, target)

    return Candidate(DrafterInfo(name, found.method, drafts=found.drafts, **info), found.config.taps, load)  # type: ignore[arg-type]


@pytest.fixture
def loads() -> list[str]:
    """Names of drafters in the order in which they were loaded."""
    return []


@pytest.fixture
def session(target: Target, folders: Path, loads: list[str]) -> Session:
    names = {"best": "dflash2", "markov": "dspark", "old": "dflash"}
    candidates = [candidate(target, folders / method, name, loads) for name, method in names.items()]
    other = candidate(
        target, folders / "dflash", "other", loads, usable=False, reason="it is for another target"
    )
    return Session(target, [*candidates, other])


def feed(session: Session, tokens: Sequence[int]) -> None:
    """Commit tokens as the loop does."""
    forward = session.target.forward(mx.array(tokens))
    session.target.commit(tokens)
    assert forward.rows is not None
    session.rows.append(forward.rows)


# ---------------------------------------------------------------------------- choosing


def test_taps_are_those_of_every_usable_drafter(session: Session) -> None:
    assert session.target.taps == (0, 1, 2, 3)


def test_without_drafters_nothing_is_tapped(target: Target) -> None:
    session = Session(target, [])
    assert target.taps == ()
    assert [(d.name, d.usable) for d in session.drafters()] == [
        ("none", True),
        ("lookup", True),
        ("auto", True),
    ]
    assert session.info == NONE
    with pytest.raises(
        UnknownDrafter, match=r"^target has no drafter called dspark; choose none, lookup or auto\.$"
    ):
        session.find("dspark")


def test_unusable_drafters_are_not_tapped(target: Target, folders: Path) -> None:
    Session(target, [candidate(target, folders / "dflash", "x", usable=False, reason="no")])
    assert target.taps == ()


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("none", "none"),
        ("best", "best"),
        ("markov", "markov"),
        ("dspark", "markov"),
        ("dflash2", "best"),
        ("dflash", "old"),
        ("other", "other"),
    ],
)
def test_names_and_methods_are_found(session: Session, wanted: str, found: str) -> None:
    assert session.find(wanted) == found


@pytest.mark.parametrize("wanted", ["", "DSpark", "eagle3", "best "])
def test_unknown_names_are_answered_with_the_known(session: Session, wanted: str) -> None:
    with pytest.raises(UnknownDrafter) as caught:
        session.find(wanted)
    assert (
        str(caught.value)
        == f"target has no drafter called {wanted}; choose none, best, markov, old, lookup or auto."
    )


def test_a_method_prefers_a_usable_drafter(target: Target, folders: Path) -> None:
    bad = candidate(target, folders / "dflash", "bad", usable=False, reason="too wide")
    good = candidate(target, folders / "dflash", "good")
    assert Session(target, [bad, good]).find("dflash") == "good"
    with pytest.raises(UnknownDrafter, match=r"bad is not usable here: too wide\."):
        Session(target, [bad]).select("dflash")


def test_selecting_loads_once_and_keeps(session: Session, loads: list[str]) -> None:
    assert isinstance(session.drafter, NoDrafter)
    info = session.select("dspark")
    assert (info.name, info.method, info.state, info.loaded, info.drafts) == (
        "markov",
        "dspark",
        "active",
        True,
        5,
    )
    first = session.drafter
    assert session.select("none") == NONE
    assert isinstance(session.drafter, NoDrafter)
    session.select("best")
    session.select("markov")
    assert session.drafter is first
    assert loads == ["markov", "best"]
    assert [(d.name, d.loaded) for d in session.drafters()] == [
        ("none", True),
        ("best", True),
        ("markov", True),
        ("old", False),
        ("other", False),
        ("lookup", True),
        ("auto", True),
    ]


def test_a_drafter_that_does_not_load_changes_nothing(target: Target, folders: Path) -> None:
    def broken() -> Drafter:
        raise checkpoint.CheckpointError("it is cut off.")

    bad = Candidate(DrafterInfo("bad", "dflash", drafts=4), (1,), broken)
    session = Session(target, [candidate(target, folders / "dspark", "good"), bad])
    session.select("good")
    drafter, info = session.drafter, session.info
    with pytest.raises(checkpoint.CheckpointError):
        session.select("bad")
    assert (session.drafter, session.info) == (drafter, info)
    with pytest.raises(UnknownDrafter):
        session.select("nonsense")
    assert (session.drafter, session.info) == (drafter, info)


def test_falling_back_keeps_the_name_and_says_why(session: Session) -> None:
    session.select("best")
    info = session.fall_back(session.drafter, "its numbers overflowed")
    assert (info.name, info.state, info.reason) == ("best", "fell_back", "its numbers overflowed")
    assert session.info == info
    assert isinstance(session.drafter, NoDrafter)
    again = session.select("best")
    assert (again.state, again.reason) == ("active", "")


def test_a_drafter_that_failed_begins_anew_when_it_is_chosen_again(session: Session) -> None:
    """It may have failed between two layers, of which one has taken the rows in and the other has not."""
    session.select("best")
    feed(session, [1, 2, 3])
    session.catch_up()
    failed = session.drafter
    assert isinstance(failed, BlockDrafter)
    failed._rings[0].skip_to(5)
    session.fall_back(failed, "out of memory")
    session.select("best")
    session.catch_up()
    assert session.drafter is failed
    assert [(ring.base, ring.length) for ring in failed._rings] == [(0, 3)] * len(failed._rings)


# ---------------------------------------------------------------------------- the sequence


@pytest.mark.parametrize(
    ("prompt", "kept"),
    [
        ([1, 2, 3, 4, 5, 6, 7], 5),
        ([1, 2, 3, 4, 5], 4),
        ([1, 2, 3], 2),
        ([1, 2, 9, 4, 5, 6], 2),
        ([9, 2, 3, 4, 5, 6], 0),
        ([1], 0),
    ],
)
def test_shared_prefix_is_kept(session: Session, prompt: list[int], kept: int) -> None:
    """At least the last token of the prompt is left to compute: its logits are wanted."""
    session.select("markov")
    feed(session, [1, 2, 3, 4, 5])
    session.catch_up()
    assert session.drafter.length == 5
    assert session.reuse(prompt) == kept
    assert session.target.tokens == [1, 2, 3, 4, 5][:kept]
    assert session.target.length == session.rows.length == session.drafter.length == kept


def test_rows_that_nobody_committed_go_too(session: Session) -> None:
    """A prefill chunk that was broken off has rows, but no tokens."""
    feed(session, [1, 2, 3])
    forward = session.target.forward(mx.array([4, 5]))
    assert forward.rows is not None
    session.rows.append(forward.rows)
    assert session.reuse([1, 2, 3, 4, 5]) == 3
    assert session.target.length == session.rows.length == 3


def same_context(one: BlockDrafter, other: BlockDrafter) -> None:
    assert one.length == other.length
    for mine, theirs in zip(one._rings, other._rings, strict=True):
        assert mine.base == theirs.base
        for a, b in zip(mine.rows(), theirs.rows(), strict=True):
            np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-4)


@pytest.mark.parametrize("name", ["best", "markov", "old"])
def test_a_drafter_that_comes_late_starts_warm(session: Session, target: Target, name: str) -> None:
    """After a switch, a cut and more tokens its context is as if it had been there from the start."""
    session.select("none")
    feed(session, [1, 2, 3])
    session.select(name)
    session.catch_up()
    session.select("none")
    feed(session, [4, 5, 6, 7])
    session.reuse([1, 2, 3, 4, 9, 9])
    feed(session, [9, 9, 8])
    session.select(name)
    session.catch_up()
    late = session.drafter
    assert isinstance(late, BlockDrafter)
    # The same tokens in one go, for a drafter that was active all along.
    session.reset()
    assert late.length == session.target.length == session.rows.length == 0
    fresh = checkpoint.load(checkpoint.inspect(_folder_of(session, name)), name, target)
    feed(session, [1, 2, 3, 4, 9, 9, 8])
    rows = session.rows.since(0)[1]
    columns = target.columns(fresh.taps)
    fresh.extend(rows if columns is None else rows[:, columns], 0)
    session.catch_up()
    same_context(late, fresh)


def _folder_of(session: Session, name: str) -> Path:
    method = session.candidates[name].info.method
    return Path(session.target.info.path).parent / method


def test_beyond_the_window_positions_stay_absolute(session: Session) -> None:
    session.rows = ContextRows(window=4)
    for token in range(3, 23):
        feed(session, [token])
    session.select("old")
    session.catch_up()
    drafter = session.drafter
    assert isinstance(drafter, BlockDrafter)
    assert drafter.length == 20
    base = drafter._rings[0].base
    assert base == session.rows.base > 0
    wanted = session.rows.since(base)[1]
    assert wanted is not None
    assert wanted.shape[0] == 20 - base


def test_a_cut_below_the_window_leaves_a_short_context(session: Session) -> None:
    session.rows = ContextRows(window=4)
    session.select("old")
    for token in range(3, 23):
        feed(session, [token])
    session.catch_up()
    assert session.reuse([*range(3, 8), 60, 61]) == 5
    assert session.drafter.length == session.rows.length == 5
    feed(session, [60, 61])
    session.catch_up()
    assert session.drafter.length == 7


def test_an_active_drafter_whose_successor_does_not_load_is_cut_like_any_other(
    session: Session, target: Target, folders: Path
) -> None:
    def broken() -> Drafter:
        raise checkpoint.CheckpointError("it is cut off.")

    session.select("markov")
    feed(session, [1, 2, 3, 4, 5])
    session.catch_up()
    good = session.candidates["markov"]
    session.discover = lambda folder: Candidate(good.info, good.taps, broken)
    with pytest.raises(checkpoint.CheckpointError):
        session.select("/another/markov")
    assert session.drafter.length == 5
    session.reuse([1, 2, 9])
    assert session.drafter.length == 2
    session.reset()
    assert session.drafter.length == 0


def test_plain_decoding_needs_no_context(session: Session) -> None:
    feed(session, [1, 2])
    session.catch_up()
    assert session.drafter.state() == []
