"""Arguments and subcommands.

Nothing heavy is imported before a subcommand is chosen and its arguments are right: `--version`, `--help`
and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from dspark_tui import __version__
from dspark_tui.run_arguments import add_answer_options, add_engine_options, biased_twice, number, sampling_of
from dspark_tui.text.sanitize import one_line

if TYPE_CHECKING:
    from dspark_tui.engine.protocol import Sampling

DONE, FAILED, USAGE, STOPPED = 0, 1, 2, 130
"""Exit codes."""

METHODS = ("none", "dspark", "dflash", "dflash2", "lookup", "auto")
DEMO = "demo"


class Parser(argparse.ArgumentParser):
    """argparse with one sentence for a mistake instead of a page."""

    def error(self, message: str) -> NoReturn:
        """Say it and end with exit code 2."""
        no_command = "argument COMMAND: invalid choice: "
        if message.startswith(no_command):
            # Most often the value of an option that the chat does not have.
            given = message.removeprefix(no_command).split(" (choose from")[0]
            message = f"there is no command {given}; give run or models, and the options of run after run"
        end = "" if message.endswith((".", "?")) else "."
        self.exit(USAGE, f"{self.prog}: {one_line(message)}{end} See {self.prog} --help.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `dspark-tui`. Returns the exit code."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        return _dispatch(options)
    except UsageError as error:
        print(f"dspark-tui: {one_line(str(error))}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        # A second one, while Python clears up, ends the process without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return STOPPED


class UsageError(Exception):
    """A request that cannot be right; the text is the sentence for the user."""


def build_parser() -> argparse.ArgumentParser:
    """All arguments and subcommands."""
    parser = Parser(
        prog="dspark-tui",
        description="Chat with a local language model, made fast by speculative decoding.",
    )
    parser.add_argument("--version", action="version", version=f"dspark-tui {__version__}")
    _model_options(parser, None)
    commands = parser.add_subparsers(
        title="subcommands", dest="command", metavar="COMMAND", description="without one, the chat opens"
    )
    _add_run(commands)
    _add_models(commands)
    return parser


def _model_options(parser: argparse.ArgumentParser, default: str | None) -> None:
    """The options that the chat and `run` share. Subcommands leave unset what was given before them."""
    parser.add_argument(
        "-m",
        "--model",
        default=default,
        metavar="MODEL",
        help="a folder, a repository in the Hugging Face cache, or demo",
    )
    parser.add_argument(
        "--demo",
        action="store_true",
        default=False if default is None else default,
        help="the small demo model (same as -m demo)",
    )
    parser.add_argument(
        "-d",
        "--drafter",
        default=default,
        metavar="DRAFTER",
        help=f"{', '.join(METHODS)}, or a drafter's name or folder; without it the best one known",
    )
    parser.add_argument(
        "--temperature",
        type=number,
        default=0.0 if default is None else default,
        metavar="T",
        help="0 (default, greedy) to 2",
    )
    add_engine_options(parser, default)
    _fake_option(parser, default)


def _fake_option(parser: argparse.ArgumentParser, default: str | None) -> None:
    parser.add_argument(
        "--fake",
        type=Path,
        default=default,
        metavar="SCRIPT",
        help="follow a script instead of running a model (docs/fake-engine.md)",
    )


def _add_run(commands: argparse._SubParsersAction[Parser]) -> None:
    run = commands.add_parser(
        "run",
        help="answer one prompt on stdout",
        description="Answer one prompt. The answer goes to stdout, everything else to stderr.",
        epilog="Exit codes: 0 done, 1 failed, 2 wrong use, 130 stopped.",
    )
    _model_options(run, argparse.SUPPRESS)
    add_answer_options(run)
    run.add_argument("--system", metavar="TEXT", help="a system prompt")
    run.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    run.add_argument("--rounds", action="store_true", help="tell every round (in the JSON, or on stderr)")
    run.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="the prompt; - reads it from stdin, and so does a pipe without a PROMPT",
    )


def _add_models(commands: argparse._SubParsersAction[Parser]) -> None:
    models = commands.add_parser(
        "models", help="list and fetch models", description="Models on this machine."
    )
    actions = models.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="what is here", description="List the models on this machine.")
    listing.add_argument("--json", action="store_true", help="print one JSON object")
    _fake_option(listing, argparse.SUPPRESS)
    pull = actions.add_parser("pull", help="fetch a model", description="Fetch a model to this machine.")
    pull.add_argument("model", metavar="MODEL", help="demo, or a repository on Hugging Face")
    _fake_option(pull, argparse.SUPPRESS)


def _dispatch(options: argparse.Namespace) -> int:
    fake: Path | None = options.fake
    if fake is not None and not _there(fake, Path.is_file):
        raise UsageError(f"There is no script {_short(str(fake))}; give a TOML file (docs/fake-engine.md).")
    if options.command == "models":
        from dspark_tui import models_command

        if options.action == "list":
            return models_command.list_models(as_json=options.json, fake=fake)
        return models_command.pull(options.model, fake=fake)
    if options.demo and options.model is not None:
        raise UsageError("--demo is a model already; give either --demo or -m.")
    model: str | None = DEMO if options.demo else options.model
    if model is None and fake is not None:
        model = DEMO
    if model is not None and not model.strip():
        raise UsageError(
            "The model is empty; give a folder, a repository in the Hugging Face cache, or demo."
        )
    _check_drafter(options.drafter)
    if options.command == "run":
        return _run(options, model, fake)
    if not (_on_terminal(sys.stdin) and _on_terminal(sys.stdout)):
        raise UsageError("The chat needs a terminal; use dspark-tui run in pipes and scripts.")
    from dspark_tui.engine.protocol import Sampling

    _check_sampling(Sampling(options.temperature))
    from dspark_tui import app
    from dspark_tui.ports import LoadOptions

    loading = LoadOptions(options.drafter_bits, options.kv_bits, options.lookup)
    return app.run(model, options.drafter, fake, options.temperature, loading)


def _there(path: Path, is_kind: Callable[[Path], bool]) -> bool:
    """Whether there is such a file or folder; not when the system refuses the name itself."""
    try:
        return is_kind(path.expanduser())
    except (OSError, RuntimeError, ValueError):  # a name too long, an unknown user's home, a NUL byte
        return False


def _short(text: str) -> str:
    """What was given, short enough for a sentence."""
    return text if len(text) <= 200 else text[:199] + "…"


def _on_terminal(stream: TextIO | None) -> bool:
    """Whether the stream is a terminal; one that was closed (`<&-`) is None in Python."""
    return stream is not None and stream.isatty()


def _check_drafter(drafter: str | None) -> None:
    if drafter is None:
        return
    folder = drafter.startswith(("/", "./", "../", "~"))
    if folder and not _there(Path(drafter), Path.is_dir):
        raise UsageError(
            f"There is no drafter folder {_short(drafter)}; give {', '.join(METHODS)}, a name or a folder."
        )
    if not folder and (not drafter or any(sign.isspace() or not sign.isprintable() for sign in drafter)):
        raise UsageError(
            f"{_short(drafter)!r} is no drafter; give {', '.join(METHODS)}, or a drafter's name or folder."
        )


def _check_sampling(sampling: Sampling) -> None:
    if problem := sampling.problem():
        raise UsageError(problem[0].upper() + problem[1:])


def _run(options: argparse.Namespace, model: str | None, fake: Path | None) -> int:
    if model is None:
        raise UsageError(
            "Say which model: --demo for the small demo model, or -m with a folder or repository."
        )
    if (token := biased_twice(options.logit_bias)) is not None:
        raise UsageError(f"Token {token} has two logit biases; give one.")
    sampling = sampling_of(options)
    _check_sampling(sampling)
    if options.effort is not None and not options.effort.strip():
        raise UsageError("The effort is empty; give a level that the model's chat template knows.")
    from dspark_tui import headless
    from dspark_tui.engine.protocol import Message

    prompt = options.prompt
    if prompt is None and _on_terminal(sys.stdin):
        raise UsageError("Give a prompt, or pipe one in.")
    if prompt is None or prompt == "-":
        prompt = headless.read_prompt()
    if not prompt.strip():
        raise UsageError("The prompt is empty; give some text.")
    messages = [Message("system", options.system)] if options.system else []
    request = headless.Request(
        model=model,
        drafter=options.drafter,
        messages=[*messages, Message("user", prompt)],
        sampling=sampling,
        max_tokens=options.max_tokens,
        as_json=options.json,
        rounds=options.rounds,
        fake=fake,
        stop=tuple(options.stop),
        thinking=options.think,
        effort=options.effort,
        drafter_bits=options.drafter_bits,
        kv_bits=options.kv_bits,
        lookup=options.lookup,
    )
    return headless.run(request)
