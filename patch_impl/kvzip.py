"""KVzip (arXiv 2505.23416), with patches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from attention_patch.reversible import wrap
from attention_patch.scope import serve
from patch_impl.base import BasePress
from patch_impl.collector import Collector
from press_core.methods.kvzip import KVzip
from press_core.models import body_of
from press_core.scope import Removable, Run
from press_core.sites import AttentionSite


@dataclass
class KVzipPress(KVzip, BasePress):
    collector = Collector

    def install_on(
        self, model: nn.Module, sites: list[AttentionSite], run: Run
    ) -> Iterator[Removable]:
        for site in sites:
            yield from serve(site)
        body = body_of(model, sites)

        def forward(call_next: Any, *args: Any, **kwargs: Any) -> Any:
            output = call_next(*args, **kwargs)
            self.after_body(model, sites, run, args, kwargs, output)
            return output

        yield wrap(body, "forward", forward)
