"""Train a DSpark, DFlash or DFlash 2 drafter for a small target: see docs/training.md.

python tools/train_drafter.py TARGET OUT --method dspark --seconds 600 --measure
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number from {least}")
        return value

    return parse


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def _taps(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a list of layer numbers such as 1,8,14") from None


def arguments() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(
        prog="train_drafter.py",
        description="Train a drafter for a small target on dialogues that the target writes itself.",
        epilog="Ctrl+c saves; the same command with --resume goes on. docs/training.md tells more.",
    )
    parser.add_argument("target", help="demo, a folder, or a repository in the Hugging Face cache")
    parser.add_argument("out", type=Path, help="folder of the drafter")
    parser.add_argument("--method", choices=("dspark", "dflash", "dflash2"), default="dspark")
    parser.add_argument("--resume", action="store_true", help="go on from the state in OUT/training")
    end = parser.add_argument_group("how long (the first to come ends the training)")
    end.add_argument("--steps", type=_whole(0), help="steps of training (default 2000 without --seconds)")
    end.add_argument("--seconds", type=_positive, help="seconds of training")
    shape = parser.add_argument_group("the drafter")
    shape.add_argument("--drafts", type=_whole(1), default=7, help="tokens proposed a round (7)")
    shape.add_argument("--layers", type=_whole(1), default=3, help="layers (3)")
    shape.add_argument(
        "--taps", type=_taps, help="tapped layers of the target, such as 1,8,14 (five, spread)"
    )
    shape.add_argument("--rank", type=_whole(1), default=64, help="rank of Markov head or selector (64)")
    shape.add_argument("--top-k", type=_whole(1), default=16, help="candidates of the selector (16)")
    shape.add_argument("--intermediate", type=_whole(1), help="width of the MLP (the target's)")
    shape.add_argument("--mask-token", type=_whole(0), help="id of the mask token (an unused special token)")
    learning = parser.add_argument_group("learning")
    learning.add_argument(
        "--loss", choices=("ce", "mixed"), help="backbone's loss (ce for dflash, else mixed)"
    )
    learning.add_argument("--batch", type=_whole(1), default=16, help="dialogues a step (16)")
    learning.add_argument("--anchors", type=_whole(1), default=64, help="blocks a dialogue and step (64)")
    learning.add_argument("--rate", type=_positive, default=6e-4, help="highest learning rate (6e-4)")
    learning.add_argument("--gamma", type=_positive, default=4.0, help="how far ahead drafts count (4)")
    learning.add_argument("--seed", type=_whole(0), default=0)
    data = parser.add_argument_group("dialogues")
    data.add_argument("--data", type=Path, help="their folder, which drafters can share (OUT/training/data)")
    data.add_argument("--dialogues", type=_whole(1), default=4096, help="how many to write (4096)")
    data.add_argument("--length", type=_whole(32), default=512, help="tokens of each (512)")
    data.add_argument("--part", type=_whole(1), default=512, help="how many are written at once (512)")
    data.add_argument("--held-out", type=_whole(1), default=64, help="how many more to measure on (64)")
    data.add_argument("--prompts", type=Path, help="file of users' messages, one a line, to be answered")
    telling = parser.add_argument_group("telling and saving")
    telling.add_argument("--report", type=_whole(1), default=50, help="steps between two lines (50)")
    telling.add_argument("--save", type=_positive, default=120.0, help="seconds between two saves (120)")
    telling.add_argument(
        "--measure", "--eval", action="store_true", help="end with the engine's accept length"
    )
    telling.add_argument("--measure-tokens", type=_whole(2), default=128, help="tokens an answer then (128)")
    telling.add_argument("--measure-prompts", type=Path, help="file of prompts to measure on, one a line")
    return parser


class _Interrupt:
    """Ctrl+c and a polite kill are obeyed at the next step; a second one at once."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("Saving after this step; once more stops at once.", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit code: 0 done, 1 failed, 2 a mistake in the arguments, 130 interrupted."""
    options = arguments().parse_args(argv)
    from dspark_tui.engine.blas import use_fast_blas

    use_fast_blas()  # before anything imports mlx
    from training.errors import TrainingError
    from training.run import Run

    interrupt = _Interrupt()
    try:
        finished = Run(options, lambda: interrupt.asked).run()
    except TrainingError as error:
        print(error, file=sys.stderr)
        return USAGE if error.usage else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        print(
            f"{error.filename or 'A file'} cannot be used: {os.strerror(error.errno or 0)}.", file=sys.stderr
        )
        return FAILED
    return DONE if finished else INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
