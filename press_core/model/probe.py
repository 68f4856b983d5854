"""What a press reads, compared with what the model at hand really computes.

Attention modules keep to a convention, and every second one has an exception to it: layers that do
not rotate, norms after the rotation, queries scaled beforehand, heads paired in another order,
latents in the place of keys. None of that can be told from names. So the model is run once over a
few tokens, and what its attention functions receive is compared with what a press would read.

The run uses a cache of its own and takes place once per class and configuration of a model; the
state of the random generators is put back, and so are rotary modules that adapt to what they see.
"""

from __future__ import annotations

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
from transformers.cache_utils import DynamicLayer

from press_core.errors import UnsupportedModelError
from press_core.model.decoder import decoder_of
from press_core.model.forward import AttentionForward
from press_core.model.rotary import NoRotation, Rotary, is_rotary_embedding
from press_core.model.sites import (
    LAYOUTS,
    AttentionSite,
    QueryPlace,
    attention_sites,
)

N_TOKENS = 7
_enabled: ContextVar[bool] = ContextVar("verify", default=True)
_running = threading.local()


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
        sizes: fields of the site that were assumed: heads, widths, the scaling, the head order.
        rotary_from: name of the rotary embedding module whose cosines the layer gets.
        rotary: fields of its `Rotary`; None where it rotates in a way that is not known here.
        rotates: whether the layer rotates at all.
        query: where a hook finds the query; None if nowhere.
        refusals: by need ("tokens", "states", "rope", "queries", "heads"), why it is not met.
    """

    sizes: dict[str, Any] = field(default_factory=dict)
    rotary_from: str | None = None
    rotary: dict[str, Any] | None = None
    rotates: bool = False
    query: QueryPlace | None = None
    refusals: dict[str, str] = field(default_factory=dict)


_Known = dict[str, "dict[str, SiteFacts | str] | str"]
_known: weakref.WeakKeyDictionary[type, _Known] = weakref.WeakKeyDictionary()


def verified_sites(model: nn.Module) -> list[AttentionSite]:
    """The attention modules that presses work on, with what the model at hand shows of them.

    Raises:
        UnsupportedModelError: if there are none, or if the model could not be asked.
    """
    sites: list[AttentionSite] = attention_sites(model)
    if not _enabled.get():
        return sites
    known = _known.setdefault(type(model), {})
    key = _kind_of(model, sites)
    if key not in known:
        known[key] = _probe(model, sites)
    found = known[key]
    if isinstance(found, str):
        raise UnsupportedModelError(
            f"{type(model).__name__} could not be verified, as {found}; to open a press on it all "
            "the same, and at your own risk, do so in `with press_core.unverified(): ...`"
        )
    facts = {name: of_site for name, of_site in found.items() if isinstance(of_site, SiteFacts)}
    if not facts:
        reasons = sorted({str(reason) for reason in found.values()})
        raise UnsupportedModelError(
            f"{type(model).__name__} has no layer whose cache can give tokens up: "
            + "; ".join(reasons)
        )
    left = [_with_facts(model, site, facts[site.name]) for site in sites if site.name in facts]
    return [replace(site, depth=i, n_sites=len(left)) for i, site in enumerate(left)]


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


@dataclass
class _Seen:
    """What was seen of one attention module during the probe.

    Attributes:
        args, kwargs: of its forward.
        calls: of attention functions.
        outputs: by name, what its submodules returned, the latest last.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    calls: list[_Call] = field(default_factory=list)
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def forward(self, site: AttentionSite) -> AttentionForward:
        return AttentionForward(self.args, self.kwargs, site)


def _probe(model: nn.Module, sites: list[AttentionSite]) -> dict[str, SiteFacts | str] | str:
    """By name of a site its facts, or why no press can work on it; or why nothing is known."""
    try:
        with _as_if_nothing_happened(model):
            seen = _run(model, sites)
            return {site.name: _judge(model, site, seen[site.name], seen) for site in sites}
    except Exception as error:
        told = " ".join(str(error).split())[:200]
        return f"it does not run over a few tokens alone ({type(error).__name__}: {told})"


@contextmanager
def _as_if_nothing_happened(model: nn.Module) -> Iterator[None]:
    """Put back what a forward changes: random generators, and rotary modules that adapt."""
    adapting = [module for module in model.modules() if is_rotary_embedding(module)]
    before = [(dict(module.__dict__), dict(module._buffers)) for module in adapting]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    _running.depth = getattr(_running, "depth", 0) + 1
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(list(devices)))
        stack.enter_context(torch.no_grad())
        if "torch._dynamo" in sys.modules:  # compiled models run as they were written
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            _running.depth -= 1
            for module, (attributes, buffers) in zip(adapting, before, strict=True):
                module.__dict__.update(attributes)
                module._buffers.update(buffers)


def _run(model: nn.Module, sites: list[AttentionSite]) -> dict[str, _Seen]:
    """Run the model, or if it wants more than text its decoder, over a few tokens."""
    decoder = decoder_of(model, sites)
    for module in dict.fromkeys((getattr(model, "_orig_mod", model), decoder)):
        try:
            with _watching(sites) as seen:
                _forward(model, module, sites)
            return seen
        except Exception:
            if module is decoder:
                raise
    raise AssertionError


def _forward(model: Any, module: Any, sites: list[AttentionSite]) -> None:
    config = getattr(module, "config", None) or model.config
    device = next(sites[0].module.parameters()).device
    ids = _ordinary_tokens(config).to(device)
    parameters = inspect.signature(type(module).forward).parameters
    inputs = {"input_ids": ids}
    if "decoder_input_ids" in parameters:
        inputs = {"input_ids": ids[:, :-2], "decoder_input_ids": ids}
    more: dict[str, Any] = {"use_cache": True} if "use_cache" in parameters else {}
    if "logits_to_keep" in parameters:
        more["logits_to_keep"] = 1
    module(**inputs, **more)


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
            of_module.calls.append(_Call(query, key, value, k.get("scaling")))
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
        seen.args, seen.kwargs = args, dict(kwargs)

    return module.register_forward_pre_hook(note, with_kwargs=True)


def _note_output(module: nn.Module, name: str, seen: _Seen) -> Any:
    def note(_: nn.Module, __: Any, output: Any) -> None:
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


# ---- judging what was seen -----------------------------------------------------------------------


def _judge(
    model: nn.Module, site: AttentionSite, seen: _Seen, everywhere: dict[str, _Seen]
) -> SiteFacts | str:
    cache = seen.forward(site).cache
    cache = getattr(cache, "self_attention_cache", cache)
    if cache is None or not hasattr(cache, "layers"):
        return f"{type(site.module).__name__} is given no cache"
    layer = cache.layers[site.layer_idx] if site.layer_idx < len(cache.layers) else None
    kind = type(layer)
    if kind is not DynamicLayer:
        return f"{type(site.module).__name__} caches in a {kind.__name__}"
    if not seen.calls:
        return SiteFacts(refusals={})
    return _facts(model, site, seen, layer)


def _facts(model: nn.Module, site: AttentionSite, seen: _Seen, layer: Any) -> SiteFacts | str:
    call, keys, values = seen.calls[0], layer.keys, layer.values
    if keys.shape[-2] != call.query.shape[-2] or call.key.shape[-2] != keys.shape[-2]:
        return f"{type(site.module).__name__} attends over other tokens than it is given"
    refusals: dict[str, str] = {}
    order = _order_of_heads(call, keys, values)
    name = f"{type(site.module).__name__} ({site.name})"
    if order is None and keys.shape[1] == 1 and call.key.shape[1] > 1:
        refusals["states"] = (
            f"what {name} caches is no keys and values of heads, but latents of width "
            f"{keys.shape[-1]} that both are made of; StreamingLLMPress and RandomPress, which "
            "read neither, can evict them"
        )
        refusals["heads"] = refusals["rope"] = refusals["queries"] = refusals["states"]
    elif order is None or len(seen.calls) > 1:
        refusals["tokens"] = (
            f"{name} mixes the heads of its cache before it attends, so that heads cannot keep "
            "tokens of their own; no press here keeps the same for all"
        )
    sizes: dict[str, Any] = {
        "num_heads": call.query.shape[1],
        "num_kv_heads": keys.shape[1],
        "head_dim": call.query.shape[-1],
        "value_dim": values.shape[-1],
        "head_order": order,
    }
    if call.scaling is not None:
        sizes["scaling"] = float(call.scaling)
    facts = SiteFacts(sizes=sizes, refusals=refusals)
    if "states" in refusals or "tokens" in refusals:
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
        why = "has no rotary position embeddings, or rotates inside of it where nobody can see"
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
            for in_3d in (False, True):
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
        getattr(site.module, "config", None), "layer_types", ()
    )
    return list(dict.fromkeys(known or ()))


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
