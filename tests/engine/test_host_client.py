"""The engine process and its client, over a real socket, with the fake engine inside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from dspark_tui import __version__
from dspark_tui.engine import host as host_module
from dspark_tui.engine import service as service_module
from dspark_tui.engine import spawn
from dspark_tui.engine.client import Engine, EngineFailure, EngineGone
from dspark_tui.engine.protocol import (
    MAX_LINE_BYTES,
    PROTOCOL_VERSION,
    AnyEvent,
    Chat,
    DrafterChanged,
    Failed,
    Finished,
    Hello,
    ListModels,
    Load,
    Message,
    Notice,
    Prefill,
    Progress,
    Rounds,
    Text,
    Welcome,
    decode_event,
    encode,
)

SCRIPTS = Path(__file__).parents[1] / "data" / "fake"
HELLO = "Hello! This is a scripted answer, and it has exactly as many words as it needs."
pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
async def hello() -> AsyncIterator[Engine]:
    engine = await Engine.start(SCRIPTS / "hello.toml")
    yield engine
    await engine.close()


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "script.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
async def endless(script: Callable[[str], Path]) -> AsyncIterator[Engine]:
    """A loaded engine whose answers take an hour."""
    path = script(
        """
        rate = 40
        context = 1000000
        [[drafter]]
        name = "one"
        method = "dspark"
        accept = [1]
        drafts = 4
        [[drafter]]
        name = "two"
        method = "dflash2"
        accept = [2]
        [[drafter]]
        name = "bad"
        method = "dflash"
        refuse = "it does not fit"
        [[reply]]
        text = "word "
        repeat = 144000
        """
    )
    engine = await Engine.start(path)
    await engine.load("demo")
    yield engine
    await engine.close()


def ask(words: str) -> list[Message]:
    return [Message("user", words)]


async def collect(events: AsyncIterator[AnyEvent]) -> list[AnyEvent]:
    async with asyncio.timeout(20):
        return [event async for event in events]


def text_of(events: list[AnyEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text) and not event.thinking)


# ---------------------------------------------------------------------------- a normal life


async def test_start_says_who_it_is(hello: Engine) -> None:
    assert hello.alive
    assert hello.exit_reason == ""
    assert hello.version == __version__
    assert hello.pid not in (0, os.getpid())


async def test_socket_and_folder_are_private(hello: Engine) -> None:
    assert hello.socket_path is not None
    assert stat.S_IMODE(hello.socket_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(hello.socket_path.parent.stat().st_mode) == 0o700


async def test_load_reports_progress_and_the_drafters(hello: Engine) -> None:
    seen: list[Progress] = []
    loaded = await hello.load("demo", on_progress=seen.append)
    assert [(event.stage, event.done, event.total) for event in seen] == [
        ("read", done, 4000) for done in (0, 1000, 2000, 3000, 4000)
    ]
    assert loaded.model.name == "fake small"
    assert loaded.seconds == 0.25
    assert (loaded.drafter.name, loaded.drafter.state) == ("demo-dflash2", "active")
    names = [(drafter.name, drafter.usable, drafter.reason) for drafter in loaded.drafters]
    assert names == [
        ("none", True, ""),
        ("demo-dflash2", True, ""),
        ("demo-dspark", True, ""),
        ("demo-dflash", False, "it belongs to another target"),
        ("refused", True, ""),
    ]


async def test_models_and_pull(hello: Engine) -> None:
    assert [row.name for row in await hello.models()] == ["fake small", "fake broken"]
    seen: list[Progress] = []
    pulled = await hello.pull("demo", seen.append)
    assert pulled.fetched_bytes == seen[-1].done == seen[-1].total == 1_000_000


async def test_chat_gives_prefill_text_rounds_and_the_result(hello: Engine) -> None:
    await hello.load("demo", "demo-dspark")
    events = await collect(hello.chat(ask("say hello"), rounds=True, answer="mine"))
    assert isinstance(events[0], Prefill)
    assert text_of(events) == HELLO
    assert [event.seq for event in events if isinstance(event, Text)] == list(range(6))
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.answer == "mine"
    result = last.result
    assert (result.text, result.generated_tokens, result.finish_reason) == (HELLO, 16, "stop")
    # 16 tokens, three a round: five full rounds and one that the end of the text cuts to one token.
    assert result.rounds is not None
    assert [stat.committed for stat in result.rounds] == [3, 3, 3, 3, 3, 1]
    assert result.accept_length == pytest.approx(16 / 6)
    # The fixed clock says 22.5 ms a round; the first round is not part of decoding.
    assert result.tokens_per_second == pytest.approx(13 / (5 * 0.0225))
    assert [event.rounds[0] for event in events if isinstance(event, Rounds)] == result.rounds


async def test_limits_and_stop_strings_hold(hello: Engine) -> None:
    await hello.load("demo")
    limited = (await collect(hello.chat(ask("hi"), max_tokens=5)))[-1]
    assert isinstance(limited, Finished)
    assert (limited.result.generated_tokens, limited.result.finish_reason) == (5, "length")
    stopped = (await collect(hello.chat(ask("hi"), stop=["answer"])))[-1]
    assert isinstance(stopped, Finished)
    assert (stopped.result.text, stopped.result.finish_reason) == ("Hello! This is a scripted ", "stop")


async def test_thinking_is_told_apart(hello: Engine) -> None:
    await hello.load("demo")
    last = (await collect(hello.chat(ask("think about it"))))[-1]
    assert isinstance(last, Finished)
    assert (last.result.thinking, last.result.text) == ("The user wants thought.", "Thought about it.")


async def test_text_with_lone_surrogates_can_be_sent(hello: Engine) -> None:
    await hello.load("demo")
    assert text_of(await collect(hello.chat(ask("bad \udcff \ud800")))) == HELLO


# ---------------------------------------------------------------------------- commands in mid-answer


async def test_stop_ends_the_answer_within_a_round(endless: Engine) -> None:
    generated = 0
    result = None
    async with asyncio.timeout(10):
        async for event in endless.chat(ask("go"), answer="long"):
            if isinstance(event, Rounds):
                if not generated:
                    await endless.stop("long")
                generated = event.generated_tokens
            elif isinstance(event, Finished):
                result = event.result
    assert result is not None
    assert result.finish_reason == "stopped"
    # Two tokens a round: the round that ran while the stop was under way, and at most one begun before.
    assert result.generated_tokens == generated <= 6
    assert result.text == ("word " * generated)[:-1]


async def test_stop_in_prefill(script: Callable[[str], Path]) -> None:
    path = script('[prefill]\nsteps = 1000\ndelay = 0.1\n[[reply]]\ntext = "late"\n')
    engine = await Engine.start(path)
    await engine.load("demo")
    prefills: list[Prefill] = []
    async with asyncio.timeout(10):
        async for event in engine.chat(ask("a prompt"), answer="a"):
            if isinstance(event, Prefill):
                prefills.append(event)
                await engine.stop("a")
            elif isinstance(event, Finished):
                assert (event.result.finish_reason, event.result.text) == ("stopped", "")
    assert len(prefills) <= 2
    await engine.close()


async def test_switch_in_mid_answer(endless: Engine) -> None:
    sources: list[str] = []
    switching: asyncio.Task[object] | None = None
    changed = []
    async with asyncio.timeout(10):
        async for event in endless.chat(ask("go"), answer="long"):
            if isinstance(event, Rounds):
                sources.append(event.rounds[0].source)
                if switching is None:
                    switching = asyncio.create_task(endless.switch_drafter("two"))
                if sources[-1] == "two":
                    await endless.stop("long")
            elif isinstance(event, DrafterChanged):
                changed.append(event.drafter.name)
            elif isinstance(event, Finished):
                assert event.result.drafter.name == "two"
    assert switching is not None
    info = await switching
    assert getattr(info, "name", None) == "two"
    assert changed == ["two"]
    assert sources[0] == "one"
    # It took effect at the boundary: never back, never mixed.
    assert sources == sorted(sources)


async def test_a_refused_switch_says_why_and_changes_nothing(endless: Engine) -> None:
    answering = collect(endless.chat(ask("go"), answer="long"))
    task = asyncio.create_task(answering)
    with pytest.raises(EngineFailure, match="it does not fit"):
        await endless.switch_drafter("bad")
    with pytest.raises(EngineFailure, match="knows none, one, two, bad") as error:
        await endless.switch_drafter("three")
    assert error.value.kind == "usage"
    await endless.stop("long")
    last = (await task)[-1]
    assert isinstance(last, Finished)
    assert last.result.drafter.name == "one"


async def test_of_two_hasty_switches_the_newest_wins(script: Callable[[str], Path]) -> None:
    drafters = "".join(f'[[drafter]]\nname = "{n}"\nmethod = "dspark"\n' for n in ("one", "two", "three"))
    reply = '[[reply]]\ntext = "a b c d e"\nact = [{ at = 2, do = "stall", seconds = 0.5 }]\n'
    engine = await Engine.start(script(drafters + reply))
    await engine.load("demo")
    chat = engine.chat(ask("go"))
    async with asyncio.timeout(10):
        async for event in chat:
            if isinstance(event, Rounds):
                break
        first = asyncio.create_task(engine.switch_drafter("two"))
        second = asyncio.create_task(engine.switch_drafter("three"))
        with pytest.raises(EngineFailure, match="Another drafter was chosen"):
            await first
        assert (await second).name == "three"
        await collect(chat)
    await engine.close()


async def test_a_switch_that_comes_too_late_is_done_after_the_answer(script: Callable[[str], Path]) -> None:
    """The answer's last step is deaf, and no round boundary follows."""
    text = """
    [[drafter]]
    name = "one"
    method = "dspark"
    [[drafter]]
    name = "two"
    method = "dflash"
    [[reply]]
    text = "a b"
    act = [{ at = 2, do = "stall", seconds = 0.5 }, { at = 2, do = "fail", message = "It broke." }]
    """
    engine = await Engine.start(script(text))
    await engine.load("demo")
    chat = engine.chat(ask("go"))
    switching = None
    async with asyncio.timeout(10):
        async for event in chat:
            if isinstance(event, Rounds):
                switching = asyncio.create_task(engine.switch_drafter("two"))
                break
        with pytest.raises(EngineFailure, match=r"It broke\."):
            await collect(chat)
        assert switching is not None
        assert (await switching).name == "two"
    await engine.close()


async def test_what_cannot_be_done_while_an_answer_runs_is_refused(endless: Engine) -> None:
    task = asyncio.create_task(collect(endless.chat(ask("go"), answer="long")))
    await endless.switch_drafter("two")
    with pytest.raises(EngineFailure, match="stop it before you load another"):
        await endless.load("demo")
    with pytest.raises(EngineFailure, match="An answer is running already"):
        await collect(endless.chat(ask("more")))
    assert await endless.models()
    await endless.pull("demo")
    await endless.stop("long")
    assert isinstance((await task)[-1], Finished)


async def test_leaving_a_chat_stops_it(endless: Engine) -> None:
    async with asyncio.timeout(10):
        async with contextlib.aclosing(endless.chat(ask("go"))) as events:
            async for event in events:
                if isinstance(event, Text):
                    break
        # Not refused: the first one ends by itself.
        await endless.load("demo")


# ---------------------------------------------------------------------------- failures


async def test_contexts_are_saved_and_restored_behind_answers(hello: Engine) -> None:
    for ask in (hello.save_context, hello.restore_context):
        with pytest.raises(EngineFailure, match="No model is loaded"):
            await ask("chat")
    await hello.load("demo")
    nothing = await hello.restore_context("chat")
    assert (nothing.chat, nothing.tokens) == ("chat", 0)
    assert nothing.reason
    answer = asyncio.create_task(collect(hello.chat([Message("user", "two words")])))
    await asyncio.sleep(0)
    saved = await hello.save_context("chat")
    assert isinstance((await answer)[-1], Finished)
    restored = await hello.restore_context("chat")
    assert restored.tokens == saved.tokens > 0
    assert restored.reason == ""


async def test_usage_errors_come_back_as_such(hello: Engine) -> None:
    with pytest.raises(EngineFailure, match="load one first"):
        await collect(hello.chat(ask("hi")))
    with pytest.raises(EngineFailure, match="it has fake small, fake broken") as error:
        await hello.load("other")
    assert error.value.kind == "usage"
    with pytest.raises(EngineFailure, match=r"config\.json is missing"):
        await hello.load("fake broken")
    with pytest.raises(EngineFailure, match="belongs to another target"):
        await hello.load("demo", "dflash")
    await hello.load("demo")
    with pytest.raises(EngineFailure, match="the model takes 200"):
        await collect(hello.chat(ask("word " * 200)))
    assert hello.alive


async def test_an_answer_that_breaks_off_keeps_its_text(hello: Engine) -> None:
    await hello.load("demo")
    with pytest.raises(EngineFailure, match="ran out of memory") as error:
        await collect(hello.chat(ask("fail now")))
    result = error.value.result
    assert result is not None
    assert (result.text, result.generated_tokens) == ("One two three four five", 5)
    assert result.finish_reason == "error"
    assert text_of(await collect(hello.chat(ask("hi")))) == HELLO


async def test_an_unforeseen_error_is_one_sentence_and_a_traceback_in_the_log(hello: Engine) -> None:
    await hello.load("demo")
    with pytest.raises(EngineFailure) as error:
        await collect(hello.chat(ask("raise now")))
    assert error.value.message == (
        f"The engine failed with RuntimeError; its log ({hello.log_path}) has the details."
    )
    assert hello.log_path is not None
    log = hello.log_path.read_text()
    assert "Traceback" in log
    assert "RuntimeError: a bug" in log
    assert text_of(await collect(hello.chat(ask("hi")))) == HELLO


async def test_noise_of_libraries_goes_to_the_log(hello: Engine) -> None:
    await hello.load("demo")
    assert text_of(await collect(hello.chat(ask("make noise")))) == "Quiet here."
    assert hello.log_path is not None
    log = hello.log_path.read_text()
    assert "noise on stdout" in log
    assert "noise on stderr" in log


async def test_a_script_that_is_not_right_is_named(script: Callable[[str], Path]) -> None:
    engine = await Engine.start(script('[[reply]]\ntext = "x"\ncolour = 1\n'))
    with pytest.raises(EngineFailure, match="unknown field `colour`") as error:
        await engine.load("demo")
    assert error.value.kind == "usage"
    await engine.close()


async def test_events_that_nobody_asked_for(hello: Engine, script: Callable[[str], Path]) -> None:
    news: list[AnyEvent] = []
    hello.on_event = news.append
    await hello.load("demo")
    events = await collect(hello.chat(ask("fall back")))
    assert [event.drafter.state for event in news if isinstance(event, DrafterChanged)] == ["fell_back"]
    inside = [event for event in events if isinstance(event, DrafterChanged)]
    assert [event.drafter.reason for event in inside] == ["its acceptance is too low"]
    assert not any(isinstance(event, Notice) for event in news)


# ---------------------------------------------------------------------------- ends


async def test_close_ends_the_process_and_leaves_nothing() -> None:
    engine = await Engine.start(SCRIPTS / "hello.toml")
    gone: list[str] = []
    engine.on_gone = gone.append
    folder = engine.socket_path.parent if engine.socket_path else Path()
    await engine.close()
    await engine.close()
    assert not engine.alive
    assert gone == []
    assert not folder.exists()
    assert not is_running(engine.pid)
    with pytest.raises(EngineGone):
        await engine.models()


async def test_kill_9_is_told_at_once_to_everyone_who_waits(endless: Engine) -> None:
    gone: list[str] = []
    endless.on_gone = gone.append
    chat = endless.chat(ask("go"))
    async for event in chat:
        if isinstance(event, Text):
            break
    loading = asyncio.create_task(endless.pull("demo"))
    os.kill(endless.pid, signal.SIGKILL)
    async with asyncio.timeout(5):
        with pytest.raises(EngineGone, match=r"The engine was killed by signal 9 \(SIGKILL\); its log is /"):
            await collect(chat)
        with pytest.raises(EngineGone):
            await loading
    assert not endless.alive
    assert endless.exit_reason == "was killed by signal 9 (SIGKILL)"
    assert len(gone) == 1
    with pytest.raises(EngineGone, match="killed by signal 9"):
        await endless.load("demo")


async def test_an_engine_that_exits_in_mid_answer(script: Callable[[str], Path]) -> None:
    engine = await Engine.start(script('[[reply]]\ntext = "a b c"\nact = [{ at = 2, do = "exit" }]\n'))
    await engine.load("demo")
    with pytest.raises(EngineGone, match="ended with exit code 3"):
        await collect(engine.chat(ask("go")))
    await engine.close()


async def test_sigterm_ends_the_engine(endless: Engine) -> None:
    task = asyncio.create_task(collect(endless.chat(ask("go"))))
    await endless.switch_drafter("two")
    os.kill(endless.pid, signal.SIGTERM)
    # Either the stopped answer still arrives or the connection ends first; the process is gone after both.
    with contextlib.suppress(EngineGone):
        assert isinstance((await task)[-1], Finished)
    await eventually(lambda: not endless.alive)
    assert endless.exit_reason == "ended"


@pytest.mark.parametrize("busy", [False, True])
async def test_the_engine_does_not_outlive_a_killed_client(busy: bool, tmp_path: Path) -> None:
    program = f"""
import asyncio
from pathlib import Path
from dspark_tui.engine.client import Engine
from dspark_tui.engine.protocol import Message, Text

async def main():
    engine = await Engine.start(Path({str(SCRIPTS / "slow.toml")!r}))
    if {busy}:
        await engine.load("demo")
        async for event in engine.chat([Message("user", "go")]):
            if isinstance(event, Text):
                break
    print(engine.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    assert client.stdout is not None
    pid = int(await client.stdout.readline())
    assert is_running(pid)
    client.kill()
    await client.wait()
    await eventually(lambda: not is_running(pid))


async def test_a_stuck_step_does_not_keep_the_process(script: Callable[[str], Path]) -> None:
    engine = await Engine.start(
        script('[[reply]]\ntext = "a b"\nact = [{ at = 1, do = "stall", seconds = 600 }]\n')
    )
    await engine.load("demo")
    async with asyncio.timeout(20):
        async for event in engine.chat(ask("go")):
            if isinstance(event, Text):
                break
        await engine.close()
    assert not is_running(engine.pid)


async def test_an_engine_does_not_outlive_a_close_that_is_given_up() -> None:
    engine = await Engine.start(SCRIPTS / "hello.toml")
    os.kill(engine.pid, signal.SIGSTOP)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await eventually(lambda: not is_running(engine.pid))


def working_directory(pid: int) -> Path:
    return Path(f"/proc/{pid}/cwd").readlink()


async def test_a_working_directory_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    # The engine goes on from the root, since libraries fail to be imported without a directory.
    engine = await Engine.start(SCRIPTS / "hello.toml")
    try:
        assert len(await engine.models()) == 2
        if sys.platform == "linux":
            assert working_directory(engine.pid) == Path("/")
    finally:
        await engine.close()


async def test_what_the_engine_started_ends_with_it() -> None:
    program = """
import subprocess
from dspark_tui.engine.host import end_children
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
end_children()
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    pid = int(await process.stdout.readline())
    assert await process.wait() == 0
    await eventually(lambda: not is_running(pid))


async def test_an_engine_that_does_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn.sys, "executable", "/bin/false")
    with pytest.raises(EngineGone, match=r"ended with exit code 1 before it was ready; its log is /"):
        await Engine.start()
    monkeypatch.setattr(spawn.sys, "executable", "/nowhere/python")
    with pytest.raises(EngineGone, match=r"could not be started: .*No such file"):
        await Engine.start()


async def eventually(true: Callable[[], bool]) -> None:
    """Until `true` says so; within five seconds."""
    for _ in range(250):
        if true():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not become true")


def is_running(pid: int) -> bool:
    """Whether a process runs; one that ended and was not collected by its parent does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return state.strip() != "" and not state.strip().startswith("Z")


# ---------------------------------------------------------------------------- several clients


async def test_attach_gives_what_came_after_and_goes_on_live(endless: Engine) -> None:
    assert endless.socket_path is not None
    other = await Engine.connect(endless.socket_path)
    mine = asyncio.create_task(collect(endless.chat(ask("go"), answer="shared")))
    async with asyncio.timeout(10):
        await wait_for_texts(other, "shared", 3)
        attached: list[AnyEvent] = []
        async for event in other.attach("shared", after=1):
            attached.append(event)
            if isinstance(event, Text) and event.seq == 6:
                await other.stop("shared")
        first = await mine
    seqs = [event.seq for event in attached if isinstance(event, Text)]
    assert seqs == list(range(2, len(seqs) + 2))
    assert isinstance(attached[-1], Finished)
    assert attached[-1].result == first[-1].result if isinstance(first[-1], Finished) else False
    assert text_of([e for e in first if isinstance(e, Text) and e.seq > 1]) == text_of(attached)
    # And after its end, all of it again.
    again = await collect(other.attach("shared"))
    assert text_of(again) == text_of(first)
    assert isinstance(again[-1], Finished)
    with pytest.raises(EngineFailure, match="does not know an answer 'never'"):
        await collect(other.attach("never"))
    await other.close()
    assert endless.alive


async def wait_for_texts(engine: Engine, answer: str, count: int) -> None:
    """Until an answer has that many texts; it may not have begun yet."""
    while True:
        with contextlib.suppress(EngineFailure):
            async with contextlib.aclosing(engine.attach(answer)) as events:
                async for event in events:
                    if isinstance(event, Text) and event.seq + 1 >= count:
                        return
        await asyncio.sleep(0.01)


async def test_clients_do_not_get_each_others_answers(hello: Engine) -> None:
    assert hello.socket_path is not None
    other = await Engine.connect(hello.socket_path)
    news: list[AnyEvent] = []
    other.on_event = news.append
    async with asyncio.timeout(10):
        models, loaded = await asyncio.gather(other.models(), hello.load("demo"))
        assert len(models) == 2
        info = await hello.switch_drafter("dspark")
        events, _ = await asyncio.gather(collect(hello.chat(ask("hi"))), other.models())
    assert loaded.model.name == "fake small"
    assert text_of(events) == HELLO
    # What concerns everybody is told to everybody.
    assert [type(event).__name__ for event in news] == ["Loaded", "DrafterChanged"]
    assert isinstance(news[1], DrafterChanged)
    assert news[1].drafter == info
    await other.close()


async def test_a_name_is_given_once(hello: Engine) -> None:
    await hello.load("demo")
    await collect(hello.chat(ask("hi"), answer="same"))
    with pytest.raises(EngineFailure, match="name each anew"):
        await collect(hello.chat(ask("hi"), answer="same"))


async def test_an_answer_without_a_name_is_refused(hello: Engine) -> None:
    await hello.load("demo")
    raw_chat = encode(Chat(5, answer="", messages=ask("hi")))
    _, refused = await raw(hello, encode(Hello(1, protocol=PROTOCOL_VERSION, client="raw")), raw_chat)
    assert isinstance(refused, Failed)
    assert (refused.id, refused.kind) == (5, "usage")
    assert text_of(await collect(hello.chat(ask("hi"))))  # and holds nobody up


async def test_a_slow_reader_loses_metrics_and_nothing_else(script: Callable[[str], Path]) -> None:
    words = 60_000
    engine = await Engine.start(
        script(f'context = 1000000\n[[reply]]\ntext = " {"x" * 7}"\nrepeat = {words}\n')
    )
    assert engine.socket_path is not None
    reader, writer = await asyncio.open_unix_connection(str(engine.socket_path), limit=MAX_LINE_BYTES)
    assert isinstance(writer.transport, asyncio.Transport)
    writer.transport.pause_reading()
    for command in (
        Hello(1, protocol=PROTOCOL_VERSION, client="slow"),
        Load(2, model="demo"),
        Chat(3, "big", ask("go")),
    ):
        writer.write(encode(command))
    async with asyncio.timeout(60):
        await wait_for_texts(engine, "big", 1)
        await collect_long(engine.attach("big"))
        writer.transport.resume_reading()
        texts: list[Text] = []
        rounds = 0
        while True:
            event = decode_event(await reader.readline())
            if isinstance(event, Text):
                texts.append(event)
            rounds += isinstance(event, Rounds)
            if isinstance(event, Finished):
                break
    writer.close()
    await engine.close()
    assert [text.seq for text in texts] == list(range(words))
    assert "".join(text.text for text in texts) == event.result.text
    assert 0 < rounds < words


async def collect_long(events: AsyncIterator[AnyEvent]) -> None:
    async for _ in events:
        pass


# ---------------------------------------------------------------------------- strangers


async def test_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "peer_uid", lambda connection: os.getuid() + 1)
    service = service_module.Service(lambda: host_module.fake_backend(SCRIPTS / "hello.toml"))
    path = tmp_path / "s"
    server = await asyncio.start_unix_server(service.serve, sock=host_module.listen(path))
    reader, writer = await asyncio.open_unix_connection(str(path))
    with contextlib.suppress(OSError):
        writer.write(encode(Hello(1, protocol=PROTOCOL_VERSION, client="stranger")))
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    server.close()
    assert not service.over.is_set()


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(OSError, match="open to other users"):
        host_module.listen(tmp_path / "s")


async def raw(engine: Engine, *lines: bytes) -> list[AnyEvent]:
    """What the engine says to raw lines, one event for each."""
    assert engine.socket_path is not None
    reader, writer = await asyncio.open_unix_connection(str(engine.socket_path))
    events = []
    for line in lines:
        writer.write(line)
        events.append(decode_event(await asyncio.wait_for(reader.readline(), 5)))
    writer.close()
    return events


async def test_hello_comes_first(hello: Engine) -> None:
    refused, welcome = await raw(
        hello, encode(ListModels(4)), encode(Hello(5, protocol=PROTOCOL_VERSION, client="raw"))
    )
    assert isinstance(refused, Failed)
    assert (refused.id, refused.kind) == (4, "usage")
    assert isinstance(welcome, Welcome)
    assert welcome.pid == hello.pid


async def test_another_protocol_is_told_ours_and_gets_nothing(hello: Engine) -> None:
    welcome, refused = await raw(
        hello, encode(Hello(1, protocol=PROTOCOL_VERSION + 1, client="new")), encode(ListModels(2))
    )
    assert isinstance(welcome, Welcome)
    assert welcome.protocol == PROTOCOL_VERSION
    assert isinstance(refused, Failed)


async def test_nonsense_is_answered_and_harms_nobody(hello: Engine) -> None:
    greeting = encode(Hello(1, protocol=PROTOCOL_VERSION, client="raw"))
    _, unknown, garbage = await raw(hello, greeting, b'{"type":"fly","id":77}\n', b"\xff\x00nonsense\n")
    assert isinstance(unknown, Failed)
    assert (unknown.id, unknown.kind) == (77, "usage")
    assert isinstance(garbage, Failed)
    assert garbage.id == 0
    assert len(await hello.models()) == 2


async def test_a_probe_that_says_nothing_does_not_end_the_engine(hello: Engine) -> None:
    assert hello.socket_path is not None
    _, writer = await asyncio.open_unix_connection(str(hello.socket_path))
    writer.close()
    await writer.wait_closed()
    assert len(await hello.models()) == 2
    assert hello.alive


async def test_connect_where_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(EngineGone, match="No engine answers at"):
        await Engine.connect(tmp_path / "s")
