"""Taking rejected rows out of a target's cache, one strategy per cache kind.

Afterwards the cache is what step-by-step decoding of the kept tokens would have left. The engine asks one
object, `Undo`; a kind without a strategy is refused by name, since a cache that only pretends to be trimmed
gives wrong text.
"""

from dspark_tui.engine.rollback.parts import problem
from dspark_tui.engine.rollback.snapshot import Snapshot
from dspark_tui.engine.rollback.undo import Undo

__all__ = ["Snapshot", "Undo", "problem"]
