"""Images: their tokens see later ones of the same image."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from press_core.cache.masks import bidirectional_mask
from press_core.call import AttentionCall
from press_core.errors import UnsupportedInputError
from press_core.observing import AttentionPass
from press_core.scope import ScopeState


def _bidirectional(scope: ScopeState, passed: AttentionPass) -> Tensor | None:
    """Which later ones the tokens see, `(B, q, q)` bool, if the press may ask; None: none."""
    n = passed.hidden_states.shape[1]
    if n == 1 or not scope.traits.reads_queries:
        return None
    mask = passed.mask
    return passed.forward.once(lambda: bidirectional_mask(mask, n), "bidirectional", mask, n)


def with_images(scope: ScopeState, passed: AttentionPass, call: AttentionCall) -> AttentionCall:
    """The call with what tokens see of later ones."""
    seen = _bidirectional(scope, passed)
    return call if seen is None else call.replace(at=replace(call.at, bidirectional=seen))


def require_causal(scope: ScopeState, passed: AttentionPass) -> None:
    """Refuse tokens that see later ones where the press will judge them together with others."""
    if _bidirectional(scope, passed) is not None:
        raise UnsupportedInputError(
            f"{type(scope.press).__name__} reads attention weights, and in {passed.site.name} "
            "tokens of an image see later ones; let it come with the context, in one forward"
        )
