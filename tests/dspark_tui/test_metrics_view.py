"""The numbers of the metrics pane against hand counts, and the lines that show them."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_tui.actions import Situation
from dspark_tui.conversation import AnswerState, Facts, LoadFacts, Phase
from dspark_tui.engine.protocol import DrafterInfo, ModelInfo, Prefill, Result, Rounds, RoundStat, Seconds
from dspark_tui.metrics import Baselines, Meter, Snapshot, context_bucket
from dspark_tui.screens.pickers import drafter_rows
from dspark_tui.text import lines, pane
from dspark_tui.text.format import bar, clock, count, seconds, short_count, size, sparkline
from dspark_tui.text.sanitize import cells
from dspark_tui.text.welcome import welcome

MODEL = ModelInfo("demo", "/models/demo", "llama", "4-bit", 8192, 75_000_000)
DSPARK = DrafterInfo("dspark", "dspark", "active", "", 7, 11_600_000, True)


def rounds(stats: list[tuple[int, int]], generated: int, elapsed: float, source: str = "dspark") -> Rounds:
    made = [RoundStat(source, drafted, accepted, accepted + 1, 2.0, 20.0, 0.5) for drafted, accepted in stats]
    return Rounds(1, "a", made, generated, 60 + generated, elapsed, 412_000_000, 498_000_000)


def result(**changes: Any) -> Result:
    facts: dict[str, Any] = {
        "text": "",
        "thinking": "",
        "token_ids": [],
        "prompt_tokens": 60,
        "reused_tokens": 36,
        "generated_tokens": 40,
        "finish_reason": "stop",
        "model": "demo",
        "drafter": DSPARK,
        "accept_length": 4.0,
        "tokens_per_second": 50.0,
        "seconds": Seconds(0.0, 0.2, 0.25, 0.8),
    }
    return Result(**{**facts, **changes})


def test_hand_counted_rounds() -> None:
    meter = Meter()
    meter.prefill(Prefill(1, "a", 30, 60, 36))
    assert meter.snapshot().prefill_done == 30
    meter.first_text(0.25)
    meter.rounds(rounds([(7, 3), (7, 7)], 13, 0.5))
    meter.rounds(rounds([(4, 0), (0, 0)], 15, 1.0))
    shot = meter.snapshot()
    assert (shot.rounds, shot.drafted, shot.accepted, shot.generated) == (4, 18, 10, 15)
    assert shot.accept_length == pytest.approx(14 / 4)
    assert shot.spark == (3, 7, 0)
    assert shot.positions == pytest.approx((2 / 3, 2 / 3, 2 / 3, 1 / 3, 1 / 2, 1 / 2, 1 / 2))
    assert shot.means is not None
    assert shot.means.total_ms == pytest.approx(22.5)
    assert shot.means.committed == pytest.approx(3.5)
    assert shot.average == pytest.approx(14 / 1.0)
    assert shot.speed == pytest.approx(2 / 0.5)
    assert (shot.context, shot.memory, shot.peak) == (75, 412_000_000, 498_000_000)
    assert shot.first_token == 0.25
    assert shot.prefill_speed is None


def test_speed_is_over_the_last_two_seconds() -> None:
    meter = Meter()
    for step in range(1, 11):
        meter.rounds(rounds([(7, 3)], 10 * step if step < 6 else 50 + 40 * (step - 5), 0.5 * step))
    # From 3.0 s (90 tokens) to 5.0 s (250 tokens).
    assert meter.snapshot().speed == pytest.approx(160 / 2.0)


def test_the_result_replaces_what_was_observed() -> None:
    meter = Meter()
    meter.rounds(rounds([(7, 3)], 4, 0.5))
    meter.finish(result())
    shot = meter.snapshot()
    assert (shot.running, shot.speed, shot.average) == (False, None, 50.0)
    assert shot.prefill_speed == pytest.approx(24 / 0.2)
    assert (shot.first_token, shot.context, shot.reused) == (0.25, 100, 36)


def test_plain_speed_is_only_what_was_measured() -> None:
    baselines = Baselines()
    assert baselines.plain("demo", 100) is None
    drafted = Meter(baselines, "demo")
    drafted.rounds(rounds([(7, 3)], 4, 0.5))
    drafted.finish(result())
    assert baselines.plain("demo", 100) is None
    plain = Meter(baselines, "demo")
    plain.rounds(rounds([(0, 0)] * 40, 40, 0.8, "none"))
    plain.finish(result(generated_tokens=31))
    assert baselines.plain("demo", 100) is None
    plain.finish(result(tokens_per_second=25.0))
    assert baselines.plain("demo", 100) == 25.0
    assert baselines.plain("demo", 5000) is None
    assert baselines.plain("other", 100) is None
    again = Meter(baselines, "demo")
    again.rounds(rounds([(7, 3)], 4, 0.5))
    again.finish(result())
    assert again.snapshot().speedup == pytest.approx(2.0)
    assert [context_bucket(n) for n in (0, 1024, 1025, 4096, 4097)] == [1024, 1024, 4096, 4096, 16384]


def test_nothing_measured_is_said_so() -> None:
    text = "\n".join(lines.plain(row) for row in pane.rows(Facts(), Snapshot(), 33))
    for label in ("speed", "average", "first token", "prefill", "accepted", "round", "memory", "kv reused"):
        row = next(line for line in text.splitlines() if line.startswith(label))
        assert row.split()[-1] == "n/a"
    assert not any(sign.isdigit() for sign in text)


def test_pane_rows() -> None:
    meter = Meter()
    meter.rounds(rounds([(7, 3), (7, 7), (7, 5), (7, 2)], 21, 0.25))
    meter.finish(result())
    facts = Facts(phase=Phase.READY, model=MODEL, drafter=DSPARK)
    rows = [lines.plain(row).rstrip() for row in pane.rows(facts, meter.snapshot(), 33)]
    assert rows == [
        "dspark                   ● active",
        "",
        "speed           n/a",
        "average        50.0 tok/s",
        "vs plain        n/a  try F2 none",
        "first token    0.25 s",
        "prefill         120 tok/s",
        "prompt           60 tokens",
        "",
        "accepted       4.25 of 7.0",
        "                 61 % of drafted",
        "▄█▆▃",
        "at 1-4       100 100  75  50 %",
        "at 5-7        50  25  25     %",
        "",
        "round          22.5 ms  5.25 tok",
        "  draft         2.0 ms",
        "  verify       20.0 ms",
        "  other         0.5 ms",
        "  by        dspark 4",
        "",
        "context         100 of 8.2k  1 %",
        "            ▎",
        "kv reused        36 tokens",
        "memory          412 MB",
        "  peak          498 MB",
    ]


def test_the_pane_says_who_drafted_how_many_rounds() -> None:
    meter = Meter()
    for source, many in (("dflash2-b8", 40), ("lookup", 12), ("none", 5)):
        meter.rounds(rounds([(7, 3)] * many, 100, 1.0, source))
    facts = Facts(phase=Phase.READY, model=MODEL, drafter=DSPARK)
    rows = [lines.plain(row).rstrip() for row in pane.rows(facts, meter.snapshot(), 33)]
    at = rows.index("  by        dflash2-b8 40,")
    assert rows[at + 1] == "            lookup 12, plain 5"


@pytest.mark.parametrize(
    ("state", "words"), [("parked", ["‖", "parked"]), ("fell_back", ["!", "fell", "back"])]
)
def test_a_drafter_that_does_not_draft_says_why_at_full_length(state: Any, words: list[str]) -> None:
    reason = "the draft costs more than it saves at this context"
    drafter = DrafterInfo("dflash", "dflash", state, reason, 7)
    rows = [lines.plain(row) for row in pane.rows(Facts(model=MODEL, drafter=drafter), Snapshot(), 33)]
    assert " ".join(rows[1 : rows.index("")]).split() == reason.split()
    assert rows[0].split() == ["dflash", *words]


def test_without_the_pane_the_strip_says_why_nothing_is_drafted() -> None:
    drafter = DrafterInfo("dflash", "dflash", "parked", "drafting gives 0.90 of the plain speed here", 7)
    facts = Facts(phase=Phase.READY, model=MODEL, drafter=drafter)
    assert lines.plain(lines.strip(facts, Snapshot(), 80)) == drafter.reason
    meter = Meter()
    meter.rounds(rounds([(7, 3)], 4, 0.5))
    meter.finish(result())
    assert lines.plain(lines.strip(facts, meter.snapshot(), 80)) == f"50 tok/s · {drafter.reason}"


def test_what_is_kept_for_drafters_shows_where_it_is_measured() -> None:
    meter = Meter()
    meter.rounds(Rounds(1, "a", [RoundStat("x", 7, 3, 4, 1, 1, 1)], 4, 64, 0.5, 412_000_000, None, 9_400_000))
    rows = [lines.plain(row) for row in pane.rows(Facts(model=MODEL), meter.snapshot(), 33)]
    assert "  tap rows" + "9.4 MB".rjust(12) in rows
    rows = [lines.plain(row) for row in pane.rows(Facts(model=MODEL), Snapshot(), 33)]
    assert not any("tap rows" in row for row in rows)


def test_the_picker_says_what_lookup_and_auto_do() -> None:
    lookup = DrafterInfo("lookup", "lookup", drafts=8, loaded=True)
    auto = DrafterInfo("auto", "auto", loaded=True)
    parked = DrafterInfo("dflash", "dflash", "parked", "it costs more than it saves", 7, 11_200_000, True)
    rows = drafter_rows([lookup, auto, parked], "auto")
    assert [row.detail for row in rows] == [
        "copies where the text repeats itself · 8 drafts a round",
        "chooses the fastest, round by round",
        "dflash · 7 drafts a round · 11.2 MB · loaded",
    ]
    assert [row.note for row in rows] == ["", "", "parked: it costs more than it saves"]
    assert [row.present for row in rows] == [False, True, False]


NAMES = st.text(max_size=40)


@given(
    st.integers(1, 160),
    st.sampled_from(list(Phase)),
    NAMES,
    NAMES,
    st.sampled_from(["active", "parked", "fell_back", "none"]),
    st.integers(0, 3),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_no_line_is_wider_than_its_place(
    width: int, phase: Phase, model: str, drafter: str, state: Any, queued: int, measured: bool
) -> None:
    meter = Meter()
    if measured:
        meter.rounds(rounds([(7, 3)] * 40, 400, 5.0))
        meter.rounds(rounds([(7, 3)] * 40, 800, 7.0))
    shot = meter.snapshot()
    facts = Facts(
        phase=phase,
        load=LoadFacts(model, "read", 3, 7, "tensors", 0.0),
        model=ModelInfo(model, "", "llama", "4-bit", 8192, 75),
        drafter=DrafterInfo(drafter, "dspark", state, "because " * 9, 7),
        queued=queued,
        answer_started=1.0,
        answer_state=AnswerState.WRITING,
    )
    now = Situation(answering=True, model_loaded=True, drafters=3, exchanges=2)
    made = [
        lines.title(facts, width),
        lines.status(facts, shot, 10.0, width, now, 14, keys=True),
        lines.short_status(facts, shot, 10.0, width, 14),
        lines.strip(facts, shot, width),
        lines.key_spans(now, width),
        *pane.rows(facts, shot, width),
    ]
    for line in made:
        text = lines.plain(line)
        assert cells(text) <= width
        assert "\n" not in text
        assert "\x1b" not in text
    assert welcome(facts, 10.0, width)


@pytest.mark.parametrize("width", [38, 78, 118])
def test_the_drafter_and_its_state_are_in_the_title_at_every_size(width: int) -> None:
    facts = Facts(phase=Phase.READY, model=MODEL, drafter=DSPARK)
    assert "dspark ● active" in lines.plain(lines.title(facts, width))
    fell = DrafterInfo("dflash2", "dflash2", "fell_back", "out of memory", 7)
    assert "dflash2 ! fell back" in lines.plain(
        lines.title(Facts(phase=Phase.READY, model=MODEL, drafter=fell), width)
    )


def test_status_by_phase() -> None:
    def said(width: int = 78, **changes: Any) -> str:
        facts = Facts(**{"model": MODEL, "drafter": DSPARK, **changes})
        return lines.plain(lines.status(facts, Snapshot(), 108.0, width, Situation(), 0, keys=False)).strip()

    load = LoadFacts("demo", "read", 30, 75, "bytes", 105.0)
    assert said(phase=Phase.LOADING, load=load) == "◌ loading demo read 40 % 00:03"
    assert said(phase=Phase.READY) == "○ ready"
    assert said(phase=Phase.READY, queued=2).split("  ")[-1] == "queued: 2 prompts"
    running = {"phase": Phase.ANSWERING, "answer_started": 100.0, "answer_state": AnswerState.WRITING}
    assert said(**running) == "● generating 00:08 · esc stops"
    assert said(**{**running, "answer_state": AnswerState.PREFILL}).startswith("● reading the prompt 00:08")
    assert said(phase=Phase.GONE) == "! engine gone"
    assert said(phase=Phase.NO_MODEL) == "! no model · F3 chooses one"


def test_formats() -> None:
    assert [size(n) for n in (0, 999, 35_200_000, 4_600_000_000)] == ["0 B", "999 B", "35.2 MB", "4.6 GB"]
    assert size(None) == "n/a"
    assert [short_count(n) for n in (812, 4321, 128_000)] == ["812", "4.3k", "128k"]
    assert [clock(s) for s in (8.9, 68, 3723)] == ["00:08", "01:08", "1:02:03"]
    assert [seconds(s) for s in (0.412, 8.52, 95.4)] == ["0.41 s", "8.5 s", "95 s"]
    assert count(1204) == "1 204"
    assert bar(0.5, 4) == "██  "
    assert bar(0.55, 4) == "██▎ "
    assert sparkline([0, 7, 3], 7) == "▁█▄"
