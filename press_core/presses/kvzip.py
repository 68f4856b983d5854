"""KVzip (Kim et al., arXiv 2505.23416): keep what it takes to repeat the context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from press_core.attention import attention_blocks
from press_core.cache.caches import prunable_layer, refuse_offloading, row_alone
from press_core.cache.masks import prefill_tokens
from press_core.cache.ragged import RaggedLayer
from press_core.cache.storing import mean_kept
from press_core.call import AttentionCall
from press_core.errors import UnsupportedCacheError, UnsupportedInputError
from press_core.model.decoder import tokenizer_of
from press_core.model.forward import DecoderForward
from press_core.model.generation import require_whole
from press_core.model.sites import AttentionSite
from press_core.press import Evicts, Needs, Phase, Press, RatioPress, require
from press_core.presses.criticalkv import output_weight
from press_core.scope import ScopeState, bind
from press_core.select import Tokens, best_first, upcast

FIRST = "\n\nRepeat the previous context exactly."
NEXT = "\n\nRepeat the part of the previous context exactly, starting with"
N_STARTING = 8
"""Tokens of the chunk before that tell where to start."""


@dataclass(frozen=True)
class RepeatPrompts:
    """What asks the model to repeat its context, as token ids.

    Attributes:
        first: asks for the first chunk.
        following: asks for a later one; the last tokens of the chunk before it come after.
        suffix: comes before the chunk itself, such as the end of a chat template's user turn.
        n_prefix: tokens at the beginning of a context that belong to the template.
    """

    first: Sequence[int]
    following: Sequence[int]
    suffix: Sequence[int] = ()
    n_prefix: int = 0

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> RepeatPrompts:
        """The prompts of the paper, in the words and the chat template of `tokenizer`."""

        def ids(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        if not getattr(tokenizer, "chat_template", None):
            return cls(ids(FIRST), ids(NEXT), ids("\n"))
        content = "the context"
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        before, after = text.split(content, 1)
        return cls(ids(FIRST), ids(NEXT), ids(after), len(ids(before)))

    def replays(self, context: Tensor, chunk_size: int) -> Iterator[Replay]:
        """What to run for each chunk of `context` `(S,)`."""
        previous: list[int] | None = None
        for start in range(self.n_prefix, len(context), chunk_size):
            chunk = context[start : start + chunk_size].tolist()
            asking = self.first if previous is None else [*self.following, *previous]
            ids = torch.tensor([[*asking, *self.suffix, *chunk]], device=context.device)
            yield Replay(ids, start, start + len(chunk))
            previous = chunk[-N_STARTING:]


class Replay(NamedTuple):
    """One chunk to be repeated.

    Attributes:
        ids: `(1, m)`, what asks for the chunk, and the chunk.
        start, stop: where the chunk lies in the context.
    """

    ids: Tensor
    start: int
    stop: int


@dataclass
class KVzip(RatioPress):
    """Keeps what the model attends to when it repeats its context (arXiv 2505.23416).

    After the prefill of a context the model is asked to repeat it, chunk by chunk; a key's score is
    the most attention that it gets meanwhile from any query of its group. Rows of a batch are
    replayed one by one.

    Attributes:
        compression_ratio: share of the tokens of all heads that is evicted, in [0, 1).
        layerwise: share one budget over the heads of each layer, rather than of the model.
        n_sink: first tokens, always kept.
        kvzip_plus_normalization: weight attention by the norm of the projected value, over that of
            the hidden state (KVzip+).
        chunk_size: tokens to be repeated at a time.
        prompts: what asks the model to repeat; None: in the words of the tokenizer that lies beside
            the model.
    """

    layerwise: bool = False
    n_sink: int = 4
    kvzip_plus_normalization: bool = False
    chunk_size: int = 2048
    prompts: RepeatPrompts | None = None

    needs = Needs.QUERIES
    evicts = Evicts.PER_HEAD
    phases = Phase.DECODER

    def validate(self) -> None:
        super().validate()
        require(self, "n_sink", self.n_sink >= 0, "a number of tokens, 0 or more")
        require(self, "chunk_size", self.chunk_size >= 1, "a number of tokens, 1 or more")
        known = self.prompts is None or isinstance(self.prompts, RepeatPrompts)
        require(self, "prompts", known, "RepeatPrompts or None")

    def bind(self, model: Any) -> Press:
        if self.prompts is not None:
            return self
        instead = f"hand over {type(self).__name__}(prompts=RepeatPrompts(...)) in token ids"
        prompts = RepeatPrompts.from_tokenizer(tokenizer_of(model, instead))
        return replace(self, prompts=prompts)

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        if self.kvzip_plus_normalization:
            output_weight(site)

    def scores(self, model: Any, input_ids: Tensor) -> list[Tensor]:
        """Scores of all tokens of contexts without padding, `(B, H_kv, S)` for each layer.

        Layers that no press works on get zeros.
        """
        scope = bind(self, model)
        press, decoder = scope.press, scope.decoder
        assert isinstance(press, KVzip)
        assert decoder is not None
        with torch.no_grad():
            cache = decoder(input_ids=input_ids, use_cache=True).past_key_values
            rows = [
                press.score_row(scope, cache, ids, row, None, len(ids))
                for row, ids in enumerate(input_ids)
            ]
        n_heads, device = scope.sites[0].num_kv_heads, input_ids.device
        nothing = torch.zeros(1, n_heads, input_ids.shape[1], device=device)
        n_layers = model.config.num_hidden_layers
        return [torch.cat([row.get(i, nothing) for row in rows]) for i in range(n_layers)]

    def before_decoder(self, scope: ScopeState, forward: DecoderForward) -> DecoderForward:
        """Refuse a context that cannot be replayed before it is run."""
        require_whole(scope.sites[0], type(self).__name__)
        cache = forward.cache
        if self.compression_ratio and (cache is None or cache.get_seq_length() == 0):
            ids = forward.token_ids("KVzip replays the tokens of the context")
            _tokens(forward.argument("attention_mask"), ids)
        return forward

    def after_decoder(self, scope: ScopeState, forward: DecoderForward, output: Any) -> None:
        """Evict after the prefill of a context."""
        cache = forward.cache
        cache = getattr(output, "past_key_values", None) if cache is None else cache
        if cache is None or self.compression_ratio == 0:
            return
        refuse_offloading(self, cache)
        ids = forward.token_ids("KVzip replays the tokens of the context")
        layers = {site.layer_idx: prunable_layer(cache, site.layer_idx) for site in scope.sites}
        if any(layer.get_seq_length() != ids.shape[1] for layer in layers.values()):
            return  # tokens came before these
        _check_layers(layers)
        tokens = _tokens(forward.argument("attention_mask"), ids)
        following = _next_positions(forward.argument("position_ids"), ids)
        kept = {
            i: torch.zeros_like(layer.keys[..., 0], dtype=torch.bool) for i, layer in layers.items()
        }
        for row in range(len(ids)):
            slots = None if tokens is None else tokens[row].nonzero().squeeze(1)
            context = ids[row] if slots is None else ids[row, slots]
            scores = self.score_row(scope, cache, context, row, slots, following[row])
            chosen = self.choose(scores)
            for site in scope.sites:
                n_heads = layers[site.layer_idx].keys.shape[1]
                own = site.heads.own(chosen[site.layer_idx], n_heads, dim=0)
                kept[site.layer_idx][row, :, slice(None) if slots is None else slots] = own
        n_seen = ids.shape[1] if tokens is None else float(tokens.sum(dim=-1).float().mean())
        places = torch.arange(ids.shape[1], device=ids.device).view(1, 1, -1)
        for site in scope.sites:
            index, layer = site.layer_idx, layers[site.layer_idx]
            ragged = RaggedLayer.of(layer.keys, layer.values, kept[index], places, ids.shape[1])
            cache.layers[index] = ragged
            scope.record(index, n_seen, mean_kept(site, ragged))

    def choose(self, scores: dict[int, Tensor]) -> dict[int, Tensor]:
        """Which tokens of a row each head keeps, `(H_kv, S)` bool per layer; from its scores."""
        stacked = torch.stack([layer[0] for layer in scores.values()])  # (L, H_kv, S)
        best = best_first(stacked, 1)  # no head is left empty
        stacked[..., : self.n_sink] = float("inf")
        shared = stacked.flatten(1) if self.layerwise else stacked.flatten()[None]
        n = self._n_kept(shared.shape[-1], stacked.shape[-1])
        chosen = best_first(shared[None], n)[0].view(stacked.shape) | best
        return dict(zip(scores, chosen, strict=True))

    def _n_kept(self, size: int, length: int) -> int:
        """How many tokens heads that hold `size` together keep, of a context of `length`."""
        if isinstance(self.compression_ratio, Tokens):
            return size // length * self.compression_ratio.of(length)
        return size - int(size * self.compression_ratio)

    def score_row(
        self,
        scope: ScopeState,
        cache: Any,
        context: Tensor,
        row: int,
        slots: Tensor | None,
        start: int,
    ) -> dict[int, Tensor]:
        """Scores of the tokens of one row, `(1, H_kv, S)` by layer.

        Args:
            cache: filled with the batch that the row is of.
            context: `(S,)`, the row without its padding.
            slots: `(S,)`, where those tokens lie in the cache; None: everywhere.
            start: position from which a replay goes on.
        """
        prompts, n_tokens, scores = self.prompts, len(context), {}
        assert prompts is not None
        assert scope.model is not None
        assert scope.decoder is not None
        replay: Replay

        def see(call: AttentionCall) -> None:
            received = replay_attention(
                call, replay, self.n_sink, n_tokens, self.kvzip_plus_normalization
            )
            layer = call.site.layer_idx
            if layer not in scores:
                scores[layer] = received.new_zeros(*received.shape[:2], n_tokens)
                scores[layer][..., : prompts.n_prefix] = float("inf")  # each answer needs those
            scores[layer][..., replay.start : replay.stop] = received

        with self.collector(see, decoding=True)(scope.model), torch.no_grad():
            for replay in prompts.replays(context, self.chunk_size):
                positions = start + torch.arange(replay.ids.shape[1], device=context.device)
                scope.decoder(
                    input_ids=replay.ids,
                    position_ids=positions[None],
                    past_key_values=row_alone(cache, row, slots),
                    use_cache=True,
                )
        return scores


def _check_layers(layers: dict[int, Any]) -> None:
    for index, layer in layers.items():
        if type(layer).__name__ != "DynamicLayer":
            raise UnsupportedCacheError(
                f"KVzip replays a whole context, and layer {index} is a {type(layer).__name__}; "
                "use it alone, with a DynamicCache"
            )


def _tokens(mask: Any, ids: Tensor) -> Tensor | None:
    """Which of `ids` `(B, S)` are no padding, `(B, S)` bool; None: all.

    Raises:
        UnsupportedInputError: if the mask is none of that shape, or hides other tokens than padding
            on the left.
    """
    if mask is not None and mask.dim() != 2:
        raise UnsupportedInputError(
            f"KVzip needs an attention_mask of shape (B, S), got {tuple(mask.shape)}"
        )
    return prefill_tokens(mask, ids.shape[1], len(ids))


def _next_positions(position_ids: Tensor | None, ids: Tensor) -> list[int]:
    """The position after the last one of each row of `ids` `(B, S)`."""
    if position_ids is None:  # the model counts padding too
        return [ids.shape[1]] * len(ids)
    return (position_ids[:, -1] + 1).expand(len(ids)).tolist()


def replay_attention(
    call: AttentionCall, replay: Replay, n_sink: int, length: int, normalize: bool
) -> Tensor:
    """The most attention that each key of the repeated chunk gets from any query of its group.

    Queries see the first `n_sink` tokens, the chunk and the replay itself.

    Args:
        call: the replay, over all keys.
        length: of the context.
        normalize: as KVzip+ does.

    Returns:
        `(1, H_kv, chunk)`, float32.
    """
    queries, keys = call.queries(), call.keys
    n_kv, n_before = keys.shape[1], min(n_sink, replay.start)
    seen = torch.cat(
        (keys[:, :, :n_before], keys[:, :, replay.start : replay.stop], keys[:, :, length:]), dim=2
    )
    chunk = slice(n_before, n_before + replay.stop - replay.start)
    most = upcast(keys[..., 0]).new_zeros(1, n_kv, replay.stop - replay.start)
    factors = _factors(call, replay) if normalize else None
    for block in attention_blocks(call.site, queries, seen):
        weights = block.weights[..., chunk]  # (1, heads, G, rows, chunk)
        if factors is not None:
            of_keys, of_queries = factors
            rows = of_queries[:, block.rows].view(1, 1, 1, -1, 1)
            weights = weights * of_keys[:, block.heads].unsqueeze(3) / rows
        most[:, block.heads] = torch.maximum(most[:, block.heads], weights.amax(dim=(2, 3)))
    return most


def _factors(call: AttentionCall, replay: Replay) -> tuple[Tensor, Tensor]:
    """Norms of the chunk's projected values `(1, H_kv, G, chunk)`, of hidden states `(1, m)`."""
    values = upcast(call.values[:, :, replay.start : replay.stop])
    n_kv, d = values.shape[1], values.shape[-1]
    weight = upcast(output_weight(call.site))
    per_head = weight.view(weight.shape[0], n_kv, -1, d).permute(1, 2, 3, 0)  # (H_kv, G, d, D)
    norms = (values.unsqueeze(2) @ per_head).norm(dim=-1)
    return norms, upcast(call.hidden_states).norm(dim=-1)
