"""Forwards as a mechanism intercepts them: arguments found and replaced by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from torch import Tensor, nn

from press_core.errors import UnsupportedInputError
from press_core.model.generation import Part
from press_core.model.sites import AttentionSite

F = TypeVar("F", bound="Forward")


@dataclass(frozen=True)
class Forward:
    """The arguments of one forward of a module.

    Attributes:
        args, kwargs: as they were passed.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters of the forward, in order."""
        raise NotImplementedError

    def argument(self, name: str) -> Any:
        """The argument called `name`, however it was passed, or None."""
        if name in self.kwargs:
            return self.kwargs[name]
        index = self._index(name)
        return self.args[index] if index < len(self.args) else None

    def with_argument(self: F, name: str, value: Any) -> F:
        """The same forward with `value` as the argument called `name`."""
        index = self._index(name)
        if name not in self.kwargs and index < len(self.args):
            return replace(self, args=(*self.args[:index], value, *self.args[index + 1 :]))
        return replace(self, kwargs={**self.kwargs, name: value})

    def _index(self, name: str) -> int:
        names = self.parameters
        return names.index(name) if name in names else len(self.args)


@dataclass(frozen=True)
class AttentionForward(Forward):
    """One forward of an attention module.

    Attributes:
        site: the module.
        context_output: what the module has made of the tokens before these, where they came in one
            forward and were run by themselves; see `engine.before_attention`.
        part: what it is a part of; None: that was not asked when it began.
    """

    site: AttentionSite
    context_output: Any = None
    part: Part | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        return self.site.parameters

    @cached_property
    def cache(self) -> Any:
        """The cache that the forward was given, or None; of two, that of the decoder's own keys."""
        cache = self.argument(self.site.cache_name)
        return getattr(cache, "self_attention_cache", cache)

    @property
    def layer(self) -> Any:
        """The layer of the cache, or None where it is not there yet."""
        layers, index = self.cache.layers, self.site.layer_idx
        return layers[index] if index < len(layers) else None

    @cached_property
    def hidden_states(self) -> Tensor:
        """`(B, q, D)`, the input of the attention module."""
        return self.argument("hidden_states")

    @cached_property
    def n_tokens(self) -> int:
        """`q`."""
        return int(self.hidden_states.shape[1])

    @cached_property
    def cos_sin(self) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of its tokens' positions, where it is given such."""
        given = self.argument("position_embeddings")
        pair = isinstance(given, tuple) and len(given) == 2
        return given if pair and given[0].dim() == 3 else None

    @cached_property
    def position_ids(self) -> Tensor | None:
        """`(1 or B, q)` int64, the first of their dimensions where there are three; or None."""
        ids: Tensor | None = self.argument("position_ids")
        return ids if ids is None or ids.dim() == 2 else ids[0]


@dataclass(frozen=True)
class DecoderForward(Forward):
    """One forward of the module that takes token ids and runs all layers.

    Attributes:
        decoder: the module.
    """

    decoder: nn.Module

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(type(self.decoder).forward).parameters)[1:]

    @property
    def cache(self) -> Any:
        """The cache that the forward was given, or None."""
        return self.argument("past_key_values")

    @property
    def n_tokens(self) -> int:
        """How many tokens the decoder was given, as ids or as embeddings."""
        ids = self.argument("input_ids")
        return int((self.argument("inputs_embeds") if ids is None else ids).shape[1])

    def token_ids(self, why: str) -> Tensor:
        """`(B, S)` int64.

        Args:
            why: what they are needed for, for the error message.

        Raises:
            UnsupportedInputError: if the decoder was given embeddings instead.
        """
        ids = self.argument("input_ids")
        if ids is None:
            raise UnsupportedInputError(f"{why}; pass input_ids, not inputs_embeds")
        return ids
