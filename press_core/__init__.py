"""What a press is, whatever installs it: formulas, attention sites, caches, masks and scopes."""

from press_core.cache.caches import cache_nbytes, kept_lengths
from press_core.cache.pruned import PrunedLayer
from press_core.cache.ragged import RaggedLayer
from press_core.call import AttentionCall
from press_core.chunked import prefill
from press_core.errors import (
    HyperparameterError,
    PressError,
    ScopeError,
    UnsupportedCacheError,
    UnsupportedInputError,
    UnsupportedModelError,
)
from press_core.eviction import Eviction
from press_core.model.probe import unverified
from press_core.model.sites import AttentionSite, attention_sites
from press_core.press import Evicts, Needs, Phase, Press
from press_core.scope import Scope
from press_core.select import Tokens

__all__ = [
    "AttentionCall",
    "AttentionSite",
    "Eviction",
    "Evicts",
    "HyperparameterError",
    "Needs",
    "Phase",
    "Press",
    "PressError",
    "PrunedLayer",
    "RaggedLayer",
    "Scope",
    "ScopeError",
    "Tokens",
    "UnsupportedCacheError",
    "UnsupportedInputError",
    "UnsupportedModelError",
    "attention_sites",
    "cache_nbytes",
    "kept_lengths",
    "prefill",
    "unverified",
]
