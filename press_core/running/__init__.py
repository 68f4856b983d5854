"""Special ways of running a model, one per file, outside of the main path.

Each registers its functions in the tuples below; without its entries, its file can be deleted.
"""

from __future__ import annotations

from collections.abc import Callable

from press_core.call import AttentionCall
from press_core.forward import Forward
from press_core.observing import AttentionPass
from press_core.running import chunks, images, quantized, refused, sliding, static
from press_core.running.compiled import eagerly
from press_core.running.images import require_causal
from press_core.running.ranks import decided, remembered
from press_core.running.refused import is_early_exit
from press_core.scope import ScopeState

ENTERED: tuple[Callable[[ScopeState, Forward], None], ...] = (
    refused.refuse_vmap,
    refused.refuse_paged,
    refused.refuse_draft_tokens,
    chunks.announce,
    sliding.let_slide,
    static.require_room,
    quantized.stage,
)
"""Called when a forward enters the decoder."""

OBSERVED: tuple[Callable[[ScopeState, AttentionPass, AttentionCall], AttentionCall | None], ...] = (
    chunks.wait,
    images.with_images,
)
"""Called with the call of a prefill; None if there is nothing to decide about yet."""

__all__ = [
    "ENTERED",
    "OBSERVED",
    "decided",
    "eagerly",
    "is_early_exit",
    "remembered",
    "require_causal",
]
