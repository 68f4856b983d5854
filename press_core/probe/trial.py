"""Trying an eviction: attention has to be the same as where a key is masked in its place."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from press_core.cache.caches import known
from press_core.cache.masks import columns_seen, in_form
from press_core.cache.tokens import Kept
from press_core.forward import Arguments, here, own_cache
from press_core.model.rotary import Rotary
from press_core.model.sites import AttentionSite
from press_core.probe.aside import N_TOKENS, run
from press_core.probe.facts import Facts, close
from press_core.probe.watching import Watch, watched

EVICTED = 3


def with_eviction_tried(
    model: nn.Module, module: nn.Module, cache: Any, facts: dict[str, Facts]
) -> dict[str, Facts]:
    """`facts`, with what depends on the place of a key in the cache refused.

    One token is taken out of the cache, and masked in another: attention has to be the same.

    Args:
        module: of `model`, that has been run over a few tokens and left `cache`.
    """
    pruned = [found.site for found in facts.values() if not found.left_whole]
    if not pruned or cache is None:
        return facts
    indices = {site.layer_idx for site in pruned}
    beside = [
        replace(found.site, layer_idx=found.owner)  # the layer of the cache that it reads
        for found in facts.values()
        if found.left_whole and found.owner is not None and found.owner in indices
    ]
    readers = [*pruned, *beside]
    watch, hidden_from = _again(model, module, copy.deepcopy(cache), readers)
    masked = {seen.name: seen.output for seen in watch.seen}
    for seen in watch.seen:
        if seen.name in facts and not _goes_on(facts[seen.name].site.rotary, seen.embeddings):
            facts = {**facts, seen.name: replace(facts[seen.name], goes_on=False)}
    if len(hidden_from) < len(readers):  # somebody calls modules past their hooks
        return facts
    try:
        seen_then = _again(model, module, _without_one(cache, indices))[0].seen
    except RuntimeError:  # shapes that do not fit
        seen_then = []
    evicted = {seen.name: seen.output for seen in seen_then}
    for site in pruned:
        expected, found = masked[site.name], evicted.get(site.name)
        assert expected is not None
        tolerance = 4 * torch.finfo(expected.dtype).eps ** 0.5
        if found is None or not close(found, expected, tolerance):
            why = (
                f"the attention of {site.name} changes with the number of keys that were evicted "
                "before those which it sees, as where it goes by a key's place in the cache in "
                "place of its position"
            )
            facts = {**facts, site.name: facts[site.name].refused(why, "tokens")}
    return facts


def _goes_on(rotary: Rotary | None, embeddings: Any) -> bool:
    """Whether a token behind the cache has the position after the last one there."""
    if rotary is None or rotary.embedding is None:
        return True
    found = embeddings[0]
    next_position = torch.tensor([[rotary.first_position + N_TOKENS]], device=found.device)
    return close(rotary.embeddings(found, next_position)[0], found)


def _without_one(cache: Any, indices: set[int]) -> Any:
    """A copy of `cache` in which some layers have lost one token."""
    cache = copy.deepcopy(cache)
    own = own_cache(cache)
    for index in indices:
        former = known(own, index)
        keys, values = former.states()
        left = [slot for slot in range(keys.shape[2]) if slot != EVICTED]
        layer = former.holding(keys[:, :, left], values[:, :, left])
        positions = torch.tensor(left, dtype=torch.int32).expand(*keys.shape[:2], -1)
        layer.kept = Kept(positions, len(left), len(left) + 1)
        own.layers[index] = layer
    return cache


def _again(
    model: nn.Module, module: nn.Module, cache: Any, sites: Sequence[AttentionSite] = ()
) -> tuple[Watch, list[str]]:
    """What is seen when `module` reads `cache`, and from which of `sites` one token was hidden."""
    hidden_from: list[str] = []

    def before(site: AttentionSite, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if not here.is_apart:  # another thread's forward
            return None
        given = _hiding_one(site, Arguments(args, kwargs, site.signature.parameters))
        hidden_from.append(site.name)
        return given.args, given.kwargs

    with ExitStack() as stack:
        for site in sites:
            hiding = partial(before, site)
            hook = site.module.register_forward_pre_hook(hiding, with_kwargs=True)
            stack.callback(hook.remove)
        watch = stack.enter_context(watched(model))
        run(model, module, cache)
    return watch, hidden_from


def _hiding_one(site: AttentionSite, given: Arguments) -> Arguments:
    """The arguments with a mask that hides one of the first tokens."""
    cache = given.get(site.signature.cache_name)
    own = own_cache(cache)
    # Who reads the layer of another module finds the new token there already.
    n_keys = int(own.get_seq_length(site.layer_idx)) + (site.module.layer_idx == site.layer_idx)
    mask, like = given.get("attention_mask"), given.get("hidden_states")
    if "attention_mask" not in site.signature.parameters:
        return given
    if isinstance(mask, BlockMask):
        seen = columns_seen(mask, like.shape[1], mask.seq_lengths[1])
        assert seen is not None
        seen = seen.clone()
        seen[..., EVICTED] = False
        hiding = in_form(seen, "flex_attention", like.dtype, site.num_heads)
        return given.replace(attention_mask=hiding)
    mask = like.new_zeros(1, 1, 1, n_keys) if mask is None else mask.clone()
    mask[..., EVICTED] = torch.finfo(mask.dtype).min if mask.is_floating_point() else 0
    return given.replace(attention_mask=mask)
