"""The mechanism: presses installed by PyTorch's own hooks, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attention_patch.scope import check_interface, serve
from press_core import engine, press
from press_core.call import AttentionCall
from press_core.drafts import with_context
from press_core.errors import ScopeError, UnsupportedInputError
from press_core.eviction import Eviction
from press_core.model.compiled import forget_graphs
from press_core.model.forward import AttentionForward, DecoderForward
from press_core.model.sites import AttentionSite, LeftAlone
from press_core.model.view import UnknownSite, view_of
from press_core.press import Needs, Phase, RatioScorer, Removable, TokenScorer
from press_core.scope import ScopeState

CALL = "attention_call"
"""Keyword argument under which the methods of a press find what the hooks observed."""


@dataclass
class BasePress(press.Press):
    """A press in hook terms: after an attention module has run, compress what it cached.

    The methods take what PyTorch hands a forward hook, as kvpress has them, so that a press written
    for kvpress runs unchanged. The exact queries, which a hook does not get, are in `kwargs`:
    see `queries`.
    """

    mechanism = "hooks"

    # ---- what a press may put in its own words ---------------------------------------------------

    def compress(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Eviction | tuple[Tensor, Tensor]:
        """What stays: an `Eviction`, or keys and values `(B, H_kv, n, d)` as kvpress has it.

        Args:
            module: the attention module, as an `AttentionView`: with its `rotary_emb`.
            hidden_states: `(B, q, D)`, its input.
            keys, values: `(B, H_kv, S, d)`, as cached.
            attentions: `(B, H, q, S)` where the attention implementation returns them, or None.
            kwargs: the keyword arguments of the module's forward.
        """
        return self.decide(_call_of(self, module, hidden_states, keys, values, attentions, kwargs))

    @property
    def in_own_words(self) -> bool:
        return type(self).compress is not BasePress.compress

    def evict(self, call: AttentionCall) -> Eviction:
        if type(self).compress is BasePress.compress:
            return self.decide(call)
        return Eviction.of(call, self.compress(*arguments(call)))

    def forward_hook(
        self, module: nn.Module, input: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Called after each forward of an attention module; prunes the layer that it has filled."""
        collected = kwargs.get(CALL)
        if not isinstance(collected, _Collected):
            raise UnsupportedInputError(
                f"{type(self).__name__}.forward_hook was called by a hook of its own; leave it to "
                "the scope to install it (call super().__call__, or do not override __call__)"
            )
        query = collected.query if collected.scope.reads_queries else None
        is_rotated = query is not None and collected.site.query_source.is_rotated
        begun = collected.begun.context_output, collected.begun.part
        forward = AttentionForward(input, kwargs, collected.site, *begun)
        return engine.after_attention(collected.scope, forward, output, query, is_rotated)

    # ---- around an attention module, around the decoder ------------------------------------------

    def install(self, scope: ScopeState) -> None:
        """Install the press on the model of `scope`; it comes off when that closes."""
        scope.warnings.append(partial(_passed_by, scope))
        forget_graphs(scope.sites)
        for site in scope.sites:
            hooks = _SiteHooks(self, scope, site)
            if self.evicts.needs_attention:  # a hook can choose what heads keep, not attend over it
                for patch in serve(site):
                    scope.install(patch)
            if not self.is_at_attention:
                continue
            if self.reads_queries:
                source = site.query_source.module
                scope.install(source.register_forward_hook(Hook(hooks.collect)))
            scope.install(
                site.module.register_forward_pre_hook(Hook(hooks.before, 3), with_kwargs=True)
            )
            # Prepended, so that of several scopes the inner one acts first.
            after = Hook(hooks.after)
            scope.install(site.module.register_forward_hook(after, with_kwargs=True, prepend=True))
        for other in scope.left_alone:
            module = other.site.module
            before = Hook(partial(_before_left_alone, other), 3)
            scope.install(module.register_forward_pre_hook(before, with_kwargs=True))
        if engine.acts_before_decoder(scope):
            self._install_around_decoder(scope)

    def _install_around_decoder(self, scope: ScopeState) -> None:
        decoder = scope.decoder
        assert decoder is not None

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            forward = engine.before_decoder(scope, DecoderForward(args, kwargs, decoder))
            return forward.args, forward.kwargs

        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            engine.after_decoder(scope, DecoderForward(args, kwargs, decoder), output)

        scope.install(decoder.register_forward_pre_hook(Hook(before, 3), with_kwargs=True))
        if Phase.DECODER in self.phases:
            hook = Hook(after, 4)
            scope.install(decoder.register_forward_hook(hook, with_kwargs=True, prepend=True))

    def after(self, module: nn.Module, act: Callable[[tuple[Any, ...], Any], Any]) -> Removable:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return act(args, output)

        return module.register_forward_hook(Hook(hook))

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        if self.evicts.needs_attention:
            check_interface(site)
        if Needs.QUERIES in self.needs:
            _ = site.query_source  # raises where a hook cannot tell what the query is


@dataclass
class Scorer(TokenScorer, BasePress):
    """Keeps, per KV head, as many of the best-scored tokens as its `budget` says."""

    def score(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Scores `(B, H_kv, S)`, the higher the better, from the arguments of `compress`.

        Where another press has pruned before, `hidden_states` are those of the keys. Heads that
        keep different tokens then have different ones: `score` is called for each head.
        """
        call = _call_of(self, module, hidden_states, keys, values, attentions, kwargs)
        return self.score_tokens(call)

    @property
    def in_own_words(self) -> bool:
        return super().in_own_words or type(self).score is not Scorer.score

    @property
    def independent(self) -> bool:  # type: ignore[override]
        # A score of one's own is taken to judge each token by itself, unless it says otherwise.
        return type(self).score is not Scorer.score

    def token_scores(self, call: AttentionCall) -> Tensor:
        if type(self).score is Scorer.score:  # the formula finds what it reads by itself
            return self.checked(call, self.score_tokens(call))
        scored = [self.score(*given) for given in _arguments_of_keys(call)]
        if len(scored) == 1:
            return self.checked(call, scored[0])
        of_heads = [self.checked(call, scores)[:, head] for head, scores in enumerate(scored)]
        return torch.stack(of_heads, dim=1)


@dataclass
class ScorerPress(RatioScorer, Scorer):
    """Keeps, per KV head, the `n = max(1, int(S * (1 - compression_ratio)))` best-scored tokens."""


@dataclass
class Collector(press.Collector, BasePress):
    pass


BasePress.collector = Collector


# ---- what the methods of a press are given -------------------------------------------------------


def queries(kwargs: dict[str, Any], last: int | None = None) -> Tensor:
    """The exact queries after RoPE of the (`last`) tokens, `(B, H, last or S, d)`.

    Args:
        kwargs: the last argument of `score` or `compress`, of a press with `needs = Needs.QUERIES`.
    """
    return observed(kwargs).queries(last)


def observed(kwargs: dict[str, Any]) -> AttentionCall:
    """What the hooks observed of the forward that a method of a press is called for.

    Args:
        kwargs: the last argument of `score` or `compress`.

    Raises:
        UnsupportedInputError: if it does not come from an open scope.
    """
    call = kwargs.get(CALL)
    if not isinstance(call, AttentionCall):
        raise UnsupportedInputError(
            "no hook has observed this forward; the exact queries are known only while "
            "`with press(model): ...` is open"
        )
    return call


def arguments(call: AttentionCall) -> tuple[Any, ...]:
    """What the methods of a press take, for `call`."""
    states = call.hidden_states, call.keys, call.values, call.attentions
    return view_of(call.site), *states, {**call.kwargs, CALL: call}


def _arguments_of_keys(call: AttentionCall) -> Iterator[tuple[Any, ...]]:
    """`arguments`, with the hidden states of the keys; once per KV head, where these differ."""
    module, hidden_states, *others = arguments(call)
    tokens = call.tokens
    if tokens is None or bool((tokens < 0).any()):  # those of earlier tokens are not known
        yield module, hidden_states, *others
        return
    alike = torch.equal(tokens, tokens[:, :1].expand_as(tokens))
    for of_head in tokens[:, :1].unbind(1) if alike else tokens.unbind(1):
        index = of_head.unsqueeze(-1).expand(-1, -1, hidden_states.shape[-1])
        yield module, hidden_states.gather(1, index), *others


def _call_of(
    press: BasePress,
    module: nn.Module,
    hidden_states: Tensor,
    keys: Tensor,
    values: Tensor,
    attentions: Tensor | None,
    kwargs: dict[str, Any],
) -> AttentionCall:
    """What the hooks observed; or, outside of any scope, what a press was given by hand.

    Raises:
        UnsupportedInputError: if the press reads what hooks alone observe.
    """
    if press.needs is not Needs.NOTHING or isinstance(kwargs.get(CALL), AttentionCall):
        return observed(kwargs)
    site: Any = UnknownSite(module)
    positions = torch.arange(keys.shape[2], device=keys.device)[None]
    states = hidden_states, keys, values, attentions
    return AttentionCall(site, *states, position_ids=positions, kwargs=kwargs)


# ---- hooks ---------------------------------------------------------------------------------------


class _Collected(NamedTuple):
    """What hooks know of a forward in progress.

    Attributes:
        projected: input and output of the module that makes the query; None: it has not run.
        begun: the forward as `engine.before_attention` returned it.
    """

    site: AttentionSite
    scope: ScopeState
    projected: tuple[Tensor, Tensor] | None
    begun: AttentionForward

    def query(self) -> Tensor:
        """The query before RoPE, `(B, H, q, d)`.

        Raises:
            ScopeError: if another module makes it than the one with the hook.
        """
        source = self.site.query_source
        if self.projected is None or not source.is_in_place(self.site.module):
            raise ScopeError(
                f"the module that computes the query of {self.site.name} was replaced after this "
                "scope had opened (as PEFT does with adapters), and its hook sees another query; "
                "open the scope after such changes, or use the press from patch_impl"
            )
        return source.to_heads(*self.projected)


class _SiteHooks:
    """The hooks of one scope on one attention module.

    The query has to wait from the projection's hook to the attention's: kept per thread, as several
    may run the model at once, and released when the attention hook begins.
    """

    def __init__(self, press: BasePress, scope: ScopeState, site: AttentionSite) -> None:
        self.press, self.scope, self.site = press, scope, site
        self.waiting = local()

    def collect(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if self.press.acts_here:
            self.waiting.projected = args[0], output

    def before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.press.acts_here:
            return None
        self.waiting.__dict__.clear()  # of a forward that raised
        forward = engine.before_attention(self.scope, AttentionForward(args, kwargs, self.site))
        if forward is None:
            return None
        self.waiting.begun = forward
        return forward.args, forward.kwargs

    def after(self, _: nn.Module, args: tuple[Any, ...], *kwargs_and_output: Any) -> Any:
        waiting = self.waiting.__dict__
        projected, begun = waiting.pop("projected", None), waiting.pop("begun", None)
        if not self.press.acts_here or begun is None:
            return None
        *given, output = kwargs_and_output
        if not given or not self.scope.is_open:  # see `Hook`
            return with_context(begun.context_output, output)
        (kwargs,) = given
        collected = _Collected(self.site, self.scope, projected, begun)
        seen = {**kwargs, CALL: collected}
        return self.press.forward_hook(view_of(self.site), args, seen, output)


def _before_left_alone(
    other: LeftAlone, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    forward = engine.before_left_alone(other, AttentionForward(args, kwargs, other.site))
    return forward.args, forward.kwargs


def _passed_by(scope: ScopeState) -> str | None:
    """A warning about attention modules that the hooks never saw run, though later ones did."""
    passed_by = sorted(set(range(max(scope.seen, default=0))) - scope.seen)
    if not passed_by:
        return None
    return (
        f", layers {passed_by}: nothing was pruned there, as their attention ran without this "
        "press being told; a module that calls `attention.forward(...)` in place of "
        "`attention(...)` goes past its hooks: use the press of the same name from patch_impl"
    )


class Hook:
    """A hook that does not come along when its model is copied or pickled.

    PyTorch's hook dictionaries travel with a module; a copy made inside a scope would be pruned for
    ever. The copy gets a hook that does nothing instead.

    PyTorch notes apart that a hook takes keyword arguments: while another thread puts it on or
    takes it off, a forward may call it without. Its scope does not act then, nor does it.

    Args:
        n_arguments: with how many it is called otherwise; 0: it is called whatever it is given.
    """

    def __init__(self, function: Any, n_arguments: int = 0) -> None:
        self.function, self.n_arguments = function, n_arguments

    def __call__(self, *args: Any) -> Any:
        return None if len(args) < self.n_arguments else self.function(*args)

    def __reduce__(self) -> Any:
        return Hook, (do_nothing,)


def do_nothing(*_: Any) -> None:
    """What is left of a hook in a copy of its model."""
