"""A tiny random target and tiny random drafters in memory, float32, for tests of the loop."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama

from dspark_tui.engine.drafters.base import Proposal
from dspark_tui.engine.drafters.block import BlockDrafter
from dspark_tui.engine.drafters.config import BackboneConfig, HeadConfig, LayerAttention, Rope
from dspark_tui.engine.drafters.modules import bind, build
from dspark_tui.engine.protocol import DrafterInfo, Method, ModelInfo
from dspark_tui.engine.sampling import Sampler
from dspark_tui.engine.session import Candidate, Session
from dspark_tui.engine.target import Target

METHODS: tuple[Method, ...] = ("dspark", "dflash", "dflash2")


class LetterDetokenizer:
    """Token i is the i-th letter."""

    def __init__(self) -> None:
        self.text = ""

    def add_token(self, token: int) -> None:
        self.text += chr(ord("a") + token)

    def finalize(self) -> None:
        return None


class LetterTokenizer:
    has_chat_template = True

    def __init__(self, ends: Sequence[int] = ()) -> None:
        self.eos_token_ids = set(ends)

    @property
    def detokenizer(self) -> LetterDetokenizer:
        return LetterDetokenizer()


def randomise(module: Any, seed: int, scale: float) -> None:
    """Normal weights of deviation `scale` for matrices, norms around one."""
    rng = np.random.default_rng(seed)
    fresh = []
    for path, value in tree_flatten(module.parameters()):
        noise = rng.standard_normal(value.shape).astype(np.float32)
        fresh.append((path, mx.array(1 + 0.1 * noise if "norm" in path else scale * noise)))
    module.update(tree_unflatten(fresh))
    mx.eval(module.parameters())


def make_target(vocabulary: int = 24, seed: int = 0, scale: float = 0.3, ends: Sequence[int] = ()) -> Target:
    """Four llama layers of width 32."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=4,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )
    model = llama.Model(args)
    randomise(model, seed, scale)
    return Target(model, LetterTokenizer(ends), ModelInfo("tiny", "", "llama", "float32", 4096, 0))


def make_drafter(
    method: Method,
    target: Target,
    block: int = 5,
    seed: int = 1,
    scale: float = 0.3,
    attention: tuple[LayerAttention, LayerAttention] = (LayerAttention(), LayerAttention()),
) -> BlockDrafter:
    """Two layers of random weights on the target's tables; taps differ by method on purpose."""
    taps = {"dspark": (0, 2), "dflash": (1, 3), "dflash2": (0, 1, 3)}.get(method, (1,))
    config = BackboneConfig(
        hidden_size=target.hidden_size,
        intermediate_size=40,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        vocabulary=target.vocabulary,
        eps=1e-5,
        rope=Rope(1e4),
        block_size=block,
        mask_token=0,
        taps=taps,
        tap_width=target.hidden_size,
        attention=attention,
        conv_taps=2 if method == "dflash2" else 0,
        conv_group=8,
    )
    if method == "dspark":
        head = HeadConfig(first_row=0, markov="vanilla", markov_rank=6, confidence="hidden and markov")
    elif method == "dflash2":
        head = HeadConfig(first_row=1, selector_rank=6, selector_top_k=min(4, target.vocabulary))
    else:
        head = HeadConfig(first_row=1)
    model = build(config, head)
    randomise(model, seed, scale)
    return bind(method, method, config, head, model, target, mx.float32)


class Oracle:
    """Drafts the known continuation with planted mistakes: `wrong(position)` says where."""

    method: Method = "dflash"
    taps = (1,)

    def __init__(self, known: Sequence[int], wrong: Any, vocabulary: int, drafts: int = 4) -> None:
        self.name, self.drafts = "oracle", drafts
        self._known, self._wrong, self._vocabulary = list(known), wrong, vocabulary
        self.length = 0

    def extend(self, rows: mx.array, position: int) -> None:
        assert position == self.length
        self.length += rows.shape[0]

    def propose(self, anchor: int, k: int, sampler: Sampler) -> Proposal:
        tokens = []
        for at in range(self.length + 1, self.length + 1 + k):
            right = self._known[at] if at < len(self._known) else 0
            tokens.append((right + 1) % self._vocabulary if self._wrong(at) else right)
        return Proposal(mx.array(tokens, dtype=mx.uint32))

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    def reset(self, position: int = 0) -> None:
        self.length = position

    def state(self) -> list[mx.array]:
        return []


def make_session(target: Target, *drafters: Any) -> Session:
    """A session that knows these drafters, all loaded; the first one is active."""
    candidates = [
        Candidate(DrafterInfo(d.name, d.method, drafts=d.drafts), d.taps, lambda d=d: d) for d in drafters
    ]
    session = Session(target, candidates)
    for drafter in reversed(drafters):
        session.select(drafter.name)
    return session


def plain_greedy(target: Target, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy decoding without cache or engine: the whole sequence again for every token."""
    tokens = list(prompt)
    for _ in range(count):
        logits = target.model(mx.array([tokens]))[0, -1]
        tokens.append(int(np.argmax(np.array(logits))))
    target._taps.take()
    return tokens[len(prompt) :]


def no_commands() -> Any:
    """Nobody asks for anything."""
    return SimpleNamespace(stop_requested=False, waiting=False, take_switch=lambda: None)
