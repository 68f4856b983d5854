"""What a forward is a part of: a prefill in chunks, or a context with guesses behind it.

A forward tells nobody. `transformers` hands a chunk to the model as it hands it a question, and
drafts as it hands it a context, so two sources are asked: whoever runs a prefill by `as_part`, and
`generate`, in whose frames on the call stack both are written down. Nothing of it is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType

from press_core.errors import UnsupportedInputError
from press_core.model.sites import AttentionSite


@dataclass(frozen=True)
class Part:
    """What is known of a forward.

    Attributes:
        n_to_come: tokens of the same context that later forwards bring.
        n_drafts: its last tokens, guessed by another model and rejected if they are wrong.
        beside_drafts: whether it is what was made of such a forward: the context, or the drafts.
    """

    n_to_come: int = 0
    n_drafts: int = 0
    beside_drafts: bool = False


WHOLE = Part()
"""A forward that is no part of anything."""

_announced: ContextVar[Part | None] = ContextVar("part", default=None)


@contextmanager
def as_part(part: Part) -> Iterator[None]:
    """Forwards of this thread are such a part, until the block ends."""
    token = _announced.set(part)
    try:
        yield
    finally:
        _announced.reset(token)


def part_of(site: AttentionSite) -> Part:
    """What the forward in progress is a part of."""
    announced = _announced.get()
    if announced is not None:
        return announced
    frame = _generating()
    if frame is None or not _runs(frame, site):
        return WHOLE
    known = frame.f_locals
    if frame.f_code.co_name == "_assisted_decoding":
        return Part(n_drafts=int(known.get("candidate_length", 0)))
    chunks, chunk = known.get("input_chunks", ()), known.get("input_chunk")
    index = next((i for i, other in enumerate(chunks) if other is chunk), len(chunks))
    return Part(n_to_come=sum(later.shape[-1] for later in chunks[index + 1 :]))


def require_whole(site: AttentionSite, press: str) -> None:
    """Refuse a forward that is a part, to a press that takes its context in one.

    Raises:
        UnsupportedInputError: naming what it is a part of.
    """
    part = part_of(site)
    if part.n_to_come or part.n_drafts:
        what = "a chunk of a prefill" if part.n_to_come else "a context with drafts behind it"
        raise UnsupportedInputError(
            f"{press} takes a context in one forward, and this is {what}; leave out "
            "prefill_chunk_size, prompt_lookup_num_tokens and assistant_model"
        )


def require_no_drafts(site: AttentionSite, press: str) -> None:
    """Refuse a context with drafts behind it, to a press that evicts when all layers have run.

    Raises:
        UnsupportedInputError: naming the press.
    """
    if part_of(site).n_drafts:
        raise UnsupportedInputError(
            f"{press} evicts a context when all layers have run, and would take the drafts behind "
            "this one for a part of it; leave out prompt_lookup_num_tokens and assistant_model"
        )


def tokens_cut_by_generate() -> int | None:
    """How many tokens `generate` was given, while it runs those that the cache does not count.

    Returns:
        None where it does not, or was given the new tokens alone.
    """
    frame = innermost_frame(_GENERATE, frozenset(("_prefill",)))
    # transformers 5.2 always cuts; later releases only where they are told all tokens.
    if frame is None or not frame.f_locals.get("next_sequence_length", True):
        return None
    return int(frame.f_locals["input_ids"].shape[1])


_GENERATE = "transformers.generation.utils"
_LOOPS = frozenset(("_prefill", "_assisted_decoding", "_sample", "_beam_search"))


def _generating() -> FrameType | None:
    """The innermost frame of a loop of `generate`: an assistant runs one inside another's."""
    return innermost_frame(_GENERATE, _LOOPS)


def innermost_frame(module: str, functions: frozenset[str] | None = None) -> FrameType | None:
    """The innermost frame on the call stack of a module, or of one of these functions of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        named = functions is None or frame.f_code.co_name in functions
        if named and frame.f_globals.get("__name__") == module:
            return frame
        frame = frame.f_back
    return None


def _runs(frame: FrameType, site: AttentionSite) -> bool:
    model = frame.f_locals["self"]
    return any(module is site.module for module in model.modules())
