"""KVzip (Kim et al., arXiv 2505.23416): keep what it takes to repeat the context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from press_core.attention import attention_blocks
from press_core.call import AttentionCall
from press_core.model.decoder import tokenizer_of
from press_core.model.sites import AttentionSite, output_weight
from press_core.press import Evicts, Press, require
from press_core.replay import (
    Replay,
    ReplayPress,
    Row,
    projected_value_norms,
    seen_by,
)
from press_core.select import Tokens, best_first, upcast

FIRST = "\n\nRepeat the previous context exactly."
NEXT = "\n\nRepeat the part of the previous context exactly, starting with"
N_STARTING = 8
"""Tokens of the chunk before that tell where to start."""

Weighting = Callable[[AttentionCall, Replay], tuple[Tensor, Tensor]]
"""From a call and its replay to what attention is multiplied by: of the keys of the chunk
`(1, H_kv, G, chunk)`, and of the queries `(m,)`."""


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
    n_sink: int = 4
    kvzip_plus_normalization: bool = False
    chunk_size: int = 2048
    prompts: RepeatPrompts | None = None

    evicts = Evicts.PER_HEAD
    at_least: ClassVar[int] = 1
    """Tokens of its context that every head keeps."""

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

    def score_row(self, row: Row) -> dict[int, Tensor]:
        received: dict[int, list[Tensor]] = {}
        replay: Replay

        def see(call: AttentionCall) -> None:
            of_chunk = replay_attention(call, replay, self.n_sink, row.length, self.weighting)
            received.setdefault(call.site.layer_idx, []).append(of_chunk)

        with self.watch_attention(row, see), torch.no_grad():
            for replay in self.replays(row):
                row.run(input_ids=replay.ids)
        return {layer: self.whole(of_chunks) for layer, of_chunks in received.items()}

    def replays(self, row: Row) -> Iterator[Replay]:
        """What to run for each chunk of the context of `row`."""
        assert self.prompts is not None
        return self.prompts.replays(row.tokens, self.chunk_size)

    def whole(self, of_chunks: list[Tensor]) -> Tensor:
        """The scores of a context `(1, H_kv, S)` from those of its chunks `(1, H_kv, chunk)`."""
        assert self.prompts is not None
        shape = *of_chunks[0].shape[:2], self.prompts.n_prefix
        prefix = of_chunks[0].new_full(shape, float("inf"))  # each answer needs it
        return torch.cat((prefix, *of_chunks), dim=-1)

    @property
    def weighting(self) -> Weighting | None:
        """What attention is weighted by, of a call and its replay; None: by nothing."""
        return normalization if self.kvzip_plus_normalization else None

    def choose(self, scores: dict[int, Tensor]) -> dict[int, Tensor]:
        """Which tokens of a row each head keeps, `(H_kv, S)` bool per layer; from its scores."""
        stacked = torch.stack([layer[0] for layer in scores.values()])  # (L, H_kv, S)
        best = best_first(stacked, self.at_least)
        stacked[..., : self.n_sink] = float("inf")
        shared = stacked.flatten(1) if self.layerwise else stacked.flatten()[None]
        length = stacked.shape[-1]
        n = self.n_chosen(shared.shape[-1] // length, length)
        chosen = best_first(shared[None], n)[0].view(stacked.shape)
        chosen |= best & ~chosen.any(dim=-1, keepdim=True)
        return dict(zip(scores, chosen, strict=True))

    def n_chosen(self, n_heads: int, length: int) -> int:
        """How many tokens so many heads keep together, of a context of `length`."""
        if isinstance(self.compression_ratio, Tokens):
            return n_heads * self.compression_ratio.of(length)
        size = n_heads * length
        return size - int(size * self.compression_ratio)


def replay_attention(
    call: AttentionCall, replay: Replay, n_sink: int, length: int, weighting: Weighting | None
) -> Tensor:
    """The most attention that each key of the repeated chunk gets from any query of its group.

    Queries see the first `n_sink` tokens, the chunk and the replay itself.

    Args:
        call: the replay, over all keys.
        length: of the context.
        weighting: what attention is weighted by.

    Returns:
        `(1, H_kv, chunk)`, float32.
    """
    most = torch.zeros_like(upcast(call.keys[:, :, replay.start : replay.stop, 0]))
    factors = None if weighting is None else weighting(call, replay)
    seen, chunk = seen_by(replay, call.keys, n_sink, length)
    for block in attention_blocks(call.site, call.queries(), seen):
        weights = block.weights[..., chunk]  # (1, heads, G, rows, chunk)
        if factors is not None:
            of_keys, of_queries = factors
            rows = of_queries[block.rows].view(1, 1, 1, -1, 1)
            weights = weights * of_keys[:, block.heads].unsqueeze(3) * rows
        most[:, block.heads] = torch.maximum(most[:, block.heads], weights.amax(dim=(2, 3)))
    return most


def normalization(call: AttentionCall, replay: Replay) -> tuple[Tensor, Tensor]:
    """The weighting of KVzip+: norms of the projected values over those of the hidden states."""
    values = call.values[:, :, replay.start : replay.stop]
    return projected_value_norms(call, values), 1 / upcast(call.hidden_states[0]).norm(dim=-1)
