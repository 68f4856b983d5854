"""KVzip (Kim et al., arXiv 2505.23416): keep what it takes to repeat the context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from press_core.attention import attention_tiles
from press_core.budget import n_together
from press_core.call import AttentionCall
from press_core.fields import count, limited
from press_core.model.decoder import tokenizer_of
from press_core.model.sites import AttentionSite, output_weight
from press_core.replay.rows import ReplayPress, Row
from press_core.select import best_first, upcast
from press_core.traits import Evicts

FIRST = "\n\nRepeat the previous context exactly."
NEXT = "\n\nRepeat the part of the previous context exactly, starting with"
N_STARTING = 8
"""Tokens of the chunk before that tell where to start."""


class Replay(NamedTuple):
    """A part of a context that is run again.

    Attributes:
        ids: `(1, m)`, what is run.
        start, stop: where the tokens that it judges lie in the context.
    """

    ids: Tensor
    start: int
    stop: int


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


@dataclass
class KVzip(ReplayPress):
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
    n_sink: int = count(4)
    kvzip_plus_normalization: bool = False
    chunk_size: int = count(2048, 1)
    prompts: RepeatPrompts | None = limited(
        None, lambda x: x is None or isinstance(x, RepeatPrompts), "RepeatPrompts or None"
    )

    evicts = Evicts.PER_HEAD
    at_least: ClassVar[int] = 1
    """Tokens of its context that every head keeps."""

    def prepare(self, model: Any) -> Any:
        """What asks the model to repeat."""
        if self.prompts is not None:
            return self.prompts
        instead = f"hand over {type(self).__name__}(prompts=RepeatPrompts(...)) in token ids"
        return RepeatPrompts.from_tokenizer(tokenizer_of(model, instead))

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        if self.kvzip_plus_normalization:
            output_weight(site)

    def score_row(self, row: Row) -> dict[int, Tensor]:
        received: dict[int, list[Tensor]] = {}
        replay: Replay

        def see(call: AttentionCall) -> None:
            factors = normalization(call, replay) if self.kvzip_plus_normalization else None
            of_chunk = replay_attention(call, replay, self.n_sink, row.length, factors)
            received.setdefault(call.site.layer_idx, []).append(of_chunk)

        with self.watch_attention(row, see), torch.no_grad():
            for replay in self.replays(row):
                row.run(input_ids=replay.ids)
        return {layer: self.whole(row, of_chunks) for layer, of_chunks in received.items()}

    def prompts_of(self, row: Row) -> RepeatPrompts:
        """What asks the model of `row` to repeat."""
        prompts: RepeatPrompts = row.scope.prepared(self)
        return prompts

    def replays(self, row: Row) -> Iterator[Replay]:
        """What to run for each chunk of the context of `row`."""
        return self.prompts_of(row).replays(row.tokens, self.chunk_size)

    def whole(self, row: Row, of_chunks: list[Tensor]) -> Tensor:
        """The scores of a context `(1, H_kv, S)` from those of its chunks `(1, H_kv, chunk)`."""
        shape = *of_chunks[0].shape[:2], self.prompts_of(row).n_prefix
        prefix = of_chunks[0].new_full(shape, float("inf"))  # each answer needs it
        return torch.cat((prefix, *of_chunks), dim=-1)

    def choose(self, scores: dict[int, Tensor], n_joining: int = 0) -> dict[int, Tensor]:
        """Which tokens of a row each head keeps, `(H_kv, S)` bool per layer; from its scores.

        Args:
            n_joining: tokens that join every head, and are to have room.
        """
        stacked = torch.stack([layer[0] for layer in scores.values()])  # (L, H_kv, S)
        best = best_first(stacked, self.at_least)
        stacked[..., : self.n_sink] = float("inf")
        shared = stacked.flatten(1) if self.layerwise else stacked.flatten()[None]
        length = stacked.shape[-1]
        n = n_together(shared.shape[-1] // length, length, self.amount, n_joining)
        chosen = best_first(shared[None], n)[0].view(stacked.shape)
        chosen |= best & ~chosen.any(dim=-1, keepdim=True)
        return dict(zip(scores, chosen, strict=True))


def replay_attention(
    call: AttentionCall,
    replay: Replay,
    n_sink: int,
    length: int,
    factors: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """The most attention that each key of the repeated chunk gets from any query of its group.

    Queries see the first `n_sink` tokens, the chunk and the replay itself.

    Args:
        call: the replay, over all keys.
        length: of the context.
        factors: by which to multiply attention: of the keys of the chunk `(1, H_kv, G, chunk)`, and
            of the queries `(m,)`.

    Returns:
        `(1, H_kv, chunk)`, float32.
    """
    start, stop, n_before = replay.start, replay.stop, min(n_sink, replay.start)
    parts = (call.keys[:, :, x] for x in (slice(n_before), slice(start, stop), slice(length, None)))
    most = torch.zeros_like(upcast(call.keys[:, :, start:stop, 0]))
    for tile in attention_tiles(call.site, call.queries(), torch.cat(tuple(parts), dim=2)):
        weights = tile.weights[
            ..., n_before : n_before + stop - start
        ]  # (1, heads, G, rows, chunk)
        if factors is not None:
            of_keys, of_queries = factors
            weights = weights * of_keys[:, tile.heads].unsqueeze(3) * of_queries[tile.rows, None]
        most[:, tile.heads] = torch.maximum(most[:, tile.heads], weights.amax(dim=(2, 3)))
    return most


def normalization(call: AttentionCall, replay: Replay) -> tuple[Tensor, Tensor]:
    """The factors of KVzip+: norms of the projected values over those of the hidden states."""
    return projected_value_norms(call, replay), 1 / upcast(call.hidden_states[0]).norm(dim=-1)


def projected_value_norms(call: AttentionCall, replay: Replay) -> Tensor:
    """L2 norm of each value of the chunk after the output projection, for each query head.

    Returns:
        `(1, H_kv, G, chunk)`, float32.
    """
    values = upcast(call.values[:, :, replay.start : replay.stop])
    n_kv, d = values.shape[1], values.shape[-1]
    weight = upcast(output_weight(call.site))
    per_head = weight.view(weight.shape[0], n_kv, -1, d).permute(1, 2, 3, 0)  # (H_kv, G, d, D)
    return (values.unsqueeze(2) @ per_head).norm(dim=-1)
