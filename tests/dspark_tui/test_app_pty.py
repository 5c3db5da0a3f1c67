"""The program in a terminal: bytes written, signals, leaving, the first frame."""

import os
import signal
from pathlib import Path

import pytest
from pty_run import CSI, POINTER, Terminal, gone, write_script

from dspark_tui.crash import report_text

HOSTILE = r"""
rate = 0
chunk = 5
[[model]]
name = "fake \u001b]0;owned\u0007[/b]"
detail = "\u001b[2Jx"
size_bytes = 5
[[drafter]]
name = "dspark"
method = "dspark"
[[drafter]]
name = "bad\u001b[2J"
method = "dflash"
usable = false
reason = "\u001b]52;c;SEVMTE8=\u0007 [@click=app.quit]x[/]"
[load]
notes = ["note \u001b]52;c;SEVMTE8=\u0007 [/x]"]
[[reply]]
thinking = "hm \u001b]2;t\u0007"
text = '''
ESC \u001b]52;c;SEVMTE8=\u0007 C1 \u009b31;5m DCS \u001bPq BEL \u0007 [/] [@click=app.quit]quit[/]

`code \u001b[?1049l` and &#27;[2J and &#x202e;over \u202e

| a \u001b[2J | b |
|---|---|
| [/red] \u001b]8;;x\u0007 | y |

```\u001b[2J
fence \u001b[2J
```

<script>alert(1)</script> end of it
'''
[[reply]]
text = "second"
[[reply.act]]
at = 0
do = "fail"
message = "broke \u001b]52;c;SEVMTE8=\u0007 [/b]"
"""

ECHO = """
[[reply]]
text = "Here it is."
"""

PLAIN = """
rate = 200
[[drafter]]
name = "dspark"
method = "dspark"
[[reply]]
text = "An answer of some words.\\n\\n"
repeat = 400
"""


def test_no_control_sequence_of_others_reaches_the_terminal(tmp_path: Path, home: Path) -> None:
    # TOML's literal strings keep the escapes: put the characters in.
    script = HOSTILE.replace("'''", '"""')
    with Terminal("--fake", write_script(tmp_path, script), columns=120, rows=40) as terminal:
        terminal.until("note ␛]52")
        terminal.send(b"\x1b[200~pasted \x1b]52;c;SEVMTE8=\x07 text\x1b[201~\r")
        terminal.until("end of it")
        terminal.until_quiet()
        for keys in (b"\x0f", b"\x1bOQ", b"\x1b", b"\x1bOR", b"\x1b", b"\x1bOP", b"\x1b", b"again\r"):
            terminal.send(keys)
            terminal.until_quiet(0.4)
        assert "failed" in terminal.text
        assert "␛]52;c;SEVMTE8=␇" in terminal.text
        assert "⟨U+009B⟩31;5m" in terminal.text
        assert "⟨U+202E⟩" in terminal.text
        assert "<script>alert(1)</script>" in terminal.text
        assert "[@click=app.quit]quit[/]" in terminal.text
        rest = POINTER.sub(b"", CSI.sub(b"", terminal.raw))
        assert b"\x1b" not in rest
        assert b"\x07" not in rest
        assert b"\x1b[2J" not in terminal.raw
        assert b"\x1b[?1049l" not in terminal.raw
        decoded = rest.decode("utf-8")
        assert not [sign for sign in decoded if 0x80 <= ord(sign) < 0xA0 or 0x202A <= ord(sign) <= 0x202E]
        terminal.send(b"\x11")
        assert terminal.wait() == 0


def test_nothing_is_written_when_idle(tmp_path: Path, home: Path) -> None:
    script = '[[reply]]\ntext = "Short."\n[[drafter]]\nname = "dspark"\nmethod = "dspark"\n'
    with Terminal("--fake", write_script(tmp_path, script), columns=120, rows=36) as terminal:
        terminal.until("○ ready")
        terminal.until_quiet(1.0)
        assert terminal.read(3.0) == b""
        terminal.send(b"hello\r")
        terminal.until("Short.")
        terminal.until_quiet(1.0)
        assert terminal.read(3.0) == b""


def test_sigterm_restores_the_terminal_and_ends_the_engine(tmp_path: Path, home: Path) -> None:
    with Terminal("--fake", write_script(tmp_path, PLAIN)) as terminal:
        terminal.until("○ ready")
        terminal.send(b"go\r")
        terminal.until("An answer of some words")
        engine = terminal.children()
        assert engine
        os.kill(terminal.pid, signal.SIGTERM)
        assert terminal.wait() == 130
        assert b"\x1b[?1049l" in terminal.raw
        assert b"\x1b[?25h" in terminal.raw
        assert gone(engine)


def test_sighup_leaves_at_once(tmp_path: Path, home: Path) -> None:
    with Terminal("--fake", write_script(tmp_path, PLAIN)) as terminal:
        terminal.until("○ ready")
        terminal.send(b"go\r")
        terminal.until("An answer of some words")
        engine = terminal.children()
        assert engine
        os.kill(terminal.pid, signal.SIGHUP)
        assert terminal.wait(2.0) == 129
        assert gone(engine)


def test_a_killed_engine_is_told_and_restarted(tmp_path: Path, home: Path) -> None:
    with Terminal("--fake", write_script(tmp_path, PLAIN), columns=100, rows=30) as terminal:
        terminal.until("○ ready")
        terminal.send(b"go\r")
        terminal.until("An answer of some words")
        [engine] = terminal.children()
        os.kill(engine, signal.SIGKILL)
        terminal.until("SIGKILL")
        terminal.until("restarts it")
        terminal.until_quiet()
        terminal.raw = b""
        terminal.send(b"r")
        terminal.until("○ ready")
        assert terminal.children() != [engine]
        terminal.send(b"more\r")
        terminal.until("generating")
        # Stop, let it become idle, leave by ctrl+c twice.
        terminal.send(b"\x03")
        terminal.until("stopped")
        terminal.until_quiet()
        terminal.send(b"\x03\x03")
        assert terminal.wait() == 0


def test_the_first_frame_comes_quickly(tmp_path: Path, home: Path) -> None:
    """A loose bound, since tests share the machine; benchmarks/first_paint.py measures it."""
    script = write_script(tmp_path, PLAIN)
    with Terminal("--fake", script) as terminal:
        terminal.until("Ask something", seconds=3.0)


@pytest.mark.parametrize("keys", [b"\x04\x04", b"\x11"])
def test_leaving(tmp_path: Path, home: Path, keys: bytes) -> None:
    with Terminal("--fake", write_script(tmp_path, PLAIN)) as terminal:
        terminal.until("○ ready")
        engine = terminal.children()
        terminal.send(keys)
        assert terminal.wait() == 0
        assert b"\x1b[?1049l" in terminal.raw
        assert gone(engine)


def test_fg_draws_the_whole_screen_again(tmp_path: Path, home: Path) -> None:
    with Terminal("--fake", write_script(tmp_path, '[[reply]]\ntext = "A"\n')) as terminal:
        terminal.until("ready")
        terminal.until_quiet()
        terminal.send(b"\x1a")
        _, status = os.waitpid(terminal.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        terminal.read(0.1)
        terminal.raw = b""
        os.kill(terminal.pid, signal.SIGCONT)
        for words in ("dspark-tui", "Enter sends", "Ask something", "ready"):
            terminal.until(words)
        terminal.send(b"\x11")
        assert terminal.wait() == 0


def test_bytes_that_are_not_utf_8_are_replaced(tmp_path: Path, home: Path) -> None:
    with Terminal("--fake", write_script(tmp_path, ECHO)) as terminal:
        terminal.until("ready")
        terminal.send(b"caf\xe9 \xff\xc3")
        terminal.until("caf\ufffd \ufffd")
        terminal.send(b"\x1b[200~pasted \xe9\x1b[201~\r")
        terminal.until("Here it is.")
        terminal.send(b"\x11")
        assert terminal.wait() == 0


def test_a_fault_in_a_thread_of_the_library_is_one_sentence(home: Path) -> None:
    said = report_text(["Traceback", "ValueError: [/b] broke"])
    log = home / "log" / "crash.log"
    assert said == f"dspark-tui: the program broke (ValueError: [/b] broke); please report it with {log}."
    assert log.read_text() == "Traceback\nValueError: [/b] broke\n"
