"""One `AttentionSite` per attention module of a model; the probe makes them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import DTensor

from press_core.errors import UnsupportedInputError, UnsupportedModelError
from press_core.model.rotary import Rotary

NEEDS = {
    "tokens": "a cache that can lose tokens",
    "own tokens": "heads that can keep tokens of their own",
    "states": "the keys and values of each head",
    "key norms": "keys of different norms",
    "rope": "rotary position embeddings",
    "unrotated keys": "keys before their rotation",
    "later queries": "queries that do not depend on positions, but for their rotation",
    "heads": "heads that can keep different numbers of tokens",
    "attention": "an attention function that can be replaced",
    "queries by hooks": "queries that a hook can observe",
    "queries by patches": "queries that a patch can observe",
}
"""What a press may need of an attention module (see `Press.site_needs`), for error messages."""


@dataclass(frozen=True)
class Signature:
    """How the forward of an attention module is called, and how it calls attention functions.

    Attributes:
        parameters: names of its parameters, in order.
        cache_name: the name of the cache parameter.
        interface: the registry that it gets its attention function from, or None.
        hands_on: whether it passes its keyword arguments on to that function.
        masks_one: whether a single token behind a cache comes with a mask.
    """

    parameters: tuple[str, ...]
    cache_name: str
    interface: Any = field(default=None, repr=False)
    hands_on: bool = False
    masks_one: bool = True


@dataclass(frozen=True)
class Place:
    """An attention module's place among the sites of its model.

    Attributes:
        depth, n_sites: its index, from 0, and the number of sites.
        keeps_count: whether the model still counts all tokens seen when this layer's keys are
            rerotated: other layers slide and count them too, images have 3-d positions, or the
            model does not derive positions from the cache.
        sizes_sliding: whether the first of the sites comes before modules with a sliding window, so
            that a model makes their masks for its length, too, if no layer of the cache slides.
        owner: for a module that is no site, but reads the layer that another module fills, the
            index of that layer.
        slides: whether the module is no site, because it sees a sliding window only.
    """

    depth: int = 0
    n_sites: int = 1
    keeps_count: bool = False
    sizes_sliding: bool = False
    owner: int | None = None
    slides: bool = False


@dataclass(frozen=True)
class Softmax:
    """How logits become weights.

    Attributes:
        scaling: factor on the logits.
        softcap: bound of `tanh` soft-capping of the logits (Gemma-2), or None.
    """

    scaling: float
    softcap: float | None = None


@dataclass(frozen=True)
class QuerySource:
    """The submodule output that contains the query, for hooks.

    Attributes:
        child: name of the submodule of the attention module.
        n_blocks: number of equal blocks that the channels of the output are divided into; each
            block starts with the queries of some heads. 0: the output is the query, `(B, H, q, d)`.
        factor: factor on the output.
        is_rotated: whether RoPE has already been applied to it.
    """

    child: str
    n_blocks: int
    factor: float
    is_rotated: bool


@dataclass(frozen=True, eq=False)
class HeadGroup:
    """The ranks that share the heads of an attention module: equal numbers, in rank order.

    Attributes:
        process_group: of torch.distributed; None: this process holds all heads.
        rank, size: rank of this process, and number of ranks.
    """

    process_group: Any = None
    rank: int = 0
    size: int = 1

    def gather(self, x: Tensor) -> Tensor:
        """`x` `(B, heads, ...)` with the heads of all ranks; gradients flow back."""
        if self.process_group is None:
            return x
        return torch.cat(all_gather(x.contiguous(), group=self.process_group), dim=1)

    def own(self, x: Tensor, n: int) -> Tensor:
        """A copy of this rank's `n` heads of `x`, which has the heads of all ranks."""
        if x.shape[1] == n:
            return x
        return x.chunk(self.size, dim=1)[self.rank].contiguous()

    def mean(self, value: float, device: torch.device) -> float:
        """The mean over the ranks, which exchange it on `device`, where their backend can."""
        if self.process_group is None:
            return value
        of_ranks = self.gather(torch.tensor([[value]], dtype=torch.float64, device=device))
        return float(of_ranks.mean())


@dataclass(frozen=True)
class AttentionSite:
    """One attention module of one model: its names, shapes and conventions.

    Attributes:
        name: qualified name of the module inside the model.
        layer_idx: index of its layer in the cache.
        num_heads, num_kv_heads, head_dim: `H`, `H_kv` and `d`, with the heads of all ranks.
        softmax: how logits become weights.
        rotary: the rotation of queries and keys; None: no rotation is known.
        head_order: per query head, the KV head that it attends over; None: `h // G`.
        ranks: the tensor-parallel ranks that share the heads.
        query_source: the submodule output that holds the query, for hooks; None: there is none.
        refusals: by need, why the module does not meet it, as the probe found; see `refusal` and
            `can_be_pruned`.
    """

    name: str
    module: nn.Module = field(repr=False)
    layer_idx: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    softmax: Softmax
    signature: Signature
    rotary: Rotary | None = field(default=None, repr=False)
    place: Place = field(default_factory=Place)
    head_order: tuple[int, ...] | None = None
    ranks: HeadGroup = field(default_factory=HeadGroup, repr=False)
    query_source: QuerySource | None = None
    refusals: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def rotation(self) -> Rotary:
        """The rotation, for what rotates keys or queries.

        Raises:
            UnsupportedInputError: if the module has none.
        """
        if self.rotary is None:
            raise UnsupportedInputError(
                f"{self.name} has no rotary position embeddings; a press that rotates declares "
                "`needs = Needs.ROPE`, so that its scope refuses such models before it opens"
            )
        return self.rotary

    @property
    def rotary_in_3d(self) -> Rotary | None:
        """The rotation, if the model gives images positions in three dimensions; else None.

        The position ids that attention modules get are then missing, or different ones.
        """
        return self.rotary if self.rotary is not None and self.rotary.in_3d else None

    def refusal(self, need: str) -> str | None:
        """Why the module does not meet a need of a press (see `Press.site_needs`), or None."""
        if need in ("attention", "queries by patches") and not self.signature.hands_on:
            return (
                f"{type(self.module).__name__} ({self.name}) does not call a function of the "
                "attention registry with its keyword arguments, so that it cannot attend head by "
                'head, nor a patch see its queries; load the model with attn_implementation="sdpa",'
                " or use a press from hooks_impl that keeps the same number of tokens in each head"
            )
        return self.refusals.get(need)

    @property
    def can_be_pruned(self) -> bool:
        """Whether any press can work on the module; otherwise it is no site."""
        return "pruning" not in self.refusals

    def refused(self, why: str, *needs: str) -> "AttentionSite":
        """The same with `needs` marked as not met, for the reason `why`."""
        return replace(self, refusals={**self.refusals, **dict.fromkeys(needs, why)})

    def with_modules(self, find: Callable[[Any], Any]) -> "AttentionSite":
        """The same with each module, or its name, replaced by what `find` returns for it."""
        rotary = self.rotary
        if rotary is not None and rotary.embedding is not None:
            rotary = replace(rotary, embedding=find(rotary.embedding))
        return replace(self, module=find(self.module), rotary=rotary)

    def grouped(self, of_heads: Tensor) -> Tensor:
        """`(B, H, ...)` with query heads reordered so that head `h` belongs to KV head `h // G`."""
        return of_heads if self._order is None else of_heads[:, self._order]

    def ungrouped(self, of_heads: Tensor) -> Tensor:
        """Undo `grouped`."""
        order = self._order
        if order is None:
            return of_heads
        return of_heads[:, sorted(range(len(order)), key=order.__getitem__)]

    @property
    def _order(self) -> list[int] | None:
        """The query heads sorted by KV head; None: they are sorted already."""
        heads = list(self.head_order or ())
        return None if heads == sorted(heads) else sorted(range(len(heads)), key=heads.__getitem__)

    @property
    def sinks(self) -> Tensor | None:
        """Learned sink logits `(H,)` that take part in the softmax (gpt-oss), or None."""
        sinks = getattr(self.module, "sinks", None)
        return sinks if isinstance(sinks, Tensor) else None

    @property
    def attn_implementation(self) -> str:
        """Name of the current attention implementation: "eager", "sdpa" and so on."""
        return str(self.module.config._attn_implementation)  # type: ignore[union-attr]

    @cached_property
    def query_module(self) -> nn.Module:
        """The submodule whose output holds the query, for a hook, as verified by the probe."""
        assert self.query_source is not None
        return self.module.get_submodule(self.query_source.child)

    def query_in(self, output: Tensor) -> Tensor:
        """The query `(B, H, q, d)` in the output of `query_module`."""
        source, n_heads = self.query_source, self.num_heads // self.ranks.size
        assert source is not None
        if source.n_blocks:
            batch, n = output.shape[:2]
            blocks = output.reshape(batch, n, source.n_blocks, -1)
            channels = blocks[..., : n_heads // source.n_blocks * self.head_dim]
            output = channels.reshape(batch, n, -1, self.head_dim).transpose(1, 2)
        return output if source.factor == 1.0 else output * source.factor


def site_of(module: Any) -> AttentionSite:
    """The site of an attention module that an open scope has passed to a press.

    Args:
        module: the `module` argument of hook presses, or the `call.site` of patch presses.

    Raises:
        UnsupportedInputError: if it is any other module.
    """
    site = getattr(module, "_site", module)  # a view of the module has it as `_site`
    if not isinstance(site, AttentionSite):
        raise UnsupportedInputError(
            f"a {type(module).__name__} was given, and it is not known how it rotates its keys; "
            "pass the module that a press is handed while `with press(model): ...` is open"
        )
    return site


def n_layers_of(site: AttentionSite) -> int:
    """Number of layers of the model of `site`, unpruned ones included."""
    config: Any = site.module.config
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def output_weight(site: AttentionSite) -> Tensor:
    """Weight of the output projection, `(D, H * d)`.

    Raises:
        UnsupportedModelError: if the module has none, or its weights are offloaded or quantized.
    """
    width = site.num_heads * site.head_dim
    # A module with parts may compute with other weights than its own, as with PEFT's adapters.
    children = {name: x for name, x in site.module.named_children() if not [*x.children()]}
    for name in ("o_proj", "dense", "out_proj", "c_proj"):  # only the name shows the role
        weight = getattr(children.get(name), "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point() and not weight.is_meta:
            weight = weight.T if type(children[name]).__name__ == "Conv1D" else weight
            if isinstance(weight, DTensor):
                return weight.full_tensor()
            return weight if weight.shape[1] == width else site.ranks.gather(weight)
    raise UnsupportedModelError(
        f"{type(site.module).__name__} ({site.name}) has no output projection (o_proj, dense, "
        "out_proj or c_proj) with floating-point weights on a device (device_map: not offloaded "
        "between forwards; PEFT: merge_and_unload()), and the press weighs values by them"
    )
