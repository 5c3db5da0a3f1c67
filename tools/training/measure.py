"""The accept length of a trained drafter, with the engine's own loop on prompts it has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspark_tui.engine.backend import BackendError, Control
from dspark_tui.engine.protocol import AnyEvent, Chat, Finished, Load, Loaded, Message, Sampling
from dspark_tui.engine.worker import MlxBackend
from training.errors import TrainingError


@dataclass(frozen=True)
class Measured:
    """`accept_length`: tokens committed a round over all answers, the bonus included."""

    accept_length: float
    rounds: int
    tokens: int


def measure(
    target: str, drafter: str, prompts: Sequence[str], max_tokens: int, temperature: float = 0.0
) -> Measured:
    """Answer `prompts` with the drafter in the folder `drafter`.

    Raises `TrainingError` when the pair cannot be loaded or does not speculate.
    """
    events: list[AnyEvent] = []
    backend = MlxBackend()
    committed = rounds = tokens = 0
    try:
        # Stored weights as they are: what was trained is measured, not what a later quantisation makes of it.
        backend.load(Load(1, target, drafter, drafter_bits=0), events.append)
        loaded = next(event for event in events if isinstance(event, Loaded))
        if loaded.drafter.method == "none":
            raise TrainingError(f"The trained drafter is not usable: {loaded.drafter.reason}.")
        assert backend.session is not None
        # Whole blocks, by the drafter alone: what pays on this machine is another question.
        backend.session.adaptive = False
        for number, prompt in enumerate(prompts):
            sampling = Sampling(temperature=temperature, seed=number)
            chat = Chat(
                number + 2,
                f"a{number}",
                [Message("user", prompt)],
                sampling,
                max_tokens=max_tokens,
                rounds=True,
            )
            backend.chat(chat, events.append, Control())
            ended = events[-1]
            assert isinstance(ended, Finished)
            drafted = [stat for stat in ended.result.rounds or () if stat.drafted]
            rounds += len(drafted)
            committed += sum(stat.committed for stat in drafted)
            tokens += ended.result.generated_tokens
            events.clear()
    except BackendError as error:
        raise TrainingError(error.message) from error
    if not rounds:
        raise TrainingError("No round was drafted: the answers were too short to measure anything.")
    return Measured(committed / rounds, rounds, tokens)
