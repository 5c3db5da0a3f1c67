"""What rounding a drafter's weights costs: accept length of the bundled drafters in 8 and 4 bits.

    python benchmarks/requantised.py [--prompts 10] [--tokens 200]

The bundled drafters are stored in 5 bits. Each is loaded as it is stored, and with its layers' products
rounded again; whole blocks are drafted, greedy, on the prompts of the reference. Exits 1 when a reply
differs from the reference.
"""

from __future__ import annotations

import argparse
import sys

import demo

from dspark_tui.engine.loader import load_target, make_session
from dspark_tui.engine.models.resolve import pull

BITS = (0, 8, 4)
NAMES = {0: "as stored", 8: "8 bits", 4: "4 bits"}


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    model, _ = pull("demo", lambda *_: None)
    target, config = load_target(model, lambda *_: None)
    rows = demo.reference()[: options.prompts]
    lengths: dict[tuple[str, int], float] = {}
    different = 0
    for bits in BITS:
        session, _ = make_session(target, config, None, bits, lookup=False)
        session.adaptive = False  # whole blocks: what is accepted does not hang on the clock
        for arm in demo.ARMS[1:]:
            session.select(arm)
            committed = rounds = 0
            for row in rows:
                reply = demo.answer(session, row["prompt_ids"], options.tokens)
                different += reply.tokens != row["output_ids"][: options.tokens]
                drafted = [stat for stat in reply.rounds if stat.drafted]
                committed += sum(stat.committed for stat in drafted)
                rounds += len(drafted)
            lengths[arm, bits] = committed / rounds
            print(f"{arm}, {NAMES[bits]}: {lengths[arm, bits]:.3f}", file=sys.stderr, flush=True)
    print("| drafter | " + " | ".join(f"{NAMES[bits]}" for bits in BITS) + " |")
    print("|---|" + "---|" * len(BITS))
    for arm in demo.ARMS[1:]:
        own = lengths[arm, 0]
        cells = [f"{own:.3f}"]
        cells += [f"{lengths[arm, b]:.3f} ({100 * (lengths[arm, b] / own - 1):+.1f} %)" for b in BITS[1:]]
        print(f"| {arm} | " + " | ".join(cells) + " |")
    tokens = sum(len(row["output_ids"][: options.tokens]) for row in rows)
    print(f"\nAccept length over {len(rows)} prompts, {tokens} tokens; {demo.stamp()}")
    print(f"{different} of {len(rows) * len(lengths)} replies differ from the reference.")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
