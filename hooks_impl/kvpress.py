"""Compatibility with kvpress: presses written for it run unchanged, with its method signatures."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hooks_impl.kvpress_views import AttentionView, UnknownSite, view_of
from press_core import AttentionCall, AttentionSite, Eviction, Press, PressError, engine
from press_core.budget import Tokens, n_kept
from press_core.errors import UnsupportedInputError
from press_core.fields import require
from press_core.formulas import Composed, PerLayerCompression, PrefillDecoding
from press_core.forward import own_cache
from press_core.observed import Positions
from press_core.observing import AttentionPass, context_call
from press_core.select import is_dense
from press_core.traits import Needs, Phase, also_needs

CALL = "attention_call"
"""Keyword argument that passes the `AttentionCall` to the methods of a press."""

FORWARD = "attention_forward"
"""Keyword argument that passes the `AttentionPass` to a `forward_hook`."""

SUPPORTED_MODELS = (PreTrainedModel,)
"""For programs that check `isinstance(model, SUPPORTED_MODELS)`, as with kvpress: any model."""


def is_prefilling(cache_position: Tensor, q_len: int) -> bool:
    """Whether a forward of `q_len` tokens at `cache_position` `(q_len,)` found an empty cache."""
    return bool(cache_position[-1] < q_len)


_NEVER_CALLED = {
    "merge": ("MergingPress", "override compress, or `merged` of press_core.presses.wrappers"),
    "get_layer_budget": ("PyramidKVPress", "override budget(call)"),
    "compute_window_attention": ("SnapKVPress", "override score"),
    "get_query_statistics": ("ExpectedAttentionPress", "override score"),
    "apply_avg_rope": ("ExpectedAttentionPress", "override score"),
    "vwl1norm": ("CriticalKVPress", "override score"),
    "compute_leverage_scores": ("LeverageScorePress", "override score"),
    "non_causal_chunked_attn": ("NonCausalAttnPress", "override score"),
    "compute_window_queries": ("ThinKPress", "override channel_scores(call)"),
    "is_lazy": ("SimLayerKVPress", "override laziness(call)"),
    "compress_post": ("KVzipPress", "override choose(scores)"),
    "load_attention_pattern": ("DuoAttentionPress", "give head_scores= to the press"),
    "load_q_filters": ("QFilterPress", "give filters= to the press"),
    "score": ("FinchPress", "override scores(call, n_question)"),
}
"""Methods of kvpress's presses that are not methods here: the press, and what to do instead."""


class KvpressCompatible(Press):
    """A press whose `compress` and `score` may have kvpress's signature, with six arguments.

    Both can be called with these or with an `AttentionCall`, whichever signature they have, so that
    wrappers in one style work with presses in the other.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, (press, instead) in _NEVER_CALLED.items():
            if name in vars(cls) and any(base.__name__ == press for base in cls.__mro__[1:]):
                raise PressError(f"{cls.__name__}.{name} would never be called here: {instead}")
        has_own = cls.forward_hook is not KvpressCompatible.forward_hook
        if has_own and "is_awaited" not in vars(cls):
            cls.is_awaited = lambda *_: True  # type: ignore[method-assign]  # as PyTorch calls it
        for name, translate in (("compress", _compressed), ("score", _scored)):
            method = inspect.getattr_static(cls, name, None)
            if name in vars(cls):  # it may read any of its arguments
                also_needs(cls, Needs.HIDDEN_STATES)
            if method is None or hasattr(method, "takes_both"):
                continue
            setattr(cls, name, _taking_both(name, method, translate, cls))

    def validate(self) -> None:
        super().validate()
        if not isinstance(self, (Composed, PerLayerCompression, PrefillDecoding)):
            return
        for name, part in self._named_parts():  # their hooks are those that kvpress calls
            kind: Any = type(part)
            has_none = kind.forward_hook is KvpressCompatible.forward_hook
            allowed = (
                "without a forward_hook of its own, which would never be called here: in "
                f"{kind.__name__}, override compress or score (or budget) instead"
            )
            require(self, name, has_none, allowed)

    @property
    def observed_phases(self) -> Phase:
        if type(self).forward_hook is KvpressCompatible.forward_hook:
            return self.phases
        return self.phases | Phase.PREFILL | Phase.DECODING

    def forward_hook(
        self, module: nn.Module, input: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Called after each forward of an attention module; prunes the layer that it has filled.

        A press may call the `forward_hook` of other presses, which then prune in that order.
        """
        if FORWARD not in kwargs:
            raise UnsupportedInputError(
                f"{type(self).__name__}.forward_hook was called by the press's own hook; let "
                "the scope install it (call super().__call__, or do not override __call__)"
            )
        passed = kwargs[FORWARD]
        given = passed.given._replace(kwargs={n: x for n, x in kwargs.items() if n != FORWARD})
        engine.after_attention(replace(passed, press=self, given=given, output=output))
        return output

    def after_attention(self, passed: AttentionPass) -> Any:
        """Called by the hook after an attention forward that the scope acts in."""
        if type(self).forward_hook is KvpressCompatible.forward_hook:
            return engine.after_attention(passed)
        passed.forward.acting[passed.scope].depths.add(passed.site.place.depth)
        module, kwargs = view_of(passed.site), passed.given.kwargs
        kwargs = _named_as_before(kwargs, passed.site, passed.cache, passed.hidden_states)
        kwargs[FORWARD] = passed
        output = self.forward_hook(module, passed.given.args, kwargs, passed.output)
        if passed.cache is not None:
            engine.keep_whole(passed)
        if isinstance(module, AttentionView) and module.masked_key_indices is not None:
            raise UnsupportedInputError(
                f"{type(self).__name__}.forward_hook sets masked_key_indices, which is read after "
                "compress only; set it there, or return Eviction.keep_per_head(call, mask)"
            )
        return output


# ---- the two signatures of a method --------------------------------------------------------------


def _taking_both(
    name: str, method: Any, translate: Callable[..., Any], cls: type
) -> Callable[..., Any]:
    """A method that can be called with an `AttentionCall` or with kvpress's six arguments.

    Args:
        method: as the class holds it: a function, or a static, class or partial method.

    Raises:
        PressError: if it takes neither.
    """
    signature = inspect.signature(_bound(method, object(), cls))
    parameters = signature.parameters.values()
    takes_call = len(parameters) == 1 and all(p.kind is not p.VAR_POSITIONAL for p in parameters)
    try:
        signature.bind(*range(1 if takes_call else 6))
    except TypeError as error:
        raise PressError(
            f"{cls.__name__}.{name} has the wrong signature for a press of hooks_impl ({error}); "
            f"use def {name}(self, module, hidden_states, keys, values, attentions, kwargs), or "
            f"def {name}(self, call) with one AttentionCall"
        ) from error

    @wraps(_bound(method, None, cls))
    def both(press: Any, *args: Any, **kwargs: Any) -> Any:
        call = args[0] if len(args) == 1 and isinstance(args[0], AttentionCall) else None
        bound = _bound(method, press, type(press))
        if takes_call:
            return bound(call_of(press, *args, **kwargs) if call is None else call)
        if call is None:
            return bound(*args, **kwargs)
        own = _with_ratio_of(press, call)
        returned = translate(_bound(method, own, type(press)), call)
        stored = vars(own).keys() - {press.ratio_field, "prepared_as"}
        vars(press).update({name: vars(own)[name] for name in stored})
        return returned

    both.takes_both = True  # type: ignore[attr-defined]
    return both


def _with_ratio_of(press: Any, call: AttentionCall) -> Any:
    """The press, or a copy with the ratio that its budget for `call` amounts to.

    Its methods may read their ratio, which kvpress's wrappers set.
    """
    amount, n = vars(press).get(press.ratio_field), call.budget
    if isinstance(amount, Tokens):
        n = press.budget(call)
    elif amount is None or n is None or n == n_kept(call.length, amount):
        return press
    return press.with_ratio(max(0.0, 1 - (n + 0.5) / call.length))


def _bound(method: Any, press: Any, cls: type) -> Any:
    """What `press.method` is in Python, for a `press` of the class `cls`; None: `cls.method`."""
    return method.__get__(press, cls) if hasattr(method, "__get__") else method


def _compressed(method: Callable[..., Any], call: AttentionCall) -> Any:
    module, *others = arguments(call)
    kept = method(module, *others)
    if isinstance(kept, Eviction) and kept.call.length < call.length:
        kept = tuple(kept)  # of some of the keys, and it is not known which
    hidden = module.masked_key_indices if isinstance(module, AttentionView) else None
    if hidden is None:
        return kept
    eviction = Eviction.of(call, kept)
    mask = torch.ones_like(eviction.known_kept, dtype=torch.bool)
    mask[hidden] = False
    return replace(eviction, head_mask=mask)


def _scored(method: Callable[..., Any], call: AttentionCall) -> Any:
    """Call `score` with the hidden states of the keys; once per KV head, if kept tokens differ."""
    tokens = call.at.tokens
    if tokens is None or bool((tokens < 0).any()):  # some keys' hidden states are not known
        return method(*arguments(call))

    def of_keys(tokens: Tensor) -> Any:
        def chosen(x: Tensor, dims: str) -> Tensor:
            index = tokens.view(*tokens.shape, *[1] * (x.dim() - 2))
            return x.take_along_dim(index, dim=1) if dims == "Bq" else x

        return method(*arguments(call, call.each(chosen)))

    if torch.equal(tokens, tokens[:, :1].expand_as(tokens)):
        return of_keys(tokens[:, 0])
    scores = [of_keys(of_head) for of_head in tokens.unbind(1)]
    wrong = [x for x in scores if not is_dense(x, call.keys) or x.shape != call.keys.shape[:3]]
    return wrong[0] if wrong else torch.stack([x[:, i] for i, x in enumerate(scores)], 1)


def arguments(call: AttentionCall, seen: AttentionCall | None = None) -> tuple[Any, ...]:
    """The arguments of kvpress's methods for `call`.

    Args:
        seen: `call`, with hidden states and positions of some of its tokens; None: of all.
    """
    seen = seen or call
    states = seen.hidden_states, call.keys, call.values, call.attentions
    names = call.kwargs.keys() & {"hidden_states", "position_embeddings", "position_ids"}
    given = {name: x for name in names if (x := getattr(seen, name)) is not None}
    kwargs = _named_as_before(call.kwargs, call.site)
    return view_of(call.site), *states, {**kwargs, **given, CALL: call}


def _named_as_before(
    kwargs: Mapping[str, Any], site: AttentionSite, cache: Any = None, states: Any = None
) -> dict[str, Any]:
    """A module's keyword arguments, and those that releases up to transformers 5.23 passed."""
    before = {"past_key_values": kwargs["cache"]} if "cache" in kwargs else {}
    given = {**before, **kwargs}
    cache = own_cache(given.get("past_key_values")) if cache is None else cache
    states = given.get("hidden_states") if states is None else states
    if cache is not None and states is not None and "cache_position" not in given:
        end = int(cache.get_seq_length(site.layer_idx))
        given["cache_position"] = torch.arange(end - states.shape[1], end, device=states.device)
    return given


def call_of(
    press: Press,
    module: nn.Module,
    hidden_states: Tensor,
    keys: Tensor,
    values: Tensor,
    attentions: Tensor | None = None,
    kwargs: dict[str, Any] | None = None,
) -> AttentionCall:
    """The call that the hooks observed; outside of any scope, one made from the arguments.

    Raises:
        UnsupportedInputError: if the press needs what only hooks observe.
    """
    passed: dict[str, Any] = kwargs or {}
    site: Any = module._site if isinstance(module, AttentionView) else UnknownSite(module)
    call = _call_in(passed)
    if call is None:
        if press.all_needs & (Needs.QUERIES | Needs.ROPE):
            observed(passed)
        at = Positions(ids=torch.arange(keys.shape[2], device=keys.device)[None])
        return AttentionCall(site, hidden_states, keys, values, attentions, at=at, kwargs=passed)
    if keys.shape == call.keys.shape:
        is_whole = hidden_states.shape == call.hidden_states.shape  # see `_scored`
        seen = hidden_states if is_whole else call.hidden_states
        return call.replace(hidden_states=seen, keys=keys, values=values, attentions=attentions)
    # These are some of the keys, and it is not known which.
    at = Positions(call.at.embeddings, call.at.ids)
    states: dict[str, Any] = {"hidden_states": hidden_states, "keys": keys, "values": values}
    return call.replace(**states, attentions=None, query=None, memory={}, at=at)


def queries(kwargs: dict[str, Any], last: int | None = None) -> Tensor:
    """The exact queries after RoPE of the (`last`) tokens, `(B, H, last or S, d)`.

    Args:
        kwargs: the last argument of `score` or `compress` of a press with `needs = Needs.QUERIES`.
    """
    return observed(kwargs).queries(last)


def observed(kwargs: dict[str, Any]) -> AttentionCall:
    """The `AttentionCall` that a method of a press is called for.

    Args:
        kwargs: the last argument of `score` or `compress`.

    Raises:
        UnsupportedInputError: if `kwargs` were not passed by an open scope.
    """
    call = _call_in(kwargs)
    if not isinstance(call, AttentionCall):
        raise UnsupportedInputError(
            "no hook has observed this forward; the exact queries are known only while "
            "`with press(model): ...` is open, to a forward_hook of your own in a prefill only"
        )
    return call


def _call_in(kwargs: dict[str, Any]) -> Any:
    """The call in `kwargs`; in those of a `forward_hook` the forward's, if that is a context."""
    if CALL in kwargs or FORWARD not in kwargs:
        return kwargs.get(CALL)
    passed = kwargs[FORWARD]
    is_whole = passed.layer.n_seen == passed.hidden_states.shape[1]
    return context_call(passed) if is_whole else None
