"""Where a model attends: one `AttentionSite` per attention module, found by contract, not by list.

The contract is that of `transformers`' attention interface: a module with a `layer_idx`, whose
forward takes a `Cache` and hands queries, keys and values to a function of
`ALL_ATTENTION_FUNCTIONS`.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from press_core.errors import UnsupportedModelError
from press_core.model.ranks import HeadGroup, head_group, whole_columns
from press_core.model.rotary import Rotary, find_rotary_embedding, takes_layer_type

CACHE_NAMES = ("past_key_values", "past_key_value", "layer_past")
"""What families call the cache in the signature of their attention forward."""


@dataclass(frozen=True)
class QuerySource:
    """The projection (or norm) whose output is the query before RoPE: what a hook can collect.

    Attributes:
        module: the module to hook.
        to_heads: `(input, output)` of that module to the query, `(B, H, q, d)`.
        is_rotated: whether RoPE has already been applied to it.
    """

    module: nn.Module
    to_heads: Callable[[Tensor, Tensor], Tensor]
    is_rotated: bool = False

    def is_in_place(self, attention: nn.Module) -> bool:
        """Whether the module still is what the attention module calls, and not a part of that."""
        return any(child is self.module for child in attention.children())


@dataclass(frozen=True)
class QueryPlace:
    """Where a probe has found the query.

    Attributes:
        child: name of the submodule of the attention module whose output it is part of.
        layout: how it lies in there, a name in `LAYOUTS`.
        factor: what the output is multiplied by.
        is_rotated: whether RoPE has already been applied to it.
    """

    child: str
    layout: str
    factor: float
    is_rotated: bool


@dataclass(frozen=True)
class AttentionSite:
    """One attention module of one model: what it is called and shaped like.

    Attributes:
        name: qualified name of the module inside the model.
        layer_idx: index of its layer in the cache.
        num_heads, num_kv_heads, head_dim: `H`, `H_kv` and `d`; heads of all ranks count.
        heads: the ranks that share the heads (tensor parallelism).
        scaling: factor on the attention logits.
        softcap: bound of `tanh` soft-capping of the logits, or None (Gemma-2).
        is_sliding: whether it sees a sliding window only; such layers are left alone.
        rotary: the rotation of queries and keys, or None where positions enter otherwise.
        interface: the registry that the module takes its attention function from.
        parameters: names of the parameters of its forward, in order.
        cache_name: which of them is the cache.
        depth, n_sites: its place among the model's attention modules that presses work on, from 0,
            and their number.
        shares_clock: whether layers that presses leave alone go by the same count of tokens.
        value_dim: width of the values, where it is not `d`.
        head_order: per query head, the KV head that it attends over; None: `h // G`.
        rotary_function: what the modeling module rotates queries and keys by, if it has that.
        query_place: where a probe has found the query for hooks; None: nowhere.
        refusals: by need (see `Press.needs_of_a_site`; "hooked queries" of hooks), why a press that
            has it cannot work here.
        verified: whether a probe has compared all that with what the model computes.
    """

    name: str
    module: nn.Module = field(repr=False)
    layer_idx: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    softcap: float | None
    is_sliding: bool
    rotary: Rotary | None = field(repr=False)
    interface: Any = field(repr=False)
    parameters: tuple[str, ...] = field(repr=False)
    cache_name: str = field(repr=False)
    depth: int = 0
    n_sites: int = 1
    shares_clock: bool = False
    heads: HeadGroup = field(default_factory=HeadGroup, repr=False)
    value_dim: int | None = None
    head_order: tuple[int, ...] | None = None
    rotary_function: Any = field(default=None, repr=False)
    query_place: QueryPlace | None = None
    refusals: Mapping[str, str] = field(default_factory=dict, repr=False)
    verified: bool = False

    @property
    def n_own(self) -> int:
        """Query heads of this rank."""
        return self.num_heads // self.heads.size

    def grouped(self, of_heads: Tensor) -> Tensor:
        """`(B, H, ...)` with the query heads of each KV head next to each other: `h // G`."""
        if self.head_order is None or list(self.head_order) == sorted(self.head_order):
            return of_heads
        return of_heads[:, self._group_order(of_heads)]

    def ungrouped(self, of_heads: Tensor) -> Tensor:
        """Undo `grouped`."""
        if self.head_order is None or list(self.head_order) == sorted(self.head_order):
            return of_heads
        return of_heads[:, self._group_order(of_heads).argsort()]

    def _group_order(self, like: Tensor) -> Tensor:
        return torch.tensor(self.head_order, device=like.device).argsort(stable=True)

    @property
    def keeps_clock(self) -> bool:
        """Whether the model goes on to count all tokens, whatever a layer does with its keys.

        As other layers count them too, or as it reckons from there where the images before lie.
        """
        return self.shares_clock or (self.rotary is not None and self.rotary.in_3d)

    @property
    def sinks(self) -> Tensor | None:
        """Learned sink logits `(H,)` that take part in the softmax (gpt-oss), or None."""
        sinks = getattr(self.module, "sinks", None)
        return sinks if isinstance(sinks, Tensor) else None

    @property
    def attn_implementation(self) -> str:
        """Name of the attention implementation in force: "eager", "sdpa" and so on."""
        return str(self.module.config._attn_implementation)  # type: ignore[union-attr]

    @property
    def goes_through_interface(self) -> bool:
        """Whether keyword arguments of forward reach a function of `interface`."""
        upcast = getattr(self.module, "reorder_and_upcast_attn", False)  # GPT-2 has its own, then
        return "kwargs" in self.parameters and not (upcast and self.attn_implementation == "eager")

    @cached_property
    def query_source(self) -> QuerySource:
        """Where a hook finds the query.

        Raises:
            UnsupportedModelError: if the module computes its query in a way not known here. A
                patch sees queries whatever the projections are called.
        """
        if "hooked queries" in self.refusals:
            raise UnsupportedModelError(self.refusals["hooked queries"])
        return _query_source(self) if self.query_place is None else _found_query(self)


@dataclass(frozen=True)
class LeftAlone:
    """An attention module whose cache presses leave alone, and what it needs beside pruned ones.

    Attributes:
        owner: index of the layer in the cache that it attends over, where that is another's.
        window: how many of the last tokens it sees, where a bare cache would keep all.
    """

    site: AttentionSite
    owner: int | None = None
    window: int | None = None


def attention_sites(model: nn.Module) -> list[AttentionSite]:
    """All attention modules of `model` that a press can work on, in the order of their layers.

    Raises:
        UnsupportedModelError: if there are none, or if all of them are sliding-window layers.
    """
    found = all_sites(model)
    sites = [site for site in found if not site.is_sliding]
    if not sites:
        raise UnsupportedModelError(all_slide(model, len(found)))
    return numbered(sites, shares_clock=len(sites) < len(found))


def output_weight(site: AttentionSite) -> Tensor:
    """Weight of the output projection, `(D, H * d)`.

    Raises:
        UnsupportedModelError: if the module has none that is known.
    """
    for name in ("o_proj", "dense", "out_proj", "c_proj"):
        projection = getattr(site.module, name, None)
        weight = getattr(projection, "weight", None)
        if isinstance(weight, Tensor) and weight.is_meta:
            raise UnsupportedModelError(
                f"the weights of {site.name}.{name} are offloaded between forwards (device_map), "
                "and values are weighed by them; keep the attention modules on a device"
            )
        if isinstance(weight, Tensor) and weight.is_floating_point():
            weight = weight.T if type(projection).__name__ == "Conv1D" else weight
            return whole_columns(site.heads, weight, site.num_heads * site.head_dim)
    raise UnsupportedModelError(
        f"{type(site.module).__name__} ({site.name}) has no output projection (o_proj, dense, "
        "out_proj or c_proj) with floating-point weights, by which values are weighed"
    )


def all_slide(model: nn.Module, n: int) -> str:
    """What is said of a model all of whose `n` attention layers see a window only."""
    return (
        f"all {n} attention layers of {type(model).__name__} use a sliding window, which bounds "
        "their cache already; set sliding_window=None in the config if the model was loaded for "
        "contexts shorter than its window"
    )


def numbered(sites: list[AttentionSite], shares_clock: bool) -> list[AttentionSite]:
    """`sites` as those of one model that presses work on."""
    return [
        replace(site, depth=i, n_sites=len(sites), shares_clock=shares_clock)
        for i, site in enumerate(sites)
    ]


def all_sites(model: nn.Module) -> list[AttentionSite]:
    """All attention modules of `model` that are given a cache, sliding ones too.

    Raises:
        UnsupportedModelError: if there are none.
    """
    found = [
        _describe(model, name, module)
        for name, module in model.named_modules()
        if _may_attend(module)
    ]
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no attention module that goes through transformers' "
            "attention interface with a Cache; presses need a decoder of transformers >= 5.2"
        )
    return found


def _may_attend(module: nn.Module) -> bool:
    if not isinstance(getattr(module, "layer_idx", None), int):
        return False
    if not hasattr(module, "config") or getattr(module, "is_cross_attention", False):
        return False
    # Indexers, convolutions and whole layers take a cache too, but ask for no attention function.
    forward = inspect.unwrap(type(module).forward)
    if getattr(forward, "__module__", None) == type(module).__module__:
        asks = "ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names
    else:  # replaced by somebody: all that is left to ask is the file
        asks = hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS")
    parameters = inspect.signature(forward).parameters
    return asks and any(name in parameters for name in CACHE_NAMES)


def _describe(model: nn.Module, name: str, module: Any) -> AttentionSite:
    config = module.config
    head_dim = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    if head_dim is None:
        head_dim = config.hidden_size // config.num_attention_heads
    n_kv = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    sliding_window = _layer_window(module, config)
    parameters = tuple(inspect.signature(type(module).forward).parameters)[1:]
    rotate, rotary = _rotary_function(module), None
    if rotate is not None and "position_embeddings" in parameters:
        rotary = _describe_rotary(model, name, module, head_dim, rotate)
    return AttentionSite(
        name=name,
        module=module,
        layer_idx=module.layer_idx,
        num_heads=config.num_attention_heads,
        num_kv_heads=n_kv,
        heads=head_group(model, module, n_kv * head_dim),
        head_dim=head_dim,
        scaling=_scaling(module, head_dim),
        softcap=getattr(module, "attn_logit_softcapping", None),
        is_sliding=sliding_window is not None,
        rotary=rotary,
        interface=sys.modules[type(module).__module__].ALL_ATTENTION_FUNCTIONS,
        parameters=parameters,
        cache_name=next(name for name in CACHE_NAMES if name in parameters),
        rotary_function=rotate,
    )


def _scaling(module: Any, head_dim: int) -> float:
    if hasattr(module, "scaling"):
        return float(module.scaling)
    scaling: float = head_dim**-0.5
    if module.config._attn_implementation == "eager":  # where GPT-2 of transformers 5.2 heeds these
        scaling = scaling if getattr(module, "scale_attn_weights", True) else 1.0
        if getattr(module, "scale_attn_by_inverse_layer_idx", False):
            scaling /= module.layer_idx + 1
    return scaling


def _layer_window(module: Any, config: Any) -> int | None:
    """How many of the last tokens a module sees; None: all."""
    layer_types = getattr(config, "layer_types", None)
    if "full_attention" in (layer_types or [])[module.layer_idx : module.layer_idx + 1]:
        return None
    own: int | None = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    return own


_ROTATIONS = ("apply_rotary_pos_emb", "apply_multimodal_rotary_pos_emb")


def _rotary_function(module: nn.Module) -> Any:
    modeling = sys.modules[type(module).__module__]
    function = next((getattr(modeling, n) for n in _ROTATIONS if hasattr(modeling, n)), None)
    if function is None or "k" in inspect.signature(function).parameters:
        return function
    return partial(_one_by_one, function)  # Gemma 3n rotates queries and keys in two calls


def _one_by_one(function: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return function(q, cos, sin), function(k, cos, sin)


def _describe_rotary(
    model: nn.Module, name: str, module: Any, head_dim: int, rotate: Any
) -> Rotary | None:
    """How a module that is given cosines and sines rotates with the function `rotate`."""
    if not getattr(module, "use_rope", True):
        return None
    embedding = find_rotary_embedding(model, name)
    layer_type = None
    layer_types = getattr(
        module.config, "layer_types", None
    )  # Phi-MoE of transformers 5.2 has none
    if embedding is not None and layer_types and takes_layer_type(embedding):
        layer_type = layer_types[module.layer_idx]
    return Rotary(rotate, getattr(module, "rotary_ndims", head_dim), embedding, layer_type)


# ---- queries for hooks: where a probe has found them ---------------------------------------------


def _split(output: Tensor, *sizes: int) -> Tensor:
    """`output` with its last dimension as `sizes`; -1 stands for what is left over."""
    known = math.prod(size for size in sizes if size > 0)
    if output.shape[-1] % known or (-1 not in sizes and output.shape[-1] != known):
        raise ValueError(f"{output.shape[-1]} channels are no {sizes}")
    return output.unflatten(-1, sizes)


def _as_tokens_of_heads(site: AttentionSite, output: Tensor) -> Tensor:
    return _split(output, site.n_own, site.head_dim).transpose(1, 2)


def _as_first_channels(site: AttentionSite, output: Tensor) -> Tensor:
    return _as_tokens_of_heads(site, output[..., : site.n_own * site.head_dim])


def _as_start_of_each_head(site: AttentionSite, output: Tensor) -> Tensor:
    return _split(output, site.n_own, -1)[..., : site.head_dim].transpose(1, 2)


def _as_start_of_each_group(site: AttentionSite, output: Tensor) -> Tensor:
    groups = site.num_heads // site.num_kv_heads
    per_group = _split(output, site.num_kv_heads // site.heads.size, groups + 2, site.head_dim)
    return per_group[..., :groups, :].flatten(2, 3).transpose(1, 2)


LAYOUTS: dict[str, Callable[[AttentionSite, Tensor], Tensor]] = {
    "(B, q, H, d)": lambda site, output: output.transpose(1, 2),
    "(B, H, q, d)": lambda site, output: output,
    "(B, q, H d)": _as_tokens_of_heads,
    "(B, q, H d + ...)": _as_first_channels,
    "(B, q, H (d + ...))": _as_start_of_each_head,
    "(B, q, H_kv (G + 2) d)": _as_start_of_each_group,
}
"""How the query `(B, H, q, d)` may lie in the output of a submodule, each the way out of it."""


def _found_query(site: AttentionSite) -> QuerySource:
    place = site.query_place
    assert place is not None

    def to_heads(_: Tensor, output: Tensor) -> Tensor:
        found = LAYOUTS[place.layout](site, output)
        return found if place.factor == 1.0 else found * place.factor

    return QuerySource(site.module.get_submodule(place.child), to_heads, place.is_rotated)


# ---- queries for hooks: the names that families give to their projections -----------------------

_NORMS = ("q_norm", "q_layernorm")
_KNOWN_CHILDREN = {
    *("q_proj", "k_proj", "v_proj", "o_proj", "dense", "out_proj", "rotary_emb", "rotary_fn"),
    *("q_norm", "k_norm", "q_layernorm", "k_layernorm"),
}


def _split_phi3(site: AttentionSite, output: Tensor) -> Tensor:
    return output[..., : site.num_heads * site.head_dim]  # queries, then keys, then values


def _split_gpt_neox(site: AttentionSite, output: Tensor) -> Tensor:
    per_head = output.unflatten(-1, (site.num_heads, 3 * site.head_dim))
    return per_head[..., : site.head_dim].flatten(-2)  # query, key and value side by side per head


_FUSED = {
    "Phi3Attention": ("qkv_proj", _split_phi3),
    "GPTNeoXAttention": ("query_key_value", _split_gpt_neox),
    "GPT2Attention": ("c_attn", _split_phi3),
}


def _query_source(site: AttentionSite) -> QuerySource:
    module = site.module
    family = type(module).__name__
    if family in _FUSED:
        name, split = _FUSED[family]
        return QuerySource(getattr(module, name), lambda _, out: _heads(site, split(site, out)))
    children = dict(module.named_children())
    unknown = sorted(set(children) - _KNOWN_CHILDREN)
    projection: Any = children.get("q_proj")
    width = site.num_heads * site.head_dim
    if projection is None or unknown or getattr(projection, "out_features", width) != width:
        raise UnsupportedModelError(
            f"a hook cannot tell where {family} ({site.name}) computes its query: known are q_proj "
            f"with q_norm or q_layernorm, and the fused projections of {', '.join(_FUSED)}; found "
            f"{', '.join(children) or 'no submodules'}. Use the press of the same name from "
            "patch_impl, which sees the query itself"
        )
    if getattr(module.config, "clip_qkv", None) is not None:
        raise UnsupportedModelError(
            f"{family} clips its query after the projection (clip_qkv), where no hook can see it; "
            "use the press of the same name from patch_impl"
        )
    norm = next((children[n] for n in _NORMS if n in children), None)
    if norm is None:
        return QuerySource(projection, lambda _, out: _heads(site, out))
    return QuerySource(norm, lambda inp, out: _normed_heads(site, inp, out))


def _heads(site: AttentionSite, output: Tensor) -> Tensor:
    return output.unflatten(-1, (-1, site.head_dim)).transpose(1, 2)


def _normed_heads(site: AttentionSite, inp: Tensor, output: Tensor) -> Tensor:
    if output.dim() == 3:  # OLMo-2 norms all heads at once
        return _heads(site, output)
    # (B, q, H, d) or (B, H, q, d)? Where q = H the shape does not tell, but the memory does: the
    # states before the norm are a view of the projection's output, in which heads lie next to
    # each other and tokens far apart.
    length, heads = inp.stride(1), inp.stride(2)
    if output.shape[1] == output.shape[2]:
        transposed = length < heads
    else:
        transposed = output.shape[1] == site.n_own
    return output if transposed else output.transpose(1, 2)
