"""Presses that wrap presses: in sequence, with a ratio per layer, or rerotated."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from functools import reduce
from math import log, prod
from typing import Any

import torch
from torch import Tensor

from press_core.budget import Amount, Tokens, is_amount
from press_core.call import AttentionCall
from press_core.errors import HyperparameterError
from press_core.eviction import Eviction
from press_core.fields import AMOUNT, limited, require, require_given
from press_core.model.sites import AttentionSite, n_layers_of, site_of
from press_core.press import Press
from press_core.scoring import Composition, Wrapper
from press_core.select import gather_tokens
from press_core.traits import Evicts, Needs, Phase


def _is_list(given: Any) -> bool:
    listed = isinstance(given, (list, tuple)) and len(given) > 0
    return listed and all(isinstance(press, Press) for press in given)


@dataclass
class Composed(Composition):
    """Applies presses in sequence, each to the tokens that the previous one kept.

    Hidden states, queries and positions follow the kept tokens, so that any order works. A press
    that evicts per head (AdaKV, DMS) or frees key channels can only be the last one. The total
    ratio is `1 - Π(1 - r_i)`.

    Attributes:
        presses: presses of the same mechanism that act after the prefill, in the order in which
            they act.
    """

    presses: Sequence[Press] = limited(MISSING, _is_list, "a list of at least one press")

    def validate(self) -> None:
        super().validate()
        fits = all(press.phases.in_prefill_only for press in self.presses)
        require(self, "presses", fits, "presses that act after the prefill")
        alone = any(press.evicts.needs_attention for press in self.presses[:-1])
        allowed = "ordered so that one that evicts per head, or frees channels, is the last"
        require(self, "presses", not alone, allowed)
        by_head = self.presses[-1].evicts is Evicts.PER_HEAD
        rotated = any(press.all_needs & Needs.NEW_POSITIONS for press in self.presses)
        allowed = "without a press that rerotates keys, as the last one evicts per head"
        require(self, "presses", not (by_head and rotated), allowed)

    def with_ratio(self, compression_ratio: Amount) -> Press:
        """A copy with this total ratio, divided over the presses in the same proportions."""
        require_given(*AMOUNT, compression_ratio=compression_ratio)
        presses, done, total = list(self.presses), 0.0, compression_ratio
        for index, weight in _shares(self.presses).items():
            if isinstance(total, Tokens):  # previous presses have covered the part `done`
                left = max(1e-12, 1 - total.progress * done)  # 0 before presses without a ratio
                progress = total.progress * weight / left
                share: Amount = Tokens(total.n, min(1.0, progress))
            else:
                share = 1 - (1 - total) ** weight
            presses[index] = presses[index].with_ratio(share)
            done += weight
        return self.changed(presses=presses)

    @property
    def amount(self) -> Amount:
        return 1 - prod(1 - press.requested_ratio for press in self.presses)

    def keeps(self, length: int) -> int:
        return reduce(lambda n, press: press.keeps(n), self.presses, length)

    def compress(self, call: AttentionCall) -> Eviction:
        eviction = Eviction.nothing(call)
        # The budget that a press around this one sets is divided over the presses as a ratio is.
        whole: Any = self.with_budget(call.budget) if call.budget else self
        for press in whole.presses:
            eviction = eviction.then(press.evict(eviction.next_call()))
        return eviction


def _shares(presses: Sequence[Press]) -> dict[int, float]:
    """By index, each press's part of the total compression, in logarithms; the parts sum to 1.

    Presses that take no ratio are left out, unless they evict a share of the tokens all the same.

    Raises:
        HyperparameterError: if no press takes a ratio, or one evicts a share that cannot be set.
    """
    kept = {}
    for index, press in enumerate(presses):
        try:
            press.with_ratio(0.5)
            kept[index] = 1 - press.requested_ratio
        except HyperparameterError:
            if press.requested_ratio and press.evicts in (Evicts.TOKENS, Evicts.PER_HEAD):
                raise
    if not kept:
        presses[-1].with_ratio(0.5)  # raises, and its message says what to do
    total = log(prod(kept.values()))
    return {i: log(share) / total if total else 1 / len(kept) for i, share in kept.items()}


@dataclass
class PerLayerCompression(Composition):
    """Keeps what the wrapped press keeps, with a separate compression ratio for each layer.

    Attributes:
        press: a press with a compression ratio, which decides about each layer separately.
        compression_ratios: for each layer of the model, in order, a ratio in [0, 1) or the `Tokens`
            to keep.
    """

    press: Press = limited(
        MISSING,
        lambda x: (
            x.evicts in (Evicts.TOKENS, Evicts.PER_HEAD)
            and x.phases.in_prefill_only
            and not x.phases & Phase.AFTER_DECODER
        ),
        "a press that evicts tokens after the prefill, from each layer separately",
    )
    compression_ratios: Sequence[Amount] = limited(
        MISSING,
        lambda x: isinstance(x, (list, tuple)) and len(x) > 0 and all(map(is_amount, x)),
        "numbers in [0, 1) or Tokens, one per layer",
    )

    def validate(self) -> None:
        super().validate()
        for ratio in self.compression_ratios:
            self.press.with_ratio(ratio)

    @property
    def amount(self) -> Amount:
        numbers = [ratio for ratio in self.compression_ratios if not isinstance(ratio, Tokens)]
        return sum(numbers) / len(self.compression_ratios)

    def acts_on(self, length: int) -> bool:
        presses = map(self.press.with_ratio, self.compression_ratios)
        return not self._fits(length) and any(press.acts_on(length) for press in presses)

    def keeps(self, length: int) -> int:
        kept = [self.press.with_ratio(ratio).keeps(length) for ratio in self.compression_ratios]
        return length if self._fits(length) else sum(kept) // len(kept)

    def _fits(self, length: int) -> bool:
        """Whether a context is no longer than the mean of the `Tokens`, if there is no ratio."""
        counts = [ratio.n for ratio in self.compression_ratios if isinstance(ratio, Tokens)]
        n_layers = len(self.compression_ratios)
        return len(counts) == n_layers and length * n_layers <= sum(counts)

    def compress(self, call: AttentionCall) -> Eviction:
        if self._fits(call.length) and not call.budget:
            return Eviction.nothing(call)
        return self.press.with_ratio(self.compression_ratios[call.site.layer_idx]).evict(call)

    def with_budget(self, tokens: int) -> Press:
        """A copy that keeps `tokens` on average over layers, in the proportions of this one.

        Raises:
            HyperparameterError: if some layers have `Tokens` and others a ratio.
        """
        kinds = {isinstance(ratio, Tokens) for ratio in self.compression_ratios}
        allowed = "all ratios or all Tokens for with_budget, which keeps their proportions"
        require(self, "compression_ratios", len(kinds) == 1, allowed)
        parts = [r.n if isinstance(r, Tokens) else 1 - r for r in self.compression_ratios]
        mean = sum(parts) / len(parts)
        numbers = [Tokens(max(1, round(tokens * part / mean))) for part in parts]
        return self.changed(compression_ratios=numbers)

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        n_layers, n_given = n_layers_of(site), len(self.compression_ratios)
        allowed = f"one per layer, not {n_given} for a model of {n_layers} layers"
        require(self, "compression_ratios", n_given == n_layers, allowed)


@dataclass
class KeyRerotation(Wrapper):
    """Keeps what the wrapped press keeps, with keys rerotated to the positions `0 ... n - 1`.

    New tokens continue at position `n`, even if the model passes other positions.

    Attributes:
        press: evicts tokens after the prefill, the same number from each head.
    """

    press: Press = limited(
        MISSING,
        lambda x: x.evicts is Evicts.TOKENS and x.phases.in_prefill_only,
        "a press that evicts the same number of tokens from each head, after the prefill",
    )

    needs = Needs.ROPE | Needs.NEW_POSITIONS

    def keeps(self, length: int) -> int:
        return self.press.keeps(length)

    def compress(self, call: AttentionCall) -> Eviction:
        return self.press.evict(call).rerotated()

    @staticmethod
    def rerotate_keys(module: Any, indices: Tensor, keys: Tensor) -> Tensor:
        """The keys at `indices`, rotated to the positions `0 ... n - 1`; for presses of your own.

        Args:
            module: the module that a hook press is given, or `call.site`.
            indices: `(B, H_kv, n)` int64, indices of the kept keys among the `S`.
            keys: `(B, H_kv, S, d)`, rotated to their positions in the context.

        Returns:
            `(B, H_kv, n, d)`, in the dtype of `keys`.

        Raises:
            UnsupportedInputError: if `module` does not come from an open scope, or has no RoPE.
        """
        rotary = site_of(module).rotation
        positions = torch.arange(indices.shape[-1], device=keys.device).view(1, 1, -1)
        chosen = gather_tokens(keys, indices)
        before_rope = rotary.rotate_from(chosen, indices + rotary.first_position)
        return rotary.rotate_to(before_rope, positions).to(keys.dtype)
