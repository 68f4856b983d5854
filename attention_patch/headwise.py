"""Attention over layers whose heads hold different numbers of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from attention_patch.backends import attend, check_backend
from attention_patch.channels import attend_channels
from attention_patch.interception import intercept, with_override
from attention_patch.reversible import Patch, wrap
from press_core.caches import layer_at
from press_core.errors import UnsupportedModelError
from press_core.forward import Forward
from press_core.layers import ChannelLayer
from press_core.model.sites import AttentionSite, attention_sites
from press_core.ragged import RaggedLayer
from press_core.scope import Press, Run
from press_core.steps import before


def serve(site: AttentionSite, backend: str | None = None) -> Iterator[Patch]:
    """Attend over ragged layers at `site` until the patches are removed.

    Args:
        backend: name of the function that attends, see `backends`; None: chosen call by call.
    """
    yield intercept(site.interface)
    yield wrap(site.module, "forward", partial(_forward, site, backend))


def _forward(
    site: AttentionSite, backend: str | None, forward: Any, *args: Any, **kwargs: Any
) -> Any:
    cache = site.cache(args, kwargs)
    layer = None if cache is None else layer_at(cache, site.layer_idx)
    if isinstance(layer, ChannelLayer) and layer.n_slots:
        layer.serve_channels()
        return forward(*args, **with_override(kwargs, partial(attend_channels, site, layer)))
    if not isinstance(layer, RaggedLayer) or layer.is_served:
        return forward(*args, **kwargs)
    layer.serve()
    try:
        return forward(*args, **with_override(kwargs, partial(attend, site, layer, backend)))
    finally:
        layer.unserve()


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
        backend: one of `backends.BACKENDS`; None: chosen call by call.

    Raises:
        HyperparameterError: if there is no such back end, or if it cannot do what the model needs.
        UnsupportedModelError: if a module does not go through the attention interface.
    """

    def __init__(self, model: nn.Module, backend: str | None = None) -> None:
        self.model, self.backend = model, backend
        self._opened: list[ExitStack] = []

    def __enter__(self) -> headwise:
        with ExitStack() as opened:
            for site in attention_sites(self.model):
                check_interface(site)
                if self.backend is not None:
                    check_backend(self.backend, site)
                for patch in serve(site, self.backend):
                    opened.callback(patch.remove)
                helped = wrap(site.module, "forward", partial(_with_help, site))
                opened.callback(helped.remove)
            self._opened.append(opened.pop_all())
        return self

    def __exit__(self, *_: Any) -> None:
        self._opened.pop().close()


class _Help(Press):
    """Evicts nothing: what is left of a press once its scope only helps to decode."""

    acts_in_prefill = False


def _with_help(site: AttentionSite, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Fit the mask and the positions of a call to the layer, as any open scope of a press does."""
    step = Forward(_Help(), site, Run(), args, kwargs)
    before(step)
    return forward(*step.args, **step.kwargs)


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
