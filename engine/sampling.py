"""The target's sampling pipeline: logits to a distribution to a token.

Order: bias and penalties (see `penalties`), temperature, top-k, top-p, min-p. It is the order of Hugging
Face Transformers (`GenerationMixin._get_logits_processor`), for which model cards quote their settings;
vLLM has min-p before top-k. Everything in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from dspark_tui.engine.penalties import Penalties
from dspark_tui.engine.protocol import Sampling

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy (DeepSpec's rule)."""

_LEAST = 2.0**-126
"""Smallest normal float32: a smaller top_p would be 0 there, and keep nothing."""

_MASK64 = (1 << 64) - 1


def is_greedy(sampling: Sampling) -> bool:
    """Whether every token is the most likely one."""
    return sampling.temperature < GREEDY_BELOW


def probabilities(logits: mx.array, sampling: Sampling) -> mx.array:
    """The distributions tokens are drawn from: `[n, vocabulary]` float32, rows sum to 1.

    `logits` is `[n, vocabulary]` of any float type; `sampling` must not be greedy. The most likely token
    always stays. Tokens that tie at the edge of top-k stay together. min-p (Nguyen et al. 2024) keeps what
    has at least that part of the largest probability.
    """
    scaled = logits.astype(mx.float32) / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        kth = -mx.partition(-scaled, sampling.top_k - 1, axis=-1)[:, sampling.top_k - 1, None]
        scaled = mx.where(scaled < kth, -mx.inf, scaled)
    p = mx.softmax(scaled, axis=-1)
    if sampling.top_p < 1.0:
        order = mx.argsort(-p, axis=-1)
        ranked = mx.take_along_axis(p, order, axis=-1)
        before = mx.cumsum(ranked, axis=-1) - ranked
        # A token stays while the mass above it is short of top_p, so the first one always does.
        kept = mx.where(before < max(sampling.top_p, _LEAST), ranked, 0.0)
        p = mx.put_along_axis(mx.zeros_like(p), order, kept, axis=-1)
        p = p / p.sum(axis=-1, keepdims=True)
    if sampling.min_p > 0.0:
        p = mx.where(p < sampling.min_p * p.max(axis=-1, keepdims=True), 0.0, p)
        p = p / p.sum(axis=-1, keepdims=True)
    return p


class Draws:
    """Random draws of one answer: reproducible from the seed, independent of every other answer, and no
    draw is ever used twice: draft and verify must not share randomness."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._count = 0

    def key(self) -> mx.array:
        """A fresh key, by SplitMix64 over the seed and a counter (Steele, Lea, Flood 2014)."""
        self._count += 1
        z = (self._seed + self._count * 0x9E3779B97F4A7C15) & _MASK64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
        return mx.random.key((z ^ (z >> 31)) & _MASK64)

    def uniform(self, n: int) -> mx.array:
        """`[n]` float32 in [0, 1)."""
        return mx.random.uniform(shape=(n,), key=self.key())

    def choose(self, p: mx.array) -> mx.array:
        """One token a row from `p` `[n, vocabulary]` (need not be normalised): `[n]` uint32."""
        return mx.random.categorical(mx.log(p), axis=-1, key=self.key())


class Sampler:
    """One answer's sampling settings with its random draws and its history.

    The loop says with `begin` and `observe` which tokens stand. Logits pass through `rows` before anything is
    chosen from them; without bias and penalties that does nothing.
    """

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self.sampling = sampling
        self.greedy = is_greedy(sampling)
        self.seeded = sampling.seed is not None and not self.greedy
        """Whether the same request has to give the same text again."""
        self.draws = Draws(seed)
        self._penalties: Penalties | None = None

    # ------------------------------------------------------------------ history

    def begin(self, vocabulary: int, prompt: Sequence[int], answer: Sequence[int] = ()) -> None:
        """The answer to `prompt` begins, or goes on after the tokens of `answer`. Raises ValueError when
        the bias names a token outside the vocabulary."""
        sampling = self.sampling
        used = (
            sampling.logit_bias,
            sampling.repetition_penalty != 1.0,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        self._penalties = Penalties(sampling, vocabulary, prompt) if any(used) else None
        self.observe(answer)

    def observe(self, tokens: Sequence[int]) -> None:
        """`tokens` were committed, the newest anchor included."""
        if self._penalties is not None:
            self._penalties.observe(tokens)

    @property
    def adjusts(self) -> bool:
        """Whether `rows` and `some` do anything."""
        return self._penalties is not None

    @property
    def looks_back(self) -> bool:
        """Whether a row depends on the tokens before it by penalties, so that drafts must be chosen one
        after the other."""
        return self._penalties is not None and self._penalties.look_back

    def rows(self, logits: mx.array, ahead: mx.array | None = None) -> mx.array:
        """`logits` `[n, vocabulary]` with bias and penalties. `ahead` `[m]`, `m >= n - 1`, are the tokens
        after the committed ones (drafts, or a bonus that the host has not seen): the last row comes after
        all of them, each row before it after one fewer. In a verify they are the drafts."""
        return logits if self._penalties is None else self._penalties.rows(logits, ahead)

    def some(self, logits: mx.array, ids: mx.array, ahead: mx.array | None = None) -> mx.array:
        """The same for one row of candidates: `logits` `[c]` of the tokens `ids` `[c]`."""
        return logits if self._penalties is None else self._penalties.some(logits, ids, ahead)

    # ------------------------------------------------------------------ choice

    def probabilities(self, logits: mx.array) -> mx.array:
        """See the function of the same name; `logits` have bias and penalties in them."""
        return probabilities(logits, self.sampling)

    def pick(self, logits: mx.array) -> mx.array:
        """The token after the committed ones, from the target's raw `logits` `[1, vocabulary]`: `[1]`."""
        logits = self.rows(logits)
        if self.greedy:
            return mx.argmax(logits, axis=-1)
        return self.draws.choose(self.probabilities(logits))

    def draft(self, logits: mx.array) -> tuple[mx.array, mx.array | None]:
        """Tokens `[k]` for a drafter whose rows `logits` `[k, vocabulary]` do not depend on each other, and
        the distributions they were drawn from `[k, vocabulary]` (None when greedy)."""
        if self.looks_back:
            return self._draft_in_turn(logits)
        logits = self.rows(logits)
        if self.greedy:
            return mx.argmax(logits, axis=-1), None
        q = self.probabilities(logits)
        return self.draws.choose(q), q

    def _draft_in_turn(self, logits: mx.array) -> tuple[mx.array, mx.array | None]:
        """As `draft`, where penalties tie each row to the tokens drafted before it."""
        tokens: mx.array | None = None
        q: list[mx.array] = []
        for j in range(logits.shape[0]):
            row = self.rows(logits[j : j + 1], tokens)
            if not self.greedy:
                q.append(self.probabilities(row))
            token = mx.argmax(row, axis=-1) if self.greedy else self.draws.choose(q[-1])
            tokens = token if tokens is None else mx.concatenate([tokens, token])
        assert tokens is not None, "at least one row"
        return tokens, mx.concatenate(q) if q else None
