"""Arguments: what is right, what is wrong and how that is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dspark_tui import __version__, cli, headless
from dspark_tui.engine.protocol import Message, Sampling
from dspark_tui.ports import AS_IT_COMES, LoadOptions

SCRIPT = Path(__file__).parents[1] / "data" / "fake" / "hello.toml"


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[headless.Request]:
    """What `run` was asked to do; nothing is started."""
    seen: list[headless.Request] = []

    def record(request: headless.Request) -> int:
        seen.append(request)
        return 0

    monkeypatch.setattr(headless, "run", record)
    return seen


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The exit code and stderr of a command line that must print nothing on stdout."""

    def call(*arguments: str) -> tuple[int, str]:
        try:
            code = cli.main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        assert out == ""
        return code, err

    return call


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"dspark-tui {__version__}\n"


def test_run_with_everything(requests: list[headless.Request]) -> None:
    line = (
        "run -m some/model -d dflash2 --max-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 3 --seed 11 --json"
    )
    assert cli.main([*line.split(), "--rounds", "--system", "Be short.", "hi there"]) == 0
    assert requests == [
        headless.Request(
            model="some/model",
            drafter="dflash2",
            messages=[Message("system", "Be short."), Message("user", "hi there")],
            sampling=Sampling(0.5, 0.9, 3, 11),
            max_tokens=7,
            as_json=True,
            rounds=True,
            fake=None,
        )
    ]


def test_run_with_every_wish_about_the_answer(requests: list[headless.Request]) -> None:
    sampling = "--min-p 0.05 --repetition-penalty 1.1 --presence-penalty -0.5 --frequency-penalty 0.25"
    biases = "--logit-bias 42=-5 --logit-bias 0=1.5"
    load = "--drafter-bits 0 --kv-bits 8 --no-lookup -d auto"
    line = f"run --demo {sampling} {biases} {load} --think --effort high --stop END"
    assert cli.main([*line.split(), "--stop", "\n\n", "hi"]) == 0
    (request,) = requests
    assert request.sampling == Sampling(
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={42: -5.0, 0: 1.5},
    )
    assert (request.thinking, request.effort, request.stop) == (True, "high", ("END", "\n\n"))
    assert (request.drafter, request.drafter_bits, request.kv_bits, request.lookup) == ("auto", 0, 8, False)


def test_what_is_not_wished_is_left_to_the_engine(requests: list[headless.Request]) -> None:
    cli.main(["run", "--demo", "hi"])
    cli.main(["run", "--demo", "--no-think", "--lookup", "hi"])
    plain, wished = requests
    assert plain.sampling == Sampling()
    assert (plain.thinking, plain.effort, plain.stop) == (None, None, ())
    assert (plain.drafter_bits, plain.kv_bits, plain.lookup) == (None, None, None)
    assert (wished.thinking, wished.lookup) == (False, True)


def test_run_with_nothing_is_greedy_and_adds_no_system_prompt(requests: list[headless.Request]) -> None:
    cli.main(["run", "--demo", "hi"])
    (request,) = requests
    assert request.model == "demo"
    assert request.drafter is None
    assert request.messages == [Message("user", "hi")]
    assert request.sampling == Sampling(0.0, 1.0, 0, None)
    assert (request.max_tokens, request.as_json, request.rounds) == (None, False, False)


def test_options_may_come_before_the_subcommand(requests: list[headless.Request]) -> None:
    cli.main(["-m", "x", "-d", "none", "run", "hi"])
    assert (requests[0].model, requests[0].drafter) == ("x", "none")


def test_a_fake_engine_needs_no_model(requests: list[headless.Request]) -> None:
    cli.main(["run", "--fake", str(SCRIPT), "hi"])
    assert (requests[0].model, requests[0].fake) == ("demo", SCRIPT)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["run", "hi"],
            "dspark-tui: Say which model: --demo for the small demo model, or -m with a folder "
            "or repository.\n",
        ),
        (["run", "--demo", ""], "dspark-tui: The prompt is empty; give some text.\n"),
        (["run", "--demo", " \n "], "dspark-tui: The prompt is empty; give some text.\n"),
        (
            ["run", "--demo", "-m", "x", "hi"],
            "dspark-tui: --demo is a model already; give either --demo or -m.\n",
        ),
        (
            ["run", "-m", " ", "hi"],
            "dspark-tui: The model is empty; give a folder, a repository in the Hugging Face cache, "
            "or demo.\n",
        ),
        (
            ["run", "--demo", "--temperature", "3", "hi"],
            "dspark-tui: Temperature is 3; give a number from 0 (greedy) to 2.\n",
        ),
        (
            ["run", "--demo", "--temperature", "-0.1", "hi"],
            "dspark-tui: Temperature is -0.1; give a number from 0 (greedy) to 2.\n",
        ),
        (
            ["run", "--demo", "--temperature", "warm", "hi"],
            "dspark-tui run: argument --temperature: is 'warm'; give a number. See dspark-tui run --help.\n",
        ),
        (
            ["run", "--demo", "--temperature", "nan", "hi"],
            "dspark-tui run: argument --temperature: is 'nan'; give a number. See dspark-tui run --help.\n",
        ),
        (
            ["run", "--demo", "--top-p", "0", "hi"],
            "dspark-tui: Top-p is 0; give a number above 0 and up to 1 (1 keeps every token).\n",
        ),
        (
            ["run", "--demo", "--top-k", "-1", "hi"],
            "dspark-tui run: argument --top-k: is '-1'; give a whole number, 0 to keep every token. "
            "See dspark-tui run --help.\n",
        ),
        (
            ["run", "--demo", "--max-tokens", "0", "hi"],
            "dspark-tui run: argument --max-tokens: is '0'; give a whole number from 1. "
            "See dspark-tui run --help.\n",
        ),
        (
            ["run", "--demo", "--seed", str(2**63), "hi"],
            f"dspark-tui: Seed is {2**63}; give a whole number from 0 to 2^63 - 1.\n",
        ),
        (
            ["run", "--demo", "--min-p", "1", "hi"],
            "dspark-tui: Min-p is 1; give a number from 0 (keep every token) and below 1.\n",
        ),
        (
            ["run", "--demo", "--repetition-penalty", "0", "hi"],
            "dspark-tui: Repetition penalty is 0; give a number from 0.1 to 10 (1 changes nothing).\n",
        ),
        (
            ["run", "--demo", "--presence-penalty", "3", "hi"],
            "dspark-tui: Presence penalty is 3; give a number from -2 to 2 (0: off).\n",
        ),
        (
            ["run", "--demo", "--logit-bias", "5=200", "hi"],
            "dspark-tui: Logit bias of token 5 is 200; give a number from -100 to 100.\n",
        ),
        (
            ["run", "--demo", "--logit-bias", "the=2", "hi"],
            "dspark-tui run: argument --logit-bias: is 'the=2'; give a token's id and a number, such as "
            "42=-5. See dspark-tui run --help.\n",
        ),
        (
            ["run", "--demo", "--logit-bias", "5=1", "--logit-bias", "5=2", "hi"],
            "dspark-tui: Token 5 has two logit biases; give one.\n",
        ),
        (
            ["run", "--demo", "--drafter-bits", "5", "hi"],
            "dspark-tui run: argument --drafter-bits: is '5'; give 4, 8 or 0 (as stored). "
            "See dspark-tui run --help.\n",
        ),
        (
            ["run", "--demo", "--kv-bits", "0", "hi"],
            "dspark-tui run: argument --kv-bits: is '0'; give 4 or 8. See dspark-tui run --help.\n",
        ),
        (
            ["run", "--demo", "--stop", "", "hi"],
            "dspark-tui run: argument --stop: is empty; give some text. See dspark-tui run --help.\n",
        ),
        (
            ["run", "--demo", "--effort", " ", "hi"],
            "dspark-tui: The effort is empty; give a level that the model's chat template knows.\n",
        ),
        (
            ["run", "--demo", "-d", "two words", "hi"],
            "dspark-tui: 'two words' is no drafter; give none, dspark, dflash, dflash2, lookup, auto, or a "
            "drafter's name or folder.\n",
        ),
        (
            ["run", "--demo", "-d", "", "hi"],
            "dspark-tui: '' is no drafter; give none, dspark, dflash, dflash2, lookup, auto, or a "
            "drafter's name or folder.\n",
        ),
        (
            ["run", "--demo", "-d", "/nowhere/at/all", "hi"],
            "dspark-tui: There is no drafter folder /nowhere/at/all; give none, dspark, dflash, dflash2, "
            "lookup, auto, a name or a folder.\n",
        ),
        (
            ["run", "--fake", "/nowhere.toml", "hi"],
            "dspark-tui: There is no script /nowhere.toml; give a TOML file (docs/fake-engine.md).\n",
        ),
        (
            ["run", "--demo", "-d", "~no-such-user/x", "hi"],
            "dspark-tui: There is no drafter folder ~no-such-user/x; give none, dspark, dflash, dflash2, "
            "lookup, auto, a name or a folder.\n",
        ),
        (
            ["run", "--demo", "-d", "/" + "x" * 5000, "hi"],
            f"dspark-tui: There is no drafter folder /{'x' * 198}…; give none, dspark, dflash, dflash2, "
            "lookup, auto, a name or a folder.\n",
        ),
        (
            ["run", "--fake", "/" + "x" * 5000, "hi"],
            f"dspark-tui: There is no script /{'x' * 198}…; give a TOML file (docs/fake-engine.md).\n",
        ),
        (
            ["run", "--fake", "/\x1b[31m\udcff", "hi"],
            "dspark-tui: There is no script /\u241b[31m⟨U+DCFF⟩; give a TOML file (docs/fake-engine.md).\n",
        ),
        (["--demo"], "dspark-tui: The chat needs a terminal; use dspark-tui run in pipes and scripts.\n"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], sentence: str, said: Callable[..., tuple[int, str]]
) -> None:
    assert said(*arguments) == (2, sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "--demo"], "dspark-tui: The prompt is empty; give some text.\n"),
        (["--demo"], "dspark-tui: The chat needs a terminal; use dspark-tui run in pipes and scripts.\n"),
    ],
)
def test_a_closed_stdin(
    arguments: list[str],
    sentence: str,
    said: Callable[..., tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert said(*arguments) == (2, sentence)


@pytest.mark.parametrize(
    "arguments", [["walk"], ["run", "--demo", "one", "two"], ["models"], ["models", "eat"], ["--colour"]]
)
def test_what_argparse_refuses_is_one_line(
    arguments: list[str], said: Callable[..., tuple[int, str]]
) -> None:
    code, err = said(*arguments)
    assert code == 2
    assert err.count("\n") == 1
    assert err.endswith("--help.\n")


def test_the_chat_gets_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from dspark_tui import app

    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(cli, "_on_terminal", lambda stream: True)
    monkeypatch.setattr(app, "run", lambda *arguments: seen.append(arguments) or 0)
    assert cli.main(["-m", "some/model", "-d", "dspark", "--temperature", "0.7"]) == 0
    assert cli.main(["--demo"]) == 0
    assert cli.main(["--demo", "--drafter-bits", "4", "--kv-bits", "8", "--no-lookup"]) == 0
    assert seen == [
        ("some/model", "dspark", None, 0.7, AS_IT_COMES),
        ("demo", None, None, 0.0, AS_IT_COMES),
        ("demo", None, None, 0.0, LoadOptions(drafter_bits=4, kv_bits=8, lookup=False)),
    ]


def test_an_option_of_run_before_run_is_explained(said: Callable[..., tuple[int, str]]) -> None:
    sentence = (
        "dspark-tui: there is no command '0.9'; give run or models, and the options of run after run. "
        "See dspark-tui --help.\n"
    )
    assert said("--demo", "--top-p", "0.9") == (2, sentence)


def test_the_chat_refuses_a_temperature_outside_its_range(
    monkeypatch: pytest.MonkeyPatch, said: Callable[..., tuple[int, str]]
) -> None:
    monkeypatch.setattr(cli, "_on_terminal", lambda stream: True)
    sentence = "dspark-tui: Temperature is 2.5; give a number from 0 (greedy) to 2.\n"
    assert said("--demo", "--temperature", "2.5") == (2, sentence)
