"""The mechanism: presses installed by PyTorch's own hooks, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from threading import local
from typing import Any, NamedTuple

from torch import Tensor, nn

from attention_patch.headwise import check_interface, serve
from press_core.call import AttentionCall
from press_core.errors import ScopeError, UnsupportedInputError
from press_core.forward import Forward
from press_core.model.sites import AttentionSite
from press_core.scope import Press, Removable, Run
from press_core.steps import after, before

CALL = "attention_call"
"""Keyword argument under which the methods of a press find what the hooks collected."""


@dataclass
class BasePress(Press):
    """A press in hook terms: after an attention module has run, compress what it cached.

    The methods take what PyTorch hands a forward hook, as kvpress has them, so that a press written
    for kvpress runs unchanged. The exact queries, which a hook does not get, are in `kwargs`:
    see `queries`.
    """

    mechanism = "hooks"

    def compress(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """The keys and values that stay.

        Args:
            module: the attention module.
            hidden_states: `(B, q, D)`, its input.
            keys, values: `(B, H_kv, S, d)`, as cached.
            attentions: `(B, H, q, S)` where the attention implementation returns them, or None.
            kwargs: the keyword arguments of the module's forward.

        Returns:
            Keys and values, each `(B, H_kv, n, d)`.
        """
        raise NotImplementedError

    def forward_hook(
        self, module: nn.Module, input: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Called after each forward of an attention module; prunes its layer after a prefill."""
        collected: _Collected = kwargs[CALL]

        def compress(call: AttentionCall) -> tuple[Tensor, Tensor]:
            return self.compress(*arguments(call, kwargs))

        forward = Forward(self, collected.site, collected.run, input, kwargs)
        query = collected.query() if self.uses_queries else None
        after(forward, output, query, False, compress)
        return output

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        if self.needs_attention:
            check_interface(site)
        if self.uses_queries:
            _ = site.query_source  # raises where a hook cannot tell what the query is

    def install(self, site: AttentionSite, run: Run) -> Iterator[Removable]:
        hook = _SiteHook(self, site, run)
        if self.needs_attention:  # a hook can choose what heads keep, but not attend over it
            yield from serve(site)
        if self.uses_queries:
            yield site.query_source.module.register_forward_hook(Hook(hook.collect))
        yield site.module.register_forward_pre_hook(Hook(hook.before), with_kwargs=True)
        # Prepended, so that of several scopes the inner one acts first.
        yield site.module.register_forward_hook(Hook(hook.after), with_kwargs=True, prepend=True)


def queries(kwargs: dict[str, Any], last: int | None = None) -> Tensor:
    """The exact queries after RoPE of the (`last`) tokens, `(B, H, last or S, d)`.

    Args:
        kwargs: the last argument of `score` or `compress`, of a press with `uses_queries = True`.
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


def arguments(call: AttentionCall, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What the methods of a press take, for `call`: to hand a part of a call to another press.

    Args:
        kwargs: the last argument of the method that hands it on.
    """
    states = call.hidden_states, call.keys, call.values, call.attentions
    return call.site.module, *states, {**kwargs, CALL: call}


class _Collected(NamedTuple):
    """What hooks know of a call in progress.

    Attributes:
        projected: input and output of the module that makes the query; None: it has not run.
    """

    site: AttentionSite
    run: Run
    projected: tuple[Tensor, Tensor] | None

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


class _SiteHook:
    """The hooks of one scope on one attention module.

    The query has to wait from the projection's hook to the attention's: kept per thread, as several
    may run the model at once, and released when the attention hook begins.
    """

    def __init__(self, press: BasePress, site: AttentionSite, run: Run) -> None:
        self.press, self.site, self.run = press, site, run
        self.waiting = local()

    def collect(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self.waiting.projected = args[0], output

    def before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = Forward(self.press, self.site, self.run, args, kwargs)
        before(forward)
        return forward.args, forward.kwargs

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        collected = _Collected(self.site, self.run, self.waiting.__dict__.pop("projected", None))
        return self.press.forward_hook(module, args, {**kwargs, CALL: collected}, output)


class Hook:
    """A hook that does not come along when its model is copied or pickled.

    PyTorch's hook dictionaries travel with a module; a copy made inside a scope would be pruned for
    ever. The copy gets a hook that does nothing instead.
    """

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __reduce__(self) -> Any:
        return Hook, (do_nothing,)


def do_nothing(*_: Any) -> None:
    """What is left of a hook in a copy of its model."""
