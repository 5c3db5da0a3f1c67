"""Draw docs/screenshot.svg: the terminal program on the demo pair, in the middle of a real answer.

    python tools/screenshot.py [--size 120x36] [--tokens 150] [--out docs/screenshot.svg] [PROMPT]

A short answer without a drafter comes first, so that the comparison with plain decoding is a measured one.
The figures in the picture are those of the machine that drew it.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Callable
from pathlib import Path

from textual.keys import _character_to_key

from dspark_tui.app import DsparkApp
from dspark_tui.conversation import Phase
from dspark_tui.engine.client import Engine

FIRST_PROMPT = "What is a rainbow?"
PROMPT = "Write a Python function that says whether a number is prime, then explain it step by step."
PATIENCE_SECONDS = 180.0


async def draw(size: tuple[int, int], tokens: int, prompt: str) -> str:
    """The screen as SVG once the answer has `tokens` tokens, or is over before."""
    app = DsparkApp(Engine.start, model="demo", drafter="none")
    controller = app.controller

    def phase_is(phase: Phase) -> Callable[[], bool]:
        return lambda: controller.facts.phase is phase

    async with app.run_test(size=size) as pilot:
        await until(phase_is(Phase.READY))
        await pilot.press(*map(_character_to_key, FIRST_PROMPT), "enter")
        await until(phase_is(Phase.ANSWERING))
        await until(phase_is(Phase.READY))
        await pilot.press("ctrl+t")
        await until(
            lambda: controller.facts.drafter is not None and controller.facts.drafter.method != "none"
        )
        await pilot.press(*map(_character_to_key, prompt), "enter")
        await until(phase_is(Phase.ANSWERING))
        await until(lambda: not controller.facts.busy or controller.metrics().generated >= tokens)
        picture = app.export_screenshot(title="dspark-tui")
    await controller.close()
    # Fonts are named only: a picture should load nothing from elsewhere.
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)


async def until(reached: Callable[[], bool]) -> None:
    """Wait for a state of the program. Raises TimeoutError when it does not come."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def main() -> None:
    """Draw and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", default="120x36")
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("docs/screenshot.svg"))
    parser.add_argument("prompt", nargs="?", default=PROMPT, metavar="PROMPT")
    options = parser.parse_args()
    columns, lines = (int(part) for part in options.size.split("x"))
    picture = asyncio.run(draw((columns, lines), options.tokens, options.prompt))
    options.out.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
