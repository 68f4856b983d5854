"""KVzip (arXiv 2505.23416), with hooks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from attention_patch.headwise import serve
from hooks_impl.base import BasePress, Hook
from hooks_impl.collector import Collector
from press_core.methods.kvzip import KVzip
from press_core.model.decoder import decoder_of
from press_core.model.sites import AttentionSite
from press_core.scope import Removable, Run


@dataclass
class KVzipPress(KVzip, BasePress):
    collector = Collector

    def install_on(
        self, model: nn.Module, sites: list[AttentionSite], run: Run
    ) -> Iterator[Removable]:
        for site in sites:
            yield from serve(site)
        body = decoder_of(model, sites)

        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.after_body(model, sites, run, args, kwargs, output)

        yield body.register_forward_hook(Hook(after), with_kwargs=True)
