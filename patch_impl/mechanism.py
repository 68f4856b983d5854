"""The mechanism: presses installed by reversible patches of the attention forwards."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from attention_patch.interception import intercept, with_override
from attention_patch.reversible import is_covered, wrap
from attention_patch.scope import around_decoder, helping, serve
from press_core import AttentionSite, PressError, ScopeError, engine, entry
from press_core.forward import Arguments, current, names_of
from press_core.observed import Query
from press_core.observing import AttentionPass
from press_core.on_layers import Removable
from press_core.press import RatioPress
from press_core.scope import InstalledPress, ScopeState
from press_core.scoring import Collecting, TokenScorer
from press_core.traits import Needs, also_needs


class BasePress(InstalledPress):
    """A press installed by patches: after an attention module has run, compress what it cached.

    Its `compress` takes one `AttentionCall`, with the arguments and results of the module's forward
    and the exact queries, and returns an `Eviction`, or keys and values `(B, H_kv, n, d)`.
    """

    mechanism = "patches"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("compress", "score"):
            if name not in vars(cls):
                continue
            method = vars(cls)[name]
            bound = method.__get__(object(), cls) if hasattr(method, "__get__") else method
            if len(inspect.signature(bound).parameters) != 1:
                raise PressError(
                    f"{cls.__name__}.{name} has the wrong signature for a press of patch_impl; use "
                    f"def {name}(self, call), with one AttentionCall: read call.keys, call.values, "
                    "call.hidden_states and call.queries()"
                )
            also_needs(cls, Needs.HIDDEN_STATES)

    # ---- around an attention module, around the decoder ------------------------------------------

    def install(self, scope: ScopeState) -> None:
        """Install what is called around the decoder's forward; closing `scope` removes it."""
        self._check_uncovered(scope.decoder, "the decoder")
        scope.warnings.append(partial(_lost, scope))
        around = partial(around_decoder, scope, names_of(scope.decoder))
        scope.installed.append(wrap(scope.decoder, "forward", around))

    def install_on_layers(self, scope: ScopeState) -> Iterator[Removable]:
        """Install what acts on the attention modules; removed while no forward needs it."""
        for site in scope.sites:
            if self.evicts.needs_attention:
                yield from serve(site)
            if scope.traits.reads_queries:
                yield intercept(site.signature.interface)
            self._check_uncovered(site.module, site.name)
            # The last wrapper is the innermost one, so of several scopes the inner one acts first.
            yield wrap(site.module, "forward", partial(_attention, scope, site))
        for other in scope.bystanders:
            yield helping(other)

    def _check_uncovered(self, module: nn.Module, name: str) -> None:
        if not isinstance(self, Collecting) and is_covered(module, "forward"):
            raise ScopeError(
                f"another library wrapped the forward of {name} after an outer scope was opened "
                "there, so that this press could not act before that one; open this scope first, "
                "or close the other"
            )

    def after(self, module: nn.Module, act: Callable[[tuple[Any, ...], Any], Any]) -> Removable:
        def around(call_next: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            output = call_next(*args, **kwargs)
            changed = act(args, output)
            return output if changed is None else changed

        return wrap(module, "forward", around)


class ScorerPress(RatioPress, TokenScorer, BasePress):
    """Keeps, per KV head, the `n = max(1, int(S * (1 - compression_ratio)))` best-scored tokens.

    Its `score` takes one `AttentionCall` and returns scores `(B, H_kv, S)`, higher is better. A
    user's class is assumed to score each token independently; declare `independent = False` if a
    score depends on other tokens.
    """


class Collector(Collecting, BasePress): ...


BasePress.collector = Collector


# ---- patches -------------------------------------------------------------------------------------


def _attention(
    scope: ScopeState,
    site: AttentionSite,
    call_next: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Called instead of an attention module's forward; prunes the layer that it has filled."""
    forward, given = current.forward, Arguments(args, kwargs, site.signature.parameters)
    if forward is None:
        scope.note_outside(given)
    if forward is None or not (forward.helped or scope in forward.acting):
        return call_next(*args, **kwargs)
    given = entry.before_attention(forward, site, given)
    if scope not in forward.acting:
        return call_next(*given.args, **given.kwargs)
    states: list[Tensor] = []

    def see_query(function: Any, module: Any, query: Tensor, *rest: Any, **more: Any) -> Any:
        states.append(query)
        return function(module, query, *rest, **more)

    seen = with_override(given.kwargs, see_query) if scope.traits.reads_queries else given.kwargs
    output = call_next(*given.args, **seen)
    query = Query(site.grouped(states[0])) if states else None
    passed = AttentionPass(scope, scope.press, forward, site, given, output, query)
    engine.after_attention(passed)
    return output


def _lost(scope: ScopeState) -> str | None:
    """A warning if another library replaced the patched forwards."""
    patches: list[Any] = [*scope.installed, *scope.on_layers.by_scope.get(scope, [])]
    if not scope.tally.missed and not any(patch.is_lost for patch in patches):
        return None
    return (
        ": another library replaced or put back what this scope had patched (as accelerate's "
        "remove_hook_from_module does with a forward that it had replaced before), and nothing was "
        "pruned there since; undo such changes before the scope opens, or make them inside of it"
    )
