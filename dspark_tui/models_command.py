"""`dspark-tui models`: what is on this machine, and fetching more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from dspark_tui.cli import DONE, FAILED, STOPPED, USAGE
from dspark_tui.engine.client import Engine, EngineError, EngineFailure
from dspark_tui.engine.protocol import JSON_SCHEMA_VERSION, ModelRow
from dspark_tui.interrupts import Interrupts, Stopped
from dspark_tui.narration import Narrator
from dspark_tui.output import Output, OutputGone
from dspark_tui.text.format import size
from dspark_tui.text.sanitize import cells, one_line

GAP = "  "


def list_models(*, as_json: bool, fake: Path | None) -> int:
    """Print the models on this machine. Returns the exit code."""

    async def work(engine: Engine, narrator: Narrator) -> None:
        models = await engine.models()
        if as_json:
            Output().json({"schema": JSON_SCHEMA_VERSION, "models": models})
        else:
            Output().text(models_table(models))

    return asyncio.run(_with_engine(fake, work))


def pull(model: str, *, fake: Path | None) -> int:
    """Fetch a model, with a bar on a terminal and one line at the end. Returns the exit code."""

    async def work(engine: Engine, narrator: Narrator) -> None:
        pulled = await engine.pull(model, lambda event: narrator.progress(model, event))
        got = f"fetched {size(pulled.fetched_bytes)}" if pulled.fetched_bytes else "it was there already"
        narrator.say(f"{pulled.model}: {got}, in {pulled.path}")

    return asyncio.run(_with_engine(fake, work))


def models_table(models: Sequence[ModelRow]) -> str:
    """One line a model, in columns: name, size, place, what it is, and why it cannot be used."""
    rows = [("NAME", "SIZE", "WHERE", "DETAIL")]
    for model in models:
        detail = model.detail if model.usable else f"{model.detail} (not usable: {model.reason})"
        rows.append(
            (
                one_line(model.name),
                size(model.size_bytes) if model.size_bytes is not None else "n/a",
                one_line(model.where),
                one_line(detail),
            )
        )
    widths = [max(cells(row[column]) for row in rows) for column in range(3)]
    lines = []
    for row in rows:
        padded = [text + " " * (width - cells(text)) for text, width in zip(row, widths, strict=False)]
        lines.append(GAP.join([*padded, row[3]]).rstrip())
    return "\n".join(lines) + "\n"


async def _with_engine(fake: Path | None, work: Callable[[Engine, Narrator], Awaitable[None]]) -> int:
    narrator = Narrator()

    async def with_engine() -> None:
        engine = await Engine.start(fake)
        try:
            await work(engine, narrator)
        finally:
            narrator.clear()
            await engine.close()

    with Interrupts() as interrupts:
        try:
            await interrupts.unless_asked(with_engine())
        except Stopped:
            narrator.say("Stopped.")
            return STOPPED
        except OutputGone:
            return DONE
        except OSError as error:
            narrator.say(f"The list cannot be written: {error.strerror or error}.")
            return FAILED
        except EngineError as error:
            narrator.say(error.message)
            return USAGE if isinstance(error, EngineFailure) and error.kind == "usage" else FAILED
    return DONE
