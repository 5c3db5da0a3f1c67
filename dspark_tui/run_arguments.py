"""The arguments of the chat and of `dspark-tui run`, and how they are read."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dspark_tui.engine.protocol import Sampling


def whole(low: int, what: str) -> Callable[[str], int]:
    """Reads whole numbers from `low`; `what` says so."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"is {text!r}; give {what}")
        return value

    return parse


def number(text: str) -> float:
    """Reads a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"is {text!r}; give a number")
    return value


def bits(*allowed: int) -> Callable[[str], int]:
    """Reads one of these numbers of bits; 0 quantises nothing."""

    def parse(text: str) -> int:
        if text not in map(str, allowed):
            *known, last = [f"{value} (as stored)" if value == 0 else str(value) for value in allowed]
            raise argparse.ArgumentTypeError(f"is {text!r}; give {', '.join(known)} or {last}")
        return int(text)

    return parse


def bias(text: str) -> tuple[int, float]:
    """Reads `ID=VALUE`."""
    token, sign, value = text.partition("=")
    if not sign or not token.isdecimal() or not token.isascii():
        raise argparse.ArgumentTypeError(f"is {text!r}; give a token's id and a number, such as 42=-5")
    return int(token), number(value)


def some_text(text: str) -> str:
    """Reads a text that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; give some text")
    return text


def add_answer_options(run: argparse.ArgumentParser) -> None:
    """What the answer is to be like: its length, its sampling, its thinking."""
    run.add_argument(
        "--max-tokens",
        type=whole(1, "a whole number from 1"),
        metavar="N",
        help="end after N tokens; without it at the model's context",
    )
    run.add_argument(
        "--stop",
        type=some_text,
        action="append",
        default=[],
        metavar="TEXT",
        help="end before TEXT (may be given several times; does not count in thinking)",
    )
    run.add_argument(
        "--think",
        action=argparse.BooleanOptionalAction,
        help="let the model think first, or not; without it as its chat template does",
    )
    run.add_argument(
        "--effort", metavar="LEVEL", help="how much it thinks, where its chat template knows levels"
    )
    _add_sampling(run)


def _add_sampling(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--top-p",
        type=number,
        default=1.0,
        metavar="P",
        help="keep the likeliest tokens of this mass, up to 1",
    )
    run.add_argument(
        "--top-k",
        type=whole(0, "a whole number, 0 to keep every token"),
        default=0,
        metavar="K",
        help="keep the K likeliest tokens",
    )
    run.add_argument(
        "--min-p",
        type=number,
        default=0.0,
        metavar="P",
        help="drop tokens less likely than this part of the likeliest",
    )
    run.add_argument(
        "--repetition-penalty",
        type=number,
        default=1.0,
        metavar="R",
        help="weaken tokens that prompt or answer hold; 1 changes nothing",
    )
    run.add_argument(
        "--presence-penalty",
        type=number,
        default=0.0,
        metavar="R",
        help="taken off the logits of tokens that the answer holds, -2 to 2",
    )
    run.add_argument(
        "--frequency-penalty",
        type=number,
        default=0.0,
        metavar="R",
        help="the same for every time that it holds them, -2 to 2",
    )
    run.add_argument(
        "--logit-bias",
        type=bias,
        action="append",
        default=[],
        metavar="ID=VALUE",
        help="added to the logit of token ID, -100 to 100 (may be given several times)",
    )
    run.add_argument(
        "--seed",
        type=whole(0, "a whole number from 0"),
        metavar="S",
        help="make sampling repeatable, with the same drafter",
    )


def add_engine_options(parser: argparse.ArgumentParser, default: str | None) -> None:
    """How target and drafter are loaded."""
    parser.add_argument(
        "--drafter-bits",
        type=bits(4, 8, 0),
        default=default,
        metavar="BITS",
        help="quantise the drafter to 4 or 8 bits, 0 keeps it as stored; without it as suits this machine",
    )
    parser.add_argument(
        "--kv-bits",
        type=bits(4, 8),
        default=default,
        metavar="BITS",
        help="keep the context's keys and values in 4 or 8 bits; without it whole",
    )
    parser.add_argument(
        "--lookup",
        action=argparse.BooleanOptionalAction,
        default=default,
        help="let lookup draft in the drafter's place where the text repeats itself, or not",
    )


def sampling_of(options: argparse.Namespace) -> Sampling:
    """The sampling that was asked for; its ranges are not checked."""
    from dspark_tui.engine.protocol import Sampling

    return Sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=dict(options.logit_bias),
    )


def biased_twice(biases: Sequence[tuple[int, float]]) -> int | None:
    """A token that has two biases, or None."""
    seen: set[int] = set()
    for token, _ in biases:
        if token in seen:
            return token
        seen.add(token)
    return None
