"""What presses can assume of an attention module, from what was observed of it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from press_core.cache.caches import PrunedHybridLayer, kind_of, sizes_masks
from press_core.model.decoder import ranks_of
from press_core.model.rotary import NoRotation, Rotary
from press_core.model.sites import AttentionSite, HeadGroup, Place, QuerySource, Signature, Softmax
from press_core.probe.watching import Attended, Seen, close


def probed_site(seen: Seen, all_seen: Sequence[Seen]) -> AttentionSite:
    """One module as presses see it, and why they cannot use what they may need of it.

    Args:
        seen: what was observed of it.
        all_seen: what was observed of each module.
    """
    name, cache = f"{type(seen.module).__name__} ({seen.name})", seen.cache
    site = _measured(seen)
    if seen.n_forwards > 1:
        return site.refused(f"one {name} serves several layers of the cache", "pruning")
    layer = seen.layer
    if getattr(layer, "sliding_window", None) is not None:
        why = (
            "layers that use a sliding window bound their cache already; set sliding_window=None "
            "in the config if the model was loaded for contexts shorter than its window"
        )
        return replace(site, place=Place(slides=True)).refused(why, "pruning")
    if kind_of(layer) is None:
        owner = _owner(seen, cache)
        why = f"{name} caches in a {type(layer).__name__}, which this project cannot prune"
        why = why if owner is None else f"{name} reads the cache of another layer"
        return replace(site, place=Place(owner=owner)).refused(why, "pruning")
    if not seen.attended:
        return site.refused(f"{name} calls no attention function that could be seen", "pruning")
    if not bool(seen.attended[0].query.any()):
        raise ValueError(f"{name} has queries of zeros, as if its weights were not loaded")
    if seen.output is not None and not bool(seen.output.isfinite().all()):
        raise ValueError(f"{name} returns NaN or infinity in {seen.output.dtype}")
    lengths = {x.shape[-2] for x in (layer.keys, seen.attended[0].query, seen.attended[0].key)}
    if len(lengths) > 1:
        return site.refused(f"{name} attends over other tokens than it is given", "pruning")
    site = _with_needs(name, seen, site)
    if kind_of(layer) is PrunedHybridLayer:
        why = f"{name} shares its layer with a linear state, which a head-wise one has no room for"
        site = site.refused(why, "heads")
    if any(_owner(other, cache) == site.layer_idx for other in all_seen if other is not seen):
        why = f"other layers read what {name} caches, and know one length of it"
        site = site.refused(why, "heads")
    if (other := _whole_beside(cache)) is not None:
        why = f"the model makes one mask for {name} and for a {other}, which cannot lose any"
        site = site.refused(why, "tokens")
    return site


def _whole_beside(cache: Any) -> str | None:
    """The kind of layer that cannot be pruned, but is read with a mask made for one that can."""
    masked = [layer for layer in cache.layers if sizes_masks(layer)]
    others = [type(layer).__name__ for layer in masked if kind_of(layer) is None]
    return others[0] if others and kind_of(masked[0]) is not None else None


def _measured(seen: Seen) -> AttentionSite:
    """The site with its sizes and signature; sizes are 0 if no attention call was observed."""
    sizes, softmax, hands_on, ranks = (0, 0, 0), Softmax(1.0), False, HeadGroup()
    if seen.attended:
        call = seen.attended[0]
        keys = getattr(seen.layer, "keys", None)
        keys = keys if isinstance(keys, Tensor) and keys.dim() == 4 else call.key
        group = ranks_of(seen.model)
        of_ranks = group.gather(keys).chunk(group.size, dim=1)
        shared = any(not torch.equal(of_ranks[0], x) for x in of_ranks[1:])
        ranks = group if shared else HeadGroup()  # equal keys: every rank holds all heads
        sizes = call.query.shape[1] * ranks.size, keys.shape[1] * ranks.size, call.query.shape[-1]
        softcap = call.options.get("softcap")
        softmax = Softmax(call.scaling, None if softcap is None else float(softcap))
        all_on = seen.extra is not None and all(name in call.options for name in seen.extra)
        hands_on = all_on and seen.interface is not None
    signature = Signature(seen.parameters, seen.cache_name, seen.interface, hands_on)
    return AttentionSite(
        seen.name, seen.module, seen.module.layer_idx, *sizes, softmax, signature, ranks=ranks
    )


def _owner(seen: Seen, cache: Any) -> int | None:
    """Index of the layer of `cache` whose keys the module attended over; None: no layer."""
    for index, layer in enumerate(cache.layers if seen.attended else ()):
        keys = getattr(layer, "keys", None)
        if isinstance(keys, Tensor) and torch.equal(keys, seen.attended[0].key):
            return index
    return None


def _with_needs(name: str, seen: Seen, site: AttentionSite) -> AttentionSite:
    """`site` with unmet needs, head order, rotation and query source."""
    call, keys = seen.attended[0], seen.layer.keys
    order = order_of_heads(call, keys, seen.layer.values)
    site = replace(site, head_order=order)
    if order is None and keys.shape[1] == 1 and call.key.shape[1] > 1:
        why = (
            f"what {name} caches is no keys and values of heads, but latents of width "
            f"{keys.shape[-1]} that both are made of; StreamingLLMPress and RandomPress, which "
            "read neither, can evict them"
        )
        return site.refused(why, "states", "heads", "rope")
    masks = [attended.options.get("attention_mask") for attended in seen.attended]
    of_each_head = [isinstance(x, Tensor) and x.dim() == 4 and x.shape[1] > 1 for x in masks]
    if order is None or any(of_each_head):
        why = (
            f"{name} does not attend over the heads of its cache one by one, so that they cannot "
            "keep tokens of their own; StreamingLLMPress keeps the same of all"
        )
        return site.refused(why, "own tokens", "heads", "rope")
    if site.sinks is not None and site.ranks.size > 1:
        why = f"{name} has learned sinks, which presses do not put together from several ranks"
        site = site.refused(f"{why}; load the model without tp_plan", "tokens")
    norms = keys.float().norm(dim=-1)
    if norms.std(dim=-1).max() < 1e-2 * norms.mean():
        why = (
            f"all keys of {name} have the same norm but for rounding; KeyDiffPress and SnapKVPress "
            "go by their directions"
        )
        site = site.refused(why, "key norms")
    return _with_query(name, seen, site)


def _with_query(name: str, seen: Seen, site: AttentionSite) -> AttentionSite:
    """`site` with the rotation, and with the query source for hooks."""
    rotary, why = rotation_of(seen)
    if why:
        needs = ("rope",) if seen.ignores_positions else ("rope", "unrotated keys")
        site = site.refused(f"{name} {why}", *needs)
    is_same = _is_same_later(seen)
    if not is_same:
        why = f"{name} scales queries by their positions (a temperature); use SnapKVPress"
        site = site.refused(why, "later queries")
    site = replace(site, rotary=rotary)
    source = next(_query_sources(seen, site), None) if is_same else None
    if source is not None:
        return replace(site, query_source=source)
    why = (
        f"a hook cannot tell where {name} computes its query: no output of "
        f"{', '.join(seen.outputs) or 'its submodules'} becomes what attention receives; use the "
        "press of the same name from patch_impl, which sees the query itself"
    )
    return site.refused(why, "queries by hooks")


class _Long:
    """A cache that says it has seen many tokens, and holds none."""

    n_seen = 2**20

    def get_seq_length(self, *_: Any) -> int:
        return self.n_seen

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return keys, values


def _is_same_later(seen: Seen) -> bool:
    """Whether a query stays the same after many tokens (but for its rotation): no temperature."""
    changed: dict[str, Any] = {seen.cache_name: _Long()}
    for name in ("position_ids", "cache_position"):
        if isinstance(seen.arguments.get(name), Tensor):
            changed[name] = seen.arguments[name] + _Long.n_seen
    try:
        return torch.equal(seen.again(**changed).query, seen.attended[0].query)
    except Exception:  # the module does more with its cache or positions
        return True


def order_of_heads(call: Attended, keys: Tensor, values: Tensor) -> tuple[int, ...] | None:
    """The KV head of each query head; None if attention does not use cached heads one by one."""
    given = []
    for key, value in zip(call.key.unbind(1), call.value.unbind(1), strict=True):
        cached = zip(keys.unbind(1), values.unbind(1), strict=True)
        same = [torch.equal(key, k) and torch.equal(value, v) for k, v in cached]
        if not any(same):
            return None
        given.append(same.index(True))
    repeats = call.query.shape[1] // len(given)
    return tuple(given[head // repeats] for head in range(call.query.shape[1]))


def _query_sources(seen: Seen, site: AttentionSite) -> Iterator[QuerySource]:
    """Submodule outputs that hold the query which attention receives, the latest first."""
    query, rotary = seen.attended[0].query, site.rotary
    n_heads, scale = query.shape[1], getattr(seen.module, "scaling", None)
    factors = dict.fromkeys((1.0, scale)) if isinstance(scale, float) else (1.0,)
    outputs = reversed(seen.outputs.items())
    blocks = dict.fromkeys((1, n_heads, site.num_kv_heads // site.ranks.size, 0))
    for (child, output), n_blocks, factor in product(outputs, blocks, factors):
        source = QuerySource(child, n_blocks, factor, is_rotated=True)
        try:
            found = replace(site, query_source=source).query_in(output)
        except (RuntimeError, ValueError):  # the shape does not fit
            continue
        if torch.equal(found, query):
            yield source
        if rotary is None or found.shape != query.shape or seen.embeddings is None:
            continue
        if torch.equal(rotary.rotate(found, *seen.embeddings), query):
            yield replace(source, is_rotated=False)


# ---- the rotation --------------------------------------------------------------------------------


def rotation_of(seen: Seen) -> tuple[Rotary | None, str]:
    """The rotation of a module (None: unknown), and why presses cannot use it (empty: they can)."""
    given = seen.embeddings
    if given is None:
        takes = any(made.dim() == 3 for _, made, _ in seen.makers)
        if "position_embeddings" in seen.parameters and takes and seen.ignores_positions:
            return NoRotation(), ""  # other layers of the model rotate
        rotates = takes or not seen.ignores_positions
        why = "rotates where the probe cannot see it" if rotates else "has none"
        return None, f"{why}; SnapKVPress and KnormPress do not need them"
    pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Tensor)
    if not pair or given[0].dim() != 3:
        return None, "rotates by something else than cosines and sines `(B, S, channels)`"
    cos, sin = given
    bare = seen.again(position_embeddings=(torch.ones_like(cos), torch.zeros_like(sin)))
    call = seen.attended[0]
    if torch.equal(bare.query, call.query):
        return NoRotation(), ""
    for rotary in seen.rotations:
        try:
            same = close(rotary.rotate(bare.query, cos, sin), call.query)
            same = same and close(rotary.rotate(bare.key, cos, sin), call.key)
        except (RuntimeError, TypeError, ValueError):
            continue
        if same:
            made = _with_maker(rotary, cos, sin, seen)
            why = "gets cosines and sines of positions that no module of the model gives"
            return made or rotary, "" if made else why
    return (
        None,
        "does something after rotating its queries and keys that is not undone by rotating back",
    )


def _with_maker(rotary: Rotary, cos: Tensor, sin: Tensor, seen: Seen) -> Rotary | None:
    """`rotary` with the module that computes `cos` and `sin`, and its first position; or None."""
    steps = torch.arange(cos.shape[1], device=cos.device)[None]
    like = torch.zeros(1, dtype=cos.dtype, device=cos.device)
    modules = set(seen.model.modules())
    makers = [maker for maker in seen.makers if maker[0] in modules]
    makers.sort(key=lambda maker: maker[1] is not cos)  # first the module that returned `cos`
    # 3-d first: a module that takes 3-d positions also takes plain ones.
    for (module, _, given), in_3d in product(makers, (True, False)):
        made_by = {"embedding": module, "layer_type": given.get("layer_type"), "in_3d": in_3d}
        for start in (0, 1, 2):
            candidate = replace(rotary, first_position=start, **made_by)
            try:
                made = candidate.embeddings(like, steps + start)
            except Exception:  # the module has another signature
                break
            if close(made[0], cos) and close(made[1], sin):
                return candidate
    return None
