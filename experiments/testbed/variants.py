"""Four ways to decode a cache of which every head keeps other tokens.

```python
full, kept = prefill(model, AdaKVPress(SnapKVPress(0.5)), input_ids=context)
variant = VARIANTS["mask by hook"]
with variant.open(model, kept):
    model(question, past_key_values=variant.cache(full, kept))
```

All give the same logits, and differ in what they touch, hold and cost:

| name | how | touches |
|---|---|---|
| `fake keys` | at each step evicted keys become ones that nothing attends to | forwards, registry |
| `mask by patch` | a mask per head, handed to the attention function | forwards, registry |
| `mask by hook` | a mask per head, handed to the attention module by a pre-hook | hooks |
| `ragged` | evicted tokens are gone; attention reads what is left | forwards, registry |

In the first three what is evicted is known by the scope, not by the cache, and every token that the
prefill has seen is still stored: they are there to be compared with, not how presses work here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, DynamicCache

from attention_patch import headwise, intercept, with_override, wrap
from press_core import AttentionSite, RaggedLayer, attention_sites, kept_lengths, kept_positions
from press_core.cache.masks import columns_seen, in_form
from press_core.cache.tokens import Kept as Seen
from press_core.errors import UnsupportedInputError, UnsupportedModelError
from press_core.forward import Arguments
from press_core.scope import InstalledPress

Kept = dict[int, Tensor]
"""By layer of the cache: which tokens of the prefill each head keeps, `(B, H_kv, S)` bool, padding
never. A layer that is not listed keeps all."""

Override = Callable[..., Any]
"""Called in the place of an attention function, with that function before its arguments."""

FAR = 1e3
"""How far below zero a logit has to be to vanish from any softmax."""


class Variant(NamedTuple):
    """One way to decode, a "condition" in the tables.

    Attributes:
        name: as in `VARIANTS`.
        open: from a model and what is kept to the scope in which it is decoded.
        frees: whether what is evicted is gone from the cache.
    """

    name: str
    open: Callable[[nn.Module, Kept], AbstractContextManager[Any]]
    frees: bool

    def cache(self, full: Cache, kept: Kept) -> Cache:
        """What to decode inside `open`, of a prefill that stored everything."""
        return evicted(full, kept) if self.frees else full


@torch.no_grad()
def prefill(model: Any, press: InstalledPress, **inputs: Tensor) -> tuple[Cache, Kept]:
    """The whole cache of a prefill, and what a head-wise `press` keeps of it."""
    with press(model):
        pruned = model(**inputs, use_cache=True).past_key_values
    kept = kept_in(pruned).items()
    ragged = {
        index: heads for index, heads in kept if isinstance(pruned.layers[index], RaggedLayer)
    }
    return model(**inputs, use_cache=True).past_key_values, ragged


def kept_in(cache: Cache) -> Kept:
    """What each head keeps of the tokens that its layer has seen, padding never.

    Raises:
        UnsupportedCacheError: if a press did not say.
    """
    kept = {}
    held = zip(cache.layers, kept_positions(cache), kept_lengths(cache), strict=True)
    for index, (layer, positions, lengths) in enumerate(held):
        if lengths.numel():
            n_seen = int(layer.get_seq_length())
            slots = positions.expand(*lengths.shape, -1).remainder(n_seen + 1)  # empty ones: last
            room = torch.zeros(*lengths.shape, n_seen + 1, dtype=torch.bool, device=slots.device)
            kept[index] = room.scatter(-1, slots, True)[..., :-1]
    return kept


def evicted(full: Cache, kept: Kept) -> DynamicCache:
    """A cache that holds what is kept of `full`, which stays as it is."""
    cache = DynamicCache()
    for index, layer in enumerate(full.layers):
        if index in kept:
            seen = layer.get_seq_length()
            positions = torch.arange(seen, device=layer.keys.device).view(1, 1, -1)
            known = Seen(n_seen=seen)
            layer = RaggedLayer.of(layer.keys, layer.values, kept[index], positions, known)
        cache.layers.append(copy(layer))
    return cache


# ---- the scopes ----------------------------------------------------------------------------------


@contextmanager
def overridden(
    model: nn.Module, kept: Kept, make: Callable[[AttentionSite, Tensor], Override]
) -> Iterator[None]:
    """Run what `make` gives around each attention function, once the whole prefill is cached."""
    with ExitStack() as opened:
        for site, heads in sites_of(model, kept):
            override, length = make(site, heads), heads.shape[-1]
            forward = partial(_forward, site, length, override)
            opened.callback(intercept(site.signature.interface).remove)
            opened.callback(wrap(site.module, "forward", forward).remove)
        yield


def _forward(
    site: AttentionSite, length: int, override: Override, call_next: Any, *args: Any, **kwargs: Any
) -> Any:
    if _n_cached(site, args, kwargs) >= length:
        kwargs = with_override(kwargs, override)
    return call_next(*args, **kwargs)


def fake_keys(model: nn.Module, kept: Kept) -> AbstractContextManager[None]:
    """Give evicted positions, at each step, a key that no query of that step attends to.

    The scope raises an `UnsupportedModelError` if the model caps its logits, so that none can
    vanish.
    """

    def make(site: AttentionSite, heads: Tensor) -> Override:
        softcap = site.softmax.softcap
        if softcap is not None:
            raise UnsupportedModelError(
                f"{site.name} keeps all logits within ±{softcap:g}, so that no key can be "
                "overlooked; use a mask or ragged storage"
            )
        return partial(_with_fake_keys, site, (~heads).nonzero(as_tuple=True))

    return overridden(model, kept, make)


def mask_by_patch(model: nn.Module, kept: Kept) -> AbstractContextManager[None]:
    """Add to the logits of each head a mask, inside a patched attention function."""
    return overridden(model, kept, lambda site, heads: partial(_with_mask, site, heads))


@contextmanager
def mask_by_hook(model: nn.Module, kept: Kept) -> Iterator[None]:
    """Replace the mask that attention modules are given by one for each head; patch nothing."""
    with ExitStack() as opened:
        for site, heads in sites_of(model, kept):
            hook = partial(_replace_mask, site, heads)
            opened.enter_context(site.module.register_forward_pre_hook(hook, with_kwargs=True))
        yield


VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("fake keys", fake_keys, frees=False),
        Variant("mask by patch", mask_by_patch, frees=False),
        Variant("mask by hook", mask_by_hook, frees=False),
        Variant("ragged", lambda model, _: headwise(model), frees=True),
    )
}
"""All of them by name."""


def sites_of(model: nn.Module, kept: Kept) -> list[tuple[AttentionSite, Tensor]]:
    """The sites whose heads keep different tokens, and what they keep, `(B, H_kv, S)` bool."""
    sites = attention_sites(model)
    return [(site, kept[site.layer_idx]) for site in sites if site.layer_idx in kept]


def _n_cached(site: AttentionSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Tokens that the layer holds before a forward."""
    cache = Arguments(args, kwargs, site.signature.parameters).get(site.signature.cache_name)
    return 0 if cache is None else int(cache.get_seq_length(site.layer_idx))


# ---- masks ---------------------------------------------------------------------------------------


def _with_mask(site: AttentionSite, kept: Tensor, attend: Any, *given: Any, **more: Any) -> Any:
    module, query, key, value, attention_mask = given
    mask = head_mask(site, kept, attention_mask, query[:, 0], key.shape[2])
    return attend(module, query, key, value, mask, **more)


def _replace_mask(
    site: AttentionSite, kept: Tensor, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    n_cached = _n_cached(site, args, kwargs)
    if n_cached < kept.shape[-1]:  # the prefill itself
        return None
    given = Arguments(args, kwargs, site.signature.parameters)
    hidden_states, mask = given.get("hidden_states"), given.get("attention_mask")
    n_keys = n_cached + hidden_states.shape[1]
    changed = given.replace(attention_mask=head_mask(site, kept, mask, hidden_states, n_keys))
    return changed.args, dict(changed.kwargs)


def head_mask(site: AttentionSite, kept: Tensor, mask: Any, like: Tensor, n_keys: int) -> Any:
    """What the model's own mask shows, without what each head has evicted.

    Args:
        kept: `(B, H_kv, S)` bool, of the first `S` keys.
        mask: as the model built it for all heads, in any form.
        like: of the dtype of the states, `(B, q, channels)`.

    Returns:
        `(B, H, q, n_keys)` in the form that the attention implementation takes.

    Raises:
        UnsupportedInputError: if it takes no mask of that shape.
    """
    n_queries = like.shape[1]
    shared = columns_seen(mask, n_queries, n_keys, kept.device)
    of_heads = kept.repeat_interleave(site.num_heads // kept.shape[1], dim=1)
    of_heads = pad(site.ungrouped(of_heads), (0, n_keys - kept.shape[-1]), value=True)
    seen = shared & of_heads.unsqueeze(2)
    return in_form(seen, site.attn_implementation, like.dtype, site.num_heads)


# ---- fake keys -----------------------------------------------------------------------------------


def _with_fake_keys(
    site: AttentionSite, slots: tuple[Tensor, ...], attend: Any, *given: Any, **more: Any
) -> Any:
    _, query, key, *_ = given
    rows, heads, _ = slots
    key[slots] = unattended(query, key.shape[1], site.scaling).to(key.dtype)[rows, heads]
    return attend(*given, **more)


def unattended(query: Tensor, n_kv: int, scaling: float) -> Tensor:
    """For each KV head a key that every query of its group gives a logit of `-FAR` or less.

    It is the one of least squares, which exists as long as the queries lie on one side of some
    hyperplane; of no more queries than channels they nearly always do.

    Args:
        query: `(B, H, q, d)`.

    Returns:
        `(B, H_kv, d)`, float32 or better.

    Raises:
        UnsupportedInputError: if least squares find no such key.
    """
    grouped = query.unflatten(1, (n_kv, -1)).flatten(2, 3)  # (B, H_kv, G * q, d)
    grouped = grouped.to(torch.promote_types(grouped.dtype, torch.float32))
    wanted = grouped.new_full((*grouped.shape[:3], 1), -FAR / scaling)
    keys = torch.linalg.lstsq(grouped, wanted).solution
    highest = (grouped @ keys).amax(dim=(2, 3), keepdim=True) * scaling
    if not bool((highest < -FAR / 1000).all()):  # closer to zero it would drown in rounding
        raise UnsupportedInputError(
            f"found no key that all {grouped.shape[2]} queries of a group, of {grouped.shape[3]} "
            "channels each, overlook; ask fewer tokens at a time"
        )
    return (keys * (-FAR / highest).clamp(min=1)).squeeze(-1)
