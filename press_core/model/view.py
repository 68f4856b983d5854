"""An attention module as presses of kvpress know it, without a change to the module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from press_core.errors import UnsupportedInputError
from press_core.model.sites import AttentionSite


class AttentionView:
    """An attention module that has a `rotary_emb`, whoever else holds the module.

    kvpress gives every attention module that attribute and leaves it there. Here a press is handed
    a view: what is read, set or called is the module's own, and `rotary_emb` is the view's. It is
    called as `rotary_emb(x, position_ids)` in any model, and gives the cosines and sines that this
    layer gets. As some adapt to the positions that they see, it is a copy each time.
    """

    _site: AttentionSite

    def __init__(self, site: AttentionSite) -> None:
        vars(self)["_site"] = site

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return type(self._site.module)

    def __getattr__(self, name: str) -> Any:
        if name == "rotary_emb" and not hasattr(self._site.module, name):
            return _rotary_embedding(self._site)
        return getattr(self._site.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._site.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._site.module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._site.module(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return self._site.module is (other._site.module if type(other) is AttentionView else other)

    def __hash__(self) -> int:
        return hash(self._site.module)

    def __repr__(self) -> str:
        return repr(self._site.module)


def view_of(site: AttentionSite) -> Any:
    """The attention module of `site`, as an `AttentionView`.

    In a forward that is being compiled the module itself: no compiler follows a stand-in.
    """
    return site.module if torch.compiler.is_compiling() else AttentionView(site)


def site_of(module: Any) -> AttentionSite:
    """The site of the attention module that an open scope has handed to a press.

    Args:
        module: what hook presses get as `module`, or the `call.site` of patch presses.

    Raises:
        UnsupportedInputError: if it is another module.
    """
    if isinstance(module, AttentionSite):
        return module
    if type(module) is not AttentionView:
        raise UnsupportedInputError(
            f"a {type(module).__name__} was given, and it is not known how it rotates its keys; "
            "give the module that a press is handed while `with press(model): ...` is open"
        )
    return module._site


def _rotary_embedding(site: AttentionSite) -> nn.Module:
    if site.rotary is None or site.rotary.embedding is None:
        raise AttributeError(
            f"{site.name} has no rotary_emb, as {type(site.module).__name__} does not rotate its "
            "keys there; ask hasattr(module, 'rotary_emb') first"
        )
    return site.rotary.of_this_layer()


class UnknownSite:
    """In the place of a site where a press is called by hand, outside of any scope."""

    def __init__(self, module: Any) -> None:
        self.module, self.name = module, type(module).__name__

    @property
    def layer_idx(self) -> int:
        """That of the module."""
        index = getattr(self.module, "layer_idx", None)
        if not isinstance(index, int):
            raise UnsupportedInputError(f"a {self.name} was given; the press needs its layer_idx")
        return index

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedInputError(
            f"a press that was called outside of any scope asks for the {name} of the attention "
            "module; open it on a model, `with press(model): ...`"
        )
