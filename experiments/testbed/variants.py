"""Four ways to decode a cache in which every head keeps different tokens.

```python
full, kept = prefill(model, AdaKVPress(SnapKVPress(0.5)), input_ids=context)
variant = VARIANTS["mask by hook"]
with variant.open(model, kept):
    model(question, past_key_values=variant.cache(full, kept))
```

All give the same logits, and differ in what they change on the model, in memory and in time:

| name | how | changes |
|---|---|---|
| `fake keys` | each step makes evicted keys ones that no query attends to | forwards, registry |
| `mask by patch` | a mask per head, passed to the attention function | forwards, registry |
| `mask by hook` | a mask per head, passed to the attention module by a pre-hook | hooks |
| `ragged` | evicted tokens are removed; attention reads the kept ones | forwards, registry |

In the first three, the scope stores which tokens are evicted, and the cache still holds every token
of the prefill. They serve for comparison only: presses of this project use `ragged`.
"""

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
from press_core.forward import Arguments, cache_of
from press_core.scope import InstalledPress

Kept = dict[int, Tensor]
"""Which tokens of the prefill each head keeps, `(B, H_kv, S)` bool, by layer of the cache. Padding
is never kept. A layer that is not listed keeps all tokens."""

Override = Callable[..., Any]
"""Called instead of an attention function, with that function as the first argument."""

FAR = 1e3
"""A logit of `-FAR` has no weight in any softmax."""


class Variant(NamedTuple):
    """One way to decode, called a "condition" in the tables.

    Attributes:
        name: its key in `VARIANTS`.
        open: makes the scope to decode in, from a model and the kept tokens.
        frees: whether evicted tokens are removed from the cache.
    """

    name: str
    open: Callable[[nn.Module, Kept], AbstractContextManager[Any]]
    frees: bool

    def cache(self, full: Cache, kept: Kept) -> Cache:
        """The cache to decode inside `open`, made from the full cache of a prefill."""
        return evicted(full, kept) if self.frees else full


@torch.no_grad()
def prefill(model: Any, press: InstalledPress, **inputs: Tensor) -> tuple[Cache, Kept]:
    """The full cache of a prefill, and the tokens that a head-wise `press` keeps of it."""
    with press(model):
        pruned = cache_of(model(**inputs, use_cache=True))
    kept = kept_in(pruned).items()
    ragged = {
        index: heads for index, heads in kept if isinstance(pruned.layers[index], RaggedLayer)
    }
    return cache_of(model(**inputs, use_cache=True)), ragged


def kept_in(cache: Cache) -> Kept:
    """The tokens that each head keeps of those that its layer has seen; padding is never kept.

    Raises:
        UnsupportedCacheError: if the press did not report kept positions.
    """
    kept = {}
    held = zip(cache.layers, kept_positions(cache), kept_lengths(cache), strict=True)
    for index, (layer, positions, lengths) in enumerate(held):
        if lengths.numel():
            n_seen = int(layer.get_seq_length())
            slots = positions.expand(*lengths.shape, -1).remainder(n_seen + 1)  # -1 (empty): last
            room = torch.zeros(*lengths.shape, n_seen + 1, dtype=torch.bool, device=slots.device)
            kept[index] = room.scatter(-1, slots, True)[..., :-1]
    return kept


def evicted(full: Cache, kept: Kept) -> DynamicCache:
    """A new cache with the `kept` tokens of `full`, which is unchanged."""
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
    """Call the override that `make` returns for each attention function, after the prefill."""
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
    """Replace evicted keys, at each step, by keys that no query of the step attends to.

    The scope raises an `UnsupportedModelError` if the model softcaps its logits, because then every
    key has some weight.
    """

    def make(site: AttentionSite, heads: Tensor) -> Override:
        softcap = site.softmax.softcap
        if softcap is not None:
            raise UnsupportedModelError(
                f"{site.name} caps its logits at ±{softcap:g}, so every key has some weight; use a "
                "mask or ragged storage"
            )
        return partial(_with_fake_keys, site, (~heads).nonzero(as_tuple=True))

    return overridden(model, kept, make)


def mask_by_patch(model: nn.Module, kept: Kept) -> AbstractContextManager[None]:
    """Add a mask to the logits of each head, inside a patched attention function."""
    return overridden(model, kept, lambda site, heads: partial(_with_mask, site, heads))


@contextmanager
def mask_by_hook(model: nn.Module, kept: Kept) -> Iterator[None]:
    """Replace the mask passed to attention modules by one per head, with hooks and no patch."""
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
"""The four variants by name."""


def sites_of(model: nn.Module, kept: Kept) -> list[tuple[AttentionSite, Tensor]]:
    """The sites whose heads keep different tokens, and the kept tokens, `(B, H_kv, S)` bool."""
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
    """The model's own mask with each head's evicted keys masked as well.

    Args:
        kept: `(B, H_kv, S)` bool, for the first `S` keys.
        mask: the mask that the model built for all heads, in any form.
        like: a tensor `(B, q, channels)` with the number of queries and the dtype of the states.

    Returns:
        A mask `(B, H, q, n_keys)` in the form that the attention implementation accepts.

    Raises:
        UnsupportedInputError: if the implementation accepts no mask of that shape.
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
    key[slots] = unattended(query, key.shape[1], site.softmax.scaling).to(key.dtype)[rows, heads]
    return attend(*given, **more)


def unattended(query: Tensor, n_kv: int, scaling: float) -> Tensor:
    """For each KV head, a key to which every query of its group gives a logit of `-FAR` or less.

    It is the least-squares solution, which exists if all queries are on one side of a hyperplane;
    with no more queries than channels that is nearly always the case.

    Args:
        query: `(B, H, q, d)`.

    Returns:
        `(B, H_kv, d)`, float32 or better.

    Raises:
        UnsupportedInputError: if the least-squares solution is no such key.
    """
    grouped = query.unflatten(1, (n_kv, -1)).flatten(2, 3)  # (B, H_kv, G * q, d)
    grouped = grouped.to(torch.promote_types(grouped.dtype, torch.float32))
    wanted = grouped.new_full((*grouped.shape[:3], 1), -FAR / scaling)
    keys = torch.linalg.lstsq(grouped, wanted).solution
    highest = (grouped @ keys).amax(dim=(2, 3), keepdim=True) * scaling
    if not bool((highest < -FAR / 1000).all()):  # closer to zero, rounding would dominate
        raise UnsupportedInputError(
            f"found no key without weight for all {grouped.shape[2]} queries of a group, which "
            f"have {grouped.shape[3]} channels each; pass fewer tokens per forward"
        )
    return (keys * (-FAR / highest).clamp(min=1)).squeeze(-1)
