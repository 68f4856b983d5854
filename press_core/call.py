"""One forward of one attention module as a press sees it: an immutable observation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from press_core.errors import UnsupportedInputError
from press_core.model.rotary import alike
from press_core.model.sites import AttentionSite
from press_core.observed import Moment, Positions, Query
from press_core.select import gather_each, gather_tokens, upcast


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The inputs and results of an attention module, for the tokens that a press can evict.

    `S` is the number of keys to choose from, `q` the number of tokens with known hidden states and
    queries. In a prefill these are the same tokens; while decoding, the last `q` of the `S`. If
    another press has already pruned, `at.tokens` gives the tokens that are left. The press's
    decision is not stored here: it is returned as an `Eviction`.

    Attributes:
        site: the attention module.
        hidden_states: `(B, q, D)`, its input. If `q` spans several forwards and the press has not
            declared that it reads hidden states, a tensor on the meta device (only its shape).
        keys, values: `(B, H_kv, S, d)`, as stored in the cache (keys after RoPE).
        attentions: `(B, H, q, S)` weights if the attention implementation returns them, or None.
        query: as observed by the mechanism; None if no press needs it. Use `queries()`.
        at: positions of the tokens and keys.
        when: prefill or decoding, and how far it has progressed.
        budget: number of tokens that each KV head is to keep, if another press sets it.
        memory: by name `(B, H_kv, S)`, the values that the press stores per key, up to date; see
            `Press.remember`.
        carried: by name `(B, ...)`, what an earlier eviction stored with the layer; see `Eviction`.
        kwargs: the keyword arguments of the module's forward.
        notes: what the press noted before the forward of the decoder.
        scope: the open scope of the press, of which formulas use `sites` and `prepared`; None if
            the press is called by hand.
    """

    site: AttentionSite
    hidden_states: Tensor
    keys: Tensor
    values: Tensor
    attentions: Tensor | None = None
    query: Query | None = None
    at: Positions = field(default_factory=Positions)
    when: Moment = field(default_factory=Moment)
    budget: int | None = None
    memory: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    carried: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    notes: Mapping[Any, Any] = field(default_factory=dict, repr=False)
    scope: Any = field(default=None, repr=False)

    @property
    def position_embeddings(self) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of the `q` tokens, each `(1 or B, q, rotary channels)`, or None."""
        return self.at.embeddings

    @property
    def position_ids(self) -> Tensor | None:
        """Of the `q` tokens, `(1 or B, q)` int64, or None if the model did not pass them on."""
        return self.at.ids

    @property
    def length(self) -> int:
        """`S`: number of keys to choose from."""
        return int(self.keys.shape[2])

    @property
    def context_length(self) -> int:
        """Tokens of the whole context; pruned chunk by chunk, it may be longer than `S`."""
        if self.when.n_remaining is None:
            return self.length
        return max(self.when.seen or (self.length,)) + self.when.n_remaining

    @property
    def next_position(self) -> Tensor:
        """Rotary position of the first token after this forward, `(1 or B, 1)` int64.

        Raises:
            UnsupportedInputError: if it is not known, as when the context ends with an image.
        """
        if self.at.rotary is not None:
            return self.at.rotary.flatten(1).amax(dim=1, keepdim=True) + 1
        rotary = self.site.rotary_in_3d
        if rotary is None or self.at.embeddings is None:
            return self._known_ids()[:, -1:] + 1
        cos, sin = self.at.embeddings
        limit = max(self.length, self.hidden_states.shape[1], *(self.when.seen or (0,)))
        found = rotary.find(cos[:, -1:], sin[:, -1:], limit)
        if bool((found < 0).any()):
            raise UnsupportedInputError(
                f"the last token in {self.site.name} has no text position; let text follow an image"
            )
        return found[:, None] + 1

    # ---- queries and keys ------------------------------------------------------------------------

    def queries(self, last: int | None = None) -> Tensor:
        """The exact queries after RoPE of the tokens of the (`last`) keys.

        Returns:
            `(B, H, last or S, d)`, contiguous, bit-identical to what the attention function got;
            fewer if only the last `q` are known. If tokens are already pruned, each query head
            has the queries of its KV head's kept tokens.

        Raises:
            UnsupportedInputError: if the press did not declare that it needs queries, or if all
                keys are of earlier forwards.
        """
        query, rotary = self._collected(), self.site.rotary
        if self.at.tokens is None:
            start = max(0, query.states.shape[2] - (last or self.length))
            return self._rotated(start).contiguous()
        tokens = self._known(self.at.tokens if last is None else self.at.tokens[..., -last:])
        if self.at.rotary is None or rotary is None:
            return gather_tokens(self._rotated(0), tokens)
        # Keys were rerotated, so queries are rotated to the same positions.
        before_rope = gather_tokens(self._before_rope(), tokens)
        groups = self.site.num_heads // tokens.shape[1]
        positions = self.at.rotary[..., -tokens.shape[-1] :].expand(tokens.shape)
        positions = positions.repeat_interleave(groups, dim=1)
        return rotary.rotate_to(before_rope, positions).to(query.states.dtype)

    def bidirectional_of(self, last: int) -> Tensor | None:
        """Which later tokens each of the `last` tokens sees, `(B, 1 or H_kv, last, last)` bool.

        None if attention is causal.
        """
        if self.at.bidirectional is None:
            return None
        if self.at.tokens is None:
            return self.at.bidirectional[:, None, -last:, -last:]
        tokens = self.at.tokens[..., -last:]
        seen = self.at.bidirectional[:, None].expand(*tokens.shape[:2], -1, -1)
        n, q = tokens.shape[-1], seen.shape[-1]
        seen = seen.gather(2, tokens[..., None].expand(-1, -1, n, q))
        return seen.gather(3, tokens[..., None, :].expand(-1, -1, n, -1))

    def queries_before_rope(self) -> Tensor:
        """The queries before RoPE, `(B, H, S, d)`, float32 or better.

        Both mechanisms undo the rotation, so that their results are bit-identical: a patch never
        sees queries before RoPE.

        Raises:
            UnsupportedInputError: if the press did not declare that it needs queries.
        """
        if self.at.tokens is not None:
            return gather_tokens(self._before_rope(), self._known(self.at.tokens))
        return self._before_rope().contiguous()

    def _known(self, tokens: Tensor) -> Tensor:
        """Those of `tokens` `(B, H_kv, n)` that are not of earlier forwards in any head."""
        known = tokens[..., (tokens >= 0).all(dim=(0, 1))] if self.when.decoding else tokens
        if not known.shape[-1]:
            raise UnsupportedInputError(
                f"queries in {self.site.name} are known of the latest "
                f"{self.hidden_states.shape[1]} tokens only, and keys of others were selected"
            )
        return known

    def _collected(self) -> Query:
        if self.query is None:
            raise UnsupportedInputError(
                f"the queries of {self.site.name} were not collected; a press that reads them "
                "declares `needs = Needs.QUERIES`, acts after attention (see `phases`), and is "
                "given all keys of the call, or `call.select(positions)`"
            )
        return self.query

    def _before_rope(self) -> Tensor:
        rotated = self._rotated(0)
        if self.site.rotary is not None and self.at.embeddings is not None:
            return self.site.rotary.unrotate(rotated, *self.at.embeddings)
        return upcast(rotated)

    def _rotated(self, start: int) -> Tensor:
        query, rotary = self._collected(), self.site.rotary
        states = query.states[:, :, start:]
        if query.is_rotated or rotary is None or self.at.embeddings is None:
            return states
        cos, sin = self.at.embeddings
        return rotary.rotate(states, cos[:, start:], sin[:, start:])

    def key_positions(self) -> Tensor:
        """Rotary position of each key, `(1 or B, 1 or H_kv, S)` int64.

        Raises:
            UnsupportedInputError: if the layer was pruned by a press that did not report what it
                kept, if positions are in three dimensions, or in `remember` while decoding.
        """
        if self.at.rotary is not None:
            return self.at.rotary
        if self.site.rotary_in_3d is not None:
            raise UnsupportedInputError(
                f"cannot rotate the keys of {self.site.name} back: positions in three dimensions "
                "(images) are not stored for later forwards; rotate keys in the prefill only"
            )
        positions = self._known_ids().unsqueeze(1)
        if self.at.tokens is not None:
            return positions.expand(*self.at.tokens.shape[:2], -1).gather(-1, self.at.tokens)
        if positions.shape[-1] != self.length:
            raise UnsupportedInputError(
                f"cannot rotate the keys of {self.site.name} back: an earlier press did not say "
                "which tokens it kept; let its compress return Eviction.keep(call, positions)"
            )
        return positions

    def keys_before_rope(self) -> Tensor:
        """The keys before RoPE, `(B, H_kv, S, d)`, float32 or better; the keys without RoPE."""
        rotary = self.site.rotary
        if rotary is None or self.at.embeddings is None:
            return upcast(self.keys)
        as_given = self._cos_sin_of_keys()
        if as_given is not None:
            return rotary.unrotate(self.keys, *as_given)
        return rotary.rotate_from(self.keys, self.key_positions())

    def keys_are_at(self, positions: Tensor) -> bool:
        """Whether the keys are rotated to `positions` `(B, H_kv, S)`, the same in every head."""
        rotary, as_given = self.site.rotary_in_3d, self._cos_sin_of_keys()
        if rotary is None or as_given is None:
            return torch.equal(self.key_positions().expand_as(positions), positions)
        made = rotary.embeddings(as_given[0], positions[:, 0])
        return all(bool(alike(m[:, None], g).all()) for m, g in zip(made, as_given, strict=True))

    def _cos_sin_of_keys(self) -> tuple[Tensor, Tensor] | None:
        """The model's cosines and sines per key, `(1 or B, 1 or H_kv, S, rotary channels)` each.

        None if some keys are of earlier forwards, or were rerotated.
        """
        tokens = self.at.tokens
        if self.at.embeddings is None or self.at.rotary is not None:
            return None
        cos, sin = (x.unsqueeze(1) for x in self.at.embeddings)
        if tokens is None:
            return (cos, sin) if cos.shape[2] == self.length else None
        if bool((tokens < 0).any()):  # keys of earlier forwards
            return None
        heads = tokens.shape[:2]
        cos, sin = (gather_tokens(x.expand(*heads, -1, -1), tokens) for x in (cos, sin))
        return cos, sin

    def align_to_keys(self, per_token: Tensor) -> Tensor:
        """Map values of the `q` tokens to the keys of these tokens.

        Args:
            per_token: `(B, H_kv, q)`.

        Returns:
            `(B, H_kv, S)`.

        Raises:
            UnsupportedInputError: if there are keys of other tokens.
        """
        tokens = self.at.tokens
        if tokens is None and per_token.shape[-1] == self.length:
            return per_token
        if tokens is not None and (not self.when.decoding or bool((tokens >= 0).all())):
            return per_token.gather(-1, tokens)
        raise UnsupportedInputError(
            f"the press scores {self.length} keys by their tokens' hidden states, but only those "
            f"of {per_token.shape[-1]} tokens are known; prune in the prefill"
        )

    def _known_ids(self) -> Tensor:
        if self.at.ids is not None:
            return self.at.ids
        first = 0 if self.site.rotary is None else self.site.rotary.first_position
        steps = torch.arange(self.hidden_states.shape[1], device=self.keys.device)
        return first + steps[None]

    def prepared(self, press: Any) -> Any:
        """What `press.prepare(model)` returned when the scope was opened.

        Raises:
            UnsupportedInputError: outside of any scope.
        """
        if self.scope is None:
            raise UnsupportedInputError(
                f"{type(press).__name__} is called outside of a scope; use `with press(model): ...`"
            )
        return self.scope.prepared(press)

    def replace(self, **fields: Any) -> AttentionCall:
        """A copy with other `fields`."""
        return replace(self, **fields)

    # ---- narrower calls, for presses that wrap presses -------------------------------------------

    def with_budget(self, n: int) -> AttentionCall:
        """The same call with a budget of `n` tokens per KV head."""
        return self.replace(budget=n)

    def select(self, positions: Tensor) -> AttentionCall:
        """The call restricted to the keys at `positions` `(B, H_kv, n)` and their queries."""
        return self.narrowed(positions, *gather_each(positions, self.keys, self.values))

    def narrowed(self, positions: Tensor, keys: Tensor, values: Tensor) -> AttentionCall:
        """The call over `keys` and `values` `(B, H_kv, n, d)`, taken from `positions`."""
        tokens, rotary = self.at.tokens, self.at.rotary
        older = self.length - self.hidden_states.shape[1]
        if rotary is not None:
            rotary = rotary.expand(*positions.shape[:2], -1).gather(-1, positions)
        tokens = positions - older if tokens is None else tokens.gather(-1, positions)
        return self.replace(
            keys=keys,
            values=values,
            attentions=None,
            at=replace(self.at, tokens=tokens, rotary=rotary),
            when=replace(self.when, n_remaining=None),
            memory={name: x.gather(-1, positions) for name, x in self.memory.items()},
            budget=None,
        )

    def chunk(self, start: int, stop: int) -> AttentionCall:
        """The call restricted to the keys from `start` to `stop` and their queries."""
        at = replace(self.at, ids=self._known_ids())
        known = self.replace(at=at, budget=None, attentions=None)  # weights of all keys
        return known._part(None, slice(start, min(stop, self.length)))

    def of_rows(self, rows: list[int], slots: Tensor | None) -> AttentionCall:
        """The call restricted to some rows of the batch, without their padding.

        Args:
            rows: indices into the batch.
            slots: `(n,)` int64, which of the `S` slots hold tokens in all of these rows; None: all.
        """
        part, when = self._part(rows, slots), self.when
        seen, held = (x and tuple([x[row] for row in rows]) for x in (when.seen, when.held))
        when = replace(when, seen=seen, held=held, batch_rows=tuple(rows), occupied=None)
        return part.replace(when=when)

    def _part(self, rows: list[int] | None, slots: Tensor | slice | None) -> AttentionCall:
        """The call restricted to some slots of some rows; None: all."""
        # If tokens are already pruned, `at.tokens` indexes all tokens of the forward, padding
        # included, so these are not cut.
        older = self.length - self.hidden_states.shape[1]
        tokens: Any = None
        if self.at.tokens is None and isinstance(slots, slice):
            tokens = slice(max(0, slots.start - older), max(0, slots.stop - older))
        elif self.at.tokens is None and slots is not None:
            tokens = slots[slots >= older] - older  # type: ignore[index, operator]

        def part(x: Tensor, dims: str) -> Tensor:
            x = x if rows is None or x.shape[0] == 1 else x[rows]
            for dim, name in enumerate(dims):
                index = {"q": tokens, "S": slots}.get(name)
                if isinstance(index, slice):
                    x = x[(slice(None),) * dim + (index,)]
                elif index is not None:
                    x = x.index_select(dim, index)
            return x

        return self.each(part)

    def each(self, change: Callable[[Tensor, str], Tensor]) -> AttentionCall:
        """The call with `change(x, dims)` for each tensor; `dims` as in BHqS, without channels."""

        def changed(x: Tensor | None, dims: str) -> Any:
            return None if x is None else change(x, dims)

        cos_sin, query = self.at.embeddings, self.query
        at = Positions(
            cos_sin and (change(cos_sin[0], "Bq"), change(cos_sin[1], "Bq")),
            changed(self.at.ids, "Bq"),
            changed(self.at.tokens, "BHS"),
            changed(self.at.rotary, "BHS"),
            changed(self.at.bidirectional, "Bqq"),
        )
        return self.replace(
            hidden_states=change(self.hidden_states, "Bq"),
            keys=change(self.keys, "BHS"),
            values=change(self.values, "BHS"),
            attentions=changed(self.attentions, "BHqS"),
            query=query and Query(change(query.states, "BHq"), query.is_rotated),
            at=at,
            memory={name: change(x, "BHS") for name, x in self.memory.items()},
            carried={name: change(x, "BH") for name, x in self.carried.items()},
        )
