"""Tokens a second of every drafter on the demo pair, and of mlx-lm's own loop, as ratios in one run.

    python benchmarks/demo_speed.py [--prompts 0,1,2] [--repeats 1] [--tokens 200]

All arms run on one machine in one process and take turns prompt by prompt, each first in turn, so that
other load hits them alike. Decode only: from the first token to the last.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import demo

BASE = "none"


def stream_generate(model: Any, tokenizer: Any, prompt: list[int], tokens: int) -> tuple[list[int], float]:
    """mlx-lm's reply and its decode rate, timed as ours is: first token to last."""
    from mlx_lm import stream_generate

    out: list[int] = []
    at = first = time.perf_counter()
    for response in stream_generate(model, tokenizer, prompt, max_tokens=tokens):
        at = time.perf_counter()
        first = at if not out else first
        out.append(response.token)
    return out, (len(out) - 1) / (at - first)


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", default="", help="comma-separated numbers, all ten by default")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--whole", action="store_true", help="draft whole blocks, whatever they cost")
    options = parser.parse_args()

    session = demo.open_demo()
    target, taps = session.target, session.target.taps
    arms = [*demo.ARMS, *demo.DRAFTING, "mlx-lm"]
    chosen = [int(i) for i in options.prompts.split(",") if i] or range(len(demo.reference()))
    rows = [demo.reference()[i] for i in chosen]

    def run(arm: str, prompt: list[int]) -> tuple[list[int], float, float]:
        if arm == "mlx-lm":
            # The same weights at the same place in memory, which alone is worth a few percent; no taps.
            target.tap(())
            tokens, rate = stream_generate(target.model, target.tokenizer, prompt, options.tokens)
            target.tap(taps)
            return tokens, rate, 1.0
        session.adaptive = not options.whole
        session.select(arm)
        reply = demo.answer(session, prompt, options.tokens)
        return list(reply.tokens), reply.tokens_per_second or 0.0, reply.accept_length or 0.0

    for arm in arms:  # warm up: first use of each shape
        run(arm, rows[0]["prompt_ids"])
    rates: dict[str, list[float]] = {arm: [] for arm in arms}
    accepts: dict[str, list[float]] = {arm: [] for arm in arms}
    equal: dict[str, int] = dict.fromkeys(arms, 0)
    print(f"{'prompt':<34}" + "".join(f"{arm:>12}" for arm in arms))
    for number, row in enumerate(rows):
        seen: dict[str, list[float]] = {arm: [] for arm in arms}
        for repeat in range(options.repeats):
            shift = (number + repeat) % len(arms)
            for arm in arms[shift:] + arms[:shift]:
                tokens, rate, accept = run(arm, row["prompt_ids"])
                seen[arm].append(rate)
                equal[arm] += tokens == row["output_ids"][: options.tokens]
                if repeat == 0:
                    accepts[arm].append(accept)
        for arm in arms:
            rates[arm].append(statistics.median(seen[arm]))
        print(
            f"{row['kind'] + ': ' + row['prompt'][:26]:<34}" + "".join(f"{rates[a][-1]:>12.1f}" for a in arms)
        )
    runs = len(rows) * options.repeats

    def ratio(arm: str, kind: str | None = None) -> str:
        pairs = [
            rate / base
            for rate, base, row in zip(rates[arm], rates[BASE], rows, strict=True)
            if kind in (None, row["kind"])
        ]
        return f"{statistics.mean(pairs):.2f}" if pairs else "n/a"

    print()
    for name, cells in (
        ("mean tokens/s", [f"{statistics.mean(rates[a]):.1f}" for a in arms]),
        ("accept length (mean of prompts)", [f"{statistics.mean(accepts[a]):.2f}" for a in arms]),
        ("ratio to none (mean of prompts)", [ratio(a) for a in arms]),
        ("  code prompts", [ratio(a, "code") for a in arms]),
        ("  chat prompts", [ratio(a, "chat") for a in arms]),
        ("  math prompts", [ratio(a, "math") for a in arms]),
        ("replies equal to the reference", [f"{equal[a]}/{runs}" for a in arms]),
    ):
        print(f"{name:<34}" + "".join(f"{cell:>12}" for cell in cells))
    plain = [own / theirs for own, theirs in zip(rates[BASE], rates["mlx-lm"], strict=True)]
    print(f"\nnone against mlx-lm's stream_generate: {demo.spread(plain)}\n{demo.stamp()}")


if __name__ == "__main__":
    main()
