"""FINCH (TACL 2024), with patches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from attention_patch.reversible import wrap
from patch_impl.base import BasePress
from press_core.call import AttentionCall
from press_core.methods.finch import Finch
from press_core.model.decoder import decoder_of
from press_core.model.sites import AttentionSite
from press_core.scope import Removable, Run


@dataclass
class FinchPress(Finch, BasePress):
    def compress(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        return self.keep(call)

    def install_on(
        self, model: nn.Module, sites: list[AttentionSite], run: Run
    ) -> Iterator[Removable]:
        body = decoder_of(model, sites)

        def forward(call_next: Any, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.without_delimiter(body, args, kwargs)
            return call_next(*args, **kwargs)

        yield wrap(body, "forward", forward)
        yield from super().install_on(model, sites, run)
