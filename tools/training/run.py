"""A training run from its arguments to the drafter's folder."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from dspark_tui.engine.loader import load_target
from dspark_tui.engine.models import demo
from dspark_tui.engine.models.errors import ModelError
from dspark_tui.engine.models.resolve import pull, resolve
from dspark_tui.engine.target import Target
from training.corpus import Corpus, Order
from training.design import Design, Wishes, design
from training.dialogues import Turns, read_turns, special_tokens
from training.errors import TrainingError
from training.losses import LossName, Objective
from training.measure import measure
from training.starters import MEASURED, read_prompts
from training.teacher import Teacher
from training.trainer import Recipe, Scores, Trainer, fingerprint
from training.weights import export

STEPS = 2000
"""Steps when nothing says how long."""


def unused_token(tokenizer: Any, template_pieces: Turns) -> int | None:
    """The last special token that neither ends a turn nor stands in the chat template, for a mask; None when
    there is none."""
    written = {*template_pieces.head, *template_pieces.to_assistant, *template_pieces.to_user}
    spare = special_tokens(tokenizer) - written - set(template_pieces.ends) - {tokenizer.bos_token_id}
    return max(spare, default=None)


class Run:
    """One call of the script."""

    def __init__(self, options: argparse.Namespace, interrupted: Callable[[], bool]) -> None:
        self.options, self.interrupted = options, interrupted
        self.begun = time.perf_counter()
        self.folder: Path = options.out / "training"
        self.state = self.folder / "state.safetensors"

    def say(self, text: str) -> None:
        """One line, with the seconds since the start."""
        print(f"[{time.perf_counter() - self.begun:7.1f} s] {text}", flush=True)

    def run(self) -> bool:
        """Do it all. False when it was interrupted. Raises `TrainingError` with a sentence."""
        options = self.options
        if self.state.exists() and not options.resume:
            raise TrainingError(
                f"{self.folder} holds the state of a run; go on with --resume, or name another folder.",
                usage=True,
            )
        if options.resume and not self.state.exists():
            raise TrainingError(
                f"There is nothing to resume in {self.folder}; leave --resume out.", usage=True
            )
        prompts = self._prompts(options.prompts)
        asked = self._prompts(options.measure_prompts) or MEASURED
        finished = self._train(prompts)
        if finished and options.measure:
            mx.clear_cache()
            found = measure(options.target, str(options.out), asked, options.measure_tokens)
            self.say(
                f"accept length {found.accept_length:.3f} (greedy, the engine's loop, {len(asked)} prompts, "
                f"{found.tokens} tokens, {found.rounds} rounds)"
            )
        return finished

    def _prompts(self, file: Path | None) -> tuple[str, ...]:
        if file is None:
            return ()
        try:
            return tuple(read_prompts(file.read_text(encoding="utf-8")))
        except OSError as error:
            raise TrainingError(f"{file} cannot be read ({error.strerror}).", usage=True) from error
        except UnicodeDecodeError as error:
            raise TrainingError(f"{file} is not UTF-8 text; give one prompt a line.", usage=True) from error

    def _target(self) -> tuple[Target, dict[str, Any]]:
        try:
            name, quiet = self.options.target, lambda stage, done, total, unit: None
            model = pull(name, quiet)[0] if name == demo.NAME else resolve(name)
            return load_target(model, quiet)
        except ModelError as error:
            raise TrainingError(str(error), usage=error.kind == "usage") from error

    def _train(self, prompts: tuple[str, ...]) -> bool:
        options = self.options
        target, config = self._target()
        turns = read_turns(target.tokenizer)
        plan = self._design(target, config, turns)
        order = Order(
            options.dialogues, options.length, options.part, options.held_out, options.seed, prompts
        )
        teacher = Teacher(target, plan.backbone.taps)
        kind = f"{config.get('model_type')} {target.vocabulary} {target.hidden_size} {len(target.layers)}"
        corpus = Corpus(options.data or self.folder / "data", order, turns, kind)
        if not self._write(corpus, teacher, target):
            return False
        recipe = self._recipe()
        trainer = Trainer(plan, recipe, teacher, corpus.training())
        mark = fingerprint(plan, recipe, corpus.digest)
        if options.resume:
            trainer.load(self.state, mark)
            self.say(f"going on from step {trainer.step}")
        return self._learn(plan, trainer, corpus, mark)

    def _design(self, target: Target, config: dict[str, Any], turns: Turns) -> Design:
        options = self.options
        mask = options.mask_token
        if mask is None and (mask := unused_token(target.tokenizer, turns)) is None:
            raise TrainingError(
                "The tokenizer has no unused special token; name one (--mask-token).", usage=True
            )
        wishes = Wishes(
            method=options.method,
            drafts=options.drafts,
            layers=options.layers,
            taps=options.taps,
            rank=options.rank,
            top_k=options.top_k,
            intermediate=options.intermediate,
            mask_token=mask,
        )
        plan = design(
            wishes,
            config,
            hidden=target.hidden_size,
            vocabulary=target.vocabulary,
            embedding_scale=target.embedding_scale,
        )
        taps = ",".join(map(str, plan.backbone.taps))
        self.say(
            f"{options.method} for {target.info.name}: taps {taps}, mask token {mask}, {plan.drafts} drafts"
        )
        return plan

    def _recipe(self) -> Recipe:
        options = self.options
        steps = STEPS if options.steps is None and options.seconds is None else options.steps
        loss: LossName = options.loss or ("ce" if options.method == "dflash" else "mixed")
        return Recipe(
            objective=Objective(loss, options.gamma),
            steps=steps,
            seconds=options.seconds,
            batch=options.batch,
            anchors=options.anchors,
            rate=options.rate,
            seed=options.seed,
        )

    def _write(self, corpus: Corpus, teacher: Teacher, target: Target) -> bool:
        if not corpus.missing():
            return True

        def tell(done: int, parts: int, tokens: int) -> bool:
            self.say(f"dialogues: part {done} of {parts}, {tokens} tokens of the target's own")
            return not self.interrupted()

        def encode(text: str) -> list[int]:
            found: list[int] = target.tokenizer.encode(text, add_special_tokens=False)
            return found

        return corpus.write(teacher, encode, tell)

    def _learn(self, plan: Design, trainer: Trainer, corpus: Corpus, mark: str) -> bool:
        options, held_out = self.options, corpus.held_out()
        count = sum(value.size for value in trainer.weights.values())
        self.say(f"{count / 1e6:.1f} M parameters, {len(trainer.dialogues.tokens)} dialogues")
        self._say_held_out(trainer, trainer.measure(held_out))
        mean: Scores | None = None
        saved = time.perf_counter()
        while trainer.done < 1.0 and not self.interrupted():
            scores, rate = trainer.advance()
            mean = scores if mean is None else _blend(mean, scores)
            if trainer.step % options.report == 0 or trainer.step == 1:
                speed = f"{trainer.step / trainer.seconds:.2f}" if trainer.seconds else "n/a"
                at = f"step {trainer.step} ({trainer.done:.0%})"
                self.say(f"{at}: {_words(mean)}, rate {rate:.1e}, {speed} steps/s")
            if time.perf_counter() - saved > options.save:
                self._save(plan, trainer, mark)
                saved = time.perf_counter()
        self._save(plan, trainer, mark)
        if trainer.done < 1.0:
            self.say(f"stopped at step {trainer.step}; the same command with --resume goes on")
            return False
        self._say_held_out(trainer, trainer.measure(held_out))
        self.say(f"{options.out} holds the drafter")
        return True

    def _say_held_out(self, trainer: Trainer, scores: Scores) -> None:
        self.say(f"held out at step {trainer.step}: {_words(scores)}")

    def _save(self, plan: Design, trainer: Trainer, mark: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        export(self.options.out, plan, trainer.weights)
        trainer.save(self.state, mark)


def _blend(old: Scores, new: Scores, share: float = 0.05) -> Scores:
    return Scores(*(a + share * (b - a) for a, b in zip(vars(old).values(), vars(new).values(), strict=True)))


def _words(scores: Scores) -> str:
    return f"loss {scores.loss:.3f}, accept@1 {scores.first:.3f}, tau {scores.length:.2f}"
