"""One forward of an attention module, as a mechanism intercepts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from press_core.caches import layer_at
from press_core.model.sites import AttentionSite
from press_core.scope import Press, Run


@dataclass
class Forward:
    """One forward of an attention module, and the press that a mechanism runs around it.

    Attributes:
        args, kwargs: the arguments of the forward; `before` may change them.
    """

    press: Press
    site: AttentionSite
    run: Run
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def argument(self, name: str) -> Any:
        """The argument called `name`, however it was passed, or None."""
        return self.site.argument(name, self.args, self.kwargs)

    def replace(self, name: str, value: Any) -> None:
        """Pass `value` as the argument called `name`."""
        site = self.site
        self.args, self.kwargs = site.replace_argument(name, value, self.args, self.kwargs)

    @property
    def cache(self) -> Any:
        """The cache that the forward was given, or None."""
        return self.site.cache(self.args, self.kwargs)

    @property
    def layer(self) -> Any:
        """The layer of the cache, or None where it is not there yet."""
        return layer_at(self.cache, self.site.layer_idx)

    @property
    def hidden_states(self) -> Tensor:
        """`(B, q, D)`, the input of the attention module."""
        return self.argument("hidden_states")

    @property
    def first_position(self) -> Tensor:
        """Position of its first token in the sequence, `(1 or B,)` int64, padding not counted."""
        ids = self.argument("position_ids")
        if ids is None:
            seen = self.layer.get_seq_length()
            return torch.tensor([seen], device=self.hidden_states.device)
        return ids[:, 0]
