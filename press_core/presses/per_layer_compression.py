"""One compression ratio per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from press_core.call import AttentionCall
from press_core.composite import Wrapper, acts_in_prefill_only
from press_core.errors import HyperparameterError
from press_core.eviction import Eviction
from press_core.model.sites import AttentionSite
from press_core.press import Evicts, Press, require
from press_core.select import Amount, Tokens, is_amount


@dataclass
class PerLayerCompression(Wrapper):
    """Gives each layer a compression ratio of its own.

    Attributes:
        press: can be told a compression ratio.
        compression_ratios: one in [0, 1), or the `Tokens` to keep, for each layer of the model, in
            order.
    """

    compression_ratios: Sequence[Amount]

    def validate(self) -> None:
        super().validate()
        ratios = self.compression_ratios
        fits = isinstance(ratios, (list, tuple)) and all(map(is_amount, ratios))
        require(self, "compression_ratios", fits, "numbers in [0, 1) or Tokens, one per layer")
        for ratio in self.compression_ratios:
            self.press.with_ratio(ratio)

    def takes(self, press: Press) -> tuple[bool, str]:
        fits = press.evicts in (Evicts.TOKENS, Evicts.PER_HEAD) and acts_in_prefill_only(press)
        allowed = "a press that evicts tokens after the prefill, from each layer by itself"
        return fits and not press.spans_layers, allowed

    @property
    def asked_ratio(self) -> float:
        told = [ratio for ratio in self.compression_ratios if not isinstance(ratio, Tokens)]
        return sum(told) / len(self.compression_ratios)

    @property
    def evicts(self) -> Evicts:  # type: ignore[override]
        return self.press.evicts

    def decide(self, call: AttentionCall) -> Eviction:
        if call.length <= self._mean_tokens():
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
        return replace(self, compression_ratios=numbers)

    def _mean_tokens(self) -> float:
        """How many tokens a layer keeps on average, where all are told a number; else 0."""
        numbers = [ratio.n for ratio in self.compression_ratios if isinstance(ratio, Tokens)]
        every = len(numbers) == len(self.compression_ratios)
        return sum(numbers) / len(numbers) if every else 0.0

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        n_layers = site.module.config.num_hidden_layers  # type: ignore[union-attr]
        if len(self.compression_ratios) != n_layers:
            raise HyperparameterError(
                f"{type(self).__name__}: {len(self.compression_ratios)} compression_ratios for a "
                f"model of {n_layers} layers; give one per layer"
            )
