"""Ways of running a model in which tokens cannot be evicted, each refused with what to do."""

from __future__ import annotations

import torch
from torch._C._functorch import is_batchedtensor

from press_core.cache.given import innermost_frame
from press_core.errors import UnsupportedCacheError, UnsupportedInputError
from press_core.forward import Forward
from press_core.scope import ScopeState
from press_core.traits import Phase

_LOOPS = "_prefill", "_assisted_decoding", "_sample", "_beam_search"


def refuse_draft_tokens(scope: ScopeState, forward: Forward) -> None:
    """Refuse draft tokens (speculative decoding) that would be taken for a part of a context.

    Behind a context that was brought before, they are no different from others.
    """
    decodes = scope.traits.phases & (Phase.DECODING | Phase.BEFORE_DECODING)
    acts = forward.is_context or (decodes and forward.n_tokens > 1)
    if torch.compiler.is_compiling() or not acts:
        return
    frame = innermost_frame("transformers.generation.utils", _LOOPS)
    if frame is None or frame.f_code.co_name != "_assisted_decoding":
        return
    if decodes:
        raise UnsupportedInputError(
            f"{type(scope.press).__name__} evicts tokens while decoding, and those of speculative "
            "decoding (assistant_model, prompt_lookup_num_tokens) are drafts that may be taken "
            "back; leave the assistance out, or use a press that acts after the prefill only"
        )
    if scope.press.keeps(forward.n_tokens) >= forward.n_tokens:
        return
    raise UnsupportedInputError(
        f"{type(scope.press).__name__} evicts tokens of a context, and draft tokens of speculative "
        "decoding (assistant_model, prompt_lookup_num_tokens) came behind it in one forward; "
        "prefill first, model(input_ids[:, :-1], past_key_values=cache), and then call "
        "generate(input_ids[:, -1:], attention_mask=torch.ones_like(input_ids), "
        "past_key_values=cache, ...) with the assistance (transformers 5.2 wants all of input_ids "
        "there)"
    )


def refuse_early_exit(scope: ScopeState, forward: Forward) -> None:
    """Refuse to run a context again on the first layers alone, as `assistant_early_exit` drafts."""
    if torch.compiler.is_compiling() or not forward.is_context:
        return
    frame = innermost_frame("transformers.generation.candidate_generator", ("get_candidates",))
    drafts = frame is not None and hasattr(frame.f_locals["self"], "assistant_early_exit")
    if drafts and scope.traits.phases & Phase.AFTER_DECODER:
        raise UnsupportedInputError(
            f"{type(scope.press).__name__} runs a context again through all layers, and "
            "assistant_early_exit drafts with the first ones alone; leave assistant_early_exit out"
        )


def refuse_vmap(scope: ScopeState, forward: Forward) -> None:
    """Refuse tensors of which nobody can know the values, as `torch.vmap` has them."""
    ids = forward.given.get("input_ids")
    ids = forward.given.get("inputs_embeds") if ids is None else ids
    if ids is None or forward.given.get("use_cache") is False or torch.compiler.is_compiling():
        return
    if is_batchedtensor(ids):
        raise UnsupportedInputError(
            f"{type(scope.press).__name__} chooses tokens by their scores, which torch.vmap does "
            "not let it look at; pass a batch to the model"
        )


def refuse_paged(scope: ScopeState, forward: Forward) -> None:
    """Refuse continuous batching, which passes its own cache by its own name."""
    if forward.cache is not None or forward.given.kwargs.get("cache") is None:
        return
    why = (
        " cannot prune the paged cache of continuous batching (generate_batch): requests share its "
        "blocks; use generate with a DynamicCache"
    )
    scope.warnings.append(lambda: why)  # the thread that runs the requests keeps its errors
    raise UnsupportedCacheError(type(scope.press).__name__ + why)
