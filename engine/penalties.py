"""Bias and penalties: what is done to the logits because of the request and of the tokens so far.

In this order, as in vLLM (`v1/sample/sampler.py`, `v1/sample/ops/penalties.py`):

- `logit_bias` is added to the logits of its tokens.
- Repetition (Keskar et al. 2019, CTRL; `RepetitionPenaltyLogitsProcessor` of Hugging Face): the logit of a
  token that the prompt or the answer holds is divided by the penalty when it is positive, else multiplied.
- Frequency and presence (OpenAI's API reference): `logit - count * frequency - (count > 0) * presence`,
  where `count` says how often the answer, not the prompt, holds the token.

The rows of a verify forward come after drafts whose values the host does not know yet: these count as well,
each in the rows behind it, as they would have in step-by-step decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from dspark_tui.engine.protocol import Sampling


def unknown_biased_token(sampling: Sampling, vocabulary: int) -> str | None:
    """One sentence when `logit_bias` names a token that the vocabulary does not have, or None."""
    for token in sampling.logit_bias:
        if token >= vocabulary:
            return f"logit bias names token {token}; this model's token ids go from 0 to {vocabulary - 1}."
    return None


class Penalties:
    """Bias and penalties of one answer. The host's part of the history is what `observe` was told; what
    comes after it is given to `rows` and `some` as lazy arrays."""

    def __init__(self, sampling: Sampling, vocabulary: int, prompt: Sequence[int]) -> None:
        """Raises ValueError when the bias names a token outside the vocabulary: MLX does not check ids."""
        if problem := unknown_biased_token(sampling, vocabulary):
            raise ValueError(problem)
        self._repetition = sampling.repetition_penalty
        self._frequency, self._presence = sampling.frequency_penalty, sampling.presence_penalty
        self._vocabulary = vocabulary
        self._bias: mx.array | None = None
        if sampling.logit_bias:
            ids = mx.array(list(sampling.logit_bias), dtype=mx.uint32)
            self._bias = mx.zeros((vocabulary,)).at[ids].add(mx.array(list(sampling.logit_bias.values())))
        self._in_prompt = self._times(set(prompt)) > 0
        self._count = mx.zeros((vocabulary,))

    @property
    def look_back(self) -> bool:
        """Whether the tokens so far matter (a bias alone is the same in every row)."""
        return self._repetition != 1.0 or self._frequency != 0.0 or self._presence != 0.0

    def observe(self, tokens: Sequence[int]) -> None:
        """`tokens` were committed to the answer."""
        if self.look_back and tokens:
            self._count = self._count + self._times(tokens)

    def _times(self, tokens: Sequence[int] | set[int]) -> mx.array:
        """How often each token of the vocabulary is among `tokens`: `[vocabulary]` float32."""
        known = [token for token in tokens if 0 <= token < self._vocabulary]
        none = mx.zeros((self._vocabulary,))
        return none.at[mx.array(known, dtype=mx.uint32)].add(1.0) if known else none

    def rows(self, logits: mx.array, ahead: mx.array | None = None) -> mx.array:
        """Adjusted logits, `[n, vocabulary]` float32, of `logits` `[n, vocabulary]`.

        `ahead` `[m]` are tokens after the observed ones, `m >= n - 1`: the last row comes after all of
        them, each row before it after one fewer.
        """
        logits = logits.astype(mx.float32)
        if self._bias is not None:
            logits = logits + self._bias
        if not self.look_back:
            return logits
        count = self._count
        if ahead is not None and ahead.shape[0]:
            n, m = logits.shape[0], ahead.shape[0]
            every = mx.arange(self._vocabulary, dtype=mx.uint32)
            upto = mx.cumsum((ahead.astype(mx.uint32)[:, None] == every).astype(mx.float32), axis=0)
            first = m - (n - 1)
            unseen = mx.zeros((1, self._vocabulary)) if first == 0 else upto[first - 1 : first]
            count = count + mx.concatenate([unseen, upto[first:]])
        return self._adjust(logits, count, self._in_prompt)

    def some(self, logits: mx.array, ids: mx.array, ahead: mx.array | None = None) -> mx.array:
        """Adjusted logits `[c]` float32 of the candidates `ids` `[c]` in one row that comes after all of
        `ahead` `[m]`. `ids` must lie inside the vocabulary."""
        logits = logits.astype(mx.float32)
        if self._bias is not None:
            logits = logits + self._bias[ids]
        if not self.look_back:
            return logits
        count = self._count[ids]
        if ahead is not None:
            same = ahead.astype(mx.uint32)[:, None] == ids.astype(mx.uint32)
            count = count + same.astype(mx.float32).sum(axis=0)
        return self._adjust(logits, count, self._in_prompt[ids])

    def _adjust(self, logits: mx.array, count: mx.array, in_prompt: mx.array) -> mx.array:
        held = count > 0
        if self._repetition != 1.0:
            # Without a choice by sign, which a CPU would guess wrong every second time.
            weaker = mx.maximum(logits, 0) / self._repetition + mx.minimum(logits, 0) * self._repetition
            logits = mx.where(mx.logical_or(held, in_prompt), weaker, logits)
        if self._frequency != 0.0:
            logits = logits - self._frequency * count
        if self._presence != 0.0:
            logits = logits - self._presence * held.astype(mx.float32)
        return logits
