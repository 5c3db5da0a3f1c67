"""The chat driven by keys, on an engine without a process."""

import asyncio
from typing import Any

import pytest
from textual import events
from textual.widgets import Input
from ui_stub import (
    ANSWER,
    DFLASH,
    DSPARK,
    NONE,
    Clock,
    DrafterInfo,
    StubEngine,
    make_app,
    until,
)

from dspark_tui.app import DsparkApp
from dspark_tui.conversation import AnswerState, Phase
from dspark_tui.engine.client import EngineFailure
from dspark_tui.engine.protocol import Message, ModelRow, Notice, Progress
from dspark_tui.ports import AS_IT_COMES, LoadOptions
from dspark_tui.widgets.exchange import ExchangeView
from dspark_tui.widgets.markdown import AnswerMarkdown


def screen_text(app: DsparkApp) -> str:
    """What is on the screen, row by row."""
    return "\n".join(strip.text.rstrip() for strip in app.screen._compositor.render_strips())


async def ready(app: DsparkApp, pilot: Any) -> None:
    await until(lambda: app.controller.facts.phase is Phase.READY, pilot)


async def ask(app: DsparkApp, engine: StubEngine, pilot: Any, prompt: str = "hello") -> None:
    before = len(engine.chats)
    await pilot.press(*prompt, "enter")
    await until(lambda: len(engine.chats) == before + 1, pilot)


async def answered(app: DsparkApp, pilot: Any, state: AnswerState = AnswerState.DONE) -> None:
    """Until the last answer is over and its final form is on the screen."""
    exchanges = app.controller.conversation.exchanges

    def shown() -> bool:
        return exchanges[-1].answer.state is state and not any(
            view.stale for view in app.chat.transcript.views
        )

    await until(shown, pilot)


async def test_one_answer_from_prompt_to_end() -> None:
    engine = StubEngine()
    app = make_app(engine, temperature=0.7)
    async with app.run_test(size=(120, 36)) as pilot:
        await ready(app, pilot)
        await ask(app, engine, pilot)
        assert app.chat.prompt.text == ""
        engine.prefill(30, 60)
        engine.text("one\n\ntwo is op")
        await until(lambda: "two is op" in screen_text(app), pilot)
        assert "hello" in screen_text(app)
        assert [md.source for md in app.query(AnswerMarkdown)] == ["one\n\n"]
        engine.text("en\n")
        engine.rounds([3, 7], 13, 1.0)
        engine.finish(generated=13)
        await answered(app, pilot)
        assert [md.source for md in app.query(AnswerMarkdown)] == ["one\n\n", "two is open\n"]
        text = screen_text(app)
        assert "13 tok · 1.8 s" in text
        assert "128.9 tok/s" in text
        assert "○ ready" in text
        assert engine.chats == [[Message("user", "hello")]]
        assert engine.sampling is not None
        assert engine.sampling.temperature == 0.7


async def test_a_prompt_sent_while_loading_waits() -> None:
    engine = StubEngine(loaded=False)
    engine.steps = [Progress(1, "read", 30_000_000, 75_000_000, "bytes")]
    app = make_app(engine)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(lambda: bool(engine.loads), pilot)
        await pilot.press(*"early", "enter")
        await until(lambda: "queued: 1 prompt" in screen_text(app), pilot)
        assert "waiting" in screen_text(app)
        assert not engine.chats
        engine.may_load.set()
        await until(lambda: engine.chats == [[Message("user", "early")]], pilot)


async def test_the_start_screen_shows_stage_and_share() -> None:
    engine = StubEngine(loaded=False)
    engine.steps = [Progress(1, "read", 30_000_000, 75_000_000, "bytes")]
    app = make_app(engine)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(lambda: "30.0 MB of 75.0 MB" in screen_text(app), pilot)
        assert "40 %" in screen_text(app)
        assert "00:00" in screen_text(app)


async def test_prompts_queue_while_an_answer_runs() -> None:
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await ask(app, engine, pilot, "first")
        await pilot.press(*"second", "enter")
        await until(lambda: "queued: 1 prompt" in screen_text(app), pilot)
        engine.text("answer")
        engine.finish()
        await until(lambda: len(engine.chats) == 2, pilot)
        assert engine.chats[1] == [
            Message("user", "first"),
            Message("assistant", "answer"),
            Message("user", "second"),
        ]
        assert "queued" not in screen_text(app)


async def test_esc_stops_keeps_the_text_and_returns_the_queue() -> None:
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await ask(app, engine, pilot, "first")
        engine.text("half an ans")
        await pilot.press(*"second", "enter", *"draft", "escape")
        await until(lambda: bool(engine.stops), pilot)
        assert app.chat.prompt.text == "second\n\ndraft"
        assert [e.prompt for e in app.controller.conversation.exchanges] == ["first"]
        engine.finish("stopped", 5)
        await answered(app, pilot, AnswerState.STOPPED)
        assert "half an ans" in screen_text(app)
        assert "stopped after 5 tokens" in screen_text(app)
        await pilot.press("escape", "escape")
        assert app.chat.prompt.text == "second\n\ndraft"
        # What was stopped stays part of the conversation.
        app.chat.prompt.put("go on")
        await pilot.press("enter")
        await until(lambda: len(engine.chats) == 2, pilot)
        assert engine.chats[1][1] == Message("assistant", "half an ans")


async def test_ctrl_c_by_layers() -> None:
    engine = StubEngine()
    clock = Clock()
    app = make_app(engine, clock=clock)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await ask(app, engine, pilot)
        await pilot.press(*"typed", "ctrl+c")
        await until(lambda: bool(engine.stops), pilot)
        assert app.chat.prompt.text == "typed"
        engine.finish("stopped", 0)
        await answered(app, pilot, AnswerState.STOPPED)
        await pilot.press("ctrl+c")
        assert app.chat.prompt.text == ""
        await pilot.press("ctrl+underscore")
        assert app.chat.prompt.text == "typed"
        await pilot.press("ctrl+c", "up")
        assert app.chat.prompt.text == "typed"
        app.chat.prompt.select_all()
        await pilot.press("ctrl+c")
        assert app.clipboard == "typed"
        assert app.chat.prompt.text == "typed"
        app.chat.prompt.move_cursor((0, 0))
        await pilot.press("ctrl+c", "ctrl+c")
        clock.now += 3
        await pilot.press("ctrl+c")
        assert app.is_running
        await pilot.press("ctrl+c")
    assert app.return_value == 0


async def test_ctrl_d_and_ctrl_q() -> None:
    engine = StubEngine()
    clock = Clock()
    app = make_app(engine, clock=clock)
    async with app.run_test() as pilot:
        await ready(app, pilot)
        await pilot.press("a", "b", "left", "ctrl+d")
        assert app.chat.prompt.text == "a"
        await pilot.press("enter")
        await until(lambda: bool(engine.chats), pilot)
        await pilot.press("ctrl+q")
        assert app.is_running
        clock.now += 3
        await pilot.press("ctrl+d")
        assert app.is_running
        await pilot.press("ctrl+d")
    assert app.return_value == 0


async def test_newlines_and_history() -> None:
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test() as pilot:
        await ready(app, pilot)
        prompt = app.chat.prompt
        await pilot.press("a", "ctrl+j", "b", "backslash", "enter", "c")
        assert prompt.text == "a\nb\nc"
        await pilot.press("enter")
        await until(lambda: engine.chats == [[Message("user", "a\nb\nc")]], pilot)
        await pilot.press(*"next", "up")
        assert prompt.text == "a\nb\nc"
        await pilot.press("down")
        assert prompt.text == "next"
        await pilot.press("ctrl+p", "ctrl+n")
        assert prompt.text == "next"


async def test_typing_fast_and_enter_keep_their_order() -> None:
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test() as pilot:
        await ready(app, pilot)
        # Keys posted at once, as a fast typist or a paste without brackets delivers them.
        await app._press_keys(["h", "i", "enter", "y", "o"])
        await until(lambda: bool(engine.chats), pilot)
        assert engine.chats == [[Message("user", "hi")]]
        assert app.chat.prompt.text == "yo"


async def test_a_paste_arrives_once_with_its_lines() -> None:
    app = make_app(StubEngine())
    async with app.run_test() as pilot:
        await ready(app, pilot)
        app.post_message(events.Paste("a:\n\tb\n"))
        await pilot.press("c")
        assert app.chat.prompt.text == "a:\n\tb\nc"
        await pilot.press("f3")
        field = app.screen.query_one(Input)
        app.post_message(events.Paste("org/name"))
        await pilot.press("s")
        assert field.value == "org/names"


async def test_switching_in_mid_answer_is_marked_with_its_place() -> None:
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test(size=(120, 36)) as pilot:
        await ready(app, pilot)
        await ask(app, engine, pilot)
        engine.text("some ")
        engine.rounds([3, 5], 10, 0.5)
        await pilot.press("ctrl+t")
        await until(lambda: engine.switches == ["dflash"], pilot)
        engine.changed(DFLASH)
        engine.rounds([2], 13, 0.7)
        engine.rounds([4, 4], 23, 1.0, source="dflash")
        engine.text("text")
        engine.finish(generated=23, drafter=DFLASH)
        await answered(app, pilot)
        text = screen_text(app)
        assert "drafter dspark → dflash after 13 tokens" in text
        assert "dspark → dflash · demo" in text
        assert "dflash ● active" in text


async def test_a_switch_to_auto_is_marked_by_whatever_drafts_then() -> None:
    auto = DrafterInfo("auto", "auto", "active", loaded=True)
    engine = StubEngine(drafters=[NONE, DSPARK, DFLASH, auto])
    app = make_app(engine)
    async with app.run_test(size=(120, 36)) as pilot:
        await ready(app, pilot)
        await ask(app, engine, pilot)
        engine.text("some ")
        engine.rounds([3, 5], 10, 0.5)
        await until(lambda: "some" in screen_text(app), pilot)
        await app.controller.switch_drafter("auto")
        engine.rounds([2, 4], 18, 0.7, source="lookup")
        engine.text("text")
        engine.finish(generated=18, drafter=auto)
        await answered(app, pilot)
        text = screen_text(app)
        assert "drafter dspark → auto after 10 tokens" in text
        assert "dspark → auto · demo" in text


async def test_a_switch_to_lookup_is_marked_where_it_happened_though_nothing_repeats() -> None:
    lookup = DrafterInfo("lookup", "lookup", "active", loaded=True)
    engine = StubEngine(drafters=[NONE, DSPARK, lookup])
    app = make_app(engine)
    async with app.run_test(size=(120, 36)) as pilot:
        await ready(app, pilot)
        await ask(app, engine, pilot)
        engine.text("some ")
        engine.rounds([3, 5], 10, 0.5)
        await until(lambda: "some" in screen_text(app), pilot)
        await app.controller.switch_drafter("lookup")
        engine.rounds([0, 0], 12, 0.7, source="none")
        engine.rounds([4], 17, 0.9, source="lookup")
        engine.finish(generated=17, drafter=lookup)
        await answered(app, pilot)
        assert "drafter dspark → lookup after 10 tokens" in screen_text(app)


async def test_a_drafter_that_is_left_is_not_listed_as_parked() -> None:
    parked = DrafterInfo("dspark", "dspark", "parked", "it costs more than it saves", 7, loaded=True)
    engine = StubEngine(drafters=[NONE, parked, DFLASH])
    app = make_app(engine)
    async with app.run_test(size=(120, 36)) as pilot:
        await ready(app, pilot)
        await pilot.press("f2")
        await until(lambda: "parked: it costs more than it saves" in screen_text(app), pilot)
        await pilot.press("escape")
        await app.controller.switch_drafter("dflash")
        await pilot.press("f2")
        await until(lambda: "Drafter for" in screen_text(app), pilot)
        assert "parked" not in screen_text(app)


async def test_next_drafter_skips_the_unusable() -> None:
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test() as pilot:
        await ready(app, pilot)
        for expected in (["dflash"], ["dflash", "none"], ["dflash", "none", "dspark"]):
            await pilot.press("ctrl+t")
            await until(lambda expected=expected: engine.switches == expected, pilot)
            await until(lambda: app.controller.facts.drafter.name == engine.switches[-1], pilot)


def toasts(app: DsparkApp) -> list[str]:
    return [toast.message for toast in app._notifications]


class HastyEngine(StubEngine):
    """Changes the drafter when it is let; a newer wish displaces one that waits."""

    let = False
    newest: object = None

    async def switch_drafter(self, drafter: str, on_progress: Any = None) -> DrafterInfo:
        found = await super().switch_drafter(drafter)
        wish = self.newest = object()
        while not self.let:
            await asyncio.sleep(0.001)
            if self.newest is not wish:
                raise EngineFailure("Another drafter was chosen before this one could start.")
        return found


async def test_hasty_switches_go_through_the_list_and_are_told_once() -> None:
    engine = HastyEngine()
    app = make_app(engine)
    async with app.run_test() as pilot:
        await ready(app, pilot)
        for _ in range(4):
            await pilot.press("ctrl+t")
        await until(lambda: engine.switches == ["dflash", "none", "dspark", "dflash"], pilot)
        engine.let = True
        await until(lambda: bool(toasts(app)), pilot)
        assert toasts(app) == ["Drafter dflash, from the next answer on."]


async def test_the_same_toast_is_not_stacked() -> None:
    clock = Clock()
    app = make_app(StubEngine(), clock=clock)
    async with app.run_test() as pilot:
        await ready(app, pilot)
        for _ in range(30):
            await pilot.press("ctrl+o")
        assert toasts(app) == ["No answer here has thinking to open."]
        clock.now += app.NOTIFICATION_TIMEOUT
        await pilot.press("ctrl+o")
        assert toasts(app) == 2 * ["No answer here has thinking to open."]


async def test_drafter_picker() -> None:
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await pilot.press("f2")
        await until(lambda: "not usable: it is for a target" in screen_text(app), pilot)
        await pilot.press("4")
        assert engine.switches == []
        await pilot.press("3")
        await until(lambda: engine.switches == ["dflash"], pilot)
        await pilot.press("f2")
        await until(lambda: "filter" in screen_text(app), pilot)
        await pilot.press(*"plain", "enter")
        await until(lambda: engine.switches == ["dflash", "none"], pilot)
        await pilot.press("f2", "escape")
        assert app.screen is app.chat
        assert app.chat.prompt.has_focus


async def test_the_answer_goes_on_behind_a_picker() -> None:
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test(size=(80, 36)) as pilot:
        await ready(app, pilot)
        await ask(app, engine, pilot)
        await pilot.press("f2")
        await until(lambda: "filter" in screen_text(app), pilot)
        engine.text("while you choose\n")
        await until(lambda: app.chat.transcript.views[0]._tail.display, pilot)
        assert "while you choose" in str(app.chat.transcript.views[0]._tail.visual)


async def test_model_picker_loads_rows_and_typed_names() -> None:
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test(size=(120, 36)) as pilot:
        await ready(app, pilot)
        await pilot.press("f3")
        await until(lambda: "config.json is missing" in screen_text(app), pilot)
        await pilot.press("2")
        await until(lambda: engine.loads[-1] == ("mlx-community/Qwen3-8B-4bit", None), pilot)
        await ready(app, pilot)
        await pilot.press("f3")
        await until(lambda: "config.json is missing" in screen_text(app), pilot)
        await pilot.press(*"/models/mine")
        await until(lambda: "as a folder or repository id" in screen_text(app), pilot)
        await pilot.press("enter")
        await until(lambda: engine.loads[-1] == ("/models/mine", None), pilot)


async def test_every_model_is_loaded_as_the_command_line_said() -> None:
    engine = StubEngine()
    how = LoadOptions(drafter_bits=4, kv_bits=8, lookup=False)
    app = make_app(engine, loading=how)
    async with app.run_test(size=(120, 36)) as pilot:
        await ready(app, pilot)
        assert engine.load_options == how
        engine.load_options = AS_IT_COMES
        await app.controller.load("/models/mine")
        assert engine.load_options == how


async def test_no_other_model_while_an_answer_runs() -> None:
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test(size=(120, 36), notifications=True) as pilot:
        await ready(app, pilot)
        await ask(app, engine, pilot)
        await pilot.press("f3")
        await until(lambda: "Qwen3" in screen_text(app), pilot)
        await pilot.press("2")
        await until(lambda: "stop it first (esc)" in screen_text(app), pilot)
        assert len(engine.loads) == 1


async def test_a_failed_load_is_told_and_f3_offered() -> None:
    engine = StubEngine(failure="The folder /models/demo has no config.json.")
    app = make_app(engine)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(lambda: app.controller.facts.phase is Phase.NO_MODEL, pilot)
        await pilot.pause()
        assert "The folder /models/demo has no config.json." in screen_text(app)
        assert "F3 chooses" in screen_text(app)
        await pilot.press(*"kept", "enter")
        engine.failure = ""
        await pilot.press("f3")
        await until(lambda: "Qwen3" in screen_text(app), pilot)
        await pilot.press("1")
        await until(lambda: engine.chats == [[Message("user", "kept")]], pilot)


async def test_without_a_model_the_demo_or_a_choice() -> None:
    engine = StubEngine()
    app = make_app(engine, model=None)
    async with app.run_test() as pilot:
        await ready(app, pilot)
        assert engine.loads == [("demo", None)]
    engine = StubEngine(models=[ModelRow("demo", "demo", None, "76 MB to fetch")])
    app = make_app(engine, model=None)
    async with app.run_test(size=(120, 36)) as pilot:
        await until(lambda: "76 MB to fetch" in screen_text(app), pilot)
        assert engine.loads == []
        await pilot.press("escape")
        await until(lambda: "dspark-tui models pull demo" in screen_text(app), pilot)


async def test_a_failed_answer_keeps_its_text_and_says_why() -> None:
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await ask(app, engine, pilot)
        engine.text("so far")
        engine.send(EngineFailure("The template raised an error."))
        await answered(app, pilot, AnswerState.FAILED)
        assert "so far" in screen_text(app)
        assert "failed: The template raised an error." in screen_text(app)
        await ask(app, engine, pilot, "again")
        engine.send(EngineFailure("Too long."))
        await answered(app, pilot, AnswerState.FAILED)
        assert "There is no text" in screen_text(app)
        await ask(app, engine, pilot, "third")
        assert [m.content for m in engine.chats[2]] == ["hello", "so far", "third"]


async def test_a_full_context_is_marked() -> None:
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await ask(app, engine, pilot)
        engine.text("long")
        engine.finish("length", 8000)
        await answered(app, pilot, AnswerState.LENGTH)
        assert "cut at 8 000 tokens: the context is full" in screen_text(app)


async def test_a_lost_engine_keeps_everything_and_restarts_with_r() -> None:
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await ask(app, engine, pilot)
        engine.text("before the end")
        await until(lambda: "before the end" in screen_text(app), pilot)
        engine.die()
        await answered(app, pilot, AnswerState.FAILED)
        text = screen_text(app)
        assert "before the end" in text
        assert "was killed by signal 9 (SIGKILL)" in text
        assert "r restarts it" in text
        await until(lambda: app.chat.banner.has_focus, pilot)
        await pilot.press("x")
        assert app.chat.prompt.text == "x"
        await pilot.press("escape", "r")
        await ready(app, pilot)
        assert engine.loads == [("demo", None), ("demo", "dspark")]
        await pilot.press("backspace")
        await ask(app, engine, pilot, "go on")
        assert [m.content for m in engine.chats[1]] == ["hello", "before the end", "go on"]


async def test_a_lost_engine_does_not_take_the_keys_of_somebody_typing() -> None:
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await pilot.press("a")
        assert engine.on_gone is not None
        engine.on_gone("The engine ended by itself.")
        await until(lambda: "The engine ended by itself." in screen_text(app), pilot)
        await pilot.press("r")
        assert app.chat.prompt.text == "ar"


async def test_new_chat() -> None:
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await ask(app, engine, pilot)
        engine.text("old")
        await pilot.press("f4")
        assert len(app.controller.conversation.exchanges) == 1
        engine.finish()
        await answered(app, pilot)
        await pilot.press("f4")
        await until(lambda: not app.query(ExchangeView), pilot)
        assert "Enter sends" in screen_text(app)
        await ask(app, engine, pilot, "new")
        assert engine.chats[1] == [Message("user", "new")]


async def test_thinking_is_folded_and_opens() -> None:
    engine = StubEngine()
    clock = Clock()
    app = make_app(engine, clock=clock)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await ask(app, engine, pilot)
        engine.text("let me see", thinking=True)
        await until(lambda: "▸ thinking…, 3 words" in screen_text(app), pilot)
        engine.text(" now", thinking=True)
        await until(lambda: "▸ thinking…, 4 words" in screen_text(app), pilot)
        assert "let me see" not in screen_text(app)
        clock.now += 3.2
        engine.text("Done.")
        engine.finish()
        await answered(app, pilot)
        assert "▸ thought for 3.2 s, 4 words" in screen_text(app)
        await pilot.press("ctrl+o")
        await until(lambda: "let me see" in screen_text(app), pilot)
        await pilot.press("ctrl+o")
        await until(lambda: "let me see" not in screen_text(app), pilot)
        await ask(app, engine, pilot)
        # What the model thought is not sent to it again.
        assert [message.content for message in engine.chats[1]][1:2] == ["Done."]


@pytest.mark.parametrize("size", [(40, 16), (80, 24), (120, 40)])
async def test_a_drafter_that_loads_beside_an_answer_is_named(size: tuple[int, int]) -> None:
    engine = StubEngine()
    engine.switch_steps = [Progress(3, "drafter", 0, 1, "steps")]
    engine.may_switch.clear()
    app = make_app(engine)
    async with app.run_test(size=size) as pilot:
        await ready(app, pilot)
        await ask(app, engine, pilot)
        engine.text("One, ")
        engine.rounds([3], 4, 0.5)
        await until(lambda: "One," in screen_text(app), pilot)
        switching = asyncio.create_task(app.controller.switch_drafter("dflash"))
        named = "loading dflash" if size[0] < 60 else "loading drafter dflash"
        await until(lambda: named in screen_text(app), pilot)
        engine.text("two.")
        await until(lambda: "One, two." in screen_text(app), pilot)
        assert named in screen_text(app)
        engine.may_switch.set()
        await switching
        await until(lambda: named not in screen_text(app), pilot)


async def test_scrolling_keeps_the_prompt_and_follows_again() -> None:
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await ask(app, engine, pilot)
        engine.text("".join(f"line {n}\n\n" for n in range(60)))
        await until(lambda: "line 59" in screen_text(app), pilot)
        await pilot.press("pageup")
        await until(lambda: "below, ctrl+e follows" in screen_text(app), pilot)
        engine.text("line 60\n\nline 61\n\n")
        await until(lambda: not app.chat.transcript.views[0].stale, pilot)
        assert "line 61" not in screen_text(app)
        assert app.chat.prompt.has_focus
        await pilot.press("ctrl+e")
        await until(lambda: "line 61" in screen_text(app), pilot)
        await pilot.press("f6", "k", "k", "z")
        assert app.chat.prompt.text == "z"


async def test_the_window_of_live_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark_tui.widgets.transcript.RICH", 2)
    monkeypatch.setattr("dspark_tui.widgets.transcript.MOUNTED", 4)
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test(size=(80, 40)) as pilot:
        await ready(app, pilot)
        for number in range(6):
            await ask(app, engine, pilot, f"q{number}")
            engine.text(f"answer **{number}** with <b>html</b>\n")
            engine.finish()
            await answered(app, pilot)
        await until(lambda: len(app.query(ExchangeView)) == 4, pilot)
        assert [view.rich for view in app.chat.transcript.views] == [False, False, True, True]
        text = screen_text(app)
        assert "▲ 2 earlier exchanges" in text
        for number in range(2, 6):
            assert f"answer {number} with <b>html</b>" in text
        assert len(engine.chats[5]) == 11


async def test_pieces_that_look_unlike_the_whole_are_replaced_at_the_end() -> None:
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await ask(app, engine, pilot)
        text = "see [the page][1]\n\nmore\n\n[1]: https://example.org\n"
        engine.text(text)
        await until(lambda: "[the page][1]" in screen_text(app), pilot)
        engine.finish()
        await answered(app, pilot)
        assert [md.source for md in app.query(AnswerMarkdown)] == [text]
        await until(lambda: "see the page" in screen_text(app), pilot)


async def test_blocks_one_by_one_and_the_whole_give_the_same_picture() -> None:
    text = ANSWER + "\n# Head\n\n> quote\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n" + "- item\n" * 20 + "\nend\n"
    pictures = []
    for chunk in (7, len(text)):
        engine = StubEngine()
        app = make_app(engine)
        async with app.run_test(size=(80, 100)) as pilot:
            await ready(app, pilot)
            await ask(app, engine, pilot)
            for at in range(0, len(text), chunk):
                engine.text(text[at : at + chunk])
                if at % 70 == 0:
                    await pilot.pause()
            engine.finish()
            await answered(app, pilot)
            if chunk == len(text):
                # The whole text as one Markdown widget, as a later visit would show it.
                view = app.chat.transcript.views[0]
                from dspark_tui.text.splitter import Block

                for widget in list(view.query(AnswerMarkdown)):
                    await widget.remove()
                await view.mount(AnswerMarkdown(Block(text)), before=view._tail)
            await pilot.pause()
            pictures.append(screen_text(app))
    assert pictures[0] == pictures[1]


async def test_the_lines_of_a_verse_stay_lines() -> None:
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await ask(app, engine, pilot)
        engine.text("Roses are red,\nviolets *are*\nblue.\n\n- one\n  two\n")
        engine.finish()
        await answered(app, pilot)
        rows = [row.strip() for row in screen_text(app).splitlines()]
        at = rows.index("Roses are red,")
        assert rows[at : at + 6] == ["Roses are red,", "violets are", "blue.", "", "• one", "two"]


async def test_metrics_modes_and_sizes() -> None:
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test(size=(120, 36)) as pilot:
        await ready(app, pilot)
        assert "first token" in screen_text(app)
        await pilot.press("f7")
        await until(lambda: "first token" not in screen_text(app), pilot)
        assert "speed n/a" in screen_text(app)
        await pilot.press("f7")
        await until(lambda: "speed n/a" not in screen_text(app), pilot)
        await pilot.press("f7")
        await until(lambda: "first token" in screen_text(app), pilot)
        for size, seen, unseen in (
            ((80, 24), "speed n/a", "first token"),
            ((40, 16), "dspark ● active", "speed n/a"),
            ((39, 16), "dspark-tui needs 40x10", "active"),
            ((40, 9), "dspark-tui needs 40x10", "active"),
            ((20, 3), "dspark-tui needs", "active"),
            ((120, 36), "first token", "needs 40x10"),
        ):
            await pilot.resize_terminal(*size)
            await until(lambda seen=seen: seen in screen_text(app), pilot)
            assert unseen not in screen_text(app)


async def test_a_drafter_that_falls_back_says_why() -> None:
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test(size=(120, 36), notifications=True) as pilot:
        await ready(app, pilot)
        await ask(app, engine, pilot)
        reason = "drafting costs more than it saves here"
        engine.changed(DrafterInfo("dspark", "dspark", "parked", reason, 7, 11_600_000, True))
        engine.text("x")
        await until(lambda: "‖ parked" in screen_text(app), pilot)
        await until(lambda: "Drafter dspark is parked" in screen_text(app), pilot)
        assert engine.on_event is not None
        engine.on_event(Notice(0, "A note from the engine."))
        await until(lambda: "A note from the engine." in screen_text(app), pilot)


async def test_links_open_only_http_and_ask_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    opened: list[str] = []
    engine = StubEngine()
    app = make_app(engine)
    monkeypatch.setattr(app, "open_url", lambda url, **_: opened.append(url))
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await ready(app, pilot)
        await ask(app, engine, pilot)
        engine.text("[web](https://example.org/a) [file](file:///etc/passwd)\n\n")
        await until(lambda: bool(app.query(AnswerMarkdown)), pilot)
        markdown = app.query_one(AnswerMarkdown)
        for href in ("https://example.org/a", "file:///etc/passwd", "vscode://x\x1b[2J"):
            markdown.post_message(AnswerMarkdown.LinkClicked(markdown, href))
            await pilot.pause()
        assert opened == ["https://example.org/a"]
        await until(lambda: "is no web address" in screen_text(app), pilot)
        monkeypatch.setenv("SSH_CONNECTION", "1")
        markdown.post_message(AnswerMarkdown.LinkClicked(markdown, "https://example.org/b"))
        await until(lambda: app.clipboard == "https://example.org/b", pilot)
        assert opened == ["https://example.org/a"]


async def test_help_and_palette_come_from_the_registry() -> None:
    engine = StubEngine()
    app = make_app(engine)
    async with app.run_test(size=(120, 36)) as pilot:
        await ready(app, pilot)
        await pilot.press("f1")
        await until(lambda: "Everywhere" in screen_text(app), pilot)
        await pilot.press("escape", "f5")
        await until(lambda: "Choose the drafter" in screen_text(app), pilot)
        await pilot.press(*"next dr")
        await until(lambda: "Next drafter" in screen_text(app), pilot)
        await pilot.press("enter")
        await until(lambda: engine.switches == ["dflash"], pilot)
