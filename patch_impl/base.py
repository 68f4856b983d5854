"""The mechanism: presses installed by reversible patches of the attention forwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from attention_patch.headwise import check_interface, serve
from attention_patch.interception import intercept, with_override
from attention_patch.reversible import is_covered, wrap
from press_core.call import AttentionCall
from press_core.errors import ScopeError, UnsupportedModelError
from press_core.forward import Forward
from press_core.model.sites import AttentionSite
from press_core.scope import LOST, Press, Removable, Run
from press_core.steps import after, before


@dataclass
class BasePress(Press):
    """A press in patch terms: around the call of an attention module, compress what it cached.

    The methods take one `AttentionCall`: the arguments and results of the call in progress, the
    exact queries among them.
    """

    mechanism = "patches"

    def compress(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """The keys and values that stay, each `(B, H_kv, n, d)`; see `AttentionCall.keep`."""
        raise NotImplementedError

    def attention_forward(
        self, site: AttentionSite, run: Run, forward: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Called in place of an attention module's forward; prunes its layer after a prefill."""
        step = Forward(self, site, run, args, kwargs)
        before(step)
        query = None

        def see_query(function: Any, module: Any, states: Tensor, *rest: Any, **more: Any) -> Any:
            nonlocal query
            query = states
            return function(module, states, *rest, **more)

        seen = with_override(step.kwargs, see_query) if self.uses_queries else step.kwargs
        output = forward(*step.args, **seen)
        after(step, output, query, True, self.compress)
        return output

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        if self.needs_attention:
            check_interface(site)
        if self.uses_queries and not site.goes_through_interface:
            raise UnsupportedModelError(
                f"{type(site.module).__name__} ({site.name}) does not call a function of the "
                "attention registry with its keyword arguments, so that no patch sees its queries; "
                "use the press of the same name from hooks_impl"
            )

    def install(self, site: AttentionSite, run: Run) -> Iterator[Removable]:
        if is_covered(site.module, "forward"):
            raise ScopeError(
                f"somebody has wrapped the forward of {site.name} since another scope was opened "
                "there, so that this press could not act before that one; open this scope first, "
                "or close the other"
            )
        if self.needs_attention:
            yield from serve(site)
        if self.uses_queries:
            yield intercept(site.interface)
        # The latest layer of a patch is the innermost, so of several scopes the inner acts first.
        forward = partial(self._forward, len(run.patches), site, run)
        run.patches.append(wrap(site.module, "forward", forward))
        yield run.patches[-1]

    def _forward(self, index: int, site: AttentionSite, run: Run, *args: Any, **kwargs: Any) -> Any:
        if run.patches[index - 1].is_lost:  # each looks after its neighbour, the first at the last
            raise ScopeError(
                f"{type(self).__name__} prunes some layers and no longer others: {LOST}"
            )
        return self.attention_forward(site, run, *args, **kwargs)
