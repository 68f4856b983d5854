"""Ways of running a model in which tokens cannot be evicted.

All but the drafts of `is_early_exit`, which scopes leave alone, raise an error with advice.
"""

from types import FrameType

import torch
from torch._C._functorch import is_batchedtensor
from transformers.cache_utils import Cache

from press_core.cache.caches import pruned_layers
from press_core.cache.given import innermost_frame
from press_core.errors import UnsupportedCacheError, UnsupportedInputError
from press_core.forward import CACHE_NAMES, Forward, own_cache
from press_core.scope import ScopeState
from press_core.traits import Phase

_LOOPS = "_prefill", "_assisted_decoding", "_sample", "_beam_search"


def _loop_of(forward: Forward) -> FrameType | None:
    """The frame of the loop of `generate` that runs this forward, if one does.

    A logits processor may run the model by itself, as that of classifier-free guidance does.
    """
    frame = innermost_frame("transformers.generation.utils", _LOOPS)
    given = {} if frame is None else frame.f_locals.get("model_inputs", {})
    caches = [own_cache(given[name]) for name in CACHE_NAMES if given.get(name) is not None]
    return frame if given and (not caches or forward.cache in caches) else None


def refuse_draft_tokens(scope: ScopeState, forward: Forward) -> None:
    """Raise if draft tokens (speculative decoding) would be pruned, or as part of a context.

    After a separate prefill, draft tokens are like any others to presses that act in prefills only.
    """
    decodes = scope.traits.phases & Phase.BEHIND_CONTEXTS
    acts = forward.is_context or (decodes and forward.n_tokens > 1)
    frame = _loop_of(forward) if acts else None
    if frame is None or frame.f_code.co_name != "_assisted_decoding":
        return
    if decodes:
        raise UnsupportedInputError(
            f"{type(scope.press).__name__} evicts tokens while decoding, but draft tokens of "
            "speculative decoding (assistant_model, prompt_lookup_num_tokens) may be rolled back; "
            "leave the assistance out, or use a press that acts after the prefill only"
        )
    if not scope.press.acts_on(forward.n_tokens):
        return
    raise UnsupportedInputError(
        f"{type(scope.press).__name__} evicts tokens of a context, but draft tokens of speculative "
        "decoding (assistant_model, prompt_lookup_num_tokens) are in the same forward; "
        "prefill first, model(input_ids[:, :-1], past_key_values=cache), and then call "
        "generate(input_ids[:, -1:], attention_mask=torch.ones_like(input_ids), "
        "past_key_values=cache, ...) with the assistance (transformers 5.2 wants all of input_ids "
        "there, 5.3 to 5.17 cannot do it)"
    )


def refuse_restart(scope: ScopeState, forward: Forward) -> None:
    """Raise if `generate` runs its tokens again without the cache: Phi-3 at its original length.

    It counts the tokens of the cache for this, which are fewer after rerotation.
    """
    frame = _loop_of(forward) if forward.cache is None else None
    given = {} if frame is None else frame.f_locals.get("model_kwargs", {})
    dropped = [layer for name in CACHE_NAMES for layer in pruned_layers(own_cache(given.get(name)))]
    if any(layer.kept.following is not None for layer in dropped):
        raise UnsupportedInputError(
            f"generate leaves out the cache that {type(scope.press).__name__} pruned, because the "
            "model changes its rotary frequencies at the original length (LongRoPE) and the cache "
            "counts fewer tokens; call the model step by step, or do not rotate kept keys"
        )


def is_early_exit() -> bool:
    """Whether scopes take no part: assistant_early_exit drafts with the first layers only.

    Drafts have a cache of their own, and the whole model checks them.
    """
    frame = innermost_frame("transformers.generation.candidate_generator", ("get_candidates",))
    return frame is not None and hasattr(frame.f_locals["self"], "assistant_early_exit")


def refuse_unreadable(scope: ScopeState, forward: Forward) -> None:
    """Raise where values cannot be read, or where those of one input would be recorded for all."""
    found = [forward.given.get(name) for name in ("input_ids", "inputs_embeds")]
    is_batched = any(is_batchedtensor(x) for x in found if x is not None)
    acts_in = Phase.ON_CONTEXTS if forward.is_context else Phase.BEHIND_CONTEXTS
    is_recorded = torch.compiler.is_exporting() or torch._C._get_tracing_state()
    refused = is_batched or (is_recorded and scope.traits.phases & acts_in)
    if refused and forward.given.get("use_cache") is not False:
        raise UnsupportedInputError(
            f"{type(scope.press).__name__} chooses tokens by their scores, which torch.vmap cannot "
            "read, and an exported or traced program does not read again; pass a batch to the "
            "model, and export or trace only decode steps in which the press does not act"
        )


def refuse_paged(scope: ScopeState, forward: Forward) -> None:
    """Raise on the paged cache of continuous batching."""
    if forward.cache is None or isinstance(forward.cache, Cache):
        return
    from transformers.generation.continuous_batching import PagedAttentionCache  # slow to import

    if not isinstance(forward.cache, PagedAttentionCache):
        return
    why = (
        " cannot prune the paged cache of continuous batching (generate_batch): requests share its "
        "blocks; use generate with a DynamicCache"
    )
    scope.warnings.append(lambda: why)  # the thread that runs the requests swallows errors
    raise UnsupportedCacheError(type(scope.press).__name__ + why)
