"""Attention over layers whose heads hold different numbers of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from attention_patch.channels import attend_channels
from attention_patch.interception import intercept, with_override
from attention_patch.kernels import attend, check_backend
from attention_patch.reversible import Patch, wrap
from press_core.cache.pruned import ChannelPrunedLayer
from press_core.cache.ragged import RaggedLayer
from press_core.cache.reading import layer_of, prepared
from press_core.errors import UnsupportedModelError
from press_core.model.forward import AttentionForward
from press_core.model.probe import verified_sites
from press_core.model.sites import AttentionSite


class HeadwiseReader:
    """Lets layers be read that only the attention of this package can read, while it is open."""

    def __init__(self) -> None:
        self.is_open = True

    def remove(self) -> None:
        self.is_open = False


def serve(
    site: AttentionSite, backend: str | None = None, helps: bool = False
) -> Iterator[Patch | HeadwiseReader]:
    """Attend over head-wise and channel-wise compressed layers at `site` until all is removed.

    Args:
        backend: name of the kernel, see `kernels`; None: chosen call by call.
        helps: fit the mask and the positions of calls to layers that are pruned in another way,
            too, as scopes of presses do.
    """
    reader = HeadwiseReader()
    yield reader
    yield intercept(site.interface)
    yield wrap(site.module, "forward", partial(_forward, site, backend, reader, helps))


def _forward(
    site: AttentionSite,
    backend: str | None,
    reader: HeadwiseReader,
    helps: bool,
    call_next: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    forward = AttentionForward(args, kwargs, site)
    if helps:
        forward = prepared(forward, reader)
    layer = layer_of(forward)
    if isinstance(layer, ChannelPrunedLayer) and layer.n_slots:
        layer.allow_attention(reader)
        override: Any = partial(attend_channels, site, layer)
    elif isinstance(layer, RaggedLayer) and not layer.is_allowed:
        layer.allow_update(reader)
        override = partial(attend, site, layer, backend)
    else:
        return call_next(*forward.args, **forward.kwargs)
    try:
        return call_next(*forward.args, **with_override(forward.kwargs, override))
    finally:
        layer.disallow_update()


class headwise:  # noqa: N801 - used like a function: `with headwise(model):`
    """The scope in which head-wise compressed caches can be decoded, and all others that need help.

    ```python
    with AdaKVPress(SnapKVPress(0.5))(model):
        model(context, past_key_values=cache)
    with headwise(model):
        model(question, past_key_values=cache)
    ```

    A scope of a head-wise press opens it by itself. Other models, other caches and plain layers
    are attended over as ever.

    Args:
        model: a decoder of `transformers`.
        backend: one of `kernels.KERNELS`; None: chosen call by call.

    Raises:
        HyperparameterError: if there is no such back end, or if it cannot do what the model needs.
        UnsupportedModelError: if a module does not go through the attention interface.
    """

    def __init__(self, model: nn.Module, backend: str | None = None) -> None:
        self.model, self.backend = model, backend
        self._opened: list[ExitStack] = []

    def __enter__(self) -> headwise:
        with ExitStack() as opened:
            for site in verified_sites(self.model):
                check_interface(site)
                if self.backend is not None:
                    check_backend(self.backend, site)
                for removable in serve(site, self.backend, helps=True):
                    opened.callback(removable.remove)
            self._opened.append(opened.pop_all())
        return self

    def __exit__(self, *_: Any) -> None:
        self._opened.pop().close()


def check_interface(site: AttentionSite) -> None:
    """Refuse a module whose attention nobody can take over.

    Raises:
        UnsupportedModelError: saying why.
    """
    if not site.goes_through_interface:
        raise UnsupportedModelError(
            f"{type(site.module).__name__} ({site.name}) does not call a function of the attention "
            "registry with its keyword arguments, so that nothing can attend head by head there; "
            'load the model with attn_implementation="sdpa"'
        )
