"""The only source about a model: what a press reads is compared with what the model computes.

Attention modules keep to a convention, and every second one has an exception to it: layers that do
not rotate, norms after the rotation, queries scaled beforehand, heads paired in another order,
latents in the place of keys. None of that can be told from names. So the model is run once over a
few tokens, and what its attention functions receive is compared with what a press would read.

The run uses a cache of its own and takes place once per class and configuration of a model; nothing
is patched meanwhile, the state of the random generators is put back, and so is what modules have
noted of it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from press_core.errors import UnsupportedModelError
from press_core.model.decoder import decoder_of
from press_core.model.ranks import ranks_of
from press_core.model.sites import AttentionSite, Bystander, Place
from press_core.probe.aside import as_if_nothing_happened, one_at_a_time, run
from press_core.probe.facts import Facts, judged
from press_core.probe.trial import with_eviction_tried
from press_core.probe.watching import Watch, layers_of, watched


@dataclass(frozen=True)
class Verified:
    """The attention modules of a model.

    Attributes:
        sites: those that presses work on, in the order of their layers.
        bystanders: modules beside them that need help once those are pruned.
    """

    sites: list[AttentionSite]
    bystanders: list[Bystander]


_known: weakref.WeakKeyDictionary[type, dict[str, list[Facts] | str]] = weakref.WeakKeyDictionary()
"""By class and kind of a model what was found, or why nothing was."""

_NOBODY = nn.Module()
"""In the place of modules, in facts that keep no model alive."""

_NO_ATTENTION = (
    "it has no attention module that goes through transformers' attention interface with a Cache; "
    "presses need a decoder of transformers >= 5.2"
)


def attention_sites(model: nn.Module) -> list[AttentionSite]:
    """All attention modules of `model` that presses work on, in the order of their layers.

    The first time for a model of its kind it is run over a few tokens.

    Raises:
        UnsupportedModelError: if there are none, or if the model could not be asked.
    """
    return verified(model).sites


def verified(model: nn.Module) -> Verified:
    """The same, and the modules beside them that need help once those are pruned."""
    known, key = _known.setdefault(type(model), {}), _kind_of(model)
    with one_at_a_time:
        if key not in known:
            known[key] = _probe(model)
    found = known[key]
    if isinstance(found, str):
        raise UnsupportedModelError(f"{type(model).__name__} could not be verified, as {found}")
    if found and all(facts.window is not None for facts in found):
        raise UnsupportedModelError(
            f"all {len(found)} attention layers of {type(model).__name__} use a sliding window, "
            "which bounds their cache already; set sliding_window=None in the config if the model "
            "was loaded for contexts shorter than its window"
        )
    found = [facts.of(model.get_submodule) for facts in found]
    pruned = [facts for facts in found if not facts.left_whole]
    sites = [facts.site for facts in pruned]
    if not sites:
        reasons = sorted({facts.left_whole for facts in found})
        raise UnsupportedModelError(
            f"no layer of {type(model).__name__} can give tokens up: {'; '.join(reasons)}"
        )
    slides = any(facts.window for facts in found)
    for depth, site in enumerate(sites):
        in_3d = site.rotary is not None and site.rotary.in_3d
        ranks = ranks_of(model) if site.ranks.size > 1 else site.ranks
        keeps_count = slides or in_3d or not pruned[depth].goes_on
        place = Place(depth, len(sites), keeps_count)
        sites[depth] = replace(site, place=place, ranks=ranks)
    return Verified(sites, _bystanders(found, sites))


def _bystanders(found: list[Facts], pruned: list[AttentionSite]) -> list[Bystander]:
    rotaries: dict[int | None, Any] = {site.layer_idx: site.rotary for site in pruned}
    sliding = [facts.site.layer_idx for facts in found if facts.window]
    slides_later = min(sliding, default=0) > pruned[0].layer_idx  # else a layer says so in time
    return [
        # Who reads the keys of another layer rotates its queries as that one does.
        Bystander(replace(facts.site, rotary=rotaries.get(facts.owner)), facts.owner, facts.window)
        for facts in found
        if facts.owner is not None or (facts.window and slides_later)
    ]


def _kind_of(model: Any) -> str:
    """What two models of one class have in common that need not be probed apart."""
    config = getattr(model, "config", None)
    told = "" if config is None else config.to_json_string(use_diff=False)
    of_modules = []
    for name, module in layers_of(model):
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", "")
        children = {n: type(child).__name__ for n, child in module.named_children()}
        options = {n: x for n, x in vars(module).items() if isinstance(x, (bool, int, float, str))}
        options.pop("training", None)
        of_modules.append(f"{name}:{type(module)}:{implementation}:{children}:{options}")
    return "\n".join((told, *of_modules))


def _probe(model: nn.Module) -> list[Facts] | str:
    """The facts about each attention module; or why nothing is known."""
    if not layers_of(model):
        return _NO_ATTENTION
    step = "it does not run over a few tokens alone"
    try:
        with as_if_nothing_happened(model):
            module, watch, cache = _run(getattr(model, "_orig_mod", model))
            step = "what it does with a few tokens is like no other model"
            attending = [s for s in watch.seen if s.cache_name and s.interface]
            if not attending:
                return _NO_ATTENTION
            facts = {seen.name: judged(seen, watch) for seen in attending}
            facts = with_eviction_tried(model, module, cache, facts)
            return [known.of(lambda _: _NOBODY) for known in facts.values()]
    except Exception as error:
        return f"{step} ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


def _run(model: nn.Module) -> tuple[nn.Module, Watch, Any]:
    """What was run: the model, or its decoder where that wants more than text; what was seen."""
    decoder = decoder_of(model, [name for name, _ in layers_of(model)])
    for module in (model, decoder):
        try:
            with watched(model) as watch:
                output = run(model, module)
            break
        except Exception:
            if module is decoder:
                raise
    return module, watch, getattr(output, "past_key_values", None)


def run_aside(model: nn.Module) -> Any:
    """Run the decoder over a few tokens as if nothing had happened; no press takes part in it.

    Gradients are those of the caller.
    """
    decoder = decoder_of(model, [site.name for site in attention_sites(model)])
    with_gradients = torch.is_grad_enabled()
    with as_if_nothing_happened(model), torch.set_grad_enabled(with_gradients):
        return run(model, decoder)
