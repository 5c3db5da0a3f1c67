"""`run` and `models` as a user sees them: stdout, stderr, exit codes of a process on the fake engine."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "data" / "fake"
HELLO = "Hello! This is a scripted answer, and it has exactly as many words as it needs.\n"
PROGRAM = [sys.executable, "-m", "dspark_tui"]
pytestmark = pytest.mark.usefixtures("home")


def run(*arguments: str, script: str = "hello.toml", given: bytes = b"") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `dspark-tui run`."""
    done = subprocess.run(
        [*PROGRAM, "run", "--fake", str(SCRIPTS / script), *arguments],
        input=given,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def start(*arguments: str, script: Path, **more: Any) -> subprocess.Popen[bytes]:
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
    command = [*PROGRAM, "run", "--fake", str(script), *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """An answer that takes an hour."""
    path = tmp_path / "endless.toml"
    path.write_text('rate = 40\ncontext = 1000000\n[[reply]]\ntext = "word "\nrepeat = 144000\n')
    return path


# ---------------------------------------------------------------------------- answers


def test_the_answer_is_all_there_is_on_stdout() -> None:
    assert run("hi") == (0, HELLO, "")


def test_an_answer_that_ends_with_a_newline_gets_no_second_one(tmp_path: Path) -> None:
    script = tmp_path / "s.toml"
    script.write_text('[[reply]]\ntext = "a line\\n"\n')
    assert run("hi", script=str(script)) == (0, "a line\n", "")


@pytest.mark.parametrize("arguments", [["-"], []])
def test_the_prompt_comes_from_a_pipe(arguments: list[str]) -> None:
    code, out, err = run(*arguments, given="please think, é\n".encode())
    assert (code, out, err) == (0, "Thought about it.\n", "")


def test_a_pipe_that_is_not_utf8_is_read_and_it_says_so() -> None:
    code, out, err = run(given=b"think \xff\xfe")
    assert (code, out) == (0, "Thought about it.\n")
    assert err == "dspark-tui: The prompt has bytes that are not UTF-8; they were replaced.\n"


def test_an_empty_pipe_is_an_empty_prompt() -> None:
    assert run("-", given=b"\n") == (2, "", "dspark-tui: The prompt is empty; give some text.\n")


def test_json_is_the_contract() -> None:
    code, out, err = run("--json", "--rounds", "--max-tokens", "13", "hi")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    value = json.loads(out)
    # Four, eight and one token in the first three rounds; the fixed clock says 22.5 ms a round.
    stat = {"source": "demo-dflash2", "drafted": 7, "draft_ms": 2.0, "verify_ms": 20.0, "other_ms": 0.5}
    assert value.pop("tokens_per_second") == pytest.approx(9 / 0.045)
    assert value.pop("accept_length") == pytest.approx(13 / 3)
    assert value == {
        "schema": 1,
        "text": "Hello! This is a scripted answer, and it has exactly as many words",
        "thinking": "",
        "token_ids": list(range(13)),
        "prompt_tokens": 1,
        "reused_tokens": 0,
        "generated_tokens": 13,
        "finish_reason": "length",
        "model": "fake small",
        "drafter": {"name": "demo-dflash2", "method": "dflash2", "state": "active", "reason": ""},
        "seconds": {"load": 0.25, "prefill": 0.0, "first_token": 0.0225, "decode": 0.045},
        "error": None,
        "rounds": [
            stat | {"accepted": 3, "committed": 4},
            stat | {"accepted": 7, "committed": 8},
            stat | {"accepted": 0, "committed": 1},
        ],
    }


def test_json_tells_thinking_apart_and_leaves_rounds_out() -> None:
    value = json.loads(run("--json", "think")[1])
    assert (value["thinking"], value["text"]) == ("The user wants thought.", "Thought about it.")
    assert "rounds" not in value


def test_thinking_never_shows_on_stdout() -> None:
    assert run("think") == (0, "Thought about it.\n", "")
    assert run("--think", "think") == (0, "Thought about it.\n", "")
    value = json.loads(run("--json", "--no-think", "think")[1])
    assert (value["thinking"], value["text"]) == ("", "Thought about it.")


def test_an_answer_that_never_left_the_thinking_says_so() -> None:
    code, out, err = run("--max-tokens", "2", "think")
    assert (code, out) == (0, "")
    assert err == (
        "dspark-tui: It ended while it was thinking, so there is no answer; --json shows the thinking.\n"
    )


def test_a_stop_text_ends_the_answer_before_it() -> None:
    assert run("--stop", " words as", "--stop", "exactly", "hi") == (
        0,
        "Hello! This is a scripted answer, and it has \n",
        "",
    )


def test_an_effort_that_the_model_does_not_know_is_refused() -> None:
    code, out, err = run("--effort", "high", "hi")
    assert (code, out) == (2, "")
    assert err == "dspark-tui: fake small knows no levels of effort; leave the effort out.\n"


def test_rounds_are_a_table_on_stderr() -> None:
    code, out, err = run("--rounds", "-d", "dspark", "--max-tokens", "4", "hi")
    assert (code, out) == (0, "Hello! This is a\n")
    assert [line.split() for line in err.splitlines()] == [
        ["round", "source", "drafted", "accepted", "committed", "draft", "ms", "verify", "ms", "other", "ms"],
        ["1", "demo-dspark", "4", "2", "3", "2.00", "20.00", "0.50"],
        ["2", "demo-dspark", "4", "2", "1", "2.00", "20.00", "0.50"],
    ]


def test_a_drafter_that_falls_back_is_told() -> None:
    code, out, err = run("fall back")
    assert (code, out) == (0, "One two three four five six seven eight nine ten.\n")
    assert err == (
        "dspark-tui: The drafter demo-dflash2 fell back to plain decoding: its acceptance is too low.\n"
    )
    drafter = json.loads(run("--json", "fall back")[1])["drafter"]
    assert (drafter["state"], drafter["reason"]) == ("fell_back", "its acceptance is too low")


def test_a_pipe_gets_control_characters_as_they_are() -> None:
    assert run("escape")[1] == "red \x1b[31mtext\x1b[0m and a bell \x07.\n"


# ---------------------------------------------------------------------------- failures


def test_a_wrong_drafter_is_a_usage_error_with_the_allowed_names() -> None:
    assert run("-d", "eagle", "hi") == (
        2,
        "",
        "dspark-tui: There is no drafter 'eagle'; this model knows none, demo-dflash2, demo-dspark, "
        "demo-dflash, refused.\n",
    )


def test_a_prompt_longer_than_the_context_is_a_usage_error() -> None:
    code, out, err = run("word " * 300)
    assert (code, out) == (2, "")
    assert "the model takes 200" in err
    assert run("--json", "word " * 300)[:2] == (2, "")


def test_an_answer_that_breaks_off_keeps_its_text() -> None:
    assert run("fail") == (1, "One two three four five\n", "dspark-tui: The device ran out of memory.\n")
    code, out, _ = run("--json", "fail")
    value = json.loads(out)
    assert code == 1
    assert (value["finish_reason"], value["generated_tokens"]) == ("error", 5)
    assert value["error"] == "The device ran out of memory."


def test_an_engine_that_is_killed_in_mid_answer() -> None:
    code, out, err = run("crash")
    assert (code, out) == (1, "One two three four five\n")
    assert err.startswith("dspark-tui: The engine was killed by signal 9 (SIGKILL); its log is ")
    assert err.count("\n") == 1
    code, out, err = run("--json", "--rounds", "crash")
    value = json.loads(out)
    assert code == 1
    assert (value["finish_reason"], value["text"]) == ("error", "One two three four five")
    # What nobody counted is not made up.
    assert (value["token_ids"], value["generated_tokens"], value["tokens_per_second"]) == (None, None, None)
    assert [stat["committed"] for stat in value["rounds"]] == [4, 1]


def test_a_load_that_fails_is_one_sentence() -> None:
    code, out, err = run("-m", "fake broken", "hi")
    assert (code, out) == (1, "")
    assert err == "dspark-tui: The model fake broken cannot be used: config.json is missing.\n"


# ---------------------------------------------------------------------------- signals and pipes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_answer_and_keeps_the_text(number: signal.Signals, endless: Path) -> None:
    process = start("hi", script=endless)
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 4096)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert (first + out).decode().split() == ["word"] * len((first + out).split())
    assert (first + out).endswith(b"\n")
    assert err == b"dspark-tui: Stopped.\n"


def test_a_stopped_answer_in_json(tmp_path: Path) -> None:
    script = tmp_path / "long.toml"
    act = 'act = [{ at = 3, do = "notice", message = "Three tokens." }]'
    script.write_text(f'rate = 40\ncontext = 1000000\n[[reply]]\ntext = "word "\nrepeat = 144000\n{act}\n')
    process = start("--json", "hi", script=script)
    assert process.stderr is not None
    assert process.stderr.readline() == b"dspark-tui: Three tokens.\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    value = json.loads(out)
    assert value["finish_reason"] == "stopped"
    assert value["text"].split() == ["word"] * value["generated_tokens"]
    assert 3 <= value["generated_tokens"] < 40
    assert err == b"dspark-tui: Stopped.\n"


def test_the_second_signal_ends_a_stuck_answer(tmp_path: Path) -> None:
    script = tmp_path / "stuck.toml"
    script.write_text('[[reply]]\ntext = "a b"\nact = [{ at = 1, do = "stall", seconds = 600 }]\n')
    process = start("hi", script=script)
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 4096) == b"a"
    began = time.monotonic()
    while process.poll() is None and time.monotonic() - began < 10:
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    process.communicate(timeout=10)
    assert process.returncode == 130


def test_a_reader_that_leaves_is_no_failure(endless: Path) -> None:
    process = start("hi", script=endless)
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 10)
    process.stdout.close()
    assert process.wait(timeout=20) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_stdout_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "only-read"
    path.touch()
    with path.open("rb") as readable:
        process = start("hi", script=SCRIPTS / "hello.toml", stdout=readable)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert err == b"dspark-tui: The answer cannot be written: Bad file descriptor.\n"


# ---------------------------------------------------------------------------- on a terminal


def read_all(master: int, until: bytes | None = None) -> bytes:
    """What a terminal is sent, up to its end or to `until`."""
    seen = b""
    while until is None or until not in seen:
        ready, _, _ = select.select([master], [], [], 20)
        assert ready, f"nothing more after {seen!r}"
        try:
            piece = os.read(master, 65536)
        except OSError:  # Linux says so at the end of a terminal
            piece = b""
        if not piece:
            break
        seen += piece
    return seen


def test_a_terminal_gets_no_control_characters_of_the_model() -> None:
    master, terminal = pty.openpty()
    process = start("escape", script=SCRIPTS / "hello.toml", stdout=terminal)
    os.close(terminal)
    shown = read_all(master).decode()
    _, err = process.communicate(timeout=20)
    os.close(master)
    assert (process.returncode, err) == (0, b"")
    assert shown == "red ␛[31mtext␛[0m and a bell ␇.\r\n"


def test_stderr_on_a_terminal_shows_progress_and_a_summary(tmp_path: Path) -> None:
    script = tmp_path / "hello.toml"
    # Long enough for a line that is drawn at most ten times a second.
    text = (SCRIPTS / "hello.toml").read_text().replace("parts = 4", "parts = 4\ndelay = 0.1")
    script.write_text(text)
    master, terminal = pty.openpty()
    process = start("hi", script=script, stderr=terminal)
    os.close(terminal)
    shown = read_all(master).decode()
    out, _ = process.communicate(timeout=20)
    os.close(master)
    assert out.decode() == HELLO
    assert "demo: read [" in shown
    # What remains on the screen: the status line is wiped, the summary stays.
    assert shown.split("\x1b[K")[-1] == (
        "dspark-tui: 16 tokens, 177.8 tok/s, drafter demo-dflash2, accept length 4.00\r\n"
    )


def test_a_signal_while_loading_stops_at_once() -> None:
    master, terminal = pty.openpty()
    process = start("hi", script=SCRIPTS / "slow.toml", stderr=terminal)
    os.close(terminal)
    read_all(master, until=b"read [")
    process.send_signal(signal.SIGINT)
    shown = read_all(master).decode()
    out, _ = process.communicate(timeout=20)
    os.close(master)
    assert (process.returncode, out) == (130, b"")
    assert shown.endswith("dspark-tui: Stopped before the answer began.\r\n")


# ---------------------------------------------------------------------------- models


def models(*arguments: str, script: Path = SCRIPTS / "hello.toml", stderr: Any = subprocess.PIPE) -> Any:
    command = [*PROGRAM, "models", *arguments, "--fake", str(script)]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, timeout=60, check=False)


def test_models_list() -> None:
    done = models("list")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == (
        "NAME         SIZE    WHERE   DETAIL\n"
        "fake small   4.0 KB  script  llama, 4-bit\n"
        "fake broken  10 B    script  fake (not usable: config.json is missing)\n"
    )


def test_models_list_in_json() -> None:
    value = json.loads(models("list", "--json").stdout)
    assert value["schema"] == 1
    assert value["models"][1] == {
        "name": "fake broken",
        "where": "script",
        "size_bytes": 10,
        "detail": "fake",
        "usable": False,
        "reason": "config.json is missing",
    }


def test_models_pull_says_one_line_without_a_terminal() -> None:
    done = models("pull", "demo")
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr == b"dspark-tui: demo: fetched 1.0 MB, in (fake)\n"


def test_models_pull_shows_bytes_and_rate_on_a_terminal(tmp_path: Path) -> None:
    script = tmp_path / "pull.toml"
    script.write_text('[pull]\ntotal = 2000000\nparts = 10\ndelay = 0.05\n[[reply]]\ntext = "x"\n')
    master, terminal = pty.openpty()
    done = models("pull", "demo", script=script, stderr=terminal)
    os.close(terminal)
    shown = read_all(master).decode()
    os.close(master)
    assert done.returncode == 0
    assert "of 2.0 MB" in shown
    assert "MB/s" in shown
    assert shown.split("\x1b[K")[-1] == "dspark-tui: demo: fetched 2.0 MB, in (fake)\r\n"


def test_a_pull_that_fails_is_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "pull.toml"
    script.write_text('[pull]\nfail = "There is no network."\n[[reply]]\ntext = "x"\n')
    done = models("pull", "demo", script=script)
    assert (done.returncode, done.stderr) == (1, b"dspark-tui: There is no network.\n")
