"""Special ways of running a model, one per file, outside of the main path.

Each registers its functions in the tuples below; without its entries, its file can be deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from press_core.call import AttentionCall
from press_core.errors import UnsupportedInputError
from press_core.eviction import Eviction
from press_core.forward import Forward
from press_core.observing import AttentionPass
from press_core.press import Press
from press_core.running import chunks, images, quantized, ranks, refused, sliding, static
from press_core.running.images import require_causal
from press_core.scope import ScopeState

ENTERED: tuple[Callable[[ScopeState, Forward], None], ...] = (
    refused.refuse_vmap,
    refused.refuse_paged,
    refused.refuse_early_exit,
    refused.refuse_draft_tokens,
    chunks.announce,
    sliding.let_slide,
    quantized.stage,
)
"""Called when a forward enters the decoder."""

OBSERVED: tuple[Callable[[ScopeState, AttentionPass, AttentionCall], AttentionCall | None], ...] = (
    chunks.wait,
    images.with_images,
)
"""Called with the call of a prefill; None if there is nothing to decide about yet."""


def decided(press: Press, call: AttentionCall) -> Eviction:
    """The press's decision about the heads of all ranks, restricted to those of this rank.

    Raises:
        UnsupportedInputError: if the press reads hidden states that were not buffered.
    """
    try:
        return ranks.of_own_heads(press.evict(ranks.of_all_heads(call)), call)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        if not (call.hidden_states.is_meta and "meta" in str(error)):
            raise
        raise UnsupportedInputError(
            f"{type(press).__name__} reads hidden states of {call.site.name} that were not "
            "buffered; declare `needs = Needs.HIDDEN_STATES` in the press that reads them"
        ) from error


def remembered(press: Press, call: AttentionCall) -> Mapping[str, Tensor]:
    """The result of `Press.remember` for the heads of this rank."""
    return ranks.own_heads(press.remember(ranks.of_all_heads(call)), call)


__all__ = ["ENTERED", "OBSERVED", "decided", "remembered", "require_causal", "static"]
