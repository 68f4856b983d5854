"""Special ways of running a model, one per file, outside of the main path.

The main path calls what is listed here, and names no file: without its entries, a file can be
deleted.
"""

from collections.abc import Callable

from press_core.call import AttentionCall
from press_core.forward import Forward
from press_core.observing import AttentionPass
from press_core.running import chunks, images, quantized, refused, sliding, static
from press_core.running.compiled import eagerly as eagerly
from press_core.running.images import require_causal as require_causal
from press_core.running.ranks import decided as decided
from press_core.running.ranks import remembered as remembered
from press_core.running.refused import is_early_exit as is_early_exit
from press_core.running.sliding import let_slide as let_slide
from press_core.scope import ScopeState

ENTERED: tuple[Callable[[ScopeState, Forward], None], ...] = (
    refused.refuse_unreadable,
    refused.refuse_paged,
    refused.refuse_draft_tokens,
    refused.refuse_restart,
    sliding.refuse_full,
    chunks.announce,
    static.require_room,
    quantized.stage,
)
"""Called when a forward that is not compiled enters the decoder."""

OBSERVED: tuple[Callable[[AttentionPass, AttentionCall], AttentionCall | None], ...] = (
    chunks.wait,
    images.with_images,
)
"""Called with the call of a prefill; None if there is nothing to decide about yet."""
