"""Pictures of every view and state at three sizes, with a fixed clock and fixed numbers.

After a change that is meant: `pytest tests/dspark_tui/test_app_snapshots.py --snapshot-update`, then look.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import pytest
from ui_stub import ANSWER, Clock, StubEngine, make_app, until

from dspark_tui.app import DsparkApp
from dspark_tui.conversation import Phase
from dspark_tui.engine.client import EngineFailure
from dspark_tui.engine.protocol import Progress

Drive: TypeAlias = Callable[[DsparkApp, StubEngine, Clock, Any], Awaitable[None]]
SIZES = [(120, 36), (80, 24), (40, 16)]
ACCEPTED = [3, 7, 5, 2, 6, 0, 4]


async def empty(app: DsparkApp, engine: StubEngine, clock: Clock, pilot: Any) -> None:
    await until(lambda: app.controller.facts.phase is Phase.READY, pilot)


async def loading(app: DsparkApp, engine: StubEngine, clock: Clock, pilot: Any) -> None:
    await until(lambda: app.controller.facts.load is not None, pilot)
    clock.now += 3
    app.chat.draw()


async def generating(app: DsparkApp, engine: StubEngine, clock: Clock, pilot: Any) -> None:
    await empty(app, engine, clock, pilot)
    app.chat.prompt.put("Write a Metal kernel that sums a float array.")
    await pilot.press("enter")
    await until(lambda: bool(engine.chats), pilot)
    engine.prefill(60, 60, 36)
    clock.now += 0.25
    engine.text(ANSWER + "\n- one\n- two is op")
    await until(lambda: not app.chat.transcript.views[-1].stale, pilot)
    clock.now += 7.75
    engine.rounds(ACCEPTED * 3, 80, 1.0)
    engine.rounds(ACCEPTED * 2, 160, 2.0)
    await until(lambda: app.controller.metrics().generated == 160, pilot)
    app.chat.draw()
    await pilot.pause()


async def over(app: DsparkApp, pilot: Any) -> None:
    exchanges = app.controller.conversation.exchanges

    def settled() -> bool:
        # A lost engine is known before its answer is marked as failed.
        ended = not app.controller.facts.busy and not exchanges[-1].answer.state.running
        return ended and not any(view.stale for view in app.chat.transcript.views)

    await until(settled, pilot)
    app.chat.draw()
    await pilot.pause()


async def finished(app: DsparkApp, engine: StubEngine, clock: Clock, pilot: Any) -> None:
    await generating(app, engine, clock, pilot)
    engine.finish(generated=160)
    await over(app, pilot)


async def stopped(app: DsparkApp, engine: StubEngine, clock: Clock, pilot: Any) -> None:
    await generating(app, engine, clock, pilot)
    await pilot.press("escape")
    engine.finish("stopped", 160)
    await over(app, pilot)


async def failed(app: DsparkApp, engine: StubEngine, clock: Clock, pilot: Any) -> None:
    await generating(app, engine, clock, pilot)
    engine.send(EngineFailure("The memory limit of 24.0 GB was reached; close other programs or choose F3."))
    await over(app, pilot)


async def engine_gone(app: DsparkApp, engine: StubEngine, clock: Clock, pilot: Any) -> None:
    await generating(app, engine, clock, pilot)
    engine.die()
    await over(app, pilot)
    await until(lambda: app.chat.banner.has_focus, pilot)


async def load_failed(app: DsparkApp, engine: StubEngine, clock: Clock, pilot: Any) -> None:
    await until(lambda: app.controller.facts.phase is Phase.NO_MODEL, pilot)


async def drafter_picker(app: DsparkApp, engine: StubEngine, clock: Clock, pilot: Any) -> None:
    await generating(app, engine, clock, pilot)
    await pilot.press("f2")
    await until(lambda: app.screen is not app.chat, pilot)
    await pilot.pause()


async def model_picker(app: DsparkApp, engine: StubEngine, clock: Clock, pilot: Any) -> None:
    await finished(app, engine, clock, pilot)
    await pilot.press("f3")
    await until(lambda: app.screen is not app.chat, pilot)
    await pilot.pause()


async def help_screen(app: DsparkApp, engine: StubEngine, clock: Clock, pilot: Any) -> None:
    await empty(app, engine, clock, pilot)
    await pilot.press("f1")
    await until(lambda: app.screen is not app.chat, pilot)
    await pilot.pause()


STATES: list[tuple[Drive, dict[str, Any]]] = [
    (loading, {"loaded": False}),
    (empty, {}),
    (generating, {}),
    (finished, {}),
    (stopped, {}),
    (failed, {}),
    (engine_gone, {}),
    (load_failed, {"failure": "The folder /models/demo has no config.json."}),
    (drafter_picker, {}),
    (model_picker, {}),
    (help_screen, {}),
]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize(("drive", "options"), STATES, ids=[drive.__name__ for drive, _ in STATES])
def test_picture(snap_compare: Any, drive: Drive, options: dict[str, Any], size: tuple[int, int]) -> None:
    clock = Clock()
    engine = StubEngine(**options)
    engine.steps = [Progress(1, "read", 30_000_000, 75_000_000, "bytes")]
    app = make_app(engine, clock=clock)

    async def run(pilot: Any) -> None:
        await drive(app, engine, clock, pilot)
        # The thumb of the scrollbar may lag behind the text by a frame.
        app.chat.transcript.refresh(layout=True)
        await pilot.pause()
        app.chat.transcript.vertical_scrollbar.refresh()
        await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=run)
