"""The mechanism: presses installed by reversible patches of the attention forwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from attention_patch.interception import intercept, with_override
from attention_patch.reversible import Patch, is_covered, wrap
from attention_patch.scope import check_interface, serve
from press_core import engine, press
from press_core.call import AttentionCall
from press_core.errors import ScopeError, UnsupportedModelError
from press_core.eviction import Eviction
from press_core.model.forward import AttentionForward, DecoderForward
from press_core.model.sites import AttentionSite, LeftAlone
from press_core.press import Needs, RatioScorer, Removable, TokenScorer
from press_core.scope import ScopeState


@dataclass
class BasePress(press.Press):
    """A press in patch terms: around the call of an attention module, compress what it cached.

    The methods take one `AttentionCall`: the arguments and results of the call in progress, the
    exact queries among them.
    """

    mechanism = "patches"

    # ---- what a press may put in its own words ---------------------------------------------------

    def compress(self, call: AttentionCall) -> Eviction | tuple[Tensor, Tensor]:
        """What stays: an `Eviction`, or keys and values `(B, H_kv, n, d)`."""
        return self.decide(call)

    @property
    def in_own_words(self) -> bool:
        return type(self).compress is not BasePress.compress

    def evict(self, call: AttentionCall) -> Eviction:
        return Eviction.of(call, self.compress(call))

    def attention_forward(
        self,
        scope: ScopeState,
        site: AttentionSite,
        call_next: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Called in place of an attention module's forward; prunes the layer that it has filled."""
        forward = engine.before_attention(scope, AttentionForward(args, kwargs, site))
        if forward is None:
            return call_next(*args, **kwargs)
        if forward.context_output is not None:
            return engine.run_drafts(scope, forward)
        queries: list[Tensor] = []
        seen = dict(forward.kwargs)

        def see_query(function: Any, module: Any, states: Tensor, *rest: Any, **more: Any) -> Any:
            queries.append(states)
            return function(module, states, *rest, **more)

        if scope.reads_queries:
            seen = with_override(seen, see_query)
        output = call_next(*forward.args, **seen)
        query = queries.pop if queries else None
        return engine.after_attention(scope, forward, output, query, query_is_rotated=True)

    # ---- around an attention module, around the decoder ------------------------------------------

    def install(self, scope: ScopeState) -> None:
        """Install the press on the model of `scope`; it comes off when that closes."""
        patches = _Patches(self, scope)
        for site in scope.sites:
            if self.evicts.needs_attention:
                for patch in serve(site):
                    scope.install(patch)
            if not self.is_at_attention:
                continue
            if self.reads_queries:
                scope.install(intercept(site.interface))
            patches.add(site)
        for other in scope.left_alone:
            scope.install(wrap(other.site.module, "forward", partial(_left_alone, other)))
        if engine.acts_before_decoder(scope):
            self._install_around_decoder(scope)

    def _install_around_decoder(self, scope: ScopeState) -> None:
        decoder = scope.decoder
        assert decoder is not None

        def around(call_next: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            forward = engine.before_decoder(scope, DecoderForward(args, kwargs, decoder))
            output = call_next(*forward.args, **forward.kwargs)
            engine.after_decoder(scope, forward, output)
            return output

        scope.install(wrap(decoder, "forward", around))

    def after(self, module: nn.Module, act: Callable[[tuple[Any, ...], Any], Any]) -> Removable:
        def around(call_next: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            output = call_next(*args, **kwargs)
            changed = act(args, output)
            return output if changed is None else changed

        return wrap(module, "forward", around)

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        if self.evicts.needs_attention:
            check_interface(site)
        if Needs.QUERIES in self.needs and not site.goes_through_interface:
            raise UnsupportedModelError(
                f"{type(site.module).__name__} ({site.name}) does not call a function of the "
                "attention registry with its keyword arguments, so that no patch sees its queries; "
                "use the press of the same name from hooks_impl"
            )


@dataclass
class Scorer(TokenScorer, BasePress):
    """Keeps, per KV head, as many of the best-scored tokens as its `budget` says."""

    def score(self, call: AttentionCall) -> Tensor:
        """Scores `(B, H_kv, S)`, the higher the better."""
        return self.score_tokens(call)

    @property
    def in_own_words(self) -> bool:
        return super().in_own_words or type(self).score is not Scorer.score

    @property
    def independent(self) -> bool:  # type: ignore[override]
        # A score of one's own is taken to judge each token by itself, unless it says otherwise.
        return type(self).score is not Scorer.score

    def token_scores(self, call: AttentionCall) -> Tensor:
        return self.checked(call, self.score(call))


@dataclass
class ScorerPress(RatioScorer, Scorer):
    """Keeps, per KV head, the `n = max(1, int(S * (1 - compression_ratio)))` best-scored tokens."""


@dataclass
class Collector(press.Collector, BasePress):
    pass


BasePress.collector = Collector


# ---- patches -------------------------------------------------------------------------------------


def _left_alone(other: LeftAlone, call_next: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    forward = engine.before_left_alone(other, AttentionForward(args, kwargs, other.site))
    return call_next(*forward.args, **forward.kwargs)


LOST = (
    "somebody has put back what this scope had patched (as accelerate's remove_hook_from_module "
    "does with a forward that it had replaced before), and nothing was pruned there since; take "
    "such changes off before the scope opens, or make them inside of it"
)
"""What is said of a scope some of whose patches are gone."""


class _Patches:
    """The patches of one scope on the attention forwards; each looks after its neighbour."""

    def __init__(self, press: BasePress, scope: ScopeState) -> None:
        self.press, self.scope = press, scope
        self.patches: list[Patch] = []
        scope.warnings.append(self.warning)

    def add(self, site: AttentionSite) -> None:
        if is_covered(site.module, "forward"):
            raise ScopeError(
                f"somebody has wrapped the forward of {site.name} since another scope was opened "
                "there, so that this press could not act before that one; open this scope first, "
                "or close the other"
            )
        # The latest layer of a patch is the innermost, so of several scopes the inner acts first.
        forward = partial(self._forward, len(self.patches), site)
        self.patches.append(wrap(site.module, "forward", forward))
        self.scope.install(self.patches[-1])

    def _forward(
        self, index: int, site: AttentionSite, call_next: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not self.press.acts_here:
            return call_next(*args, **kwargs)
        is_lost = self.patches[index - 1].is_lost  # the first looks at the last
        if is_lost and self.scope.is_open:  # asked second: closing takes patches off, too
            raise ScopeError(
                f"{type(self.press).__name__} prunes some layers and no longer others: {LOST}"
            )
        return self.press.attention_forward(self.scope, site, call_next, *args, **kwargs)

    def warning(self) -> str | None:
        return f": {LOST}" if any(patch.is_lost for patch in self.patches) else None
