"""What a press is, whatever installs it: formulas, attention sites, caches, masks and scopes."""

from press_core.cache.caches import cache_nbytes, kept_lengths
from press_core.cache.pruned import PrunedLayer
from press_core.cache.ragged import RaggedLayer
from press_core.cache.records import CacheFileError
from press_core.cache.saving import SavedCache, about_cache, load_cache, save_cache
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
    "CacheFileError",
    "Eviction",
    "Evicts",
    "HyperparameterError",
    "Needs",
    "Phase",
    "Press",
    "PressError",
    "PrunedLayer",
    "RaggedLayer",
    "SavedCache",
    "Scope",
    "ScopeError",
    "Tokens",
    "UnsupportedCacheError",
    "UnsupportedInputError",
    "UnsupportedModelError",
    "about_cache",
    "attention_sites",
    "cache_nbytes",
    "kept_lengths",
    "load_cache",
    "prefill",
    "save_cache",
    "unverified",
]
