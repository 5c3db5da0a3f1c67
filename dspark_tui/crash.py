"""A fault of the program itself: a sentence for the user, the traceback in a file."""

from __future__ import annotations

import io
import traceback
from collections.abc import Iterable

from rich.console import Console, RenderableType
from textual.worker import WorkerFailed

from dspark_tui.paths import log_dir
from dspark_tui.text.sanitize import one_line


def report(error: BaseException | None) -> str:
    """Write the traceback to the log folder and say where it is."""
    if error is None:
        return "dspark-tui: the program broke for an unknown reason; please report it."
    cause = error.error if isinstance(error, WorkerFailed) else error
    what = one_line(f"{type(cause).__name__}: {cause}", 200)
    return _written(what, "".join(traceback.format_exception(cause)))


def report_text(renderables: Iterable[RenderableType]) -> str:
    """The same for a fault that is only there as something to draw."""
    console = Console(file=io.StringIO(), width=200, markup=False, emoji=False, highlight=False)
    console.print(*renderables, sep="\n")
    details = console.file.getvalue()  # type: ignore[attr-defined]
    last = [line for line in details.splitlines() if line.strip()][-1:]
    return _written(one_line("".join(last), 200), details)


def _written(what: str, details: str) -> str:
    path = log_dir() / "crash.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(details, encoding="utf-8", errors="replace")
    except OSError as failure:
        return f"dspark-tui: the program broke ({what}); the details could not be written: {failure}."
    return f"dspark-tui: the program broke ({what}); please report it with {path}."
