"""Where a model attends: one `AttentionSite` per attention module, as the probe has found it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from press_core.errors import UnsupportedInputError, UnsupportedModelError
from press_core.model.ranks import HeadGroup, whole_columns
from press_core.model.rotary import Rotary


@dataclass(frozen=True)
class Signature:
    """How the forward of an attention module is called, and what it calls.

    Attributes:
        parameters: names of its parameters, in order.
        cache_name: which of them is the cache.
        interface: the registry that it takes its attention function from, or None.
        hands_on: whether its keyword arguments reach that function.
    """

    parameters: tuple[str, ...]
    cache_name: str
    interface: Any = field(default=None, repr=False)
    hands_on: bool = False


@dataclass(frozen=True)
class Place:
    """Where an attention module stands among those that presses work on.

    Attributes:
        depth, n_sites: its place, from 0, and how many there are.
        keeps_count: whether the model goes on to count all tokens, whatever this layer does with
            its keys: other layers count them too, images before have positions of their own, or it
            does not count by its cache at all.
    """

    depth: int = 0
    n_sites: int = 1
    keeps_count: bool = False


@dataclass(frozen=True)
class Softmax:
    """How logits become weights.

    Attributes:
        scaling: factor on the logits.
        softcap: bound of `tanh` soft-capping of the logits, or None (Gemma-2).
    """

    scaling: float
    softcap: float | None = None


@dataclass(frozen=True)
class QuerySource:
    """Where a hook finds the query.

    Attributes:
        child: name of the submodule of the attention module whose output it is part of.
        n_blocks: into how many equal blocks the channels of each token are divided there, each of
            which starts with the query of some heads; 0: the output is the query, `(B, H, q, d)`.
        factor: what the output is multiplied by.
        is_rotated: whether RoPE has already been applied to it.
    """

    child: str
    n_blocks: int
    factor: float
    is_rotated: bool

    def query_in(self, output: Tensor, n_heads: int, head_dim: int) -> Tensor:
        """The query `(B, H, q, d)` in what the submodule returned."""
        if self.n_blocks:
            batch, n = output.shape[:2]
            blocks = output.reshape(batch, n, self.n_blocks, -1)
            channels = blocks[..., : n_heads // self.n_blocks * head_dim]
            output = channels.reshape(batch, n, -1, head_dim).transpose(1, 2)
        return output if self.factor == 1.0 else output * self.factor


@dataclass(frozen=True)
class AttentionSite:
    """One attention module of one model: what it is called and shaped like.

    Attributes:
        name: qualified name of the module inside the model.
        layer_idx: index of its layer in the cache.
        num_heads, num_kv_heads, head_dim: `H`, `H_kv` and `d`; heads of all ranks count.
        softmax: how logits become weights.
        rotary: the rotation of queries and keys, or None where positions enter otherwise.
        head_order: per query head, the KV head that it attends over; None: `h // G`.
        ranks: those that share the heads (tensor parallelism).
        query_source: where a hook finds the query; None: nowhere.
        refusals: by need (see `Press.site_needs`), why a press that has it cannot work here.
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
    def scaling(self) -> float:
        """Factor on the attention logits."""
        return self.softmax.scaling

    def grouped(self, of_heads: Tensor) -> Tensor:
        """`(B, H, ...)` with the query heads of each KV head next to each other: `h // G`."""
        return of_heads if self._order is None else of_heads[:, self._order]

    def ungrouped(self, of_heads: Tensor) -> Tensor:
        """Undo `grouped`."""
        order = self._order
        if order is None:
            return of_heads
        return of_heads[:, sorted(range(len(order)), key=order.__getitem__)]

    @cached_property
    def _order(self) -> list[int] | None:
        """The query heads, those of each KV head next to each other; None: they are."""
        heads = list(self.head_order or ())
        return None if heads == sorted(heads) else sorted(range(len(heads)), key=heads.__getitem__)

    @property
    def sinks(self) -> Tensor | None:
        """Learned sink logits `(H,)` that take part in the softmax (gpt-oss), or None."""
        sinks = getattr(self.module, "sinks", None)
        return sinks if isinstance(sinks, Tensor) else None

    @property
    def attn_implementation(self) -> str:
        """Name of the attention implementation in force: "eager", "sdpa" and so on."""
        return str(self.module.config._attn_implementation)  # type: ignore[union-attr]

    @cached_property
    def query_module(self) -> nn.Module:
        """The submodule whose output holds the query, for a hook; the one that was verified.

        Raises:
            UnsupportedModelError: if there is none. A patch sees queries all the same.
        """
        if self.query_source is None:
            raise UnsupportedModelError(self.refusals["hooked queries"])
        return self.module.get_submodule(self.query_source.child)

    def query_in(self, output: Tensor) -> Tensor:
        """The query `(B, H, q, d)` in the output of `query_module`."""
        assert self.query_source is not None
        return self.query_source.query_in(output, self.num_heads // self.ranks.size, self.head_dim)


@dataclass(frozen=True)
class Bystander:
    """An attention module whose cache presses leave alone, and what it needs beside pruned ones.

    Attributes:
        owner: index of the layer in the cache that it attends over, where that is another's.
        window: how many of the last tokens it sees, where a bare cache would keep all.
    """

    site: AttentionSite
    owner: int | None = None
    window: int | None = None


def site_of(module: Any) -> AttentionSite:
    """The site of the attention module that an open scope has handed to a press.

    Args:
        module: what hook presses get as `module`, or the `call.site` of patch presses.

    Raises:
        UnsupportedInputError: if it is another module.
    """
    site = module if isinstance(module, AttentionSite) else vars(module).get("_site")
    if not isinstance(site, AttentionSite):
        raise UnsupportedInputError(
            f"a {type(module).__name__} was given, and it is not known how it rotates its keys; "
            "give the module that a press is handed while `with press(model): ...` is open"
        )
    return site


def n_layers_of(site: AttentionSite) -> int:
    """How many layers the model of `site` has, those that presses leave alone too."""
    config: Any = site.module.config
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def output_weight(site: AttentionSite) -> Tensor:
    """Weight of the output projection, `(D, H * d)`.

    Raises:
        UnsupportedModelError: if the module has none with floating-point weights at hand.
    """
    width = site.num_heads * site.head_dim
    children = dict(site.module.named_children())
    for name in ("o_proj", "dense", "out_proj", "c_proj"):  # by role; nothing else tells it
        weight = getattr(children.get(name), "weight", None)
        if isinstance(weight, Tensor) and weight.is_meta:
            raise UnsupportedModelError(
                f"the weights of {site.name}.{name} are offloaded between forwards (device_map), "
                "and values are weighed by them; keep the attention modules on a device"
            )
        if isinstance(weight, Tensor) and weight.is_floating_point():
            weight = weight.T if type(children[name]).__name__ == "Conv1D" else weight
            return whole_columns(site.ranks, weight, width)
    raise UnsupportedModelError(
        f"{type(site.module).__name__} ({site.name}) has no output projection (o_proj, dense, "
        "out_proj or c_proj) with floating-point weights, by which values are weighed"
    )
