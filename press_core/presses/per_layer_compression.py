"""One compression ratio per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from press_core.call import AttentionCall
from press_core.composite import Wrapper, acts_in_prefill_only
from press_core.errors import HyperparameterError
from press_core.eviction import Eviction
from press_core.model.sites import AttentionSite
from press_core.press import Evicts, Press, require


@dataclass
class PerLayerCompression(Wrapper):
    """Gives each layer a compression ratio of its own.

    Attributes:
        press: can be told a compression ratio.
        compression_ratios: one in [0, 1) for each layer of the model, in order.
    """

    compression_ratios: Sequence[float]

    def validate(self) -> None:
        super().validate()
        ratios = self.compression_ratios
        fits = isinstance(ratios, (list, tuple)) and all(0 <= ratio < 1 for ratio in ratios)
        require(self, "compression_ratios", fits, "numbers in [0, 1), one per layer")
        for ratio in self.compression_ratios:
            self.press.with_ratio(ratio)

    def takes(self, press: Press) -> tuple[bool, str]:
        fits = press.evicts in (Evicts.TOKENS, Evicts.PER_HEAD) and acts_in_prefill_only(press)
        return fits, "a press that evicts tokens after the prefill"

    @property
    def asked_ratio(self) -> float:
        return sum(self.compression_ratios) / len(self.compression_ratios)

    @property
    def evicts(self) -> Evicts:  # type: ignore[override]
        return self.press.evicts

    def decide(self, call: AttentionCall) -> Eviction:
        ratio = self.compression_ratios[call.site.layer_idx]
        return self.press.with_ratio(ratio).evict(call)

    def with_ratio(self, compression_ratio: float) -> Press:
        return Press.with_ratio(self, compression_ratio)

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        n_layers = site.module.config.num_hidden_layers  # type: ignore[union-attr]
        if len(self.compression_ratios) != n_layers:
            raise HyperparameterError(
                f"{type(self).__name__}: {len(self.compression_ratios)} compression_ratios for a "
                f"model of {n_layers} layers; give one per layer"
            )
