"""Attention over cache layers that the model's own attention cannot read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attention_patch.interception import intercept, with_override
from attention_patch.kernels import Query, attend_heads, by_kv_head, check_backend, queries_of
from attention_patch.reversible import Patch, wrap
from press_core import AttentionSite, Evicts, Phase, RaggedLayer, Scope, entry
from press_core.cache.in_place import ChannelPrunedLayer
from press_core.forward import Arguments, current, names_of
from press_core.on_layers import Removable
from press_core.running.compiled import runs_eagerly
from press_core.scope import InstalledPress, ScopeState
from press_core.select import upcast


def attend_channels(layer: ChannelPrunedLayer, queries: Query, _: str | None) -> Tensor:
    """Attention over keys with evicted channels, `(B, H, q, d)`.

    Queries are reduced to the channels of the pruned keys and scaled for the full head_dim, so the
    logits equal those of keys with zeros in the evicted channels.
    """
    states = upcast(queries.states)
    grouped = states.unflatten(1, (layer.channels.shape[1], -1))  # (B, H_kv, G, q, d)
    index = layer.channels[:, :, None, None].expand(*grouped.shape[:-1], -1)
    old = grouped.gather(-1, index) @ upcast(layer.keys).unsqueeze(2).mT
    recent = grouped @ upcast(layer.recent_keys).unsqueeze(2).mT
    logits = queries.logits(torch.cat((old, recent), dim=-1) * queries.factor())
    if queries.visible is not None:  # covers all tokens, or the last ones only
        visible = by_kv_head(queries.visible, layer.channels.shape[1])
        logits[..., logits.shape[-1] - visible.shape[-1] :].masked_fill_(~visible, float("-inf"))
    weights = queries.weights(logits).to(layer.values.dtype)
    return (weights @ layer.values.unsqueeze(2)).flatten(1, 2)


ATTEND: dict[type, Any] = {RaggedLayer: attend_heads, ChannelPrunedLayer: attend_channels}
"""The attention function of each kind of layer."""


def attend(
    site: AttentionSite,
    layer: Any,
    backend: str | None,
    function: Any,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Replacement for an attention function where keys and values are stored in `layer`.

    Returns:
        The output `(B, q, H, d)`, and None in place of weights.

    Raises:
        UnsupportedInputError: for dropout, which is not supported.
    """
    output = ATTEND[type(layer)](layer, queries_of(site, query, attention_mask, kwargs), backend)
    return site.ungrouped(output).transpose(1, 2).contiguous(), None


def serve(site: AttentionSite, backend: str | None = None) -> Iterator[Patch]:
    """Attend over head-wise and channel-wise compressed layers at `site`.

    Args:
        backend: name of the kernel, see `kernels`; None: chosen per call.
    """
    yield intercept(site.signature.interface)
    yield helping(site, backend)


def helping(site: AttentionSite, backend: str | None = None) -> Patch:
    """Give the module of `site`, which presses may not work on, what it reads its layer with."""
    return wrap(site.module, "forward", partial(_forward, site, backend))


def _forward(
    site: AttentionSite, backend: str | None, call_next: Any, *args: Any, **kwargs: Any
) -> Any:
    forward, owner = current.forward, site.place.owner
    if forward is None or not forward.helped:
        return call_next(*args, **kwargs)
    layer = forward.helped[site.layer_idx] if owner is None else None
    attends = type(layer) in ATTEND and forward.reading is not layer  # else another scope does
    given = Arguments(args, kwargs, site.signature.parameters)
    given = entry.before_attention(forward, site, given, attends)
    if attends:
        override = partial(attend, site, layer, backend)
        given = given._replace(kwargs=with_override(given.kwargs, override))
    return call_next(*given.args, **given.kwargs)


@dataclass
class Reading(InstalledPress):
    """The press that `headwise` installs: it reads compressed layers and evicts nothing."""

    backend: str | None = None

    evicts = Evicts.NOTHING
    phases = Phase.NEVER

    def site_needs(self) -> list[str]:
        return ["attention"]

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        if self.backend is not None:
            check_backend(self.backend, site)

    def install(self, scope: ScopeState) -> None:
        around = partial(around_decoder, scope, names_of(scope.decoder))
        scope.installed.append(wrap(scope.decoder, "forward", around))

    def install_on_layers(self, scope: ScopeState) -> Iterator[Removable]:
        for site in scope.sites:
            yield from serve(site, self.backend)
        for other in scope.bystanders:
            yield helping(other)


class headwise:  # noqa: N801 - used like a function: `with headwise(model):`
    """A scope in which head-wise compressed caches, and others that need help, can be decoded.

    ```python
    with AdaKVPress(SnapKVPress(0.5))(model):
        model(context, past_key_values=cache)
    with headwise(model):
        model(question, past_key_values=cache)
    ```

    The scope of a head-wise press includes it. Attention of other models, other caches and plain
    layers is unchanged.

    Args:
        model: a decoder of `transformers`.
        backend: one of `kernels.KERNELS`; None: chosen per call.

    Raises:
        HyperparameterError: if the back end is unknown or does not support the model.
        UnsupportedModelError: if a module does not use the attention interface.
    """

    def __init__(self, model: nn.Module, backend: str | None = None) -> None:
        self.model, self.press = model, Reading(backend)
        self._opened: list[Scope] = []

    def __enter__(self) -> headwise:
        self._opened.append(self.press.register(self.model))
        return self

    def __exit__(self, *_: Any) -> None:
        if self._opened:
            self._opened.pop().remove()


def around_decoder(
    scope: ScopeState, names: tuple[str, ...], call_next: Any, *args: Any, **kwargs: Any
) -> Any:
    """Called in place of a decoder's forward, whose parameters are `names`, in `scope`."""
    given = Arguments(args, kwargs, names)
    around = _eagerly_around if runs_eagerly(scope, given) else _around
    return around(scope, call_next, given)


def _around(scope: ScopeState, call_next: Any, given: Arguments) -> Any:
    forward = entry.joined_forward(scope, given)
    if forward is None:
        return call_next(*given.args, **given.kwargs)
    try:
        given = entry.begin(scope, forward, given)
        output = call_next(*given.args, **given.kwargs)
    except BaseException:
        entry.leave(scope, None, failed=True)
        raise
    entry.leave(scope, output)
    return output


_eagerly_around = torch.compiler.disable(_around)
