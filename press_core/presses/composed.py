"""Presses one after the other, with a ratio for each layer, or with keys at new positions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass
from math import log, prod
from typing import Any

import torch
from torch import Tensor

from press_core.budget import Amount, Tokens, is_amount
from press_core.call import AttentionCall
from press_core.errors import HyperparameterError, UnsupportedInputError
from press_core.eviction import Eviction
from press_core.fields import limited, require
from press_core.model.sites import AttentionSite, n_layers_of, site_of
from press_core.press import Press
from press_core.scoring import Composition, Wrapper, acts_in_prefill_only
from press_core.select import gather_tokens
from press_core.traits import Evicts, Needs, Phase


def _is_list(given: Any) -> bool:
    listed = isinstance(given, (list, tuple)) and len(given) > 0
    return listed and all(isinstance(press, Press) for press in given)


@dataclass
class Composed(Composition):
    """Runs presses one after the other, each on what the former has left.

    Hidden states, queries and positions follow what is kept, so that any order works. A press that
    evicts other tokens of each head can only be the last.

    Attributes:
        presses: of the same mechanism, in the order in which they act.
    """

    presses: Sequence[Press] = limited(MISSING, _is_list, "a list of at least one press")

    def validate(self) -> None:
        super().validate()
        fits = all(map(acts_in_prefill_only, self.presses))
        require(self, "presses", fits, "presses that act after the prefill")
        alone = any(press.evicts.needs_attention for press in self.presses[:-1])
        allowed = "such that one that evicts by head, or frees channels, is the last"
        require(self, "presses", not alone, allowed)
        by_head = self.presses[-1].evicts is Evicts.PER_HEAD
        rotated = any(Needs.NEW_POSITIONS in press.needs for press in self.presses)
        allowed = "such that no press rerotates keys where the last evicts by head"
        require(self, "presses", not (by_head and rotated), allowed)

    def with_ratio(self, compression_ratio: Amount) -> Press:
        """A copy whose presses share what is to be evicted as these do."""
        weights = _shares(self.presses)
        presses, done = list(self.presses), 0.0
        for index, weight in weights.items():
            share = _share_of(compression_ratio, weight, done)
            presses[index] = presses[index].with_ratio(share)
            done += weight
        return self.changed(presses=presses)

    @property
    def asked_ratio(self) -> float:
        return 1 - prod(1 - press.asked_ratio for press in self.presses)

    def keeps(self, length: int) -> int:
        return min(press.keeps(length) for press in self.presses)

    def compress(self, call: AttentionCall) -> Eviction:
        eviction = Eviction.nothing(call)
        for press in self.presses:
            eviction = eviction.then(press.evict(eviction.next_call()))
        return eviction


def _shares(presses: Sequence[Press]) -> dict[int, float]:
    """By its place, how much of what is evicted each press evicts that can be told; 1 in all.

    Raises:
        HyperparameterError: if none can be told.
    """
    kept = {}
    for index, press in enumerate(presses):
        with suppress(HyperparameterError):
            press.with_ratio(0.5)
            kept[index] = 1 - press.asked_ratio
    if not kept:
        presses[-1].with_ratio(0.5)  # says what to do
    total = log(prod(kept.values()))
    return {i: log(share) / total if total else 1 / len(kept) for i, share in kept.items()}


def _share_of(amount: Amount, weight: float, done: float) -> Amount:
    """What a press is told whose `weight` of `amount` comes after `done` of it."""
    if not isinstance(amount, Tokens):
        return 1 - (1 - amount) ** weight
    left = 1 - amount.progress * done
    return Tokens(amount.n, min(1.0, amount.progress * weight / left))


@dataclass
class PerLayerCompression(Wrapper):
    """Gives each layer a compression ratio of its own.

    Attributes:
        press: can be told a compression ratio.
        compression_ratios: one in [0, 1), or the `Tokens` to keep, for each layer of the model, in
            order.
    """

    press: Press = limited(
        MISSING,
        lambda x: (
            x.evicts in (Evicts.TOKENS, Evicts.PER_HEAD)
            and acts_in_prefill_only(x)
            and Phase.AFTER_DECODER not in x.phases
        ),
        "a press that evicts tokens after the prefill, from each layer by itself",
    )
    compression_ratios: Sequence[Amount] = limited(
        MISSING,
        lambda x: isinstance(x, (list, tuple)) and all(map(is_amount, x)),
        "numbers in [0, 1) or Tokens, one per layer",
    )

    def validate(self) -> None:
        super().validate()
        for ratio in self.compression_ratios:
            self.press.with_ratio(ratio)

    @property
    def asked_ratio(self) -> float:
        told = [ratio for ratio in self.compression_ratios if not isinstance(ratio, Tokens)]
        return sum(told) / len(self.compression_ratios)

    def compress(self, call: AttentionCall) -> Eviction:
        told = [ratio.n for ratio in self.compression_ratios if isinstance(ratio, Tokens)]
        n_layers = len(self.compression_ratios)
        if len(told) == n_layers and call.length <= sum(told) / n_layers:
            return Eviction.nothing(call)
        ratio = self.compression_ratios[call.site.layer_idx]
        return self.press.with_ratio(ratio).evict(call)

    def with_ratio(self, compression_ratio: Amount) -> Press:
        return Press.with_ratio(self, compression_ratio)

    def with_budget(self, tokens: int) -> Press:
        """A copy that keeps so many tokens on average, each layer as large a part as in this."""
        parts = [r.n if isinstance(r, Tokens) else 1 - r for r in self.compression_ratios]
        mean = sum(parts) / len(parts)
        numbers = [Tokens(max(1, round(tokens * part / mean))) for part in parts]
        return self.changed(compression_ratios=numbers)

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        n_layers = n_layers_of(site)
        if len(self.compression_ratios) != n_layers:
            raise HyperparameterError(
                f"{type(self).__name__}: {len(self.compression_ratios)} compression_ratios for a "
                f"model of {n_layers} layers; give one per layer"
            )


@dataclass
class KeyRerotation(Wrapper):
    """Prunes, then turns each kept key to its new position `0 ... n - 1`.

    Later positions continue from `n`, also where the model counts otherwise.

    Attributes:
        press: evicts as many tokens of each head.
    """

    press: Press = limited(
        MISSING,
        lambda x: x.evicts is Evicts.TOKENS and acts_in_prefill_only(x),
        "a press that evicts as many tokens of each head, after the prefill",
    )

    needs = Needs.ROPE | Needs.NEW_POSITIONS

    def compress(self, call: AttentionCall) -> Eviction:
        return self.press.evict(call).rerotated()

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
        site = site_of(getattr(module, "_site", module))  # a view holds it in a slot
        if site.rotary is None:
            raise UnsupportedInputError(f"{site.name} has no rotary position embeddings to turn")
        positions = torch.arange(indices.shape[-1], device=keys.device).view(1, 1, -1)
        chosen = gather_tokens(keys, indices)
        before_rope = site.rotary.rotate_from(chosen, indices + site.rotary.first_position)
        return site.rotary.rotate_to(before_rope, positions).to(keys.dtype)
