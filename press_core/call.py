"""One forward of one attention module, as a press sees it: an observation that nobody changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from press_core.copies import copied
from press_core.errors import UnsupportedInputError
from press_core.model.rotary import alike
from press_core.model.sites import AttentionSite
from press_core.select import gather_alike, gather_tokens, upcast

if TYPE_CHECKING:
    from press_core.scope import ScopeState


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What an attention module was given and made, for the tokens that a press is to judge.

    `S` counts the keys to choose from, `q` the tokens whose hidden states and queries are known. In
    a prefill they are the same tokens; while decoding they are the last `q` of the `S`; where
    another press has already pruned, `tokens` says which are left. What a press decides is not
    written here: it returns an `Eviction`.

    Attributes:
        site: the attention module.
        hidden_states: `(B, q, D)`, its input. Where that came in several forwards, and the press
            has not declared that it reads them, the shape alone: they lie on the meta device.
        keys, values: `(B, H_kv, S, d)`, as they lie in the cache (keys after RoPE).
        attentions: `(B, H, q, S)` weights where the attention implementation returns them, or None.
        position_embeddings: cosines and sines, each `(1 or B, q, rotary channels)`, or None.
        position_ids: `(1 or B, q)` int64, or None where the model did not pass them on.
        query: `(B, H, q, d)` as the mechanism found it: before RoPE (collected by a hook) or after
            it (seen by a patch); None if no press asked. Use `queries()`.
        query_is_rotated: which of the two.
        tokens: `(B, H_kv, S)` int64, which of the `q` tokens each key belongs to; None: the last
            `q` keys belong to them, in order.
        rotary_positions: `(1 or B, 1 or H_kv, S)` int64, to which position each key is rotated;
            None: as `position_ids` says.
        batch_rows: rows of the batch that this call is about; None: all.
        decoding: whether the layer held tokens before this forward.
        n_to_come: tokens of the same context that later forwards bring, of a prefill in chunks that
            the press prunes chunk by chunk.
        budget: number of tokens that each KV head is to keep, where another press sets it.
        memory: by name `(B, H_kv, S)`, what the press wanted to know of each key, up to date; see
            `Press.remember`.
        seen: tokens that the layer has seen of each of the `B` rows, padding left out.
        n_steps: forwards since the press pruned the layer last, while decoding.
        n_forwards: forwards that the scope has seen the layer through, while decoding.
        recent_scores: `(B, H_kv, w)`, what an earlier eviction left to judge late; see `Eviction`.
        kwargs: the keyword arguments of the forward, as the module got them.
        later: `(1 or B, q, q)` bool, which later ones each of the `q` tokens sees (those of an
            image, in some models); None: none.
        scope: what the open scope of the press knows.
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
    batch_rows: tuple[int, ...] | None = None
    decoding: bool = False
    n_to_come: int | None = None
    budget: int | None = None
    memory: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    seen: tuple[int, ...] | None = None
    n_steps: int = 0
    n_forwards: int = 0
    recent_scores: Tensor | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    later: Tensor | None = None
    scope: ScopeState | None = field(default=None, repr=False)

    @property
    def length(self) -> int:
        """`S`: number of keys to choose from."""
        return int(self.keys.shape[2])

    @property
    def context_length(self) -> int:
        """Tokens of the whole context, of which `S` are there and not yet evicted."""
        if self.n_to_come is None:
            return self.length
        return int(self._known_position_ids()[:, -1:].max()) + 1 + self.n_to_come

    @property
    def next_position(self) -> Tensor:
        """Position of the token that comes after this forward, under RoPE, `(1 or B, 1)` int64.

        Raises:
            UnsupportedInputError: if that is not known, as where an image comes last.
        """
        if self.tokens is not None and self.rotary_positions is not None:
            return self.rotary_positions.flatten(1).amax(dim=1, keepdim=True) + 1
        if self._has_own_positions and self.position_embeddings is not None:
            return self._found_position() + 1
        return self._known_position_ids()[:, -1:] + 1

    @property
    def _has_own_positions(self) -> bool:
        """Whether the model counts positions in its own way: those of images in three dimensions.

        What it hands on as position ids are then none, or other ones.
        """
        return self.site.rotary is not None and self.site.rotary.in_3d

    def _found_position(self) -> Tensor:
        assert self.site.rotary is not None
        assert self.position_embeddings is not None
        seen = 0 if self.seen is None else max(self.seen)
        limit = max(self.length, self.hidden_states.shape[1], seen)
        cos, sin = self.position_embeddings
        found = self.site.rotary.find(cos[:, -1:], sin[:, -1:], limit)
        if bool((found < 0).any()):
            raise UnsupportedInputError(
                f"the position of the last token of {self.site.name} is none of text, as of an "
                "image or a video, and where the next one goes is not known; let text follow it"
            )
        return found[:, None]

    # ---- queries and keys ------------------------------------------------------------------------

    def queries(self, last: int | None = None) -> Tensor:
        """The exact queries after RoPE that belong to the (`last`) keys.

        Returns:
            `(B, H, last or S, d)`, contiguous, the bits that the attention function received; fewer
            where only the last `q` are known. Where tokens are already pruned each query head
            follows its KV head's kept tokens.

        Raises:
            UnsupportedInputError: if the press did not declare that it needs them.
        """
        if self.query is None:
            raise UnsupportedInputError(
                f"the queries of {self.site.name} were not collected; a press that reads them "
                "declares `needs = Needs.QUERIES`"
            )
        if self.tokens is None:
            return self._rotated(max(0, self.query.shape[2] - last) if last else 0).contiguous()
        tokens = self.tokens if last is None else self.tokens[..., -last:]
        if self.rotary_positions is None or self.site.rotary is None:
            return gather_tokens(self._rotated(0), tokens)
        # Keys that were rerotated meet queries that are rerotated alike.
        before_rope = gather_tokens(self._before_rope(), tokens)
        groups = self.site.num_heads // tokens.shape[1]
        positions = self.rotary_positions[..., -tokens.shape[-1] :].expand(tokens.shape)
        positions = positions.repeat_interleave(groups, dim=1)
        return self.site.rotary.rotate_to(before_rope, positions).to(self.query.dtype)

    def later_of(self, last: int) -> Tensor | None:
        """Which later ones each of the `last` tokens sees, `(B, 1 or H_kv, last, last)` bool.

        None where attention is causal.
        """
        if self.later is None:
            return None
        if self.tokens is None:
            return self.later[:, None, -last:, -last:]
        tokens = self.tokens[..., -last:]
        seen = self.later[:, None].expand(*tokens.shape[:2], -1, -1)
        n, q = tokens.shape[-1], seen.shape[-1]
        seen = seen.gather(2, tokens[..., None].expand(-1, -1, -1, q))
        return seen.gather(3, tokens[..., None, :].expand(-1, -1, n, -1))

    def queries_before_rope(self) -> Tensor:
        """The queries before RoPE, `(B, H, S, d)`, float32 or better.

        Both mechanisms rotate the queries back, so that their bits agree; a patch never sees the
        ones before.
        """
        if self.tokens is not None:
            return gather_tokens(self._before_rope(), self.tokens)
        return self._before_rope().contiguous()

    def _before_rope(self) -> Tensor:
        rotated = self._rotated(0)
        if self.site.rotary is not None and self.position_embeddings is not None:
            return self.site.rotary.unrotate(rotated, *self.position_embeddings)
        return rotated

    def _rotated(self, start: int) -> Tensor:
        assert self.query is not None
        query, rotary = self.query[:, :, start:], self.site.rotary
        if self.query_is_rotated or rotary is None or self.position_embeddings is None:
            return query
        cos, sin = self.position_embeddings
        return rotary.rotate(query, cos[:, start:], sin[:, start:])

    def key_positions(self) -> Tensor:
        """Rotary position of each key, `(1 or B, 1 or H_kv, S)` int64.

        Raises:
            UnsupportedInputError: if a press pruned before that did not say what it kept, or if
                positions are in three dimensions.
        """
        if self.rotary_positions is not None:
            return self.rotary_positions
        if self._has_own_positions:
            raise UnsupportedInputError(
                f"the keys of {self.site.name} are to be rotated back, and the positions of tokens "
                "of earlier forwards are not known in a model that gives images positions in three "
                "dimensions"
            )
        positions = self._known_position_ids().unsqueeze(1)
        if self.tokens is None:
            if positions.shape[-1] != self.length:
                raise UnsupportedInputError(
                    f"the keys of {self.site.name} are to be rotated back, and a press that pruned "
                    "before did not say which tokens it kept; let its compress return "
                    "Eviction.keep(call, positions)"
                )
            return positions
        return positions.expand(*self.tokens.shape[:2], -1).gather(-1, self.tokens)

    def keys_before_rope(self) -> Tensor:
        """The keys before RoPE, `(B, H_kv, S, d)`, float32 or better; as they are without RoPE."""
        rotary = self.site.rotary
        if rotary is None or self.position_embeddings is None:
            return upcast(self.keys)
        as_given = self._cos_sin_of_keys()
        if as_given is not None:
            return rotary.unrotate_heads(self.keys, *as_given)
        return rotary.rotate_from(self.keys, self.key_positions())

    def lie_at(self, positions: Tensor) -> bool:
        """Whether the keys are rotated to `positions` `(B, H_kv, S)`, the same in every head."""
        as_given = self._cos_sin_of_keys()
        if not self._has_own_positions or as_given is None:
            return torch.equal(self.key_positions().expand_as(positions), positions)
        assert self.site.rotary is not None
        made = self.site.rotary.embeddings(as_given[0], positions[:, 0])
        return all(bool(alike(m[:, None], g).all()) for m, g in zip(made, as_given, strict=True))

    def _cos_sin_of_keys(self) -> tuple[Tensor, Tensor] | None:
        """Of each key, as the model gave them, `(1 or B, 1 or H_kv, S, rotary channels)` each.

        None where keys are of earlier forwards, or rotated to other positions meanwhile.
        """
        if self.position_embeddings is None or self.rotary_positions is not None:
            return None
        cos, sin = (x.unsqueeze(1) for x in self.position_embeddings)
        if self.tokens is None:
            return (cos, sin) if cos.shape[2] == self.length else None
        return _of_tokens(cos, self.tokens), _of_tokens(sin, self.tokens)

    def align_to_keys(self, per_token: Tensor) -> Tensor:
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

    def _known_position_ids(self) -> Tensor:
        if self.position_ids is not None:
            return self.position_ids
        first = 0 if self.site.rotary is None else self.site.rotary.first_position
        steps = torch.arange(self.hidden_states.shape[1], device=self.keys.device)
        return first + steps[None]

    def but(self, **fields: Any) -> AttentionCall:
        """The same with other `fields`."""
        return copied(self, **fields)

    # ---- narrower calls, for presses that wrap presses -------------------------------------------

    def with_budget(self, n: int) -> AttentionCall:
        """The same call, of which each KV head is to keep `n` tokens."""
        return self.but(budget=n)

    def select(self, positions: Tensor) -> AttentionCall:
        """The call over the keys at `positions` `(B, H_kv, n)` alone; queries follow them."""
        return self.narrowed(positions, *gather_alike(positions, self.keys, self.values))

    def narrowed(self, positions: Tensor, keys: Tensor, values: Tensor) -> AttentionCall:
        """The call over `keys` and `values` `(B, H_kv, n, d)`, which lay at `positions`."""
        older = self.length - self.hidden_states.shape[1] if self.tokens is None else 0
        rotary = self.rotary_positions
        if rotary is not None:
            rotary = rotary.expand(*positions.shape[:2], -1).gather(-1, positions)
        return self.but(
            keys=keys,
            values=values,
            attentions=None,
            tokens=positions - older if self.tokens is None else self.tokens.gather(-1, positions),
            rotary_positions=rotary,
            memory={name: x.gather(-1, positions) for name, x in self.memory.items()},
            n_to_come=None,
            budget=None,
        )

    def chunk(self, start: int, stop: int) -> AttentionCall:
        """The call over the keys from `start` to `stop`, with the queries of their tokens only."""
        stop = min(stop, self.length)
        keys, values = self.keys[:, :, start:stop], self.values[:, :, start:stop]
        if self.tokens is not None:
            positions = torch.arange(start, stop, device=keys.device)
            return self.narrowed(positions.expand(*keys.shape[:2], -1), keys, values)
        cos_sin, weights = self.position_embeddings, self.attentions
        return self.but(
            hidden_states=self.hidden_states[:, start:stop],
            keys=keys,
            values=values,
            attentions=None if weights is None else weights[:, :, start:stop, start:stop],
            position_embeddings=cos_sin and (cos_sin[0][:, start:stop], cos_sin[1][:, start:stop]),
            position_ids=self._known_position_ids()[:, start:stop],
            query=None if self.query is None else self.query[:, :, start:stop],
            later=None if self.later is None else self.later[:, start:stop, start:stop],
            memory={name: x[..., start:stop] for name, x in self.memory.items()},
            budget=None,
        )

    def of_rows(self, rows: list[int], slots: Tensor | None) -> AttentionCall:
        """The call as it would have been for some rows of the batch alone, without their padding.

        Args:
            rows: of the batch.
            slots: `(n,)` int64, which of the `S` slots hold tokens in all of these rows; None: all.
        """
        if slots is None:
            slots = torch.arange(self.length, device=self.keys.device)
        # Where tokens are already pruned they index the forward's tokens, padding and all, and the
        # weights that the layer returned no longer fit.
        older = self.length - self.hidden_states.shape[1]
        known = None if self.tokens is not None else slots[slots >= older] - older

        def per_row(x: Tensor | None) -> Tensor | None:
            return x if x is None or x.shape[0] == 1 else x[rows]

        def of_tokens(x: Tensor | None, dim: int) -> Tensor | None:
            x = per_row(x)
            return x if x is None or known is None else x.index_select(dim, known)

        def of_slots(x: Tensor | None) -> Tensor | None:
            x = per_row(x)
            return None if x is None else x.index_select(2, slots)

        weights = None if self.tokens is not None else of_tokens(self.attentions, 2)
        later = of_tokens(self.later, 1)
        cos_sin = self.position_embeddings
        return self.but(
            batch_rows=tuple(rows),
            hidden_states=_required(of_tokens(self.hidden_states, 1)),
            keys=_required(of_slots(self.keys)),
            values=_required(of_slots(self.values)),
            attentions=None if weights is None else weights.index_select(3, slots),
            position_embeddings=cos_sin
            and (_required(of_tokens(cos_sin[0], 1)), _required(of_tokens(cos_sin[1], 1))),
            position_ids=of_tokens(self.position_ids, 1),
            query=of_tokens(self.query, 2),
            later=later if later is None or known is None else later.index_select(2, known),
            tokens=of_slots(self.tokens),
            rotary_positions=of_slots(self.rotary_positions),
            memory={name: _required(of_slots(x)) for name, x in self.memory.items()},
            seen=self.seen and tuple([self.seen[row] for row in rows]),
            recent_scores=per_row(self.recent_scores),
        )


def _of_tokens(x: Tensor, tokens: Tensor) -> Tensor:
    """Of `x` `(1 or B, 1, q, c)` what belongs to `tokens` `(B, H_kv, S)`: `(B, H_kv, S, c)`."""
    return gather_tokens(x.expand(*tokens.shape[:2], -1, -1), tokens)


def _required(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
