"""KVzip (arXiv 2505.23416), with patches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from attention_patch.headwise import serve
from attention_patch.reversible import wrap
from patch_impl.base import BasePress
from patch_impl.collector import Collector
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

        def forward(call_next: Any, *args: Any, **kwargs: Any) -> Any:
            output = call_next(*args, **kwargs)
            self.after_body(model, sites, run, args, kwargs, output)
            return output

        yield wrap(body, "forward", forward)
