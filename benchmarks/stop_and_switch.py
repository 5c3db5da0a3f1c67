"""How soon an answer obeys: from a stop to idle, and from a switch to the new drafter's first round.

    python benchmarks/stop_and_switch.py [--repeats 5]

On the demo pair in this process, asked from another thread at random moments of an answer. Times are given
beside the length of the rounds around them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable

import demo

from dspark_tui.engine.answer_text import AnswerText
from dspark_tui.engine.backend import Control
from dspark_tui.engine.generator import RoundStep, SwitchStep, generate
from dspark_tui.engine.protocol import SwitchDrafter
from dspark_tui.engine.reply import Reply
from dspark_tui.engine.sampling import Sampler
from dspark_tui.engine.session import Session

PROMPT = "Explain how rainbows form, in detail."


def asked(session: Session, start: str, ask: Callable[[Control], None]) -> tuple[float, float, float]:
    """Milliseconds until the answer stopped or the drafter changed, until the first round after that, and
    of a round (the median of this answer's)."""
    session.select(start)
    session.reset()
    tokenizer = session.target.tokenizer
    prompt = demo.chat_prompt(session, PROMPT)
    reply = Reply(prompt, 150, tokenizer.eos_token_ids, AnswerText(tokenizer, []))
    control, at = Control(), [0.0]

    def later() -> None:
        at[0] = time.perf_counter()
        ask(control)

    timer = threading.Timer(1.0 + random.random(), later)
    steps = generate(session, reply, Sampler(demo.GREEDY, 0), control)
    obeyed = first = None
    for step in steps:
        if isinstance(step, RoundStep) and step.stat is None:
            timer.start()
        if isinstance(step, SwitchStep) and step.command is not None and obeyed is None:
            obeyed = time.perf_counter()
        elif isinstance(step, RoundStep) and obeyed is not None and first is None:
            first = time.perf_counter()
            control.stop()
    ended = time.perf_counter()
    timer.join()
    obeyed, first = obeyed or ended, first or ended
    round_ms = statistics.median(s.draft_ms + s.verify_ms + s.other_ms for s in reply.rounds)
    return (obeyed - at[0]) * 1e3, (first - at[0]) * 1e3, round_ms


def report(name: str, rows: list[tuple[float, float, float]]) -> None:
    """One line of the table: medians with the ranges."""
    obeyed, first, rounds = zip(*rows, strict=True)
    print(f"{name:<34}{demo.spread(obeyed):>28}{demo.spread(first):>28}{demo.spread(rounds):>28}")


def main() -> None:
    """Run it and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    session = demo.open_demo()
    for name in demo.ARMS:
        session.select(name)
        demo.answer(session, demo.chat_prompt(session, PROMPT), 12)
    print(f"{'milliseconds':<34}{'obeyed after':>28}{'next round done after':>28}{'a round takes':>28}")
    for start in ("none", "dspark", "dflash2"):
        rows = [asked(session, start, Control.stop) for _ in range(options.repeats)]
        report(f"stop ({start})", rows)
    for start, wanted in (("none", "dflash2"), ("dspark", "dflash2"), ("dflash2", "none")):
        command = SwitchDrafter(1, wanted)
        rows = [
            asked(session, start, lambda control, command=command: control.offer_switch(command))
            for _ in range(options.repeats)
        ]
        report(f"switch, {start} to {wanted}", rows)
    print(f"\n{demo.stamp()}")


if __name__ == "__main__":
    main()
