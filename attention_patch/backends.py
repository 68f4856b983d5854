"""Ways to attend over a layer whose heads hold different numbers of tokens.

All take the same arguments and give the same result within rounding:

| name | how | on |
|---|---|---|
| `heads` | scaled dot-product attention, head by head, over the storage as it lies | any device |
| `padded` | one scaled dot-product attention over a padded copy, with a mask | any device |
| `eager` | the same, written out in float32: for learned sinks and capped logits | any device |
| `flex` | flex attention over the storage as it lies, each head a document | any device |
| `varlen` | torch's variable-length kernel over the storage as it lies | CUDA, 16-bit |
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from press_core.cache.ragged import RaggedLayer
from press_core.errors import HyperparameterError, UnsupportedInputError
from press_core.model.sites import AttentionSite
from press_core.select import upcast


@dataclass
class Query:
    """What asks, and how.

    Attributes:
        states: `(B, H, q, d)`, after RoPE.
        visible: `(1 or B, q, n)` bool, which of the last `n` tokens of the layer each query sees;
            all see what came before. None: they see everything.
        causal: whether `visible` says no more than that no query sees later tokens.
        scaling: factor on the logits.
        softcap: bound of `tanh` soft-capping of the logits, or None.
        sinks: `(H,)` learned logits that take part in the softmax, or None.
    """

    states: Tensor
    visible: Tensor | None
    causal: bool
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None

    def mask(self, n: int) -> Tensor | None:
        """Which of `n` keys, the last of the layer, each query sees: `(1 or B, q, n)` bool."""
        if self.visible is None:
            return None
        old = n - self.visible.shape[-1]
        return torch.nn.functional.pad(self.visible, (old, 0), value=True)


def attend(
    site: AttentionSite,
    layer: RaggedLayer,
    backend: str | None,
    function: Any,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called in place of an attention function whose keys and values lie in `layer`.

    Returns:
        `(B, q, H, d)`, and no weights.

    Raises:
        UnsupportedInputError: for dropout, which no back end has.
    """
    asked = ask(site, query, attention_mask, layer.n_recent, kwargs)
    layer.attended_by = backend or choose(layer, asked)
    output = site.ungrouped(BACKENDS[layer.attended_by](layer, asked))
    return output.transpose(1, 2).contiguous(), None


def ask(
    site: AttentionSite, query: Tensor, attention_mask: Any, n: int, kwargs: dict[str, Any]
) -> Query:
    """What an attention function is asked.

    Args:
        query: `(B, H, q, d)`, after RoPE.
        n: of how many of the latest tokens the mask is to tell.
        kwargs: the other keyword arguments of the attention function.

    Raises:
        UnsupportedInputError: for dropout, and for a mask of each head.
    """
    if kwargs.get("dropout"):
        raise UnsupportedInputError(
            f"attention over compressed heads or channels has no dropout, got {kwargs['dropout']}; "
            "call model.eval()"
        )
    scaling, sinks = kwargs.get("scaling"), kwargs.get("s_aux")
    return Query(
        site.grouped(query),
        _visible(attention_mask, n, query.shape[2], query.device),
        attention_mask is None,
        site.scaling if scaling is None else scaling,
        site.softcap,
        site.sinks if sinks is None else sinks,
    )


def choose(layer: RaggedLayer, query: Query) -> str:
    """Name of the back end for a call."""
    if query.softcap is not None or query.sinks is not None:
        return "eager"
    states = query.states
    if states.is_cuda:
        sixteen = states.dtype in (torch.float16, torch.bfloat16)
        return "varlen" if sixteen and query.causal else "padded"
    return "heads"


def check_backend(name: str, site: AttentionSite) -> None:
    """Refuse a back end that is not known, or that lacks what a module needs.

    Raises:
        HyperparameterError: naming those that will do.
    """
    if name not in BACKENDS:
        raise HyperparameterError(
            f"unknown back end {name!r} for head-wise attention; known: {', '.join(BACKENDS)}"
        )
    if name != "eager" and (site.softcap is not None or site.sinks is not None):
        raise HyperparameterError(
            f"the back end {name!r} has no soft-capped logits and no learned sinks, which "
            f"{type(site.module).__name__} ({site.name}) has; only 'eager' does"
        )


def _visible(mask: Any, n_recent: int, n_queries: int, device: torch.device) -> Tensor | None:
    """`(1 or B, q, n_recent)` bool: which of the latest tokens each query sees; None: all.

    Args:
        mask: of an attention function, in any form: None, `(B, n)`, `(B, 1, q, n)` of bools or
            of what is added to the logits, or the `BlockMask` of flex attention.

    Raises:
        UnsupportedInputError: for a mask of each head.
    """
    if mask is None and n_queries == 1:
        return None
    causal = torch.ones(n_queries, n_recent, dtype=torch.bool, device=device)
    causal = causal.tril(n_recent - n_queries)[None]
    if mask is None:
        return causal
    if isinstance(mask, BlockMask):
        rows = torch.arange(mask.shape[0], device=device)[:, None, None]
        asking = torch.arange(n_queries, device=device)[:, None]
        asked = mask.seq_lengths[1] - n_recent + torch.arange(n_recent, device=device)
        seen = mask.mask_mod(rows, torch.zeros_like(rows), asking, asked)
        visible = seen.expand(mask.shape[0], n_queries, n_recent)
    elif mask.dim() == 2:
        visible = mask[:, None, mask.shape[1] - n_recent :].bool() & causal
    elif mask.shape[1] != 1:
        raise UnsupportedInputError(
            f"an attention mask of shape {tuple(mask.shape)} hides other tokens from each head, "
            "which no compressed head can follow; use one of shape (B, 1, q, n)"
        )
    else:
        recent = mask[:, 0, :, mask.shape[-1] - n_recent :]
        visible = recent if recent.dtype == torch.bool else recent >= 0
    return None if n_queries == 1 and bool(visible.all()) else visible


# ---- the back ends -------------------------------------------------------------------------------


def heads(layer: RaggedLayer, query: Query) -> Tensor:
    """Scaled dot-product attention, KV head by KV head."""
    batch, n_heads, n_queries, d = query.states.shape
    group = n_heads // layer.n_heads
    outputs = []
    for index, states in enumerate(query.states.reshape(-1, 1, group, n_queries, d)):
        # The group's queries as heads of their own, for it is heads that torch gives to threads.
        keys, values = (held.expand(1, group, -1, -1) for held in layer.head(index))
        mask = query.mask(keys.shape[2])
        if mask is not None:
            mask = mask[0 if len(mask) == 1 else index // layer.n_heads]
        outputs.append(
            scaled_dot_product_attention(states, keys, values, mask, scale=query.scaling)
        )
    return torch.cat(outputs).view(batch, n_heads, n_queries, -1)  # values may be narrower


def padded(layer: RaggedLayer, query: Query) -> Tensor:
    """Scaled dot-product attention over heads of one length, what they lack masked away."""
    keys, values, mask = _dense(layer, query)
    group = query.states.shape[1] // layer.n_heads
    keys, values, mask = (x.repeat_interleave(group, dim=1) for x in (keys, values, mask))
    return scaled_dot_product_attention(query.states, keys, values, mask, scale=query.scaling)


def eager(layer: RaggedLayer, query: Query) -> Tensor:
    """The same written out, with soft-capped logits and learned sinks."""
    keys, values, mask = _dense(layer, query)
    grouped = query.states.unflatten(1, (layer.n_heads, -1))  # (B, H_kv, G, q, d)
    logits = capped(grouped @ keys.unsqueeze(2).mT, query.scaling, query.softcap)
    logits = logits.masked_fill(~mask.unsqueeze(2), float("-inf"))
    weights = softmax_with_sinks(logits, query.sinks)
    return (weights.to(values.dtype) @ values.unsqueeze(2)).flatten(1, 2)


def capped(logits: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Scaled logits in float32 or better, soft-capped where the model does that."""
    logits = upcast(logits) * scaling
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def softmax_with_sinks(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights `(B, H_kv, G, q, n)`; learned `sinks` `(H,)` take their share."""
    if sinks is None:
        return logits.softmax(dim=-1)
    extra = sinks.to(logits).view(1, logits.shape[1], -1, 1, 1).expand(*logits.shape[:-1], 1)
    return torch.cat((logits, extra), dim=-1).softmax(dim=-1)[..., :-1]


def _dense(layer: RaggedLayer, query: Query) -> tuple[Tensor, Tensor, Tensor]:
    """Padded keys and values `(B, H_kv, n, d)`, and who sees what: `(B, H_kv, q, n)` bool."""
    keys, values, positions = layer.dense()
    mask = (positions >= 0).unsqueeze(2).expand(-1, -1, query.states.shape[2], -1)
    visible = query.mask(keys.shape[2])
    return keys, values, mask if visible is None else mask & visible.unsqueeze(1)


def flex(layer: RaggedLayer, query: Query) -> Tensor:
    """Flex attention in which each head is a document of its own."""
    batch, n_heads, n_queries, d = query.states.shape
    n, group, device = batch * layer.n_heads, n_heads // layer.n_heads, query.states.device
    document = torch.full((len(layer.keys),), -1, device=device)
    place = torch.zeros(len(layer.keys), dtype=torch.long, device=device)  # from the newest back
    for index, (start, count) in enumerate(zip(layer.starts, layer.counts, strict=True)):
        document[start : start + count] = index
        place[start : start + count] = torch.arange(count, 0, -1, device=device)
    visible = query.visible
    if visible is None:
        visible = torch.ones(1, n_queries, 1, dtype=torch.bool, device=device)
    n_recent = visible.shape[-1]
    visible = visible.expand(batch, -1, -1)

    def sees(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        head, asking = q // n_queries, q % n_queries
        recent = (n_recent - place[kv]).clamp(0, n_recent - 1)  # spare room has no place
        seen = visible[head // layer.n_heads, asking, recent] | (place[kv] > n_recent)
        return (document[kv] == head) & seen

    mask = create_block_mask(sees, None, None, n * n_queries, len(layer.keys), device=str(device))
    states = query.states.reshape(n, group, n_queries, d).transpose(0, 1).flatten(1, 2)[None]
    output: Any = flex_attention(
        states,
        layer.keys[None, None],
        layer.values[None, None],
        block_mask=mask,
        scale=query.scaling,
        enable_gqa=True,
    )
    per_head = output[0].unflatten(1, (n, n_queries)).transpose(0, 1)
    return per_head.reshape(batch, n_heads, n_queries, -1)


def varlen(layer: RaggedLayer, query: Query) -> Tensor:
    """Torch's variable-length kernel; each KV head of each row is a sequence of its own."""
    from torch.nn.attention.varlen import varlen_attn  # torch 2.10 has it first

    batch, n_heads, n_queries, d = query.states.shape
    n, group = batch * layer.n_heads, n_heads // layer.n_heads
    states = query.states.reshape(n, group, n_queries, d).transpose(1, 2).reshape(-1, group, d)

    def integers(numbers: Any) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.int32, device=states.device)

    output: Any = varlen_attn(
        states,
        layer.keys.unsqueeze(1),
        layer.values.unsqueeze(1),
        integers(range(0, (n + 1) * n_queries, n_queries)),
        integers(itertools.chain(layer.starts, [len(layer.keys)])),
        n_queries,
        max(layer.counts),
        scale=query.scaling,
        window_size=(-1, 0) if n_queries > 1 else (-1, -1),
        enable_gqa=True,
        seqused_k=integers(layer.counts),
    )
    per_head = output.view(n, n_queries, group, -1).transpose(1, 2)
    return per_head.reshape(batch, n_heads, n_queries, -1)


BACKENDS: dict[str, Callable[[RaggedLayer, Query], Tensor]] = {
    "heads": heads,
    "padded": padded,
    "eager": eager,
    "flex": flex,
    "varlen": varlen,
}
"""Every back end by its name."""
