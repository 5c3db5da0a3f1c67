"""The target's sampling pipeline: logits to a distribution to a token.

Order: temperature, then top-k, then top-p, as in Hugging Face Transformers and vLLM, for which model
cards quote their settings. Everything in float32.
"""

from __future__ import annotations

import mlx.core as mx

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
    always stays. Tokens that tie at the edge of top-k stay together.
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
    """One answer's sampling settings with its random draws."""

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self.sampling = sampling
        self.greedy = is_greedy(sampling)
        self.draws = Draws(seed)

    def probabilities(self, logits: mx.array) -> mx.array:
        """See the function of the same name."""
        return probabilities(logits, self.sampling)

    def pick(self, logits: mx.array) -> mx.array:
        """The next token of each row of `logits` `[n, vocabulary]`: `[n]` uint32."""
        if self.greedy:
            return mx.argmax(logits, axis=-1)
        return self.draws.choose(self.probabilities(logits))
