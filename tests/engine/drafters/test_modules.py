"""Every kind of backbone and head against its formulas in NumPy, on random weights in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import ProportionalRoPE, YarnRoPE
from numpy_drafters import NumpyTables, unpack
from numpy_reference import Array, Reference

from dspark_tui.engine.drafters.base import Proposal
from dspark_tui.engine.drafters.block import BlockDrafter
from dspark_tui.engine.drafters.config import BackboneConfig, HeadConfig, LayerAttention, Rope, Yarn
from dspark_tui.engine.drafters.context_ring import ContextRing
from dspark_tui.engine.drafters.dspark import _Rows
from dspark_tui.engine.drafters.modules import bind, build
from dspark_tui.engine.drafters.rotary import Rotary, frequencies
from dspark_tui.engine.protocol import Method, Sampling
from dspark_tui.engine.sampling import Sampler
from dspark_tui.engine.verify import DenseQ, SparseQ

ANCHOR = 21
WINDOW = 6
LENGTHS = (0, 1, WINDOW - 1, WINDOW, WINDOW + 5)
GREEDY = Sampling()

PLAIN = BackboneConfig(
    hidden_size=32,
    intermediate_size=40,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=12,
    vocabulary=50,
    eps=1e-5,
    rope=Rope(500.0),
    block_size=5,
    mask_token=7,
    taps=(0, 2),
    tap_width=32,
    attention=(LayerAttention(), LayerAttention()),
)
GEMMA = replace(PLAIN, style="gemma4", embedding_scale=32**0.5, rope=Rope(500.0, pairs=2), kv_heads=1)
CONVOLVED = replace(PLAIN, conv_taps=2, conv_group=8)
YARN = Yarn(factor=8.0, original_context=64, beta_fast=6.0, beta_slow=1.0, attention_factor=1.2)
DFLASH = HeadConfig(first_row=1)
DSPARK = HeadConfig(first_row=0, markov="vanilla", markov_rank=6, confidence="hidden and markov")
SELECTOR = HeadConfig(first_row=1, selector_rank=6, selector_top_k=8)
REDUCED = {"draft_vocabulary": 20, "own_head": True}


def windows(*layers: tuple[int | None, bool]) -> BackboneConfig:
    return replace(PLAIN, attention=tuple(LayerAttention(*layer) for layer in layers))


@dataclass(frozen=True)
class Case:
    method: Method
    config: BackboneConfig
    head: HeadConfig
    own_mask: bool = False


CASES = {
    # Attention.
    "sliding": Case("dflash", windows((WINDOW, False), (WINDOW, False)), DFLASH),
    "sliding, causal": Case("dflash", windows((WINDOW, True), (WINDOW, True)), DFLASH),
    "sliding, causal, and full": Case("dflash", windows((WINDOW, True), (None, False)), DFLASH),
    "sliding of two widths": Case("dspark", windows((WINDOW, False), (9, True)), DSPARK),
    "causal": Case("dspark", windows((None, True), (None, True)), DSPARK),
    "window shorter than the block": Case("dflash", windows((3, False), (2, True)), DFLASH),
    "window of itself": Case("dflash", windows((1, False), (1, True)), DFLASH),
    "limited context": Case("dspark", replace(PLAIN, context_limit=WINDOW), DSPARK),
    "limited context, sliding": Case(
        "dflash", replace(windows((WINDOW, False), (None, True)), context_limit=3), DFLASH
    ),
    "block of two, sliding": Case("dflash", replace(windows((2, True), (3, False)), block_size=2), DFLASH),
    "block of two, limited": Case("dspark", replace(PLAIN, block_size=2, context_limit=2), DSPARK),
    "block of one": Case("dspark", replace(PLAIN, block_size=1), DSPARK),
    # Rotary positions and other traits of the backbone.
    "interleaved": Case("dspark", replace(PLAIN, rope=Rope(500.0, interleaved=True)), DSPARK),
    "yarn": Case("dspark", replace(PLAIN, rope=Rope(500.0, yarn=YARN)), DSPARK),
    "yarn, interleaved": Case("dflash", replace(PLAIN, rope=Rope(500.0, True, None, YARN)), DFLASH),
    "biases": Case("dflash", replace(PLAIN, attention_bias=True), DFLASH),
    "wider taps": Case("dflash", replace(PLAIN, tap_width=48, taps=(-1, 0, 3)), DFLASH),
    "scaled embedding": Case("dflash", replace(PLAIN, embedding_scale=5.5), DFLASH),
    "gemma": Case("dspark", GEMMA, replace(DSPARK, softcap=3.0, own_embedding=True, own_head=True)),
    "gemma, keys are values": Case(
        "dspark", replace(GEMMA, keys_are_values=True), replace(DSPARK, softcap=3.0)
    ),
    "gemma, sliding": Case(
        "dspark", replace(GEMMA, attention=windows((WINDOW, True), (None, False)).attention), DSPARK
    ),
    "mask of its own": Case("dflash", replace(PLAIN, embedding_scale=1.5), DFLASH, own_mask=True),
    # Heads.
    "gated": Case("dspark", PLAIN, replace(DSPARK, markov="gated")),
    "rnn": Case("dspark", PLAIN, replace(DSPARK, markov="rnn", confidence="hidden")),
    "no markov": Case("dspark", PLAIN, HeadConfig(first_row=0, confidence="hidden")),
    "no confidence": Case("dspark", PLAIN, replace(DSPARK, confidence=None)),
    "multiplier and cap": Case("dspark", PLAIN, replace(DSPARK, multiplier=0.3, softcap=1.5)),
    "infill": Case("dspark", PLAIN, replace(DSPARK, first_row=1)),
    "infill, rnn": Case("dspark", PLAIN, replace(DSPARK, first_row=1, markov="rnn")),
    "infill, gated": Case(
        "dspark", windows((WINDOW, True), (None, True)), replace(DSPARK, first_row=1, markov="gated")
    ),
    "next tokens without markov": Case("dflash", PLAIN, HeadConfig(first_row=0, own_head=True)),
    "capped": Case("dflash", PLAIN, HeadConfig(first_row=1, multiplier=0.2, softcap=2.0)),
    "reduced vocabulary": Case("dspark", PLAIN, replace(DSPARK, **REDUCED)),
    "reduced vocabulary, rnn": Case("dspark", PLAIN, replace(DSPARK, first_row=1, markov="rnn", **REDUCED)),
    "reduced vocabulary, gated": Case(
        "dspark", PLAIN, replace(DSPARK, markov="gated", softcap=2.0, **REDUCED)
    ),
    "reduced vocabulary, dflash": Case("dflash", PLAIN, HeadConfig(first_row=1, **REDUCED)),
    "some candidates": Case("dspark", PLAIN, replace(DSPARK, markov_candidates=6)),
    "some candidates, reduced vocabulary": Case(
        "dspark", PLAIN, replace(DSPARK, first_row=1, markov="rnn", markov_candidates=5, **REDUCED)
    ),
    "more candidates than tokens": Case("dspark", PLAIN, replace(DSPARK, markov_candidates=1000)),
    # DFlash 2.
    "selector": Case(
        "dflash2", replace(CONVOLVED, attention=windows((WINDOW, False), (WINDOW, False)).attention), SELECTOR
    ),
    "one tap": Case("dflash2", replace(CONVOLVED, conv_taps=1), SELECTOR),
    "more taps than rows": Case("dflash2", replace(CONVOLVED, conv_taps=5, block_size=3), SELECTOR),
    "selector without convolutions": Case("dflash2", PLAIN, replace(SELECTOR, selector_top_k=50)),
    "selector, multiplier and cap": Case(
        "dflash2", CONVOLVED, replace(SELECTOR, multiplier=0.2, softcap=2.0)
    ),
    "selector with its own tables": Case(
        "dflash2", CONVOLVED, replace(SELECTOR, own_embedding=True, own_head=True), own_mask=True
    ),
}
SAMPLED = [name for name in CASES if CASES[name].head != DFLASH]


class Pair:
    """A drafter and its reference, with the same random weights."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        config, head = case.config, case.head
        random = np.random.default_rng(seed)
        model = build(config, head)
        weights: dict[str, Array] = {}
        for name, value in tree_flatten(model.parameters()):
            draw = random.standard_normal(value.shape).astype(np.float32)
            if "norm" in name or "layer_scalar" in name:
                draw = 1 + 0.3 * draw
            elif "base_kernel" in name or "bias" in name:
                draw = 0.5 * draw
            elif "embed_tokens" in name:
                draw = 1.0 * draw
            elif "markov_w" in name or "codebook" in name:
                draw = 0.6 * draw
            else:
                draw = draw * (1.5 / value.shape[-1] ** 0.5)
            weights[name] = draw.astype(np.float32)
        model.load_weights([(name, mx.array(value)) for name, value in weights.items()])
        self.d2t: list[int] | None = None
        if head.draft_vocabulary:
            ids = np.sort(random.choice(config.vocabulary, head.draft_vocabulary, replace=False))
            self.d2t = (ids - np.arange(head.draft_vocabulary)).tolist()
        mask = random.standard_normal(config.hidden_size).astype(np.float32) if case.own_mask else None
        self.config, self.head = config, head
        self.tables = NumpyTables(config.vocabulary, config.hidden_size)
        self.reference = Reference(config, head, weights, self.tables, self.d2t, mask)
        self.drafter: BlockDrafter = bind(
            "it", case.method, config, head, model, self.tables, mx.float32,
            None if self.d2t is None else mx.array(self.d2t, dtype=mx.int32),
            None if mask is None else mx.array(mask),
        )  # fmt: skip
        self.hidden: list[mx.array] = []
        inner = self.drafter._draft

        def recording(hidden: mx.array, *rest: Any) -> Proposal:
            self.hidden.append(hidden)
            return inner(hidden, *rest)

        self.drafter._draft = recording  # type: ignore[method-assign]

    def rows(self, n: int, seed: int = 1) -> Array:
        width = len(self.config.taps) * self.config.tap_width
        return np.random.default_rng(seed).standard_normal((n, width), dtype=np.float32) * 2

    def check(self, context: Array, base: int = 0) -> None:
        """Hidden states, drafts and confidences are the reference's."""
        proposal = self.drafter.propose(ANCHOR, 99, Sampler(GREEDY, 0))
        wanted = self.reference.hidden(context, ANCHOR, base)
        np.testing.assert_allclose(np.array(self.hidden[-1]), wanted, atol=1e-4)
        drafts = self.reference.greedy(wanted, ANCHOR)
        assert proposal.tokens.tolist() == drafts
        assert len(drafts) == self.drafter.drafts
        assert proposal.finite is not None
        assert proposal.finite.item() is True
        self.check_confidence(proposal, wanted, drafts)

    def check_confidence(self, proposal: Proposal, hidden: Array, drafts: list[int]) -> None:
        if self.head.confidence is None:
            assert proposal.confidence is None
            return
        confidence = [
            self.reference.confidence(hidden, slot, before)
            for slot, before in enumerate([ANCHOR, *drafts[:-1]])
        ]
        np.testing.assert_allclose(np.array(proposal.confidence), confidence, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_drafts_equal_the_reference(name: str) -> None:
    pair = Pair(CASES[name])
    for length in LENGTHS:
        pair.drafter.reset()
        context = pair.rows(length)
        if length:
            pair.drafter.extend(mx.array(context), 0)
        assert pair.drafter.length == length
        pair.check(context)
        pair.check(context)  # a block leaves nothing behind


ATTENTION = [
    name
    for name, case in CASES.items()
    if case.config.attention != PLAIN.attention or case.config.context_limit
]


@pytest.mark.parametrize("name", ATTENTION)
def test_context_may_come_in_any_chunks(name: str) -> None:
    pair = Pair(CASES[name])
    context = pair.rows(23)
    for size in (1, 3, 7, 23):
        pair.drafter.reset(40)
        for at in range(0, 23, size):
            pair.drafter.extend(mx.array(context[at : at + size]), 40 + at)
        assert pair.drafter.length == 63
        pair.check(context, base=40)


@pytest.mark.parametrize("name", ["sliding", "sliding, causal, and full", "limited context", "causal"])
@pytest.mark.parametrize("cut", [0, 3, 9, 10, 15, 16, 19, 20])
@pytest.mark.parametrize("more", [0, 1, 13])
def test_a_context_cut_back_and_extended_again_equals_a_fresh_one(name: str, cut: int, more: int) -> None:
    """What was dropped from a ring and would be seen again makes the drafter ask for everything anew."""
    pair = Pair(CASES[name])
    old, new = pair.rows(20, seed=1), pair.rows(more, seed=2)
    for at in range(0, 20, 4):
        pair.drafter.extend(mx.array(old[at : at + 4]), at)
    pair.drafter.truncate(cut)
    assert pair.drafter.length in (cut, 0)
    kept = pair.drafter.length
    pair.drafter.extend(mx.array(np.concatenate([old[kept:cut], new])), kept)
    pair.check(np.concatenate([old[:cut], new]))


@pytest.mark.parametrize("name", ["sliding", "limited context"])
def test_a_short_cut_of_a_short_context_forgets_nothing(name: str) -> None:
    pair = Pair(CASES[name])
    context = pair.rows(5)
    pair.drafter.reset(30)
    pair.drafter.extend(mx.array(context), 30)
    pair.drafter.truncate(33)
    assert pair.drafter.length == 33
    pair.check(context[:3], base=30)
    pair.drafter.truncate(10)
    assert pair.drafter.length == 10


def test_a_ring_that_turned_many_times_holds_what_it_should() -> None:
    """Buffers have room for 256 rows more and are moved along: several moves, with blocks in between."""
    pair = Pair(CASES["sliding"])
    context = pair.rows(800)
    for at in range(0, 800, 5):
        pair.drafter.extend(mx.array(context[at : at + 5]), at)
        if at % 50 == 0:
            pair.check(context[max(0, at - 15) : at + 5], base=max(0, at - 15))
    assert all(array.shape[2] < WINDOW + 256 for array in pair.drafter.state())


@pytest.mark.parametrize(("name", "kept"), [("sliding of two widths", 8), ("limited context", WINDOW)])
def test_rows_that_no_layer_sees_are_not_projected(name: str, kept: int) -> None:
    pair = Pair(CASES[name])
    projected: list[int] = []
    project = pair.drafter.model.fc

    def counting(rows: mx.array) -> Any:
        projected.append(rows.shape[0])
        return project(rows)

    pair.drafter.model.fc = counting  # type: ignore[assignment]
    context = pair.rows(40)
    pair.drafter.extend(mx.array(context), 0)
    assert projected == [kept]
    assert pair.drafter.length == 40
    pair.check(context)
    pair.drafter.extend(mx.array(context[:2]), 40)
    pair.check(np.concatenate([context, context[:2]]))
    # The rows before were there, so a cut asks for them again.
    pair.drafter.truncate(39)
    assert pair.drafter.length == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_some_candidates_of_a_quantised_correction(temperature: float) -> None:
    """Only the candidates' rows of the packed table are unpacked; the result is that of the whole table."""
    pair = Pair(Case("dspark", PLAIN, replace(DSPARK, markov_rank=32, markov_candidates=9)))
    markov = pair.drafter.model.markov_head
    packed, scales, biases = mx.quantize(markov.markov_w2.weight, group_size=32, bits=4)
    markov.markov_w2 = markov.markov_w2.to_quantized(group_size=32, bits=4)
    pair.reference.weights["markov_head.markov_w2.weight"] = np.float64(
        unpack(packed, scales, biases, bits=4)
    )
    context = pair.rows(4)
    pair.drafter.extend(mx.array(context), 0)
    if not temperature:
        pair.check(context)
        return
    proposal = pair.drafter.propose(ANCHOR, 99, Sampler(Sampling(temperature=temperature), 2))
    hidden = pair.reference.hidden(context, ANCHOR)
    drafts: list[int] = proposal.tokens.tolist()  # type: ignore[assignment]
    wanted = pair.reference.distributions(hidden, ANCHOR, drafts, temperature, 0, 1.0)
    assert isinstance(proposal.q, DenseQ)
    np.testing.assert_allclose(np.array(proposal.q.probs), wanted, atol=1e-4)


# ---------------------------------------------------------------------------- rotary positions


@pytest.mark.parametrize("yarn", [YARN, Yarn(32.0, 8192, attention_factor=0.1 * np.log(32.0) + 1)])
@pytest.mark.parametrize(("theta", "width"), [(500.0, 12), (1e7, 128), (1e4, 64)])
def test_yarn_turns_as_in_mlx_lm(yarn: Yarn, theta: float, width: int) -> None:
    theirs = YarnRoPE(
        width,
        base=theta,
        scaling_factor=yarn.factor,
        original_max_position_embeddings=yarn.original_context,
        beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow,
    )
    np.testing.assert_allclose(
        frequencies(Rope(theta, yarn=yarn), width), 1 / np.array(theirs._freqs, dtype=np.float64), rtol=1e-5
    )
    x = mx.random.normal((1, 2, 3, width), key=mx.random.key(1))
    theirs.mscale = yarn.attention_factor
    np.testing.assert_allclose(
        np.array(Rotary(Rope(theta, yarn=yarn), width)(x, 700)), np.array(theirs(x, offset=700)), atol=2e-3
    )


def test_the_first_pairs_alone_turn_as_in_mlx_lm() -> None:
    """Gemma 4's proportional kind: 64 of 256 pairs, exponents over the whole head."""
    x = mx.random.normal((1, 2, 3, 512), key=mx.random.key(1))
    theirs = ProportionalRoPE(512, 128, base=1e6)
    ours = Rotary(Rope(1e6, pairs=64), 512)
    np.testing.assert_allclose(np.array(ours(x, 900)), np.array(theirs(x, offset=900)), atol=1e-4)


def test_more_pairs_than_a_head_has_are_refused() -> None:
    with pytest.raises(ValueError, match="rotary pairs"):
        Rotary(Rope(1e4, pairs=7), 12)
    with pytest.raises(ValueError, match="rotary pairs"):
        Rotary(Rope(1e4), 13)


# ---------------------------------------------------------------------------- sampled drafts

SAMPLINGS = {
    "T 1": Sampling(temperature=1.0),
    "T 0.6, top-p, top-k": Sampling(temperature=0.6, top_p=0.8, top_k=12),
}


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_q_is_the_distribution_given_the_drawn_prefix(name: str, sampling: Sampling) -> None:
    pair = Pair(CASES[name])
    context = pair.rows(9)
    pair.drafter.extend(mx.array(context), 0)
    hidden = pair.reference.hidden(context, ANCHOR)
    for seed in (3, 4, 5):
        proposal = pair.drafter.propose(ANCHOR, 99, Sampler(sampling, seed))
        drafts: list[int] = proposal.tokens.tolist()  # type: ignore[assignment]
        wanted = pair.reference.distributions(
            hidden, ANCHOR, drafts, sampling.temperature, sampling.top_k, sampling.top_p
        )
        q = proposal.q
        assert isinstance(q, DenseQ | SparseQ)
        size = pair.config.vocabulary
        rows = np.array([np.array(q.row(mx.array(j), size)) for j in range(len(drafts))])
        np.testing.assert_allclose(rows, wanted, atol=1e-4)
        of = np.array(q.of(proposal.tokens))
        np.testing.assert_allclose(of, rows[range(len(drafts)), drafts], rtol=1e-6)
        assert (of > 0).all()
        pair.check_confidence(proposal, hidden, drafts)


RUNS = 500


@pytest.mark.parametrize(
    "name",
    [
        "gated",
        "rnn",
        "infill, rnn",
        "reduced vocabulary",
        "reduced vocabulary, rnn",
        "reduced vocabulary, dflash",
        "some candidates",
    ],
)
def test_drafts_are_drawn_from_q(name: str) -> None:
    """Frequencies of the first two drafts over many seeds, by a chi-square test on the likely pairs."""
    case = CASES[name]
    config = replace(case.config, block_size=3, layers=1, vocabulary=14, attention=(LayerAttention(),))
    head = replace(case.head, draft_vocabulary=6) if case.head.draft_vocabulary else case.head
    pair = Pair(Case(case.method, config, head))
    context = pair.rows(4)
    pair.drafter.extend(mx.array(context), 0)
    hidden = pair.reference.hidden(context, 5)
    size = config.vocabulary
    first = pair.reference.distributions(hidden, 5, [0], 1.0, 0, 1.0)[0]
    second = [pair.reference.distributions(hidden, 5, [d, 0], 1.0, 0, 1.0)[1] for d in range(size)]
    joint = np.array([first[d] * second[d] for d in range(size)])
    proposals = [pair.drafter.propose(5, 2, Sampler(Sampling(temperature=1.0), seed)) for seed in range(RUNS)]
    mx.eval([p.tokens for p in proposals])
    counts = np.zeros((size, size))
    for p in proposals:
        counts[tuple(p.tokens.tolist())] += 1  # type: ignore[arg-type]
    likely = joint * RUNS >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    expected = np.append(joint[likely], joint[~likely].sum()) * RUNS
    chi2 = ((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    degrees = likely.sum()
    # Mean plus four standard deviations of the chi-square distribution.
    assert chi2 < degrees + 4 * np.sqrt(2 * degrees)


@pytest.mark.parametrize("name", ["reduced vocabulary", "reduced vocabulary, dflash", "selector", "gated"])
def test_bias_and_penalties_count_in_target_ids(name: str) -> None:
    """A token that the request forbids is never drafted, and one it wants always."""
    pair = Pair(CASES[name])
    pair.drafter.extend(mx.array(pair.rows(4)), 0)
    plain = pair.drafter.propose(ANCHOR, 99, Sampler(GREEDY, 0)).tokens.tolist()
    for temperature in (0.0, 1.0):
        bias = dict.fromkeys(plain, -100.0)
        sampler = Sampler(Sampling(temperature=temperature, logit_bias=bias), 1)
        sampler.begin(pair.config.vocabulary, [])
        assert not {*pair.drafter.propose(ANCHOR, 99, sampler).tokens.tolist()} & {*plain}
        wanted = plain[0]
        sampler = Sampler(Sampling(temperature=temperature, logit_bias={wanted: 100.0}), 1)
        sampler.begin(pair.config.vocabulary, [])
        assert {*pair.drafter.propose(ANCHOR, 99, sampler).tokens.tolist()} == {wanted}


# ---------------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize("name", ["reduced vocabulary", "selector", "infill, rnn", "capped"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_flagged_and_draft_known_tokens(
    name: str, bad: float, temperature: float
) -> None:
    case = CASES[name]
    pair = Pair(replace(case, head=replace(case.head, softcap=None)))
    table = pair.drafter.model.lm_head.weight if pair.head.own_head else mx.array(pair.tables.head_weight)
    table[3] = mx.full((pair.config.hidden_size,), bad)
    if pair.head.own_head:
        pair.drafter.model.lm_head.weight = table
    else:
        pair.tables.head_weight = np.array(table)
    sampler = Sampler(Sampling(temperature=temperature, top_k=5 if temperature else 0, top_p=0.9), 1)
    proposal = pair.drafter.propose(ANCHOR, 99, sampler)
    assert proposal.finite is not None
    assert proposal.finite.item() is False
    assert all(0 <= token < pair.config.vocabulary for token in proposal.tokens.tolist())  # type: ignore[union-attr]


def test_dflash2_never_runs_in_float16() -> None:
    model = build(CONVOLVED, SELECTOR)
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        bind("it", "dflash2", CONVOLVED, SELECTOR, model, NumpyTables(50, 32), mx.float16)


@pytest.mark.parametrize("d2t", [None, [0] * 19, [40] * 20, [-1] + [0] * 19, [1, 0] + [0] * 18], ids=str)
def test_a_vocabulary_map_that_leads_astray_is_refused(d2t: list[int] | None) -> None:
    head = replace(DSPARK, **REDUCED)  # type: ignore[arg-type]
    given = None if d2t is None else mx.array(d2t, dtype=mx.int32)
    with pytest.raises(ValueError, match="d2t"):
        bind("it", "dspark", PLAIN, head, build(PLAIN, head), NumpyTables(50, 32), mx.float32, given)


CONTRADICTIONS: dict[str, tuple[BackboneConfig, HeadConfig]] = {
    "kinds of attention": (replace(PLAIN, layers=3), DFLASH),
    "is empty": (replace(PLAIN, block_size=1), DFLASH),
    "cannot share": (replace(PLAIN, kv_heads=3), DFLASH),
    "do not divide": (replace(CONVOLVED, conv_group=5), SELECTOR),
    "do not go with gemma4": (replace(GEMMA, conv_taps=2, conv_group=8), SELECTOR),
    "must hold a row": (windows((0, False), (None, False)), DFLASH),
    "a head of its own": (PLAIN, replace(DSPARK, draft_vocabulary=20)),
    "needs a rank": (PLAIN, replace(DSPARK, markov_rank=0)),
    "needs a candidate": (PLAIN, replace(DSPARK, markov_candidates=0)),
    "that is not there": (PLAIN, replace(DSPARK, markov=None)),
    "does not go with": (PLAIN, replace(DSPARK, selector_rank=4, selector_top_k=4)),
    "cannot be picked": (PLAIN, replace(SELECTOR, selector_top_k=51)),
}


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_contradictions_are_refused_in_words(words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(*CONTRADICTIONS[words])


def test_building_takes_no_memory() -> None:
    """Full-size modules are shapes until weights are loaded."""
    large = replace(
        PLAIN,
        hidden_size=4096,
        intermediate_size=12288,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocabulary=151936,
    )
    before = mx.get_active_memory()
    build(large, replace(DSPARK, own_embedding=True, own_head=True))
    assert mx.get_active_memory() - before < 1 << 20


# ---------------------------------------------------------------------------- planted faults


def one_position_early(patch: pytest.MonkeyPatch) -> None:
    """The block begins on the last context row's position."""
    turn = Rotary.__call__

    def early(self: Rotary, x: mx.array, position: int) -> mx.array:
        block = x.shape[2] == PLAIN.block_size
        return turn(self, x, position - 1 if block else position)

    patch.setattr(Rotary, "__call__", early)


def causal_block(patch: pytest.MonkeyPatch) -> None:
    """A row of the block does not see the rows after it."""
    patch.setattr(ContextRing, "mask", lambda self, rows: "causal")


def bias_before_the_cap(patch: pytest.MonkeyPatch) -> None:
    """The Markov bias goes through the soft cap with the logits."""
    cap = CASES["gemma"].head.softcap
    assert cap is not None
    correct = _Rows._corrected

    def squashed(self: _Rows, j: int, turned: mx.array | None) -> mx.array:
        capped = self._logits[j : j + 1]
        bias = correct(self, j, turned) - capped
        return cap * mx.tanh(mx.arctanh(capped / cap) + bias / cap)

    patch.setattr(_Rows, "_corrected", squashed)


def wrong_predecessor(patch: pytest.MonkeyPatch) -> None:
    """Every slot is scored after the anchor instead of after the draft before it."""
    call = nn.Embedding.__call__

    def stuck(self: nn.Embedding, ids: mx.array) -> mx.array:
        return call(self, mx.array([ANCHOR], dtype=mx.uint32) if ids.shape == (1,) else ids)

    patch.setattr(nn.Embedding, "__call__", stuck)


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("yarn", one_position_early),
        ("next tokens without markov", causal_block),
        ("gemma", bias_before_the_cap),
        ("selector", wrong_predecessor),
    ],
)
def test_a_planted_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    def compare() -> None:
        for seed in range(6):
            pair = Pair(CASES[name], seed)
            rows = pair.rows(7)
            pair.drafter.extend(mx.array(rows), 0)
            pair.check(rows)

    compare()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        compare()
