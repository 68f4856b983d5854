"""One forward of one attention module, as a press sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from press_core.errors import UnsupportedInputError
from press_core.model.sites import AttentionSite
from press_core.select import gather_tokens, upcast


@dataclass
class AttentionCall:
    """What an attention module was given and made, for the tokens that a press is to judge.

    `S` counts the keys to choose from, `q` the tokens whose hidden states and queries are known. In
    a prefill they are the same tokens; while decoding they are the last `q` of the `S`; where
    another press has already pruned, `tokens` says which are left.

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
        tokens: `(B, H_kv, S)` int64, which of the `q` tokens each key belongs to; None: the last
            `q` keys belong to them, in order.
        rotary_positions: `(1 or B, 1 or H_kv, S)` int64, to which position each key is rotated;
            None: as `position_ids` says.
        batch_rows: rows of the batch that this call is about; None: all.
        decoding: whether this is a call between forwards that found their layer filled.
        target: number of tokens that each KV head is to keep, where that is not the press's to say.
        kept: set by `keep`: `(B, H_kv, n)` int64, which of the `S` keys the press kept.
        kept_heads: set by `keep_heads`: `(B, H_kv, n)` bool, which of those each head keeps.
        turned_to: set by `turn`: `(B, H_kv, n)` int64, to which positions the kept keys are turned.
        n_turned: set by `turn`: the position that comes after them.
        remembered: `(B, H_kv, w)`: scores of the last `w` tokens, from one forward to the next.
        evicted: set by a press that judges tokens late: `(B, H_kv, m)` bool, which to evict of the
            `m` tokens before those `w`.
        channels: set by a press that keeps some channels of the keys only: `(B, H_kv, d')` int64.
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
    rotary_positions: Tensor | None = None
    batch_rows: list[int] | None = None
    decoding: bool = False
    target: int | None = None
    kept: Tensor | None = field(default=None, init=False)
    kept_heads: Tensor | None = field(default=None, init=False)
    turned_to: Tensor | None = field(default=None, init=False)
    n_turned: int | None = field(default=None, init=False)
    remembered: Tensor | None = field(default=None, init=False)
    evicted: Tensor | None = field(default=None, init=False)
    channels: Tensor | None = field(default=None, init=False)
    _origin: Tensor | None = field(default=None, init=False)

    @property
    def length(self) -> int:
        """`S`: number of keys to choose from."""
        return int(self.keys.shape[2])

    @property
    def next_position(self) -> Tensor:
        """Position of the token that comes after this forward, `(1 or B, 1)` int64."""
        if self.tokens is not None and self.rotary_positions is not None:
            return self.rotary_positions.flatten(1).amax(dim=1, keepdim=True) + 1
        if self.position_ids is None:
            return torch.tensor([[self.hidden_states.shape[1]]], device=self.keys.device)
        return self.position_ids[:, -1:] + 1

    def queries(self, last: int | None = None) -> Tensor:
        """The exact queries after RoPE that belong to the (`last`) keys.

        Returns:
            `(B, H, last or S, d)`, contiguous, the bits that the attention function received; fewer
            where only the last `q` are known. Where tokens are already pruned each query head
            follows its KV head's kept tokens.
        """
        if self.query is None:
            raise UnsupportedInputError(
                f"the queries of {self.site.name} were not collected; a press that reads them "
                "declares `uses_queries = True`"
            )
        if self.tokens is None:
            return self._rotated(max(0, self.query.shape[2] - last) if last else 0).contiguous()
        tokens = self.tokens if last is None else self.tokens[..., -last:]
        if self.rotary_positions is None or self.site.rotary is None:
            return gather_tokens(self._rotated(0), tokens)
        # Keys that were turned meet queries that are turned alike.
        before_rope = gather_tokens(self._before_rope(), tokens)
        groups = self.site.num_heads // tokens.shape[1]
        positions = self.rotary_positions[..., -tokens.shape[-1] :].expand(tokens.shape)
        turned = self.site.rotary.turn(before_rope, positions.repeat_interleave(groups, dim=1))
        return turned.to(self.query.dtype)

    def queries_before_rope(self) -> Tensor:
        """The queries before RoPE, `(B, H, S, d)`, float32 or better.

        Both mechanisms turn the rotated queries back, so that their bits agree; a patch never sees
        the ones before.
        """
        if self.tokens is not None:
            return gather_tokens(self._before_rope(), self.tokens)
        return self._before_rope().contiguous()

    def _before_rope(self) -> Tensor:
        rotated = self._rotated(0)
        if self.site.rotary is not None and self.position_embeddings is not None:
            return self.site.rotary.unrotate(rotated, *self.position_embeddings)
        return rotated

    def key_positions(self) -> Tensor:
        """Rotary position of each key, `(1 or B, 1 or H_kv, S)` int64."""
        if self.rotary_positions is not None:
            return self.rotary_positions
        positions = self.position_ids
        if positions is None:
            positions = torch.arange(self.hidden_states.shape[1], device=self.keys.device)[None]
        positions = positions.unsqueeze(1)
        if self.tokens is None:
            return positions
        return positions.expand(*self.tokens.shape[:2], -1).gather(-1, self.tokens)

    def keys_before_rope(self) -> Tensor:
        """The keys before RoPE, `(B, H_kv, S, d)`, float32 or better; as they are without RoPE."""
        rotary = self.site.rotary
        if rotary is None or self.position_embeddings is None:
            return upcast(self.keys)
        if self.tokens is None and self.rotary_positions is None:
            return rotary.unrotate(self.keys, *self.position_embeddings)
        return rotary.turn(self.keys, self.key_positions(), back=True)

    def of_tokens(self, per_token: Tensor) -> Tensor:
        """From something for each of the `q` tokens to the same for each key.

        Args:
            per_token: `(B, H_kv, q)`.

        Returns:
            `(B, H_kv, S)`.

        Raises:
            UnsupportedInputError: if there are keys of earlier tokens.
        """
        if self.tokens is not None:
            return per_token.gather(-1, self.tokens)
        if per_token.shape[-1] != self.length:
            raise UnsupportedInputError(
                f"{self.length} keys are to be judged by the hidden states of their own tokens, "
                f"and those of {per_token.shape[-1]} tokens are known"
            )
        return per_token

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

    def keep_heads(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Keep another number of tokens in each KV head.

        Args:
            kept: `(B, H_kv, S)` bool.

        Returns:
            Keys and values as they are: the cache layer takes out of them what is kept.
        """
        self.kept_heads = kept
        return self.keys, self.values

    def turn(self, keys: Tensor) -> Tensor:
        """Turn kept keys to the positions `0 ... n - 1`, from where later tokens are to continue.

        Args:
            keys: `(B, H_kv, n, d)`, those that were kept, as they lie in the cache.

        Returns:
            `(B, H_kv, n, d)`, in the dtype of `keys`; themselves where all were kept.

        Raises:
            UnsupportedInputError: if nobody said which were kept.
        """
        rotary, n, before = self.site.rotary, keys.shape[2], self.turned_to
        assert rotary is not None
        self.turned_to = torch.arange(n, device=keys.device).expand(keys.shape[:3])
        self.n_turned = n
        if self.kept is None and n == self.length:
            return keys
        narrowed = self._narrowed(self._known_kept(keys), keys, keys)
        if before is not None:
            narrowed.rotary_positions = before
        return rotary.turn(narrowed.keys_before_rope(), self.turned_to[:1, :1]).to(keys.dtype)

    def _known_kept(self, keys: Tensor) -> Tensor:
        """Which keys a press has kept that returned `keys`, `(B, H_kv, n)`."""
        if self.kept is not None:
            return self.kept
        if keys.shape[2] != self.length:
            raise UnsupportedInputError(
                "a press pruned without saying which tokens it kept, and another is to follow; "
                "let its compress return what AttentionCall.keep(positions) gives"
            )
        return torch.arange(self.length, device=keys.device).expand(keys.shape[:3])

    # ---- narrower calls, for presses that wrap presses -------------------------------------------

    def select(self, positions: Tensor) -> AttentionCall:
        """The call over the keys at `positions` `(B, H_kv, n)` alone; queries follow them."""
        keys, values = gather_tokens(self.keys, positions), gather_tokens(self.values, positions)
        return self._narrowed(positions, keys, values)

    def chunk(self, start: int, stop: int) -> AttentionCall:
        """The call over the keys from `start` to `stop`, with the queries of their tokens only."""
        stop = min(stop, self.length)
        keys, values = self.keys[:, :, start:stop], self.values[:, :, start:stop]
        if self.tokens is not None:
            positions = torch.arange(start, stop, device=keys.device)
            return self._narrowed(positions.expand(*keys.shape[:2], -1), keys, values)
        cos_sin, ids, weights = self.position_embeddings, self.position_ids, self.attentions
        if ids is None:
            ids = torch.arange(self.length, device=keys.device)[None]
        return replace(
            self,
            hidden_states=self.hidden_states[:, start:stop],
            keys=keys,
            values=values,
            attentions=None if weights is None else weights[:, :, start:stop, start:stop],
            position_embeddings=cos_sin and (cos_sin[0][:, start:stop], cos_sin[1][:, start:stop]),
            position_ids=ids[:, start:stop],
            query=None if self.query is None else self.query[:, :, start:stop],
            target=None,
        )

    def following(self, keys: Tensor, values: Tensor) -> AttentionCall:
        """The call as the next press is to see it, after one has returned `keys` and `values`.

        Raises:
            UnsupportedInputError: if the press dropped keys and did not say which it kept.
        """
        left = self._narrowed(self._known_kept(keys), keys, values)
        left.channels, left.n_turned = self.channels, self.n_turned
        left.kept_heads, left.remembered = self.kept_heads, self.remembered
        if self.turned_to is not None:
            left.rotary_positions = self.turned_to
        return left

    def conclude(self, left: AttentionCall) -> tuple[Tensor, Tensor]:
        """End as the presses have left it whose calls, one `following` the other, began here."""
        self.kept, self.kept_heads, self.remembered = left._origin, left.kept_heads, left.remembered
        self.channels, self.n_turned = left.channels, left.n_turned
        self.turned_to = None if left.n_turned is None else left.rotary_positions
        return left.keys, left.values

    def _narrowed(self, positions: Tensor, keys: Tensor, values: Tensor) -> AttentionCall:
        """The call over `keys` and `values`, which lay at `positions` `(B, H_kv, n)`."""
        older = self.length - self.hidden_states.shape[1] if self.tokens is None else 0
        turned_to = self.rotary_positions
        narrowed = replace(
            self,
            keys=keys,
            values=values,
            attentions=None,
            tokens=positions - older if self.tokens is None else self.tokens.gather(-1, positions),
            rotary_positions=None
            if turned_to is None
            else turned_to.expand(*positions.shape[:2], -1).gather(-1, positions),
            target=None,
        )
        narrowed._origin = positions
        if self._origin is not None:
            narrowed._origin = self._origin.gather(-1, positions)
        return narrowed

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
        older = self.length - self.hidden_states.shape[1]
        first = max(0, start - older) if self.tokens is None else 0
        attentions = None if self.tokens is not None else self.attentions
        embeddings, turned_to = self.position_embeddings, self.rotary_positions
        return replace(
            self,
            batch_rows=rows,
            hidden_states=self.hidden_states[rows, first:],
            keys=self.keys[rows, :, start:],
            values=self.values[rows, :, start:],
            attentions=attentions if attentions is None else attentions[rows, :, first:, start:],
            position_embeddings=embeddings
            and (of_rows(embeddings[0])[:, first:], of_rows(embeddings[1])[:, first:]),
            position_ids=None
            if self.position_ids is None
            else of_rows(self.position_ids)[:, first:],
            query=None if self.query is None else self.query[rows, :, first:],
            tokens=None if self.tokens is None else self.tokens[rows, :, start:],
            rotary_positions=None if turned_to is None else of_rows(turned_to)[:, :, start:],
        )

    def parts(
        self, padding: list[int], each_row: bool = False
    ) -> Iterator[tuple[list[int], int, AttentionCall]]:
        """The batch as parts of equal padding: rows, their padding, and the call for them alone.

        Args:
            padding: per row (or one for all), the slots on the left that hold nothing; empty where
                there are none.
            each_row: whether each row is a part of its own.
        """
        batch = self.keys.shape[0]
        if each_row and batch > 1:
            starts = padding or [0]
            for row, start in enumerate(starts * batch if len(starts) == 1 else starts):
                yield [row], start, self.rows([row], start)
            return
        if not padding:
            yield list(range(batch)), 0, self
            return
        padding = padding * batch if len(padding) == 1 else padding
        for start in sorted(set(padding)):
            rows = [row for row in range(batch) if padding[row] == start]
            yield rows, start, self.rows(rows, start)
