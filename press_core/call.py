"""One forward of one attention module, as a press sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from press_core.errors import UnsupportedInputError
from press_core.select import gather_tokens
from press_core.sites import AttentionSite


@dataclass
class AttentionCall:
    """What an attention module was given and made, for the tokens that a press is to judge.

    `S` counts the keys to choose from, `q` the tokens of the forward. In a prefill they are the
    same tokens; where an inner scope has already pruned, `tokens` says which are left.

    Attributes:
        site: the attention module.
        hidden_states: `(B, q, D)`, its input.
        keys, values: `(B, H_kv, S, d)`, as they lie in the cache (keys after RoPE).
        attentions: `(B, H, q, S)` weights where the attention implementation returns them, or None.
        position_embeddings: cosines and sines, each `(1 or B, q, rotary channels)`, or None.
        position_ids: `(1 or B, q)` int64, or None where the model did not pass them on.
        query: `(B, H, q, d)` as the mechanism found it: before RoPE (collected by a hook) or after
            it (seen by a patch); None if nobody asked. Use `queries()`.
        query_is_rotated: which of the two.
        tokens: `(B, H_kv, S)` int64, which token of the forward each key belongs to; None: key `j`
            belongs to token `j`.
        kept: set by `keep`: `(B, H_kv, n)` int64, which of the `S` keys the press kept.
    """

    site: AttentionSite
    hidden_states: Tensor
    keys: Tensor
    values: Tensor
    attentions: Tensor | None = None
    position_embeddings: tuple[Tensor, Tensor] | None = None
    position_ids: Tensor | None = None
    query: Tensor | None = None
    query_is_rotated: bool = False
    tokens: Tensor | None = None
    kept: Tensor | None = field(default=None, init=False)

    @property
    def length(self) -> int:
        """`S`: number of keys to choose from."""
        return int(self.keys.shape[2])

    @property
    def next_position(self) -> Tensor:
        """Position of the token that comes after this forward, `(1 or B, 1)` int64."""
        if self.position_ids is None:
            return torch.tensor([[self.hidden_states.shape[1]]], device=self.keys.device)
        return self.position_ids[:, -1:] + 1

    def queries(self, last: int | None = None) -> Tensor:
        """The exact queries after RoPE that belong to the (`last`) keys.

        Returns:
            `(B, H, last or S, d)`, contiguous, the bits that the attention function received. Where
            tokens are already pruned each query head follows its KV head's kept tokens.
        """
        if self.query is None:
            raise UnsupportedInputError(
                f"the queries of {self.site.name} were not collected; a press that reads them "
                "declares `uses_queries = True`"
            )
        if self.tokens is None:
            return self._rotated(self.query.shape[2] - (last or self.query.shape[2])).contiguous()
        tokens = self.tokens if last is None else self.tokens[..., -last:]
        return gather_tokens(self._rotated(0), tokens)

    def queries_before_rope(self) -> Tensor:
        """The queries before RoPE, `(B, H, S, d)`, float32 or better.

        Both mechanisms turn the rotated queries back, so that their bits agree; a patch never sees
        the ones before.
        """
        rotated = self._rotated(0)
        if self.site.rotary is not None and self.position_embeddings is not None:
            rotated = self.site.rotary.unrotate(rotated, *self.position_embeddings)
        if self.tokens is not None:
            return gather_tokens(rotated, self.tokens)
        return rotated.contiguous()

    def _rotated(self, start: int) -> Tensor:
        assert self.query is not None
        query, rotary = self.query[:, :, start:], self.site.rotary
        if self.query_is_rotated or rotary is None or self.position_embeddings is None:
            return query
        cos, sin = self.position_embeddings
        return rotary.rotate(query, cos[:, start:], sin[:, start:])

    def keep(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values at `positions` `(B, H_kv, n)`, and remember which they are.

        Returns:
            Keys and values, each `(B, H_kv, n, d)`.
        """
        self.kept = positions
        return gather_tokens(self.keys, positions), gather_tokens(self.values, positions)

    def rows(self, rows: list[int], start: int) -> AttentionCall:
        """The call as it would have been for the batch `rows` alone, without padding.

        Args:
            rows: rows of the batch.
            start: slots on the left of these rows that hold padding or nothing.
        """

        def of_rows(x: Tensor) -> Tensor:
            return x if x.shape[0] == 1 else x[rows]

        # Where tokens are already pruned they count from the start of the forward, padding and
        # all, and the weights that the layer returned no longer fit.
        first = start if self.tokens is None else 0
        attentions = None if self.tokens is not None else self.attentions
        embeddings = self.position_embeddings
        return replace(
            self,
            hidden_states=self.hidden_states[rows, first:],
            keys=self.keys[rows, :, start:],
            values=self.values[rows, :, start:],
            attentions=attentions if attentions is None else attentions[rows, :, first:, first:],
            position_embeddings=embeddings
            and (of_rows(embeddings[0])[:, first:], of_rows(embeddings[1])[:, first:]),
            position_ids=None
            if self.position_ids is None
            else of_rows(self.position_ids)[:, first:],
            query=None if self.query is None else self.query[rows, :, first:],
            tokens=None if self.tokens is None else self.tokens[rows, :, start:],
        )

    def parts(self, padding: list[int]) -> Iterator[tuple[list[int], int, AttentionCall]]:
        """The batch as parts of equal padding: rows, their padding, and the call for them alone.

        Args:
            padding: per row (or one for all), the slots on the left that hold nothing; empty where
                there are none.
        """
        batch = self.keys.shape[0]
        if not padding:
            yield list(range(batch)), 0, self
            return
        padding = padding * batch if len(padding) == 1 else padding
        for start in sorted(set(padding)):
            rows = [row for row in range(batch) if padding[row] == start]
            yield rows, start, self.rows(rows, start)
