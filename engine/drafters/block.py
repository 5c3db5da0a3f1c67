"""What every block drafter does: keep the context, run the block, and hand hidden states to a head."""

from __future__ import annotations

from abc import ABC, abstractmethod

import mlx.core as mx

from dspark_tui.engine.drafters.base import Proposal, Tables
from dspark_tui.engine.drafters.config import BackboneConfig, HeadConfig
from dspark_tui.engine.drafters.context_ring import ContextRing
from dspark_tui.engine.drafters.heads import DrafterModel
from dspark_tui.engine.protocol import Method
from dspark_tui.engine.sampling import Sampler


class BlockDrafter(ABC):
    """A block drafter with its context; a subclass turns the block's hidden states into a proposal."""

    def __init__(
        self,
        name: str,
        method: Method,
        config: BackboneConfig,
        head: HeadConfig,
        model: DrafterModel,
        tables: Tables,
        dtype: mx.Dtype,
        d2t: mx.array | None = None,
        mask_embedding: mx.array | None = None,
    ) -> None:
        """`d2t` `[draft vocabulary]`: what to add to a draft id to get the target's. `mask_embedding`
        `[hidden]` replaces the mask token's row. Raises ValueError when these do not fit the configuration.
        """
        self.name, self.method = name, method
        self.config, self.head = config, head
        self.model, self.tables = model, tables
        self.drafts = config.block_size - head.first_row
        self.taps = config.taps
        self._dtype = dtype
        self._vocabulary = DraftVocabulary(head, config.vocabulary, d2t)
        self._masks = mx.array([config.mask_token] * (config.block_size - 1), dtype=mx.uint32)
        self._mask_rows: mx.array | None = None
        if mask_embedding is not None:
            row = mask_embedding.reshape(1, config.hidden_size).astype(dtype)
            self._mask_rows = mx.broadcast_to(row, (config.block_size - 1, config.hidden_size))
        self._scale = mx.array(config.embedding_scale, dtype=dtype)
        self._rings = [ContextRing(layer, config.context_limit) for layer in config.attention]

    # ------------------------------------------------------------------ context

    @property
    def length(self) -> int:
        """The position after the last context row."""
        return self._rings[0].length

    def extend(self, rows: mx.array, position: int) -> None:
        """See `Drafter.extend`. Rows that no layer can see are not even projected. Raises `ValueError`
        when `position` leaves a gap."""
        if position != self.length:
            raise ValueError(f"context rows for position {position}, but the context ends at {self.length}")
        limits = [ring.limit for ring in self._rings]
        coming = rows.shape[0]
        if None not in limits and coming > (longest := max(limit for limit in limits if limit is not None)):
            rows = rows[coming - longest :]
            for ring in self._rings:
                ring.skip_to(position + coming - longest)
        if rows.shape[0]:
            self.model.extend(rows.astype(self._dtype), self._rings)

    def truncate(self, length: int) -> None:
        """See `Drafter.truncate`. A context whose dropped rows would be wanted again is forgotten whole, so
        that it is given anew."""
        if length < self._rings[0].first:
            self.reset(length)
        elif not all(ring.truncate(length) for ring in self._rings):
            self.reset()

    def reset(self, position: int = 0) -> None:
        """See `Drafter.reset`."""
        for ring in self._rings:
            ring.reset(position)

    def state(self) -> list[mx.array]:
        """See `Drafter.state`."""
        return [array for ring in self._rings for array in ring.state()]

    # ------------------------------------------------------------------ a round

    def propose(self, anchor: int, k: int, sampler: Sampler) -> Proposal:
        """See `Drafter.propose`. The block keeps all its rows whatever `k` is: where attention runs both
        ways, a shorter block would change every prediction."""
        hidden = self.model(self._embed(anchor), self._rings)
        # Not a number has no place in an order, and what is picked by one could lie outside a table.
        finite = mx.isfinite(hidden).all()
        hidden = mx.where(finite, hidden, mx.zeros_like(hidden))
        first = self.head.first_row
        logits = self._logits(hidden[first : first + min(k, self.drafts)])
        fit = mx.isfinite(logits.sum())
        logits = mx.where(fit, logits, mx.zeros_like(logits))
        proposal = self._draft(hidden, logits, anchor, sampler)
        return Proposal(proposal.tokens, proposal.q, proposal.confidence, mx.logical_and(finite, fit))

    def _embed(self, anchor: int) -> mx.array:
        """The block's input `[block, hidden]`."""
        ids = mx.array([anchor], dtype=mx.uint32)
        if self._mask_rows is None:
            ids = mx.concatenate([ids, self._masks])
        own = self.head.own_embedding
        rows = (self.model.embed_tokens(ids) if own else self.tables.embed(ids)).astype(self._dtype)
        if self._mask_rows is not None:
            rows = mx.concatenate([rows, self._mask_rows])
        return rows if self.config.embedding_scale == 1.0 else rows * self._scale

    def _logits(self, rows: mx.array) -> mx.array:
        """The head's logits `[n, draft vocabulary]` float32 of hidden rows, with multiplier and soft cap."""
        own = self.head.own_head
        logits = (self.model.lm_head(rows) if own else self.tables.head(rows)).astype(mx.float32)
        if self.head.multiplier != 1.0:
            logits = logits * self.head.multiplier
        if self.head.softcap is not None:
            logits = mx.tanh(logits / self.head.softcap) * self.head.softcap
        return logits

    @abstractmethod
    def _draft(self, hidden: mx.array, logits: mx.array, anchor: int, sampler: Sampler) -> Proposal:
        """Turn final hidden states `[block, hidden]` and the head's `logits` `[k, draft vocabulary]` of the
        rows that propose into `k` drafts. Lazy."""


class DraftVocabulary:
    """Draft ids and target ids: the same, unless the head's vocabulary is reduced."""

    def __init__(self, head: HeadConfig, vocabulary: int, d2t: mx.array | None) -> None:
        """Raises ValueError when `d2t` is missing, or maps outside the target's `vocabulary` or twice to
        the same token."""
        self._targets: mx.array | None = None
        if head.draft_vocabulary is None:
            return
        if d2t is None or d2t.size != head.draft_vocabulary:
            raise ValueError(
                f"a reduced vocabulary of {head.draft_vocabulary} tokens needs as many d2t entries"
            )
        targets = mx.arange(head.draft_vocabulary, dtype=mx.int64) + d2t.reshape(-1).astype(mx.int64)
        ids: list[int] = targets.tolist()  # type: ignore[assignment]
        if min(ids) < 0 or max(ids) >= vocabulary or len(set(ids)) != len(ids):
            raise ValueError(f"its d2t does not map to distinct tokens of the target's {vocabulary}")
        self._targets = targets.astype(mx.uint32)
        places = [len(ids)] * vocabulary
        for place, token in enumerate(ids):
            places[token] = place
        self._places = mx.array(places, dtype=mx.uint32)

    def spread(self, logits: mx.array) -> mx.array:
        """Logits `[n, draft vocabulary]` as logits `[n, vocabulary]`: minus infinity where nothing can be
        drafted."""
        if self._targets is None:
            return logits
        padded = mx.pad(logits, [(0, 0), (0, 1)], constant_values=-mx.inf)
        return mx.take(padded, self._places, axis=-1)

    def best(self, logits: mx.array) -> mx.array:
        """The most likely tokens `[n]` of the target's vocabulary."""
        return self.targets(mx.argmax(logits, axis=-1))

    def targets(self, drafted: mx.array) -> mx.array:
        """The target's ids of draft ids."""
        return drafted if self._targets is None else self._targets[drafted]
