"""Attention over a layer whose heads hold different numbers of tokens.

| kernel | method | device |
|---|---|---|
| `blocks` | products over all blocks of slots, combined per head | any device |
| `varlen` | torch's variable-length kernel over the kept context | CUDA, 16-bit, torch 2.12 |

Both attend over the recent tokens, which are the same for all heads, in one product. Their results
agree within rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from press_core import AttentionSite, HyperparameterError, RaggedLayer, UnsupportedInputError
from press_core.attention import softmax_with_sinks
from press_core.select import upcast

_SIXTEEN = torch.float16, torch.bfloat16

HAS_VARLEN: bool = torch.__version__ >= (2, 12)  # type: ignore[operator]
"""Whether torch's variable-length kernel can leave the empty slots of a sequence unread."""

LOG2_E = math.log2(math.e)

LOGITS = 2**22
"""Logits held at a time (16 MiB in float32); longer calls are split along the query tokens."""


@dataclass
class Query:
    """The queries of one attention call and how they attend.

    Attributes:
        states: `(B, H, q, d)`, after RoPE.
        visible: `(1 or B, 1 or H, q, n)` bool, which of the last `n` tokens of the sequence each
            query sees; earlier tokens are always visible. None: all tokens are visible.
        scaling: factor on the logits.
        softcap: bound of `tanh` soft-capping of the logits, or None.
        sinks: `(H,)` learned sink logits that take part in the softmax, or None.
    """

    states: Tensor
    visible: Tensor | None
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None

    def factor(self, unit: float = 1.0) -> float:
        """Factor on the states before their product with keys; see `logits`."""
        return unit * self.scaling if self.softcap is None else self.scaling / self.softcap

    def logits(self, products: Tensor, unit: float = 1.0) -> Tensor:
        """Logits times `unit`, in float32 or better.

        Args:
            products: of the keys with the states, which are multiplied by `factor(unit)`.
        """
        products = upcast(products)
        softcap = self.softcap
        return products if softcap is None else torch.tanh(products) * (softcap * unit)

    def weights(self, logits: Tensor) -> Tensor:
        """Softmax of `(B, H_kv, G, q, n)` logits and the sinks; 0 if the mask hides all tokens."""
        weights = softmax_with_sinks(logits, self.sinks)
        return weights if self.visible is None else weights.nan_to_num(0)

    def masks_context(self, layer: RaggedLayer) -> bool:
        """Whether `visible` covers tokens of the context, and not only recent tokens."""
        visible = self.visible
        return visible is not None and visible.shape[-1] > layer.recent_states()[0].shape[1]

    def rows(self, start: int, stop: int) -> Query:
        """The same for the query tokens `start` to `stop`."""
        visible = None if self.visible is None else self.visible[:, :, start:stop]
        return replace(self, states=self.states[:, :, start:stop], visible=visible)


def attend_heads(layer: RaggedLayer, queries: Query, backend: str | None) -> Tensor:
    """Attention over a layer whose heads hold different numbers of tokens, `(B, H, q, d)`.

    Args:
        backend: name of the kernel; None: chosen for this call.
    """
    layer.attended_by = backend or choose(layer, queries)
    return KERNELS[layer.attended_by](layer, queries)


def queries_of(
    site: AttentionSite, query: Tensor, visible: Tensor | None, kwargs: dict[str, Any]
) -> Query:
    """The `Query` of a call of an attention function.

    Args:
        query: `(B, H, q, d)`, after RoPE.
        visible: see `Query`; made by `press_core.cache.reading.helped`.
        kwargs: the other keyword arguments of the attention function.

    Raises:
        UnsupportedInputError: for dropout.
    """
    if kwargs.get("dropout"):
        raise UnsupportedInputError(
            f"compressed layers take no dropout, got {kwargs['dropout']}; call model.eval()"
        )
    scaling, sinks = kwargs.get("scaling"), kwargs.get("s_aux")
    scaling = site.softmax.scaling if scaling is None else scaling
    sinks = site.sinks if sinks is None else sinks
    return Query(site.grouped(query), visible, scaling, site.softmax.softcap, sinks)


def choose(layer: RaggedLayer, query: Query) -> str:
    """Name of the fastest kernel that supports a call."""
    sixteen = layer.keys.is_cuda and layer.keys.dtype == layer.values.dtype in _SIXTEEN
    fits = HAS_VARLEN and sixteen and _beyond_varlen(layer, query) is None
    return "varlen" if fits else "blocks"


def _beyond_varlen(layer: RaggedLayer, query: Query) -> str | None:
    """What torch's variable-length kernel lacks for a call."""
    if query.masks_context(layer):
        return "mask of the context"
    if layer.keys.shape[-1] != layer.values.shape[-1] or not _fits_varlen(layer.keys.shape[-1]):
        return "keys or values of such a width"
    states = query.states, layer.keys, layer.values
    if torch.is_grad_enabled() and any(x.requires_grad for x in states):
        return "gradients"
    return None if query.softcap is None else "soft-capped logits"


def _fits_varlen(head_dim: int) -> bool:
    return head_dim <= 256 and head_dim % 8 == 0


def check_backend(name: str, site: AttentionSite) -> None:
    """Raise if a kernel is unknown, or does not support a module.

    Raises:
        HyperparameterError: naming what is supported.
    """
    if name not in KERNELS:
        raise HyperparameterError(f"unknown back end {name!r}; known: {', '.join(KERNELS)}")
    weight, softcap = next(site.module.parameters()), site.softmax.softcap
    fits = HAS_VARLEN and weight.is_cuda and weight.dtype in _SIXTEEN and softcap is None
    if name == "varlen" and not (fits and _fits_varlen(site.head_dim)):
        raise HyperparameterError(
            "the back end 'varlen' runs on CUDA in 16 bits, without soft-capped logits, with a "
            f"head_dim up to 256 that 8 divides, from torch 2.12 on; {site.name} has softcap "
            f"{softcap}, head_dim {site.head_dim} and is on {weight.device.type} in "
            f"{weight.dtype}, with torch {torch.__version__}; use 'blocks'"
        )


def by_kv_head(visible: Tensor, n_kv_heads: int) -> Tensor:
    """`(1 or B, 1 or H, q, n)` as `(1 or B, 1 or H_kv, 1 or G, q, n)`."""
    return visible.unflatten(1, (min(n_kv_heads, visible.shape[1]), -1))


# ---- the kernels ---------------------------------------------------------------------------------
#
# The queries of a GQA group, for all tokens of the call, are the rows of one product with the keys:
# `(N, G * q, d)` for the N = B * H_kv heads of all rows of the batch. Both are upcast: in 16 bits
# large logits would lose what tells tokens apart.


def blocks(layer: RaggedLayer, query: Query) -> Tensor:
    """Attention over all blocks of all heads at once."""
    n_heads, n_queries = query.states.shape[1:3]
    n_logits = layer.blocks.hidden.numel() + len(layer.held) * layer.recent.keys.shape[2]
    step = max(1, LOGITS // (n_heads // layer.n_heads * n_logits))
    attended = _one_softmax if layer.blocks.of_rows else _merged_softmax
    if n_queries <= step:
        return attended(layer, query)
    starts = range(0, n_queries, step)
    return torch.cat([attended(layer, query.rows(i, i + step)) for i in starts], dim=2)


def _one_softmax(layer: RaggedLayer, query: Query) -> Tensor:
    """For layouts in which every head reads exactly one block: one plain softmax per head."""
    states = upcast(_rows(layer, query)) * query.factor()
    recent_keys, recent_values = layer.recent_states()
    old = _old_logits(layer, query, states)
    n, recent = old.shape[-1], _recent_logits(layer, query, states, recent_keys)
    weights = _weights(layer, query, torch.cat((old, recent), dim=-1)).to(recent_values.dtype)
    read = _products(layer, weights[..., :n], layer.values)
    output = torch.baddbmm(read, weights[..., n:], recent_values)
    return output.view(*query.states.shape[:3], -1).to(query.states.dtype)


def _merged_softmax(layer: RaggedLayer, query: Query) -> Tensor:
    """Combine the softmax of each head from partial softmaxes of its blocks.

    Logits are in base 2: `exp2` takes a quarter of the time of `exp`.
    """
    states, heads = upcast(_rows(layer, query)) * query.factor(LOG2_E), layer.blocks.heads
    recent_keys, recent_values = layer.recent_states()
    old = _old_logits(layer, query, states.index_select(0, heads), LOG2_E)
    recent = _recent_logits(layer, query, states, recent_keys, LOG2_E)
    if query.sinks is not None:  # each is one more token, without a value
        sinks = (query.sinks.to(recent.dtype) * LOG2_E).view(layer.n_heads, -1, 1)
        sinks = sinks.expand(-1, -1, query.states.shape[2]).flatten(1)
        recent = torch.cat((recent, sinks.repeat(layer.batch, 1).unsqueeze(-1)), dim=-1)
    # The softmax is shift-invariant, so the maximum can be detached.
    highest = recent.detach().amax(dim=-1, keepdim=True)
    of_readings = old.detach().amax(dim=-1, keepdim=True)
    highest.scatter_reduce_(0, heads.view(-1, 1, 1).expand_as(of_readings), of_readings, "amax")
    if query.visible is not None:  # the mask may hide all tokens from a query
        highest = highest.clamp(min=torch.finfo(highest.dtype).min)
    recent = recent.sub_(highest).exp2_()
    old = old.sub_(highest.index_select(0, heads)).exp2_()
    total = _added(recent.sum(dim=-1, keepdim=True), heads, old.sum(dim=-1, keepdim=True))
    recent = recent[..., : recent_keys.shape[1]].to(recent_values.dtype)
    read = _products(layer, old.to(recent_values.dtype), layer.values)
    output = _added(upcast(torch.bmm(recent, recent_values)), heads, upcast(read))
    if query.visible is not None:
        total = total.masked_fill(total == 0, 1)
    return (output / total).view(*query.states.shape[:3], -1).to(query.states.dtype)


def varlen(layer: RaggedLayer, query: Query) -> Tensor:
    """Torch's variable-length kernel over the context; each KV head of each row is a sequence.

    The rows of `_rows` are its queries, as all of them see the whole context.

    Raises:
        UnsupportedInputError: if the call masks tokens of the context, padding included, or needs
            gradients.
    """
    if lacks := _beyond_varlen(layer, query):
        raise UnsupportedInputError(f"the back end 'varlen' has no {lacks}; use 'blocks'")
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    states = _rows(layer, query)
    n, rows, d = states.shape
    attended: Any = varlen_attn(
        states.reshape(-1, 1, d),
        layer.keys.view(-1, 1, d),
        layer.values.view(-1, 1, layer.values.shape[-1]),
        torch.arange(0, n * rows + 1, rows, dtype=torch.int32, device=states.device),
        layer.blocks.bounds,
        rows,
        max(layer.held),
        scale=query.scaling,
        seqused_k=layer.blocks.lengths,
        return_aux=AuxRequest(lse=True),
    )
    old, log_total = attended[0].view(n, rows, -1), attended[1].view(n, rows, 1)
    if 0 in layer.held:  # the kernel says that the sum over no tokens is infinite
        empty = (layer.blocks.lengths == 0).view(-1, 1, 1)
        log_total = log_total.masked_fill(empty, torch.finfo(log_total.dtype).min)
        old = old.masked_fill(empty, 0)
    # The context counts as one more token, of which this is the logit, and `old` the value.
    recent_keys, recent_values = layer.recent_states()
    recent = _recent_logits(layer, query, upcast(states) * query.factor(), recent_keys)
    weights = _weights(layer, query, torch.cat((log_total, recent), dim=-1))
    read = torch.bmm(weights[..., 1:].to(recent_values.dtype), recent_values)
    output = old * weights[..., :1] + read
    return output.view(*query.states.shape[:3], -1).to(query.states.dtype)


KERNELS: dict[str, Callable[[RaggedLayer, Query], Tensor]] = {"blocks": blocks, "varlen": varlen}
"""The kernels by name."""


def _rows(layer: RaggedLayer, query: Query) -> Tensor:
    batch, _, _, d = query.states.shape
    return query.states.reshape(batch * layer.n_heads, -1, d).to(layer.keys.dtype)


def _products(layer: RaggedLayer, left: Tensor, stored: Tensor) -> Tensor:
    """The product of each reading's `left` `(P, r, x)` with its block of `stored` `(n, x, y)`.

    Returns:
        `(P, r, y)`.
    """
    n, n_own, shape = layer.blocks.n, layer.blocks.n_own, (-1, left.shape[1], stored.shape[2])
    if n_own == n:
        return _product(left, stored)
    of_shared = left[n_own:].reshape(n - n_own, -1, left.shape[2])
    shared = _product(of_shared, stored[n_own:]).reshape(shape)
    return torch.cat((_product(left[:n_own], stored[:n_own]), shared)) if n_own else shared


def _product(left: Tensor, stored: Tensor) -> Tensor:
    """`left @ stored`, transposed: a CPU multiplies few queries in two thirds of the time.

    Args:
        left: `(n, r, x)`.
        stored: `(n, x, y)`.
    """
    return torch.bmm(stored.mT, left.mT).mT


def _old_logits(layer: RaggedLayer, query: Query, states: Tensor, unit: float = 1.0) -> Tensor:
    """Logits `(P, G * q, c)` of the context times `unit`; minus infinity for hidden tokens.

    Args:
        states: of the queries of each reading, times the query's factor, `(P, G * q, d)`.
    """
    # The product of strided weights with the values would take several times as long.
    products = _products(layer, states, upcast(layer.keys).mT).contiguous()
    old = query.logits(products, unit).add_(layer.blocks.hidden)
    if query.visible is None or not query.masks_context(layer):
        return old
    heads, n = layer.blocks.heads[:, None], layer.n_heads
    visible = by_kv_head(query.visible[..., : layer.kept.n_seen], n)
    of_heads = visible.expand(layer.batch, n, -1, -1, -1)
    seen = of_heads[heads // n, heads % n, :, :, _slots_read(layer)]  # (P, c, 1 or G, q)
    split = old.view(len(old), -1, query.states.shape[2], old.shape[-1])
    return split.masked_fill_(~seen.permute(0, 2, 3, 1), float("-inf")).view_as(old)


def _recent_logits(
    layer: RaggedLayer, query: Query, states: Tensor, keys: Tensor, unit: float = 1.0
) -> Tensor:
    """Logits `(N, G * q, n_recent)` of recent tokens times `unit`; minus infinity for hidden ones.

    Args:
        states: of the queries, times their factor, `(N, G * q, d)`.
        keys: `(N, n_recent, d)`.
    """
    logits = query.logits(torch.bmm(states, upcast(keys).mT), unit)
    if query.visible is None:
        return logits
    n = keys.shape[1]
    seen = by_kv_head(query.visible[..., query.visible.shape[-1] - n :], layer.n_heads)
    split = logits.view(layer.batch, layer.n_heads, -1, *seen.shape[3:])
    return split.masked_fill_(~seen, float("-inf")).view_as(logits)


def _slots_read(layer: RaggedLayer) -> Tensor:
    """`(P, c)` int64: sequence position of each slot that is read, 0 for empty slots."""
    n, n_own = layer.blocks.n, layer.blocks.n_own
    own, shared = layer.slots.long().clamp(min=0).split((n_own, n - n_own))
    n_readers = (len(layer.blocks.heads) - n_own) // max(1, n - n_own)
    return torch.cat((own, shared.repeat_interleave(n_readers, dim=0)))


def _weights(layer: RaggedLayer, query: Query, logits: Tensor) -> Tensor:
    """Softmax of `(N, G * q, n)` logits and the sinks."""
    grouped = logits.view(layer.batch, layer.n_heads, -1, query.states.shape[2], logits.shape[-1])
    return query.weights(grouped).view_as(logits)


def _added(sums: Tensor, heads: Tensor, parts: Tensor) -> Tensor:
    """`sums` `(N, ...)` and the `parts` `(P, ...)` of `heads`, in the same order each time."""
    if sums.is_cuda:  # where `index_add_` adds in any order
        return sums.index_put_((heads,), parts, accumulate=True)
    return sums.index_add_(0, heads, parts)
