"""Images: attention within an image is bidirectional in some models."""

from dataclasses import replace

from torch import Tensor

from press_core.cache.masks import bidirectional_mask
from press_core.call import AttentionCall
from press_core.errors import UnsupportedInputError
from press_core.observing import AttentionPass


def _bidirectional(passed: AttentionPass) -> Tensor | None:
    """Which later tokens each token sees, `(B, q, q)` bool; None: none, or no queries are read."""
    n = passed.hidden_states.shape[1]
    if n == 1 or not passed.scope.traits.reads_queries:
        return None
    mask = passed.mask
    return passed.forward.once(lambda: bidirectional_mask(mask, n), "bidirectional", mask, n)


def with_images(passed: AttentionPass, call: AttentionCall) -> AttentionCall:
    """The call with its bidirectional attention mask, if there is one."""
    seen = _bidirectional(passed)
    return call if seen is None else call.replace(at=replace(call.at, bidirectional=seen))


def require_causal(passed: AttentionPass) -> None:
    """Raise on bidirectional attention, if the press scores these tokens with those of others."""
    if _bidirectional(passed) is not None:
        name = type(passed.scope.press).__name__
        raise UnsupportedInputError(
            f"{name} reads attention weights, but in {passed.site.name} "
            "tokens of an image see later ones; pass images with the context, in one forward"
        )
