"""What a press reads, compared with what the model at hand really computes.

Attention modules keep to a convention, and every second one has an exception to it: layers that do
not rotate, norms after the rotation, queries scaled beforehand, heads paired in another order,
latents in the place of keys. None of that can be told from names. So the model is run once over a
few tokens, and what its attention functions receive is compared with what a press would read.

The run uses a cache of its own and takes place once per class and configuration of a model; the
state of the random generators is put back, and so is what modules have noted of it.
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.cache_utils import DynamicLayer

from press_core.cache.pruned import HybridLayer, KeptTokens, filled, pruned_layer
from press_core.cache.reading import prepared
from press_core.errors import UnsupportedModelError
from press_core.model.decoder import decoder_of, device_of
from press_core.model.forward import AttentionForward
from press_core.model.ranks import HeadGroup, ranks_of
from press_core.model.rotary import NoRotation, Rotary, is_rotary_embedding
from press_core.model.sites import (
    LAYOUTS,
    AttentionSite,
    LeftAlone,
    QueryPlace,
    all_sites,
    all_slide,
    attention_sites,
    numbered,
)

N_TOKENS = 7
_enabled: ContextVar[bool] = ContextVar("verify", default=True)
_running = threading.local()
_one_at_a_time = threading.RLock()


@contextmanager
def unverified() -> Iterator[None]:
    """Open scopes without a probe: what presses read is then assumed, as the names suggest it."""
    token = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(token)


def is_running() -> bool:
    """Whether this thread is in the middle of a probe, which no press is to take part in."""
    return getattr(_running, "depth", 0) > 0


@dataclass(frozen=True)
class SiteFacts:
    """What was found out about one attention module.

    Attributes:
        left_alone: why presses leave its cache alone; empty: they do not.
        owner, window: see `LeftAlone`.
        sizes: fields of the site that were assumed: heads, widths, the scaling, the head order.
        rotary_from: name of the rotary embedding module whose cosines the layer gets.
        rotary: fields of its `Rotary`; None where it rotates in a way that is not known here.
        rotates: whether the layer rotates at all.
        query: where a hook finds the query; None if nowhere.
        refusals: by need, why it is not met; see `AttentionSite`.
    """

    left_alone: str = ""
    owner: int | None = None
    window: int | None = None
    sizes: dict[str, Any] = field(default_factory=dict)
    rotary_from: str | None = None
    rotary: dict[str, Any] | None = None
    rotates: bool = False
    query: QueryPlace | None = None
    refusals: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Verified:
    """The attention modules of a model: those that presses work on, and those that need help then.

    Attributes:
        sites: in the order of their layers.
        left_alone: modules that go on as ever, but for what pruned layers beside them change.
    """

    sites: list[AttentionSite]
    left_alone: list[LeftAlone]


_known: weakref.WeakKeyDictionary[type, dict[str, dict[str, SiteFacts] | str]] = (
    weakref.WeakKeyDictionary()
)


def verified_sites(model: nn.Module) -> list[AttentionSite]:
    """The attention modules that presses work on, with what the model at hand shows of them.

    Raises:
        UnsupportedModelError: if there are none, or if the model could not be asked.
    """
    return verified(model).sites


def verified(model: nn.Module) -> Verified:
    """The same, and the modules beside them that need help once those are pruned."""
    if not _enabled.get():
        return Verified(attention_sites(model), [])
    sites = all_sites(model)
    known = _known.setdefault(type(model), {})
    key = _kind_of(model, sites)
    with _one_at_a_time:
        if key not in known:
            known[key] = _probe(model, sites)
    facts = known[key]
    if isinstance(facts, str):
        raise UnsupportedModelError(
            f"{type(model).__name__} could not be verified, as {facts}; to open a press on it all "
            "the same, and at your own risk, do so in `with press_core.unverified(): ...`"
        )
    pruned = [site for site in sites if not facts[site.name].left_alone]
    if all(facts[site.name].window is not None for site in sites):
        raise UnsupportedModelError(all_slide(model, len(sites)))
    if not pruned:
        reasons = sorted({facts[site.name].left_alone for site in sites})
        raise UnsupportedModelError(
            f"no layer of {type(model).__name__} can give tokens up: {'; '.join(reasons)}"
        )
    sliding = [site.layer_idx for site in sites if facts[site.name].window is not None]
    slides_later = min(sliding, default=0) > pruned[0].layer_idx
    others = [_left_alone(site, facts[site.name], slides_later) for site in sites]
    left = [_with_facts(model, site, facts[site.name]) for site in pruned]
    return Verified(
        numbered(left, shares_clock=bool(sliding)), [other for other in others if other]
    )


def _left_alone(site: AttentionSite, facts: SiteFacts, slides_later: bool) -> LeftAlone | None:
    if facts.owner is not None:
        return LeftAlone(site, owner=facts.owner)
    if facts.window is not None and slides_later:
        return LeftAlone(site, window=facts.window)
    return None


def _kind_of(model: Any, sites: list[AttentionSite]) -> str:
    """What two models of one class have in common that need not be probed apart."""
    config = getattr(model, "config", None)
    told = "" if config is None else config.to_json_string(use_diff=False)
    implementation = sites[0].attn_implementation
    parts = [f"{site.name}:{type(site.module)}:{_children(site.module)}" for site in sites]
    return "\n".join((told, implementation, *parts))


def _children(module: nn.Module) -> str:
    return " ".join(f"{name}={type(child).__name__}" for name, child in module.named_children())


def _with_facts(model: nn.Module, site: AttentionSite, facts: SiteFacts) -> AttentionSite:
    if not facts.sizes:  # nothing was seen of it
        return site
    rotary: Rotary | None = None
    if facts.rotary is not None and site.rotary_function is not None:
        embedding = model.get_submodule(facts.rotary_from) if facts.rotary_from else None
        rotary = Rotary(site.rotary_function, embedding=embedding, **facts.rotary)
    elif not facts.rotates and "rope" not in facts.refusals:
        rotary = NoRotation()
    return replace(
        site,
        **facts.sizes,
        rotary=rotary,
        query_place=facts.query,
        refusals=facts.refusals,
        verified=True,
    )


# ---- running the model ---------------------------------------------------------------------------


@dataclass
class _Call:
    """What an attention function received."""

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float | None
    masks_heads: bool


@dataclass
class _Seen:
    """What was seen of one attention module during the probe.

    Attributes:
        args, kwargs: of its forward.
        calls: of attention functions.
        outputs: by name, what its submodules returned, the latest last.
        n_forwards: how often it ran.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    calls: list[_Call] = field(default_factory=list)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    n_forwards: int = 0

    def forward(self, site: AttentionSite) -> AttentionForward:
        return AttentionForward(self.args, self.kwargs, site)


def _probe(model: nn.Module, sites: list[AttentionSite]) -> dict[str, SiteFacts] | str:
    """By name of a site its facts, or why no press can work on it; or why nothing is known."""
    step = "it does not run over a few tokens alone"
    try:
        with _as_if_nothing_happened(model):
            run = _run(model, sites)
            step = "what it does with a few tokens is like no other model"
            facts = {site.name: _judge(model, site, run.seen) for site in sites}
            return _with_eviction_tried(model, sites, run, facts)
    except Exception as error:
        return f"{step} ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


@contextmanager
def _as_if_nothing_happened(model: nn.Module) -> Iterator[None]:
    """Put back what a forward changes: random generators, and what modules note of it.

    Some rotary modules adapt to what they see, and models with images write down how far positions
    lag behind tokens.
    """
    noted = [(m, dict(vars(m)), dict(m._buffers)) for m in model.modules()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    _running.depth = getattr(_running, "depth", 0) + 1
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(list(devices)))
        stack.enter_context(torch.no_grad())
        if "torch._dynamo" in sys.modules:  # compiled models run as they were written
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module, attributes, _ in noted:
            if "rope_deltas" in attributes:  # of the image before, by which 5.2 counts on
                module.rope_deltas = None  # type: ignore[assignment]
        try:
            yield
        finally:
            _running.depth -= 1
            for module, attributes, buffers in noted:
                vars(module).update(attributes)
                module._buffers.update(buffers)


def run_aside(model: nn.Module, sites: list[AttentionSite]) -> Any:
    """Run the decoder over a few tokens as if nothing had happened; no press takes part in it.

    Gradients are those of the caller.
    """
    with_gradients = torch.is_grad_enabled()
    with _one_at_a_time, _as_if_nothing_happened(model), torch.set_grad_enabled(with_gradients):
        return _forward(model, decoder_of(model, sites), sites)


@dataclass(frozen=True)
class _Run:
    """A forward over a few tokens.

    Attributes:
        module: what was run: the model, or its decoder where the model wants more than text.
        seen: what was seen of each site, by name.
        cache: what it left.
    """

    module: nn.Module
    seen: dict[str, _Seen]
    cache: Any


def _run(model: nn.Module, sites: list[AttentionSite]) -> _Run:
    decoder = decoder_of(model, sites)
    for module in dict.fromkeys((getattr(model, "_orig_mod", model), decoder)):
        try:
            with _watching(sites) as seen:
                output = _forward(model, module, sites)
            return _Run(module, seen, getattr(output, "past_key_values", None))
        except Exception:
            if module is decoder:
                raise
    raise AssertionError


def _forward(
    model: Any, module: Any, sites: list[AttentionSite], cache: Any = None, n: int = N_TOKENS
) -> Any:
    """Run `module` over the first tokens, or over one more after those that `cache` has seen."""
    config = getattr(module, "config", None) or model.config
    device = device_of(sites[0].module)
    ids = _ordinary_tokens(config).to(device)
    ids = ids[:, :n] if cache is None else ids[:, :1]
    parameters = inspect.signature(type(module).forward).parameters
    inputs = {"input_ids": ids}
    if "decoder_input_ids" in parameters:
        inputs = {"input_ids": _ordinary_tokens(config).to(device)[:, 2:], "decoder_input_ids": ids}
    more: dict[str, Any] = {"use_cache": True} if "use_cache" in parameters else {}
    if "logits_to_keep" in parameters:
        more["logits_to_keep"] = 1
    if cache is not None:
        more["past_key_values"] = cache
    return module(**inputs, **more)


def _ordinary_tokens(config: Any) -> Tensor:
    """`(1, N_TOKENS)` token ids that stand for nothing special."""
    text = config.get_text_config()
    special: set[int] = set()
    for part in (config, text):
        for name, value in part.to_dict().items():
            if name.endswith(("_token_id", "_token_index", "_id")):
                special.update([value] if isinstance(value, int) else value or ())
    size = getattr(text, "vocab_size", None) or 1000
    ordinary = [token for token in range(min(size, 1000)) if token not in special]
    return torch.tensor([ordinary[-N_TOKENS:]])


@contextmanager
def _watching(sites: list[AttentionSite]) -> Iterator[dict[str, _Seen]]:
    """Note what `sites` and their attention functions receive in this thread."""
    seen = {site.name: _Seen() for site in sites}
    by_module = {id(site.module): seen[site.name] for site in sites}

    def attend(function: Any, module: Any, query: Any, key: Any, value: Any, *a: Any, **k: Any):  # type: ignore[no-untyped-def]
        of_module = by_module.get(id(module))
        if of_module is not None and is_running():
            mask = a[0] if a else k.get("attention_mask")
            masks_heads = isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] > 1
            of_module.calls.append(_Call(query, key, value, k.get("scaling"), masks_heads))
        return function(module, query, key, value, *a, **k)

    with ExitStack() as stack:
        for interface in {id(site.interface): site.interface for site in sites}.values():
            stack.enter_context(_passing_by(interface, attend))
        for site in sites:
            of_site = seen[site.name]
            stack.callback(_note_arguments(site.module, of_site).remove)
            for name, child in site.module.named_children():
                stack.callback(_note_output(child, name, of_site).remove)
        yield seen


def _note_arguments(module: nn.Module, seen: _Seen) -> Any:
    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        if not is_running():  # another thread's
            return
        seen.args, seen.kwargs = args, dict(kwargs)
        seen.n_forwards += 1

    return module.register_forward_pre_hook(note, with_kwargs=True)


def _note_output(module: nn.Module, name: str, seen: _Seen) -> Any:
    def note(_: nn.Module, __: Any, output: Any) -> None:
        if not is_running():
            return
        output = output[0] if isinstance(output, tuple) else output
        if isinstance(output, Tensor):
            seen.outputs.pop(name, None)
            seen.outputs[name] = output

    return module.register_forward_hook(note)


@contextmanager
def _passing_by(interface: Any, attend: Callable[..., Any]) -> Iterator[None]:
    """Let attention functions that are asked for go through `attend`, while this is open."""
    original = interface.get_interface
    own = "get_interface" in interface.__dict__
    open_now = True

    def get_interface(*args: Any, **kwargs: Any) -> Any:
        function = original(*args, **kwargs)
        if not open_now:
            return function
        return lambda *a, **k: attend(function, *a, **k)

    interface.get_interface = get_interface
    try:
        yield
    finally:
        open_now = False
        if interface.__dict__.get("get_interface") is get_interface:  # else left, without effect
            if own:
                interface.get_interface = original
            else:
                del interface.get_interface


# ---- trying an eviction --------------------------------------------------------------------------

EVICTED = 3


def _with_eviction_tried(
    model: nn.Module,
    sites: list[AttentionSite],
    run: _Run,
    facts: dict[str, SiteFacts],
) -> dict[str, SiteFacts]:
    """`facts`, with what depends on the place of a key in the cache refused.

    One token is taken out of the cache, and masked in another: attention has to be the same.
    """
    pruned = [site for site in sites if facts[site.name].sizes]
    if not pruned or run.cache is None:
        return facts
    indices = {site.layer_idx for site in pruned}
    readers = [s for s in sites if s in pruned or facts[s.name].owner in indices]
    cache = run.cache
    with _masking(readers), _outputs(pruned) as masked:
        _forward(model, run.module, sites, copy.deepcopy(cache))
    try:
        with _helping(pruned), _outputs(pruned) as evicted:
            _forward(model, run.module, sites, _without_one(cache, indices))
    except RuntimeError:  # shapes that do not fit
        evicted = {}
    differs = [s.name for s in pruned if not _alike(masked[s.name], evicted.get(s.name))]
    why = (
        "the attention of {} changes with the number of keys that were evicted before those which "
        "it sees, as where it goes by a key's place in the cache in place of its position"
    )
    return {
        name: _refused(known, "tokens", why.format(name)) if name in differs else known
        for name, known in facts.items()
    }


def _without_one(cache: Any, indices: set[int]) -> Any:
    """A copy of `cache` in which some layers have lost one token."""
    cache = copy.deepcopy(cache)
    own = getattr(cache, "self_attention_cache", cache)
    for index in indices:
        storage = own.layers[index]
        left = [slot for slot in range(storage.keys.shape[2]) if slot != EVICTED]
        states = storage.keys[:, :, left], storage.values[:, :, left]
        layer = pruned_layer(filled(storage, *states))
        positions = torch.tensor(left, dtype=torch.int32).expand(*storage.keys.shape[:2], -1)
        layer.kept = KeptTokens(positions, len(left), len(left) + 1)
        own.layers[index] = layer
    return cache


@contextmanager
def _masking(sites: list[AttentionSite]) -> Iterator[None]:
    """Let `sites` attend as if one of the first tokens were not there."""
    modules = {id(site.module) for site in sites}

    def attend(function: Any, module: Any, query: Any, key: Any, value: Any, *a: Any, **k: Any):  # type: ignore[no-untyped-def]
        if id(module) not in modules or not is_running():
            return function(module, query, key, value, *a, **k)
        mask = a[0] if a else k.pop("attention_mask", None)
        mask = _hiding_one(mask, query, key)
        return function(module, query, key, value, mask, *a[1:], **k)

    with ExitStack() as stack:
        for interface in {id(site.interface): site.interface for site in sites}.values():
            stack.enter_context(_passing_by(interface, attend))
        yield


def _hiding_one(mask: Any, query: Tensor, key: Tensor) -> Any:
    if isinstance(mask, BlockMask):
        sees = mask.mask_mod
        return create_block_mask(
            lambda b, h, q, kv: sees(b, h, q, kv) & (kv != EVICTED),
            *(None, None, query.shape[2], key.shape[2]),
            device=str(key.device),
        )
    if mask is None:
        mask = query.new_zeros(1, 1, 1, key.shape[2])
    mask = mask.clone()
    mask[..., EVICTED] = 0 if mask.dtype != query.dtype else torch.finfo(mask.dtype).min
    return mask


class _Reader:
    is_open = True


@contextmanager
def _helping(sites: list[AttentionSite]) -> Iterator[None]:
    """Give `sites` the mask that an open scope would give them."""

    def help_with(site: AttentionSite) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if not is_running():
                return None
            forward = prepared(AttentionForward(args, kwargs, site), _Reader())
            return forward.args, forward.kwargs

        return hook

    with ExitStack() as stack:
        for site in sites:
            handle = site.module.register_forward_pre_hook(help_with(site), with_kwargs=True)
            stack.callback(handle.remove)
        yield


@contextmanager
def _outputs(sites: list[AttentionSite]) -> Iterator[dict[str, Tensor]]:
    """What `sites` return, by name."""
    outputs: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if not is_running():
                return
            outputs[name] = output[0] if isinstance(output, tuple) else output

        return hook

    with ExitStack() as stack:
        for site in sites:
            stack.callback(site.module.register_forward_hook(note(site.name)).remove)
        yield outputs


def _alike(a: Tensor, b: Tensor | None) -> bool:
    if b is None or a.shape != b.shape:
        return False
    tolerance = 4 * torch.finfo(b.dtype).eps ** 0.5
    return bool(((a - b).abs() <= tolerance * b.abs().amax()).all())


# ---- judging what was seen -----------------------------------------------------------------------


def _judge(model: nn.Module, site: AttentionSite, everywhere: dict[str, _Seen]) -> SiteFacts:
    seen = everywhere[site.name]
    name = type(site.module).__name__
    cache = seen.forward(site).cache
    if seen.calls and not seen.n_forwards:  # `attention.forward(...)` goes past all hooks
        return SiteFacts()
    if not hasattr(cache, "layers"):
        what = "no cache" if cache is None else f"a {type(cache).__name__}, which has no layers"
        return SiteFacts(left_alone=f"{name} is given {what}")
    if seen.n_forwards > 1:
        return SiteFacts(left_alone=f"one {name} serves several layers of the cache")
    layer = cache.layers[site.layer_idx] if site.layer_idx < len(cache.layers) else None
    kind = type(layer)
    window = getattr(layer, "sliding_window", None)
    if window is not None:
        why = f"{name} sees a sliding window only, which bounds its cache already"
        return SiteFacts(left_alone=why, window=window)
    if kind is not DynamicLayer and kind is not HybridLayer:
        owner = _owner(seen, cache)
        why = f"{name} caches in a {kind.__name__}, which this project cannot prune"
        if owner is not None:
            why = f"{name} reads the cache of another layer"
        return SiteFacts(left_alone=why, owner=owner)
    if not seen.calls:
        return SiteFacts()
    facts = _facts(model, site, seen, layer)
    if kind is HybridLayer:
        why = f"{name} shares its layer with a linear state, which a head-wise one has no room for"
        facts = _refused(facts, "heads", why)
    if any(
        _owner(other, cache) == site.layer_idx for other in everywhere.values() if other is not seen
    ):
        why = f"other layers read what {name} ({site.name}) caches, and know one length of it"
        facts = _refused(facts, "heads", why)
    return facts


def _owner(seen: _Seen, cache: Any) -> int | None:
    """The layer of `cache` whose keys a module attended over, if it has none of its own."""
    if not seen.calls:
        return None
    given = seen.calls[0].key
    for index, layer in enumerate(cache.layers):
        keys = getattr(layer, "keys", None)
        if isinstance(keys, Tensor) and torch.equal(keys, given):
            return index
    return None


def _facts(model: nn.Module, site: AttentionSite, seen: _Seen, layer: Any) -> SiteFacts:
    call, keys, values = seen.calls[0], layer.keys, layer.values
    if keys.shape[-2] != call.query.shape[-2] or call.key.shape[-2] != keys.shape[-2]:
        why = f"{type(site.module).__name__} attends over other tokens than it is given"
        return SiteFacts(left_alone=why)
    refusals: dict[str, str] = {}
    order = _order_of_heads(call, keys, values)
    name = f"{type(site.module).__name__} ({site.name})"
    if order is None and keys.shape[1] == 1 and call.key.shape[1] > 1:
        refusals["states"] = (
            f"what {name} caches is no keys and values of heads, but latents of width "
            f"{keys.shape[-1]} that both are made of; StreamingLLMPress and RandomPress, which "
            "read neither, can evict them"
        )
        refusals["heads"] = refusals["rope"] = refusals["states"]
    elif order is None or any(call.masks_heads for call in seen.calls):
        refusals["own tokens"] = (
            f"{name} does not attend over the heads of its cache one by one, so that they cannot "
            "keep tokens of their own; StreamingLLMPress keeps the same of all"
        )
        refusals["heads"] = refusals["rope"] = refusals["own tokens"]
    group = site.heads if site.heads.size > 1 else ranks_of(model)  # of fused projections too
    if keys.shape[1] * group.size != site.num_kv_heads:  # they share the weights, or there is one
        group = HeadGroup()
    n_ranks = group.size
    sizes: dict[str, Any] = {
        "num_heads": call.query.shape[1] * n_ranks,
        "num_kv_heads": keys.shape[1] * n_ranks,
        "head_dim": call.query.shape[-1],
        "value_dim": values.shape[-1],
        "head_order": order,
        "heads": group,
    }
    if call.scaling is not None:
        sizes["scaling"] = float(call.scaling)
    facts = SiteFacts(sizes=sizes, refusals=refusals)
    if "states" in refusals or "own tokens" in refusals:
        return facts
    norms = keys.float().norm(dim=-1)
    if norms.std(dim=-1).max() < 1e-2 * norms.mean():
        refusals["key norms"] = (
            f"all keys of {name} have the same norm but for rounding; KeyDiffPress and SnapKVPress "
            "go by their directions"
        )
    facts = _with_rotation(model, site, seen, facts)
    place = _query_place(model, site, seen, facts)
    if place is not None:
        return replace(facts, query=place)
    return _refused(
        facts,
        "hooked queries",
        f"a hook cannot tell where {name} computes its query: no output of "
        f"{', '.join(seen.outputs) or 'its submodules'} becomes what attention receives; use the "
        "press of the same name from patch_impl, which sees the query itself",
    )


def _order_of_heads(call: _Call, keys: Tensor, values: Tensor) -> tuple[int, ...] | None:
    """The KV head of each query head, or None if they are not paired one by one."""
    if keys.shape[-1] != call.key.shape[-1] or values.shape[-1] != call.value.shape[-1]:
        return None
    if keys.shape[2] != call.key.shape[2] or values.shape[2] != call.value.shape[2]:
        return None
    given = []
    for head in range(call.key.shape[1]):
        same = [
            cached
            for cached in range(keys.shape[1])
            if torch.equal(call.key[:, head], keys[:, cached])
            and torch.equal(call.value[:, head], values[:, cached])
        ]
        if not same:
            return None
        given.append(same[0])
    repeats = call.query.shape[1] // len(given)
    return tuple(given[head // repeats] for head in range(call.query.shape[1]))


def _with_rotation(
    model: nn.Module, site: AttentionSite, seen: _Seen, facts: SiteFacts
) -> SiteFacts:
    """`facts` with what the layer does to its queries and keys at their positions."""
    name = f"{type(site.module).__name__} ({site.name})"
    embeddings = seen.forward(site).argument("position_embeddings")
    if embeddings is None:
        takes = any(is_rotary_embedding(module) for module in model.modules())
        if "position_embeddings" in site.parameters and takes:
            return facts  # other layers of the model rotate, this one is given no rotation
        why = "rotates where nobody can see it" if takes else "has no rotary position embeddings"
        return _refused(facts, "rope", f"{name} {why}")
    pair = isinstance(embeddings, tuple) and len(embeddings) == 2
    if not pair or site.rotary_function is None or embeddings[0].dim() != 3:
        why = "rotates by something else than cosines and sines `(B, S, channels)`"
        return _refused(facts, "rope", f"{name} {why}")
    cos, sin = embeddings
    unrotated = _asked_again(site, seen, (torch.ones_like(cos), torch.zeros_like(sin)))
    call = seen.calls[0]
    if torch.equal(unrotated.query, call.query):
        return facts
    for n_channels in dict.fromkeys((_n_channels(site), call.query.shape[-1], cos.shape[-1])):
        rotary = Rotary(site.rotary_function, n_channels)
        try:
            same = _close(rotary.rotate(unrotated.query, cos, sin), call.query)
            same = same and _close(rotary.rotate(unrotated.key, cos, sin), call.key)
        except (RuntimeError, TypeError, ValueError):
            continue
        if same:
            fields = {"n_channels": n_channels}
            return _with_embedding(model, site, replace(facts, rotates=True), fields, cos, sin)
    why = "does something after rotating its queries and keys that is not undone by rotating back"
    return _refused(replace(facts, rotates=True), "rope", f"{name} {why}")


def _n_channels(site: AttentionSite) -> int:
    return site.head_dim if site.rotary is None else site.rotary.n_channels


def _with_embedding(
    model: nn.Module,
    site: AttentionSite,
    facts: SiteFacts,
    fields: dict[str, Any],
    cos: Tensor,
    sin: Tensor,
) -> SiteFacts:
    """`facts` with the module that makes these `cos` and `sin`, and from which position on."""
    like = torch.zeros(1, dtype=cos.dtype, device=cos.device)
    steps = torch.arange(cos.shape[1], device=cos.device)[None]
    for name, embedding in model.named_modules():
        if not is_rotary_embedding(embedding):
            continue
        for layer_type in _layer_types(site, embedding):
            for in_3d in (True, False):  # those that take three take one too
                more: dict[str, Any] = {
                    "layer_type": layer_type,
                    "in_3d": in_3d,
                }
                rotary = Rotary(site.rotary_function, embedding=embedding, **fields, **more)
                for start in (0, 1, 2):
                    try:
                        made = rotary.embeddings(like, steps + start)
                    except Exception:  # not how this one is called
                        break
                    if made[0].shape == cos.shape and _close(made[0], cos) and _close(made[1], sin):
                        made_by = {**fields, **more, "first_position": start}
                        return replace(facts, rotary_from=name, rotary=made_by)
    why = "gets cosines and sines of positions that no rotary module of the model gives"
    return _refused(
        replace(facts, rotary=fields), "rope", f"{type(site.module).__name__} ({site.name}) {why}"
    )


def _layer_types(site: AttentionSite, embedding: nn.Module) -> list[str | None]:
    if "layer_type" not in inspect.signature(type(embedding).forward).parameters:
        return [None]
    known = getattr(embedding, "layer_types", None) or getattr(
        getattr(site.module, "config", None), "layer_types", None
    )
    return list(dict.fromkeys(known or (None,)))  # Phi-MoE of transformers 5.2 has none


def _refused(facts: SiteFacts, need: str, why: str) -> SiteFacts:
    return replace(facts, refusals={**facts.refusals, need: why})


def _asked_again(site: AttentionSite, seen: _Seen, embeddings: tuple[Tensor, Tensor]) -> _Call:
    """The attention once more, over the same tokens, with other position embeddings."""
    forward = seen.forward(site).with_argument("position_embeddings", embeddings)
    forward = forward.with_argument(site.cache_name, None)
    with _watching([site]) as again:
        site.module(*forward.args, **forward.kwargs)
    return again[site.name].calls[0]


def _query_place(
    model: nn.Module, site: AttentionSite, seen: _Seen, facts: SiteFacts
) -> QueryPlace | None:
    """Where a hook finds the query that attention receives, or None."""
    query = seen.calls[0].query
    described = _with_facts(model, replace(site, **facts.sizes), facts)
    embeddings = seen.forward(site).argument("position_embeddings")
    for child, output in reversed(seen.outputs.items()):
        for layout, to_heads in LAYOUTS.items():
            try:
                found = to_heads(described, output)
            except (RuntimeError, ValueError, IndexError):
                continue
            if found.shape != query.shape:
                continue
            scale = getattr(site.module, "scaling", None)
            for factor in (1.0, scale) if isinstance(scale, float) else (1.0,):
                scaled = found if factor == 1.0 else found * factor
                if torch.equal(scaled, query):
                    return QueryPlace(child, layout, factor, is_rotated=True)
                if described.rotary is None or not facts.rotates:
                    continue
                if torch.equal(described.rotary.rotate(scaled, *embeddings), query):
                    return QueryPlace(child, layout, factor, is_rotated=False)
    return None


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    tolerance = 8 * torch.finfo(b.dtype).eps
    return bool(((a - b).abs() <= tolerance * b.abs().amax().clamp(min=1)).all())
