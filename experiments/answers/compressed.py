"""A batch of contexts, compressed once, that can be continued many times."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from experiments import UserError
from experiments.answers.prompts import chosen
from press_core import Phase, RaggedLayer, kept_lengths
from press_core.cache.in_place import ChannelPrunedLayer
from press_core.cache.memory import Memories
from press_core.cache.pruned import PrunedLayer
from press_core.forward import with_cache
from press_core.scope import InstalledPress


class Compressed:
    """A batch of rows, compressed, that can be continued many times.

    Attributes:
        ids: `(B, S)` int64, the tokens that the cache has seen, left-padded.
        mask: `(B, S)` int64, 0 for padding.
        cache: the compressed cache; `generate` does not change it.
        evicted: share of evicted tokens, mean over rows: of the compressed tokens or, for a press
            that acts while decoding, of all tokens seen by the last `generate`.
        acts_later: whether the press acts after the prefill.
    """

    def __init__(
        self, model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: Any, acts_later: bool
    ) -> None:
        self.model, self.ids, self.mask, self.cache = model, ids, mask, cache
        self.acts_later = acts_later
        self.evicted = _share_evicted(cache, mask.sum(dim=1))

    def n_positions(self, row: int) -> int:
        """Number of positions that a row takes; with rerotated keys, only the kept tokens count."""
        return int(self.mask[row, -int(self.cache.get_seq_length()) :].sum())

    def generate(
        self, rows: Sequence[int], new: Sequence[Sequence[int]], options: Mapping[str, Any]
    ) -> list[list[list[int]]]:
        """Append new tokens to some rows, and generate.

        Args:
            rows: indices of rows of the batch.
            new: the new tokens of each row, the same number for all. If there are none, the last
                token runs again, at its own position or, if keys were rerotated, at the next one.
            options: arguments of `model.generate`.

        Returns:
            For each row its sequences of generated tokens, cut before the end-of-sequence token.
        """
        config, widths = self.model.generation_config, ("num_beams", "num_return_sequences")
        width = max(chosen(name, options, config) or 1 for name in widths)
        cache = independent_copy(self.cache)
        seen = int(cache.get_seq_length())  # with rerotated keys, only the kept tokens count
        ids, mask = self.ids[rows, -seen:], self.mask[rows, -seen:]
        again = not new[0]
        following = ids[:, -1:] if again else torch.tensor(new, device=ids.device)
        mask = torch.cat((mask, torch.ones_like(following)), dim=1)
        if list(rows) != list(range(len(self.ids))):
            cache.reorder_cache(torch.tensor(rows, device=ids.device))
        if seen < self.ids.shape[1] < seen + following.shape[1]:
            self._run(following[:, :-1], mask[:, :-1], cache)
        if width > 1:
            cache.reorder_cache(torch.arange(len(rows), device=ids.device).repeat_interleave(width))
        arguments = {"attention_mask": mask, **with_cache(self.model, cache), **options}
        arguments["return_dict_in_generate"] = False  # overrides options and generation_config
        if again and not any(getattr(layer, "is_rerotated", False) for layer in cache.layers):
            positions = mask.cumsum(dim=-1) - 1
            positions[:, -1] -= 1
            arguments["position_ids"] = positions.clamp(min=0)
        ids = torch.cat((ids, following), dim=1)
        output = self.model.generate(ids, **arguments)[:, ids.shape[1] :]
        if self.acts_later:
            n_new = following.shape[1] + output.shape[1] - 1  # the last token is not in the cache
            self.evicted = _share_evicted(cache, self.mask[rows].sum(dim=1) + n_new, width)
        ends = chosen("eos_token_id", options, config)
        ends = ends if isinstance(ends, (list, tuple)) else [ends]
        ended = [[*takewhile(lambda t: t not in ends, sequence)] for sequence in output.tolist()]
        n = len(ended) // len(rows)
        return [ended[start : start + n] for start in range(0, len(ended), n)]

    def _run(self, ids: Tensor, mask: Tensor, cache: Cache) -> None:
        """Run tokens alone: `generate` refuses more than a cache with rerotated keys has seen."""
        positions = (mask.cumsum(dim=-1) - 1)[:, -ids.shape[1] :]
        given = {"attention_mask": mask, "position_ids": positions, "logits_to_keep": 1}
        with torch.no_grad():
            self.model(ids, **with_cache(self.model, cache), **given)


@contextmanager
def compressed(
    model: PreTrainedModel,
    rows: Sequence[list[int]],
    press: InstalledPress | None,
    pad_id: int,
    cache: Any = None,
    read: Sequence[list[int]] | None = None,
) -> Iterator[Compressed]:
    """Prefill the rows as one batch and compress their cache.

    The press's scope is closed right after the prefill, unless the press acts while decoding, or
    the compressed cache can only be decoded within a scope.

    Args:
        rows: token ids, at least one row.
        pad_id: token id for left padding.
        cache: an empty cache; None: a `DynamicCache`.
        read: the rows with a delimiter token, which the press removes; None: no delimiter.

    Raises:
        UserError: if the cache is none, or not empty.
    """
    cache = DynamicCache(config=model.config) if cache is None else cache
    if not isinstance(cache, Cache):
        raise UserError(f"cache is {cache!r:.60}; give an empty one, such as DynamicCache()")
    if cache.get_seq_length():
        raise UserError(f"the cache holds {cache.get_seq_length()} tokens; give an empty one")
    # A model dispatched over devices accepts inputs on any device.
    device = torch.device("cpu") if model.device.type == "meta" else model.device
    ids, mask = _left_padded(rows, pad_id, device)
    given, given_mask = _left_padded(read or rows, pad_id, device)
    arguments = {"input_ids": given}
    if not bool(given_mask.all()):
        positions = (given_mask.cumsum(dim=-1) - 1).clamp(min=0)
        arguments |= {"attention_mask": given_mask, "position_ids": positions}
    with ExitStack() as scope:
        if press is not None:
            scope.enter_context(press(model))
        with torch.no_grad():
            model(**arguments, **with_cache(model, cache), use_cache=True, logits_to_keep=1)
        if not acts_later(press) and not any(map(needs_scope, cache.layers)):
            scope.close()
        yield Compressed(model, ids, mask, cache, acts_later(press))


def _left_padded(
    rows: Sequence[list[int]], pad_id: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Ids and mask, both `(B, S)`, of rows of different lengths."""
    longest = max(len(row) for row in rows)
    ids = [[pad_id] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _share_evicted(cache: Any, seen: Tensor, width: int = 1) -> float:
    """Share of the tokens that were evicted from a cache, mean over rows, heads and layers.

    Args:
        seen: `(B,)`, number of tokens that the cache has seen, by row.
        width: number of rows of the cache for each row of `seen`, as with beam search.
    """
    seen = seen.repeat_interleave(width).cpu()[:, None]
    shares = [
        (1 - kept.cpu().clamp(max=seen).double() / seen).mean()
        for kept, layer in zip(kept_lengths(cache), cache.layers, strict=True)
        if kept.numel() and not getattr(layer, "is_sliding", False)  # sliding windows drop tokens
    ]
    return float(torch.stack(shares).mean()) if shares else 0.0


def acts_later(press: InstalledPress | None) -> bool:
    """Whether there is a press and it acts after the prefill."""
    return press is not None and bool(press.phases & (Phase.DECODING | Phase.BEFORE_DECODING))


def needs_scope(layer: Any) -> bool:
    """Whether a layer can only be decoded while a scope is open."""
    always = isinstance(layer, (RaggedLayer, ChannelPrunedLayer))
    return always or (isinstance(layer, PrunedLayer) and bool(layer.needs))


def independent_copy(cache: Any) -> Any:
    """A copy of a cache; decoding with it does not change `cache`."""
    copied = copy.copy(cache)  # streams and buffers for offloading stay shared
    if cache is not None:
        copied.layers = [_copied_layer(layer) for layer in cache.layers]
    return copied


def _copied_layer(layer: Any) -> Any:
    replaces = isinstance(layer, DynamicLayer) and not hasattr(layer, "conv_states")
    is_buffer = isinstance(layer, PrunedLayer) and layer.room is not None
    if isinstance(layer, RaggedLayer) or is_buffer or not replaces:
        return copy.deepcopy(layer)  # these layers write to their tensors in place
    copied = copy.copy(layer)
    if isinstance(layer, PrunedLayer):
        copied.inner, copied.memories = copy.copy(layer.inner), Memories(layer.memories)
    return copied
