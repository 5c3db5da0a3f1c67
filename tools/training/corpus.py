"""The dialogues on disk: written once in parts, taken up again where they broke off, read in batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from training.dialogues import ASSISTANT, USER, Beginning, Turns, write
from training.errors import TrainingError
from training.starters import STARTERS
from training.teacher import Teacher
from training.weights import write_json, write_safetensors

LEAST_SUPERVISED = 14
"""Sequences in which the target wrote fewer tokens teach next to nothing and are left out."""
TEMPERATURES, SHARES = (0.0, 0.5, 0.8, 1.0), (0.3, 0.25, 0.25, 0.2)
STARTED = 0.8
"""Share of dialogues whose user begins with given words; the others begin with the target's own."""
_HELD_OUT = 1 << 20
"""Number of the held-out part: far from those trained on, whose seeds count from 0."""


@dataclass(frozen=True)
class Order:
    """What is to be written: `dialogues` of `length` tokens in parts of `part`, `held_out` more of them for
    measuring (written greedily). `prompts` are whole messages to answer; without any the target plays the
    user too."""

    dialogues: int
    length: int
    part: int
    held_out: int
    seed: int
    prompts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dialogues:
    """`tokens` `[n, length]` uint32, and which of them the target wrote as the assistant."""

    tokens: NDArray[np.uint32]
    supervised: NDArray[np.bool_]

    def useful(self) -> Dialogues:
        """Those in which the target wrote enough."""
        enough = self.supervised.sum(axis=1) >= LEAST_SUPERVISED
        return Dialogues(self.tokens[enough], self.supervised[enough])


def beginnings(
    order: Order, turns: Turns, encode: Callable[[str], list[int]], number: int, count: int, *, greedy: bool
) -> list[Beginning]:
    """How the sequences of part `number` start. Reproducible from the seed."""
    draw = np.random.default_rng([order.seed, number])
    found = []
    for _ in range(count):
        heat = 0.0 if greedy else float(draw.choice(TEMPERATURES, p=SHARES))
        start, words = list(turns.head), ""
        if order.prompts:
            words = order.prompts[int(draw.integers(len(order.prompts)))]
        elif draw.random() < STARTED:
            words = STARTERS[int(draw.integers(len(STARTERS)))]
        start += encode(words) if words else []
        role = USER
        if order.prompts or not turns.to_assistant:
            start, role = start + turns.to_assistant, ASSISTANT
        found.append(Beginning(start, role, heat))
    return found


class Corpus:
    """The dialogues of one target in one folder."""

    def __init__(self, folder: Path, order: Order, turns: Turns, target: str) -> None:
        """`target` says which target writes. Raises `TrainingError` when the folder holds the dialogues of
        another order or target."""
        self.folder, self.order, self.turns = folder, order, turns
        said = asdict(order) | {"turns": asdict(turns), "target": target, "starters": list(STARTERS)}
        digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
        self.digest = digest
        folder.mkdir(parents=True, exist_ok=True)
        note = folder / "dialogues.json"
        if not note.exists():
            write_json(note, {"digest": digest, "length": order.length, "dialogues": order.dialogues})
            return
        try:
            found = json.loads(note.read_text(encoding="utf-8")).get("digest")
        except (ValueError, AttributeError) as error:
            raise TrainingError(f"{note} is damaged; remove the folder or name another (--data).") from error
        if found != digest:
            raise TrainingError(
                f"{folder} holds dialogues of another target or other settings; "
                "name another folder (--data).",
                usage=True,
            )

    def _file(self, number: int) -> Path:
        name = "held-out" if number == _HELD_OUT else f"part-{number:04d}"
        return self.folder / f"{name}.safetensors"

    def _parts(self) -> list[tuple[int, int]]:
        """Number and size of every part, the held-out one first."""
        whole, rest = divmod(self.order.dialogues, self.order.part)
        sizes = [self.order.part] * whole + ([rest] if rest else [])
        return [(_HELD_OUT, self.order.held_out), *enumerate(sizes)]

    def missing(self) -> int:
        """Parts that are still to be written."""
        return sum(not self._file(number).exists() for number, _ in self._parts())

    def write(
        self, teacher: Teacher, encode: Callable[[str], list[int]], tell: Callable[[int, int, int], bool]
    ) -> bool:
        """Write what is missing. `tell(parts, of, tokens)` hears of every part and says whether to go on;
        returns False when it did not."""
        parts = self._parts()
        for done, (number, count) in enumerate(parts, 1):
            if self._file(number).exists():
                continue
            starts = beginnings(self.order, self.turns, encode, number, count, greedy=number == _HELD_OUT)
            seed = self.order.seed * 4096 + number
            tokens, supervised = write(teacher, self.turns, starts, self.order.length, seed)
            arrays = {"tokens": mx.array(tokens), "supervised": mx.array(supervised)}
            write_safetensors(self._file(number), arrays, {})
            mx.clear_cache()
            if not tell(done, len(parts), int(supervised.sum())):
                return False
        return True

    def _read(self, numbers: Sequence[int]) -> Dialogues:
        tokens, supervised = [], []
        for number in numbers:
            file = self._file(number)
            try:
                found: Any = mx.load(str(file))
                tokens.append(np.array(found["tokens"]))
                supervised.append(np.array(found["supervised"]).astype(np.bool_))
            except (RuntimeError, KeyError) as error:
                raise TrainingError(f"{file} is damaged; remove it and run again.") from error
        return Dialogues(np.concatenate(tokens), np.concatenate(supervised))

    def training(self) -> Dialogues:
        """What is learnt from. Raises `TrainingError` when the target wrote too little."""
        found = self._read([number for number, _ in self._parts()[1:]]).useful()
        if not len(found.tokens):
            raise TrainingError(
                f"The target wrote less than {LEAST_SUPERVISED} tokens in every dialogue; give longer ones "
                "(--length) or other prompts (--prompts)."
            )
        return found

    def held_out(self) -> Dialogues:
        """What is measured on; greedy, never learnt from."""
        return self._read([_HELD_OUT])
