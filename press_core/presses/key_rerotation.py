"""Kept keys at the positions of a shorter context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.composite import Wrapper, takes_even
from press_core.errors import UnsupportedInputError
from press_core.eviction import Eviction
from press_core.model.view import site_of
from press_core.press import Needs, Press
from press_core.select import gather_tokens


@dataclass
class KeyRerotation(Wrapper):
    """Prunes, then turns each kept key to its new position `0 ... n - 1`.

    Later positions continue from `n`, also where the model counts otherwise.

    Attributes:
        press: evicts as many tokens of each head.
    """

    own_needs = Needs.ROPE
    rerotates = True

    def decide(self, call: AttentionCall) -> Eviction:
        return self.press.evict(call).rerotated()

    def takes(self, press: Press) -> tuple[bool, str]:
        return takes_even(press)

    @staticmethod
    def rerotate_keys(module: Any, indices: Tensor, keys: Tensor) -> Tensor:
        """Some keys, turned to the positions `0 ... n - 1`; for presses that call it themselves.

        Args:
            module: what the press is handed: the module in hook presses, `call.site` in others.
            indices: `(B, H_kv, n)` int64, which of the `S` keys.
            keys: `(B, H_kv, S, d)`, each rotated to its own place in the context.

        Returns:
            `(B, H_kv, n, d)`, in the dtype of `keys`.

        Raises:
            UnsupportedInputError: if `module` does not come from an open scope, or has no RoPE.
        """
        site = site_of(module)
        if site.rotary is None:
            raise UnsupportedInputError(f"{site.name} has no rotary position embeddings to turn")
        positions = torch.arange(indices.shape[-1], device=keys.device).view(1, 1, -1)
        chosen = gather_tokens(keys, indices)
        before_rope = site.rotary.rotate_from(chosen, indices + site.rotary.first_position)
        return site.rotary.rotate_to(before_rope, positions).to(keys.dtype)
