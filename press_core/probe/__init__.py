"""Probing a model: what a press reads is compared with what the model computes.

Attention modules follow a convention, but every second one deviates from it: layers without RoPE,
norms after the rotation, queries scaled beforehand, heads paired in another order, latents instead
of keys. Names do not show any of this. So the model is run once over a few tokens, and the inputs
of its attention functions are compared with what a press would read. All knowledge about models
comes from here.

The run uses a separate cache and takes place once per class and configuration of a model. Nothing
is patched for it; the random generators and the attributes of modules are restored afterwards.
"""

import copy
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from press_core.cache.caches import known
from press_core.cache.masks import columns_seen, in_form
from press_core.cache.tokens import Kept
from press_core.errors import UnsupportedModelError
from press_core.forward import Arguments, cache_of, current, own_cache
from press_core.model.decoder import decoder_of, ranks_of, uncompiled
from press_core.model.rotary import Rotary
from press_core.model.sites import AttentionSite, Place
from press_core.probe import watching
from press_core.probe.facts import probed_site

_known: weakref.WeakKeyDictionary[type, dict[str, list[Any]]] = weakref.WeakKeyDictionary()
"""By model class and `_kind_of`: the sites, with names in place of modules.

Modules would keep their model alive.
"""

_NO_ATTENTION = (
    "it has no attention module that goes through transformers' attention interface with a Cache; "
    "presses need a decoder of transformers >= 5.2"
)


def attention_sites(model: nn.Module) -> list[AttentionSite]:
    """All attention modules of `model` that presses can prune, in the order of their layers.

    The first call for a kind of model runs it over a few tokens.

    Raises:
        UnsupportedModelError: if there are none, or if the model could not be verified.
    """
    return verified(model)[0]


def verified(model: nn.Module) -> tuple[list[AttentionSite], list[AttentionSite]]:
    """The same, and the other attention modules, which read layers that these fill."""
    if not isinstance(model, nn.Module):  # a pipeline holds one
        raise UnsupportedModelError(f"a model is a torch.nn.Module, not a {type(model).__name__}")
    model = uncompiled(model)
    known, key = _known.setdefault(type(model), {}), _kind_of(model)
    with watching.one_at_a_time:
        if key not in known:
            known[key] = _probe(model)
    found = [site.with_modules(model.get_submodule) for site in known[key]]
    sites = [site for site in found if site.can_be_pruned]
    if not sites:
        reasons = sorted({site.refusals["pruning"] for site in found})
        raise UnsupportedModelError(
            f"no layer of {type(model).__name__} can give tokens up: {'; '.join(reasons)}"
        )
    sliding = [site.layer_idx for site in found if site.place.slides]
    sizes_sliding = min(sliding, default=0) > sites[0].layer_idx
    for depth, site in enumerate(sites):
        ranks = ranks_of(model) if site.ranks.size > 1 else site.ranks
        keeps_count = bool(sliding) or site.rotary_in_3d is not None or site.place.keeps_count
        place = Place(depth, len(sites), keeps_count, sizes_sliding)
        sites[depth] = replace(site, place=place, ranks=ranks)
    filled = {site.layer_idx for site in sites}
    return sites, [site for site in found if site.place.owner in filled]


def _kind_of(model: Any) -> str:
    """A key that is equal for models of one class that have the same kind of sites."""
    modules = watching.layers_of(model)
    configs = [getattr(x, "config", None) for x in (model, *(module for _, module in modules))]
    apart = {id(config): config for config in configs if config is not None}.values()
    described = [
        x.to_json_string(use_diff=False) if hasattr(x, "to_json_string") else repr(x) for x in apart
    ]
    for name, module in modules:
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", "")
        children = {n: type(child).__name__ for n, child in module.named_children()}
        own = watching.values_of(module).items()
        options = {n: x for n, x in own if isinstance(x, (bool, int, float, str))}
        options.pop("training", None)
        options["forward"] = hash(watching.code_of(module))  # libraries and users replace it
        shapes = [tuple(weight.shape) for weight in module.parameters()]
        described.append(f"{name}:{type(module)}:{implementation}:{children}:{options}:{shapes}")
    return "\n".join((*described, f"new norms: {_has_new_norms(modules)}"))


def _has_new_norms(modules: list[tuple[str, nn.Module]]) -> bool:
    """Whether norms in the first module are still as initialized: keys then have equal norms."""
    weights = [x.detach() for _, module in modules[:1] for x in module.parameters() if x.dim() == 1]
    return any(bool((x == x[0]).all()) for x in weights if not x.is_meta and x.numel())


def _probe(model: nn.Module) -> list[AttentionSite]:
    """The sites of `model`, with the names of modules in place of modules.

    Raises:
        UnsupportedModelError: if they could not be found; maybe only now.
    """
    found, why, step = [], _NO_ATTENTION, "it does not run over a few tokens alone"
    try:
        if watching.layers_of(model):
            with watching.as_if_nothing_happened(model), torch.no_grad():
                module, watch, cache = _run(model)
                step = "what it does with a few tokens is like no other model"
                attending = [s for s in watch.seen if s.cache_name and s.interface]
                sites = {seen.name: probed_site(seen, watch.seen) for seen in attending}
                sites = with_eviction_tried(model, module, cache, sites)
                names = {part: name for name, part in model.named_modules()}
                found = [site.with_modules(names.__getitem__) for site in sites.values()]
    except Exception as error:
        why = f"{step} ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    if not found:
        raise UnsupportedModelError(f"{type(model).__name__} could not be verified, as {why}")
    return found


def _run(model: nn.Module) -> tuple[nn.Module, watching.Watch, Any]:
    """Run the model, or its decoder if the model needs more than text.

    Returns:
        The module that ran, what was observed, and the cache, or None.
    """

    def ran(module: nn.Module) -> tuple[nn.Module, watching.Watch, Any]:
        with watching.watched(model) as watch:
            return module, watch, cache_of(watching.run(model, module))

    try:
        return ran(model)
    except Exception:
        return ran(decoder_of(model, [name for name, _ in watching.layers_of(model)]))


def run_aside(model: nn.Module) -> Any:
    """Run the decoder over a few tokens without side effects; no press takes part."""
    decoder = decoder_of(model, [site.name for site in attention_sites(model)])
    with watching.as_if_nothing_happened(model):
        return watching.run(model, decoder)


EVICTED = 3


def with_eviction_tried(
    model: nn.Module, module: nn.Module, cache: Any, sites: dict[str, AttentionSite]
) -> dict[str, AttentionSite]:
    """`sites`, in which modules that depend on a key's index in the cache refuse evictions.

    One token is evicted from a copy of the cache and masked in another copy; the outputs of the
    attention modules must be equal.

    Args:
        module: the part of `model` that was run over a few tokens and filled `cache`.
    """
    pruned = [site for site in sites.values() if site.can_be_pruned]
    if not pruned or cache is None:
        return sites
    indices = {site.layer_idx for site in pruned}
    readers = [x for x in sites.values() if x.can_be_pruned or x.place.owner in indices]
    masked, hidden_from = _again(model, module, copy.deepcopy(cache), readers)
    tried = {}
    for name, site in sites.items():
        on, given = _goes_on(site.rotary, masked[name].embeddings), masked[name].arguments
        masks_one = hidden_from.get(name, given.get("attention_mask")) is not None
        signature = replace(site.signature, masks_one=masks_one)
        place = replace(site.place, keeps_count=not on)
        tried[name] = replace(site, signature=signature, place=place)
    if len(hidden_from) < len(readers):  # some modules are called without running their hooks
        return tried
    try:
        evicted = _again(model, module, _evicting_a_token(cache, indices))[0]
    except RuntimeError:  # shapes that do not fit
        evicted = {}
    for site in pruned:
        expected = masked[site.name].output
        output = evicted[site.name].output if evicted else None
        assert expected is not None
        # Eager attention takes its softmax in float32 whatever the dtype.
        eps = max(torch.finfo(dtype).eps for dtype in (expected.dtype, torch.float32))
        tolerance = 4 * eps**0.5
        if output is None or not watching.close(output, expected, tolerance):
            why = (
                f"the attention of {site.name} changes with the number of keys that were evicted "
                "before those which it sees, as if it used a key's index in the cache instead of "
                "its position"
            )
            tried[site.name] = tried[site.name].refused(why, "tokens")
    return tried


def _goes_on(rotary: Rotary | None, embeddings: Any) -> bool:
    """Whether a token after the cache gets the position that follows the cached ones."""
    if rotary is None or rotary.embedding is None:
        return True
    found = embeddings[0]
    next_position = torch.tensor([[rotary.first_position + watching.N_TOKENS]], device=found.device)
    return watching.close(rotary.embeddings(found, next_position)[0], found)


def _evicting_a_token(cache: Any, indices: set[int]) -> Any:
    """A copy of `cache` in which the layers `indices` have lost one token."""
    cache = copy.deepcopy(cache)
    own = own_cache(cache)
    for index in indices:
        whole = known(own, index)
        keys, values = whole.states()
        left = [slot for slot in range(keys.shape[2]) if slot != EVICTED]
        layer = whole.holding(keys[:, :, left], values[:, :, left])
        layer.kept = Kept(n_slots=len(left), n_seen=len(left) + 1)
        own.layers[index] = layer
    return cache


def _again(
    model: nn.Module, module: nn.Module, cache: Any, sites: Sequence[AttentionSite] = ()
) -> tuple[dict[str, watching.Seen], dict[str, Any]]:
    """Run `module` with `cache`, with one token masked at `sites`.

    Returns:
        What was observed, by module name; and the mask that was replaced, by name of the site.
    """
    hidden_from: dict[str, Any] = {}

    def before(site: AttentionSite, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if current.left_out != "all":  # a forward of another thread
            return None
        given = Arguments(args, kwargs, site.signature.parameters)
        hidden_from[site.name] = given.get("attention_mask")
        given = _masking_a_token(site, given)
        return given.args, given.kwargs

    with ExitStack() as stack:
        for site in sites:
            hook = site.module.register_forward_pre_hook(partial(before, site), with_kwargs=True)
            stack.callback(hook.remove)
        watch = stack.enter_context(watching.watched(model))
        watching.run(model, module, cache)
    return {seen.name: seen for seen in watch.seen}, hidden_from


def _masking_a_token(site: AttentionSite, given: Arguments) -> Arguments:
    """The arguments with a mask that hides one of the first tokens."""
    if "attention_mask" not in (*site.signature.parameters, *given.kwargs):
        return given
    like, *_ = (x for x in (*given.args, *given.kwargs.values()) if isinstance(x, Tensor))
    seen = columns_seen(given.get("attention_mask"), 1, watching.N_TOKENS + 1, like.device).clone()
    seen[..., EVICTED] = False
    hiding = in_form(seen, site.attn_implementation, like.dtype, site.num_heads)
    return given.replace(attention_mask=hiding)
