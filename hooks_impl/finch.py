"""FINCH (TACL 2024), with hooks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from hooks_impl.base import BasePress, Hook, observed
from press_core.methods.finch import Finch
from press_core.model.decoder import decoder_of
from press_core.model.sites import AttentionSite
from press_core.scope import Removable, Run


@dataclass
class FinchPress(Finch, BasePress):
    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        return self.keep(observed(kwargs))

    def install_on(
        self, model: nn.Module, sites: list[AttentionSite], run: Run
    ) -> Iterator[Removable]:
        def before(body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self.without_delimiter(body, args, kwargs)

        yield decoder_of(model, sites).register_forward_pre_hook(Hook(before), with_kwargs=True)
        yield from super().install_on(model, sites, run)
