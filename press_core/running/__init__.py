"""Special ways of running a model, one per file, outside of the main path.

What acts when a forward enters the decoder is listed below; without its entry, its file can be
deleted. The main path calls the others by name.
"""

from __future__ import annotations

from collections.abc import Callable

from press_core.forward import Forward
from press_core.running import chunks, quantized, refused, static
from press_core.scope import ScopeState

ENTERED: tuple[Callable[[ScopeState, Forward], None], ...] = (
    refused.refuse_vmap,
    refused.refuse_paged,
    refused.refuse_draft_tokens,
    chunks.announce,
    static.require_room,
    quantized.stage,
)
"""Called when a forward enters the decoder."""
