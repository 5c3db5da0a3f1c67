"""The vocabulary that the terminal program and the engine share.

One message is one JSON object on one line (newline-delimited JSON over a unix socket). `Command`s go
from a client to the engine, `Event`s come back. Every message carries its name in the field `type`.
Nothing here imports mlx or textual: both sides, and programs of other people, can afford this module.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

PROTOCOL_VERSION = 1
"""Raised when an old client could misread a new engine, or the other way round."""

JSON_SCHEMA_VERSION = 1
"""The field `schema` of `dspark-tui run --json`."""

TEMPERATURE_RANGE = (0.0, 2.0)
REPETITION_RANGE = (0.1, 10.0)
PENALTY_RANGE = (-2.0, 2.0)
BIAS_RANGE = (-100.0, 100.0)
MAX_LINE_BYTES = 64 * 1024 * 1024
"""Upper bound of one encoded message; a longer line is a broken peer."""

FinishReason: TypeAlias = Literal["stop", "length", "stopped", "error"]
DrafterState: TypeAlias = Literal["active", "parked", "fell_back", "none"]
Method: TypeAlias = Literal["none", "dspark", "dflash", "dflash2", "lookup", "auto"]
Stage: TypeAlias = Literal["fetch", "convert", "read", "drafter", "warm up"]
FailureKind: TypeAlias = Literal["usage", "failed"]


class Message(msgspec.Struct, frozen=True):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class Sampling(msgspec.Struct, frozen=True):
    """How the target's next token is drawn.

    `temperature` 0 is greedy. `top_p` in (0, 1], 1 keeps everything. `top_k` 0 keeps everything. `min_p` in
    [0, 1): tokens less likely than that part of the likeliest one go, 0 keeps everything. `seed` None takes
    a fresh one. `repetition_penalty` (1: off) divides positive and multiplies negative logits of tokens that
    the prompt or the answer holds; `presence_penalty` is taken off the logit of every token that the answer
    holds, `frequency_penalty` once for each time it holds it (0: off). `logit_bias` is added to the logits
    of these token ids. Penalties and bias count when greedy too. Ranges are checked by `problem`.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}

    def problem(self) -> str | None:
        """One sentence that says which value is out of range and what is allowed, or None."""
        low, high = TEMPERATURE_RANGE
        if not low <= self.temperature <= high:
            return f"temperature is {self.temperature:g}; give a number from {low:g} (greedy) to {high:g}."
        if not 0.0 < self.top_p <= 1.0:
            return f"top-p is {self.top_p:g}; give a number above 0 and up to 1 (1 keeps every token)."
        if self.top_k < 0:
            return f"top-k is {self.top_k}; give 0 (keep every token) or a positive whole number."
        if self.seed is not None and not 0 <= self.seed < 2**63:
            return f"seed is {self.seed}; give a whole number from 0 to 2^63 - 1."
        if not 0.0 <= self.min_p < 1.0:
            return f"min-p is {self.min_p:g}; give a number from 0 (keep every token) and below 1."
        return self._penalty_problem()

    def _penalty_problem(self) -> str | None:
        low, high = REPETITION_RANGE
        if not low <= self.repetition_penalty <= high:
            return (
                f"repetition penalty is {self.repetition_penalty:g}; give a number from {low:g} to {high:g} "
                "(1 changes nothing)."
            )
        low, high = PENALTY_RANGE
        for name, value in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            if not low <= value <= high:
                return f"{name} penalty is {value:g}; give a number from {low:g} to {high:g} (0: off)."
        low, high = BIAS_RANGE
        for token, value in self.logit_bias.items():
            if token < 0:
                return f"logit bias names token {token}; token ids are whole numbers from 0."
            if not low <= value <= high:
                return f"logit bias of token {token} is {value:g}; give a number from {low:g} to {high:g}."
        return None


# ---------------------------------------------------------------------------- facts in events


class ModelInfo(msgspec.Struct, frozen=True):
    """The loaded target."""

    name: str
    """What the user calls it: `demo`, a repository id, or a folder's name."""
    path: str
    architecture: str
    precision: str
    """Such as `4-bit` or `float32 (from 4-bit)`."""
    context: int
    """Largest number of tokens (prompt and reply together)."""
    weight_bytes: int
    thinks: bool = False
    """Whether its answers may have a thinking part, which then comes apart from the text."""
    efforts: list[str] = []
    """Values of `Chat.effort` that its template knows; empty when it knows none."""


class DrafterInfo(msgspec.Struct, frozen=True):
    """A drafter, as it stands for the loaded target.

    `name` is what the user types; `method` the family; `reason` says in words why `state` is `parked` or
    `fell_back`, or why a listed drafter is not usable (`usable` False). `drafts` is the number of tokens
    proposed a round (0 for none).
    """

    name: str
    method: Method
    state: DrafterState = "none"
    reason: str = ""
    drafts: int = 0
    weight_bytes: int = 0
    loaded: bool = False
    usable: bool = True


class RoundStat(msgspec.Struct, frozen=True):
    """One round: `drafted` tokens proposed and checked, `accepted` of them kept, `committed` tokens
    added to the answer (bonus included, cut at a stop or limit). Times in milliseconds."""

    source: str
    drafted: int
    accepted: int
    committed: int
    draft_ms: float
    verify_ms: float
    other_ms: float


class Seconds(msgspec.Struct, frozen=True):
    """Wall time: `load` of the model (0 when it was loaded before), `prefill`, `first_token` (from the
    request to the first token), `decode` (from the first token to the last)."""

    load: float
    prefill: float
    first_token: float
    decode: float


class Result(msgspec.Struct, frozen=True):
    """What an answer came to. `accept_length` is committed tokens a round (None without a round);
    `tokens_per_second` is decode only (None when fewer than two tokens were generated)."""

    text: str
    thinking: str
    token_ids: list[int]
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    finish_reason: FinishReason
    model: str
    drafter: DrafterInfo
    accept_length: float | None
    tokens_per_second: float | None
    seconds: Seconds
    rounds: list[RoundStat] | None = None


class ModelRow(msgspec.Struct, frozen=True):
    """One target that is on this machine, for the model picker."""

    name: str
    """What `Load.model` takes."""
    where: str
    """`demo`, `hub cache` or a folder."""
    size_bytes: int | None
    detail: str
    """A few words: architecture, quantisation."""
    usable: bool = True
    reason: str = ""


# ---------------------------------------------------------------------------- commands


class Command(msgspec.Struct, frozen=True, tag=True):
    """Base of everything a client may say. Each has an `id` that the events answering it repeat."""

    id: int


class Hello(Command, frozen=True, tag="hello"):
    """First message on a connection."""

    protocol: int
    client: str


class Load(Command, frozen=True, tag="load"):
    """Load a target (`demo`, a folder, a repository id in the Hugging Face cache) and a drafter.

    `drafter`: `none`, a method (`dspark`, `dflash`, `dflash2`), a drafter's name or folder, or None for the
    best one known. `drafter_bits`: quantise drafters at load to 4 or 8 bits, 0 keeps them as stored, None
    takes this device's default. `kv_bits`: keep the target's keys and values in 4 or 8 bits; None keeps them
    whole. `lookup`: whether lookup may draft in place of a trained drafter where the context repeats itself;
    None: yes, but not for mixtures of experts. Answered by `Progress`..., then `Loaded` or `Failed`.
    """

    model: str
    drafter: str | None = None
    drafter_bits: int | None = None
    kv_bits: int | None = None
    lookup: bool | None = None


class Pull(Command, frozen=True, tag="pull"):
    """Fetch a model to this machine without loading it. `Progress`..., then `Pulled` or `Failed`."""

    model: str


class ListModels(Command, frozen=True, tag="list_models"):
    """Answered by `Models`."""


class Chat(Command, frozen=True, tag="chat"):
    """Answer a conversation. `answer` names the answer in every event about it (client's choice, unique).

    `max_tokens` None generates up to the context limit. `rounds` asks for `Result.rounds`. `thinking` and
    `effort` are passed to templates that know them; None leaves the template's own default.
    Answered by `Prefill`, `Text`, `Rounds`..., then `Finished` or `Failed`.
    """

    answer: str
    messages: list[Message]
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: list[str] = []
    rounds: bool = False
    thinking: bool | None = None
    effort: str | None = None


class SwitchDrafter(Command, frozen=True, tag="switch_drafter"):
    """Change the drafter, at the next round boundary when an answer runs. `drafter` as in `Load`. One that
    is not resident is loaded beside the running answer (`Progress` with this id) and takes over when ready.
    Answered by `DrafterChanged` or `Failed` (the present drafter then stays)."""

    drafter: str


class Stop(Command, frozen=True, tag="stop"):
    """Stop an answer; its text is kept. The answer ends with `Finished` (reason `stopped`)."""

    answer: str


class Attach(Command, frozen=True, tag="attach"):
    """Send again the `Text` events of `answer` with `seq` above `after`, then go on live."""

    answer: str
    after: int = -1


class SaveContext(Command, frozen=True, tag="save_context"):
    """Keep what the target has computed of the present sequence on disk, under the name `chat` (client's
    choice). Answered by `ContextSaved` or `Failed`."""

    chat: str


class RestoreContext(Command, frozen=True, tag="restore_context"):
    """Take the sequence kept under `chat` back, so that the next turn computes only what is new. Answered by
    `ContextRestored`, with 0 tokens when nothing usable is kept, or `Failed`."""

    chat: str


class Shutdown(Command, frozen=True, tag="shutdown"):
    """End the engine process. Answered by closing the connection."""


AnyCommand: TypeAlias = (
    Hello
    | Load
    | Pull
    | ListModels
    | Chat
    | SwitchDrafter
    | Stop
    | Attach
    | SaveContext
    | RestoreContext
    | Shutdown
)

# ---------------------------------------------------------------------------- events


class Event(msgspec.Struct, frozen=True, tag=True):
    """Base of everything the engine says. `id` is the command's, or 0 when nobody asked."""

    id: int


class Welcome(Event, frozen=True, tag="welcome"):
    """Answers `Hello`: which engine this is."""

    protocol: int
    version: str
    pid: int


class Progress(Event, frozen=True, tag="progress"):
    """`done` of `total` (`total` 0: not known) in `unit` (`bytes`, `tensors` or `steps`)."""

    stage: Stage
    done: int
    total: int
    unit: Literal["bytes", "tensors", "steps"]


class Loaded(Event, frozen=True, tag="loaded"):
    """A target is ready. `drafters` are all that the pair knows, usable or not (with the reason)."""

    model: ModelInfo
    drafter: DrafterInfo
    drafters: list[DrafterInfo]
    seconds: float
    notes: list[str] = []
    """Sentences the user should see once, such as a slower fallback that was taken."""


class Pulled(Event, frozen=True, tag="pulled"):
    """`path` now holds the model; `fetched_bytes` came over the network (0: it was there)."""

    model: str
    path: str
    fetched_bytes: int


class Models(Event, frozen=True, tag="models"):
    """Answers `ListModels`: the demo pair, the Hugging Face cache, in this order."""

    models: list[ModelRow]


class Prefill(Event, frozen=True, tag="prefill"):
    """`done` of `total` prompt tokens are in the cache; `reused` of them were there before."""

    answer: str
    done: int
    total: int
    reused: int


class Text(Event, frozen=True, tag="text"):
    """A piece of the answer. `seq` counts from 0 within an answer and never skips."""

    answer: str
    seq: int
    text: str
    thinking: bool = False


class Rounds(Event, frozen=True, tag="rounds"):
    """Metrics of the rounds since the last such event. The only event that a slow client may lose."""

    answer: str
    rounds: list[RoundStat]
    generated_tokens: int
    context_tokens: int
    """Tokens in the target's cache, prompt included."""
    elapsed: float
    """Seconds since the first token."""
    memory_bytes: int | None = None
    """MLX's active memory; None when not measured."""
    peak_bytes: int | None = None
    context_rows_bytes: int | None = None
    """Memory of the tap rows that are kept for drafters."""


class DrafterChanged(Event, frozen=True, tag="drafter_changed"):
    """The drafter or its state changed: by request, or by itself (then `id` is 0 and `reason` says why)."""

    drafter: DrafterInfo


class ContextSaved(Event, frozen=True, tag="context_saved"):
    """`tokens` positions are kept on disk in `bytes` bytes."""

    chat: str
    tokens: int
    bytes: int


class ContextRestored(Event, frozen=True, tag="context_restored"):
    """`tokens` positions are in the cache again; 0 and `reason` when nothing usable is kept."""

    chat: str
    tokens: int
    reason: str = ""


class Finished(Event, frozen=True, tag="finished"):
    """Last event of an answer."""

    answer: str
    result: Result


class Failed(Event, frozen=True, tag="failed"):
    """A command could not be carried out. `message` is one sentence for the user. `kind` `usage` means the
    request was wrong (exit code 2), `failed` that it did not work (1). `answer` and `result` are set when an
    answer broke off: the text so far is in `result`."""

    message: str
    kind: FailureKind = "failed"
    answer: str = ""
    result: Result | None = None


class Notice(Event, frozen=True, tag="notice"):
    """A sentence for the user that answers no command."""

    message: str


AnyEvent: TypeAlias = (
    Welcome
    | Progress
    | Loaded
    | Pulled
    | Models
    | Prefill
    | Text
    | Rounds
    | DrafterChanged
    | ContextSaved
    | ContextRestored
    | Finished
    | Failed
    | Notice
)

_encoder = msgspec.json.Encoder()
_commands = msgspec.json.Decoder(AnyCommand)
_events = msgspec.json.Decoder(AnyEvent)


def encode(message: Command | Event) -> bytes:
    """One line, newline included. Lone surrogates in text are not representable: clean them first."""
    return _encoder.encode(message) + b"\n"


def decode_command(line: bytes) -> AnyCommand:
    """Raises `msgspec.DecodeError` (or its subclass `ValidationError`) on anything but a command."""
    return _commands.decode(line)


def decode_event(line: bytes) -> AnyEvent:
    """Raises `msgspec.DecodeError` (or its subclass `ValidationError`) on anything but an event."""
    return _events.decode(line)
