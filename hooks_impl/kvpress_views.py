"""What presses written for kvpress are given as the attention module."""

from functools import cache
from typing import Any

import torch
from torch import nn

from press_core import AttentionSite, UnsupportedInputError


class AttentionView:
    """A view of an attention module with a `rotary_emb`, which leaves the module unchanged.

    kvpress sets that attribute on every attention module and leaves it there. Here a press gets
    another object that shares the module's attributes: reads, writes and calls go to the module,
    except for `rotary_emb`. That is called as `rotary_emb(x, position_ids)` in any model, and
    returns the cosines and sines of this layer. It is a new copy each time, as some rotary
    embeddings adapt to the positions that they get. `masked_key_indices`, which presses of kvpress
    set, is also stored in the view only.
    """

    __slots__ = ("_site", "masked_key_indices")
    _site: AttentionSite
    masked_key_indices: Any

    def __getattr__(self, name: str) -> Any:
        if name == "rotary_emb" and not hasattr(self._site.module, name):
            return _rotary_embedding(self._site)
        return getattr(self._site.module, name)

    def __eq__(self, other: object) -> bool:
        return getattr(other, "__dict__", None) is vars(self)

    def __hash__(self) -> int:
        return hash(self._site.module)


@cache
def _view_class(kind: type) -> Any:
    return type(kind.__name__, (AttentionView, kind), {})


def view_of(site: AttentionSite) -> Any:
    """The attention module of `site`, as an `AttentionView`.

    While compiling, the module itself: compilers cannot trace the view.
    """
    if torch.compiler.is_compiling():
        return site.module
    kind: Any = type(site.module)
    view = object.__new__(_view_class(kind))
    object.__setattr__(view, "__dict__", vars(site.module))
    view._site, view.masked_key_indices = site, None
    return view


def _rotary_embedding(site: AttentionSite) -> nn.Module:
    if site.rotary is None or site.rotary.embedding is None:
        raise AttributeError(
            f"{site.name} has no rotary_emb: it rotates no keys; ask hasattr(module, 'rotary_emb')"
        )
    return site.rotary.of_this_layer()


class UnknownSite:
    """Replaces the site if a press is called by hand, outside of any scope."""

    def __init__(self, module: Any) -> None:
        self.module, self.name = module, type(module).__name__

    def __getattr__(self, name: str) -> Any:
        if name == "layer_idx" and isinstance(getattr(self.module, name, None), int):
            return self.module.layer_idx
        raise UnsupportedInputError(
            f"outside of any scope, a press has no {name} to read; use `with press(model): ...`"
        )
