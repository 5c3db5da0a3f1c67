"""The steps: one batch, its loss and gradient, AdamW; and the state that a run is resumed from."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from dspark_tui.engine.precision import on_cpu
from training.batches import Batch, choose, make_batch
from training.corpus import Dialogues
from training.design import Design
from training.errors import TrainingError
from training.losses import Objective, Rows, loss, proposing_rows
from training.teacher import Teacher
from training.weights import Weights, fresh, write_safetensors

BETAS, CLIP, FINAL_RATE = (0.9, 0.95), 1.0, 0.02
STATE_FORMAT = 1


@dataclass(frozen=True)
class Recipe:
    """How a drafter is trained. It ends at `steps` or after `seconds` of training, whichever comes first;
    one of them may be None. The learning rate warms up over `warm_up` of the run and falls along a cosine."""

    objective: Objective
    steps: int | None
    seconds: float | None
    batch: int = 16
    anchors: int = 64
    rate: float = 6e-4
    warm_up: float = 0.04
    seed: int = 0


@dataclass(frozen=True)
class Scores:
    """Of one pass: `loss`; `first`, the share of anchors whose first draft is what the target wrote;
    `length`, tokens that a round would commit there, the bonus included."""

    loss: float
    first: float
    length: float


def rate_at(recipe: Recipe, done: float) -> float:
    """Learning rate when the share `done` (0 to 1) of the run is over."""
    if done < recipe.warm_up:
        return recipe.rate * max(done, recipe.warm_up / 50) / recipe.warm_up
    along = min(1.0, (done - recipe.warm_up) / (1 - recipe.warm_up))
    return recipe.rate * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * along)))


class Trainer:
    """A drafter being trained. Every step depends on the seed and its number alone, so that a resumed run
    goes on as an uninterrupted one would."""

    def __init__(self, design: Design, recipe: Recipe, teacher: Teacher, dialogues: Dialogues) -> None:
        self.design, self.recipe, self.teacher, self.dialogues = design, recipe, teacher, dialogues
        self.rows = np.arange(len(dialogues.tokens))
        self.step, self.seconds, self._warm = 0, 0.0, False
        self.weights: Weights = fresh(design, recipe.seed)
        self.optimiser = optim.AdamW(recipe.rate, list(BETAS), weight_decay=0.0, bias_correction=True)
        self.optimiser.init(self.weights)
        ages = mx.arange(design.drafts) / -recipe.objective.gamma
        self._importance = mx.exp(ages)
        self._compute = mx.float32 if on_cpu() else mx.bfloat16
        self._learn = self._compiled()

    # ------------------------------------------------------------------ a step

    @property
    def done(self) -> float:
        """Share of the run that is over, 0 to 1."""
        shares = [0.0]
        if self.recipe.steps is not None:
            shares.append(self.step / max(1, self.recipe.steps))
        if self.recipe.seconds is not None:
            shares.append(self.seconds / max(1e-9, self.recipe.seconds))
        return min(1.0, max(shares))

    def _loss(self, weights: Weights, *batch: mx.array) -> tuple[mx.array, mx.array]:
        """The loss and `[sequences, anchors, drafts]`: 1 where a draft is right."""
        taps, blocks, anchors, labels, previous, counted, logits = batch
        low = {name: value.astype(self._compute) for name, value in weights.items()}
        hidden = proposing_rows(self.design, low, taps, blocks, anchors)
        importance = (counted * self._importance).reshape(-1)
        rows = Rows(
            labels.reshape(-1), previous.reshape(-1), logits.reshape(-1, logits.shape[-1]), importance
        )
        total, drafts = loss(self.design, self.recipe.objective, low, self.teacher.head, hidden, rows)
        return total, (drafts.reshape(labels.shape) == labels).astype(mx.float32)

    def _compiled(self) -> Any:
        def learn(*batch: mx.array) -> tuple[mx.array, mx.array]:
            (total, right), gradient = mx.value_and_grad(self._loss)(self.weights, *batch)
            gradient, _ = optim.clip_grad_norm(gradient, CLIP)
            self.weights.update(self.optimiser.apply_gradients(gradient, self.weights))
            return total, right

        if on_cpu():
            return learn
        state = [self.weights, self.optimiser.state]
        return mx.compile(learn, inputs=state, outputs=state)

    def _inputs(self, batch: Batch) -> list[mx.array]:
        """What `_loss` takes, computed by the target."""
        config, teacher = self.design.backbone, self.teacher
        ids, anchors = mx.array(batch.ids), mx.array(batch.anchors)
        sequences, count = batch.anchors.shape
        at = anchors[:, :, None] + mx.arange(self.design.drafts)
        taps, logits = teacher.read(ids, at.reshape(sequences, -1))
        first = teacher.embed(mx.array(batch.previous[:, :, 0]))[:, :, None]
        masks = teacher.embed(mx.array([config.mask_token] * (config.block_size - 1), dtype=mx.uint32))
        masks = mx.broadcast_to(masks, (sequences, count, *masks.shape))
        blocks = mx.concatenate([first, masks], axis=2) * config.embedding_scale
        arrays = [mx.array(a) for a in (batch.labels, batch.previous, batch.counted)]
        return [taps, blocks.astype(self._compute), anchors, *arrays, logits]

    def advance(self) -> tuple[Scores, float]:
        """One step: its scores and its learning rate. Raises `TrainingError` when numbers overflow."""
        begun = time.perf_counter()
        rate = rate_at(self.recipe, self.done)
        draw = np.random.default_rng([self.recipe.seed, 2, self.step])
        chosen = choose(self.dialogues, self.rows, self.step, self.recipe.batch, self.recipe.seed)
        batch = make_batch(self.dialogues, chosen, self.recipe.anchors, self.design.drafts, draw)
        self.optimiser.learning_rate = rate
        total, right = self._learn(*self._inputs(batch))
        mx.eval(total, right, self.weights, self.optimiser.state)
        scores = _scores([(total, right, batch.counted)])
        if not math.isfinite(scores.loss):
            raise TrainingError(
                f"The loss overflowed at step {self.step}; try again with a lower learning rate (--rate)."
            )
        self.step += 1
        # The first step of a process makes the device's programs, which on some takes minutes.
        self.seconds += time.perf_counter() - begun if self._warm else 0.0
        self._warm = True
        return scores, rate

    def measure(self, dialogues: Dialogues) -> Scores:
        """Scores on `dialogues` without learning: the same anchors each time."""
        found = []
        for start in range(0, len(dialogues.tokens), self.recipe.batch):
            chosen = np.arange(start, min(start + self.recipe.batch, len(dialogues.tokens)))
            draw = np.random.default_rng([self.recipe.seed, 3, start])
            batch = make_batch(dialogues, chosen, self.recipe.anchors, self.design.drafts, draw)
            total, right = self._loss(self.weights, *self._inputs(batch))
            mx.eval(total, right)
            found.append((total, right, batch.counted))
        return _scores(found)

    # ------------------------------------------------------------------ the state

    def save(self, file: Path, fingerprint: str) -> None:
        """Write weights, optimiser and position to `file`, whole or not at all."""
        arrays = {f"weights/{name}": value for name, value in self.weights.items()}
        state = self.optimiser.state
        for name in self.weights:
            arrays |= {f"optimiser/{name}/{part}": state[name][part] for part in ("m", "v")}
        arrays["optimiser/step"] = state["step"]
        position = {"format": STATE_FORMAT, "step": self.step, "seconds": self.seconds}
        write_safetensors(file, arrays, {"position": json.dumps(position), "fingerprint": fingerprint})

    def load(self, file: Path, fingerprint: str) -> None:
        """Go on from `file`. Raises `TrainingError` when it is damaged or of another run."""
        try:
            loaded: Any = mx.load(str(file), return_metadata=True)
            arrays, metadata = loaded
            position = json.loads(metadata["position"])
            weights = {name: arrays[f"weights/{name}"] for name in self.weights}
            mx.eval(weights)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise TrainingError(f"{file} is damaged; start again in another folder.") from error
        if metadata.get("fingerprint") != fingerprint or position.get("format") != STATE_FORMAT:
            raise TrainingError(
                f"{file} belongs to a run with other settings; repeat those, or start in another folder.",
                usage=True,
            )
        self.step, self.seconds = int(position["step"]), float(position["seconds"])
        self.weights.update(weights)
        self._restore_optimiser(arrays)

    def _restore_optimiser(self, arrays: dict[str, mx.array]) -> None:
        state = self.optimiser.state
        for name in self.weights:
            for part in ("m", "v"):
                state[name][part] = arrays[f"optimiser/{name}/{part}"]
        state["step"] = arrays["optimiser/step"]


def fingerprint(design: Design, recipe: Recipe, corpus: str) -> str:
    """What two runs must share for one to go on from the other's state. How long they run may differ."""
    said: dict[str, Any] = asdict(recipe)
    said.pop("steps")
    said.pop("seconds")
    return json.dumps({"config": design.config, "recipe": said, "corpus": corpus}, sort_keys=True)


def _scores(found: list[tuple[mx.array, mx.array, Any]]) -> Scores:
    """Weighted by the anchors that count."""
    loss_sum = first = length = anchors = 0.0
    for total, right, counted in found:
        here = float(counted[:, :, 0].sum())
        hits = np.cumprod(np.array(right) * counted, axis=2)
        loss_sum += float(np.array(total)) * here
        first += float(hits[:, :, 0].sum())
        length += float(hits.sum()) + here
        anchors += here
    if not anchors:
        return Scores(loss_sum / max(1, len(found)), 0.0, 1.0)
    return Scores(loss_sum / anchors, first / anchors, length / anchors)
