"""Is the text the same with every drafter? `dspark-tui run` on 30 prompts, greedy, token for token.

    python benchmarks/lossless.py [--tokens 200] [--prompts 30]

Each arm is compared with `-d none`. The last arm changes the drafter every 40 tokens, in this process.
Exits 1 when any reply differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import demo

PROMPTS = Path(__file__).with_name("prompts.txt").read_text(encoding="utf-8").splitlines()
DRAFTED = ("dspark", "dflash", "dflash2")


def run(prompt: str, drafter: str, tokens: int) -> dict[str, Any]:
    """One `dspark-tui run --json`."""
    command = [sys.executable, "-m", "dspark_tui", "run", "--demo", "--json", "-d", drafter]
    done = subprocess.run(
        [*command, "--max-tokens", str(tokens), prompt], check=True, capture_output=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    """Compare and print one line a prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    options = parser.parse_args()
    session = demo.open_demo()
    different = 0
    total = 0
    for number, prompt in enumerate(PROMPTS[: options.prompts]):
        golden = run(prompt, "none", options.tokens)["token_ids"]
        arms = {drafter: run(prompt, drafter, options.tokens)["token_ids"] for drafter in DRAFTED}
        session.select("none")
        ids = demo.chat_prompt(session, prompt)
        switched = demo.answer(session, ids, options.tokens, switch_every=40)
        arms["switched"] = list(switched.tokens)
        sources = len({stat.source for stat in switched.rounds})
        verdicts = {arm: tokens == golden for arm, tokens in arms.items()}
        different += sum(not equal for equal in verdicts.values())
        total += len(golden)
        marks = "  ".join(f"{arm} {'=' if equal else 'DIFFERS'}" for arm, equal in verdicts.items())
        print(
            f"{number:>3}  {len(golden):>4} tokens  {marks}  ({sources} drafters)  {prompt[:40]}", flush=True
        )
    compared = 4 * min(options.prompts, len(PROMPTS))
    print(f"\n{compared - different} of {compared} replies equal to -d none ({total} tokens a drafter)")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
