"""The mechanism: presses installed by PyTorch's own hooks only."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from attention_patch.scope import serve
from hooks_impl.kvpress import KvpressCompatible, observed, queries
from press_core import AttentionSite, ScopeError, entry
from press_core.forward import Arguments, Forward, current, names_of
from press_core.model.graphs import forget_graphs
from press_core.observed import Query
from press_core.observing import AttentionPass
from press_core.on_layers import Removable
from press_core.press import RatioPress
from press_core.running.compiled import enter_eagerly, runs_eagerly
from press_core.running.copies import Hook
from press_core.scope import InstalledPress, ScopeState
from press_core.scoring import Collecting, TokenScorer

__all__ = ["BasePress", "Collector", "ScorerPress", "observed", "queries"]

QUERY = "query"
"""In `Forward.notes`: the module that ran last of those that compute queries, and its output."""


class BasePress(KvpressCompatible, InstalledPress):
    """A press installed by hooks: after an attention module has run, compress what it cached.

    Its `compress` takes the arguments of a PyTorch forward hook in kvpress's signature, so that a
    press written for kvpress runs unchanged:

    ```python
    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        return Eviction.keep(observed(kwargs), positions)  # or keys, values as kvpress has it
    ```

    `module` is the attention module, as an `AttentionView` with its `rotary_emb`; hidden states
    `(B, q, D)` are its input; keys and values `(B, H_kv, S, d)` are stored in the cache; attentions
    `(B, H, q, S)` are what the implementation returns, or None; `kwargs` are the keyword arguments
    of the module's forward. The exact queries, which a hook does not get, are `queries(kwargs)`.
    """

    mechanism = "hooks"

    # ---- around an attention module, around the decoder ------------------------------------------

    def install(self, scope: ScopeState) -> None:
        """Install what is called around the decoder's forward; closing `scope` removes it."""
        scope.warnings.append(partial(_bypassed, scope))
        decoder, enter = scope.decoder, Hook(partial(_enter, scope, names_of(scope.decoder)))
        scope.installed.append(decoder.register_forward_pre_hook(enter, with_kwargs=True))
        leave = Hook(partial(_leave, scope))
        scope.installed.append(decoder.register_forward_hook(leave, prepend=True, always_call=True))

    def install_on_layers(self, scope: ScopeState) -> Iterator[Removable]:
        """Install what acts on the attention modules; removed while no forward needs it."""
        forget_graphs(scope.sites)
        for site in scope.sites:
            if self.evicts.needs_attention:  # hooks cannot replace the attention function
                yield from serve(site)
            if scope.traits.reads_queries:
                collect = Hook(partial(_collect, scope))
                yield site.query_module.register_forward_hook(collect)
            # Prepended, so that of several scopes the inner one acts first.
            act = Hook(partial(_attention, scope, site))
            yield site.module.register_forward_hook(act, with_kwargs=True, prepend=True)
        for reader in (*scope.sites, *scope.bystanders):
            before = Hook(partial(_before, reader))
            yield reader.module.register_forward_pre_hook(before, with_kwargs=True)

    def after(self, module: nn.Module, act: Callable[[tuple[Any, ...], Any], Any]) -> Removable:
        return module.register_forward_hook(Hook(lambda _, *call: act(*call)))


class ScorerPress(RatioPress, TokenScorer, BasePress):
    """Keeps, per KV head, the `n = max(1, int(S * (1 - compression_ratio)))` best-scored tokens.

    Its `score` takes the arguments of `compress` and returns scores `(B, H_kv, S)`, higher is
    better. After another press has pruned, `hidden_states` are those of the kept keys; `score` is
    called once per head if heads keep different tokens. A user's class is assumed to score each
    token independently; declare `independent = False` if a score depends on other tokens.
    """


class Collector(Collecting, BasePress): ...


BasePress.collector = Collector


# ---- hooks ---------------------------------------------------------------------------------------


def _enter(
    scope: ScopeState, names: tuple[str, ...], _: nn.Module, args: tuple[Any, ...], *kwargs: Any
) -> Any:
    """Called before the decoder's forward."""
    if not kwargs:  # see `Hook`
        return None
    called = Arguments(args, kwargs[0], names)
    enter = partial(enter_eagerly, entry.enter) if runs_eagerly(scope, called) else entry.enter
    given = enter(scope, called)
    return None if given is called else (given.args, given.kwargs)


def _leave(scope: ScopeState, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Called after the decoder's forward; `output` is None if that has failed."""
    entry.leave(scope, output, failed=output is None)


def _before(site: AttentionSite, _: nn.Module, args: tuple[Any, ...], *kwargs: Any) -> Any:
    """Called before an attention module's forward."""
    forward = current.forward
    if forward is None or not forward.helped or not kwargs:
        return None
    given = Arguments(args, kwargs[0], site.signature.parameters)
    given = entry.before_attention(forward, site, given)
    return given.args, given.kwargs


def _collect(scope: ScopeState, module: nn.Module, *call: Any) -> None:
    """Called after the module that computes the query.

    The query is stored until the hook of the attention module reads it.
    """
    forward = current.forward
    if forward is not None and scope in forward.acting:
        forward.notes[QUERY] = module, call[-1]


def _attention(
    scope: ScopeState, site: AttentionSite, _: nn.Module, args: tuple[Any, ...], *rest: Any
) -> Any:
    """Called after an attention module's forward; prunes the layer that it has filled."""
    *kwargs, output = rest
    if not kwargs:  # see `Hook`
        return None
    forward, given = current.forward, Arguments(args, kwargs[0], site.signature.parameters)
    if forward is None:
        scope.note_outside(given)
    if forward is None or scope not in forward.acting:
        return None
    query = _query(forward, site) if scope.traits.reads_queries else None
    press: Any = scope.press
    passed = AttentionPass(scope, press, forward, site, given, output, query)
    return press.after_attention(passed)


def _query(forward: Forward, site: AttentionSite) -> Query:
    """The query `(B, H, q, d)` in what the module with the hook returned.

    Raises:
        ScopeError: if the module with the hook no longer computes the query.
    """
    computed_by, output = forward.notes.get(QUERY, (None, None))
    source = site.query_source
    assert source is not None
    if computed_by is None or getattr(site.module, source.child, None) is not computed_by:
        raise ScopeError(
            f"the module that computes the query of {site.name} was replaced after this scope had "
            "opened (as PEFT does with adapters), and its hook sees another query; open the scope "
            "after such changes, or use the press from patch_impl"
        )
    return Query(site.grouped(site.query_in(output)), source.is_rotated)


def _bypassed(scope: ScopeState) -> str | None:
    """A warning if some attention modules ran without their hooks being called."""
    if not scope.tally.missed:
        return None
    return (
        f", layers {sorted(scope.tally.missed)}: nothing was pruned there, as their attention ran "
        "without calling its hooks; if modules were replaced, open the scope after that; if they "
        "are called as `attention.forward(...)`, use the press of the same name from patch_impl"
    )
