"""What the benchmarks share: the demo pair in this process, and running one answer."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark_tui.engine.blas import use_fast_blas

BLAS = use_fast_blas()

from dspark_tui.engine.answer_text import AnswerText  # noqa: E402
from dspark_tui.engine.backend import Control  # noqa: E402
from dspark_tui.engine.calibration import calibrate  # noqa: E402
from dspark_tui.engine.generator import generate  # noqa: E402
from dspark_tui.engine.loader import load_target, make_session  # noqa: E402
from dspark_tui.engine.models.resolve import ResolvedModel, pull  # noqa: E402
from dspark_tui.engine.protocol import Sampling, SwitchDrafter  # noqa: E402
from dspark_tui.engine.reply import Reply  # noqa: E402
from dspark_tui.engine.sampling import Sampler  # noqa: E402
from dspark_tui.engine.session import Session  # noqa: E402

REFERENCE = Path(__file__).parent.parent / "tests" / "data" / "reference.json"
GREEDY = Sampling()
ARMS = ("none", "dspark", "dflash", "dflash2")
DRAFTING = ("lookup", "auto")


def reference() -> list[dict[str, Any]]:
    """The ten prompts with their known replies and rounds."""
    data: list[dict[str, Any]] = json.loads(REFERENCE.read_text(encoding="utf-8"))
    return data


def open_demo() -> Session:
    """The demo pair, fetched when it is not on this machine."""
    return open_target(pull("demo", lambda *_: None)[0])


def open_target(model: ResolvedModel, whole: bool = False) -> Session:
    """The target `model` with its drafters, its costs measured. `whole`: every block is drafted whole."""
    target, config = load_target(model, lambda *_: None)
    session, _ = make_session(target, config, None, lookup=False)
    session.adaptive = not whole
    calibrate(target, session.costs, 10)
    return session


def answer(
    session: Session,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: Sampling = GREEDY,
    switch_every: int = 0,
    order: Sequence[str] = ARMS,
) -> Reply:
    """One answer from an empty cache with the active drafter; `switch_every` tokens the next of `order`."""
    session.reset()
    tokenizer = session.target.tokenizer
    reply = Reply(prompt, max_tokens, tokenizer.eos_token_ids, AnswerText(tokenizer, []))
    control = Control()
    switched = 0
    for _ in generate(session, reply, Sampler(sampling, sampling.seed or 0), control):
        if switch_every and len(reply.tokens) // switch_every > switched:
            switched += 1
            control.offer_switch(SwitchDrafter(switched, order[switched % len(order)]))
    return reply


def chat_prompt(session: Session, text: str) -> list[int]:
    """The prompt of a one-message chat."""
    messages = [{"role": "user", "content": text}]
    ids: list[int] = session.target.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return ids


def stamp() -> str:
    """A line on the machine, for a table's foot."""
    load = Path("/proc/loadavg")
    busy = load.read_text().split()[0] if load.exists() else "n/a"
    return f"BLAS: {BLAS.name}; load average {busy}; {time.strftime('%Y-%m-%d %H:%M')}"


def spread(values: Sequence[float]) -> str:
    """Median with the range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
