"""What a press is, whatever installs it: formulas, attention sites, caches, masks and scopes."""

from press_core.budget import Tokens
from press_core.cache.caches import cache_nbytes, kept_lengths, kept_positions
from press_core.cache.pruned import PrunedLayer
from press_core.cache.ragged import RaggedLayer
from press_core.call import AttentionCall
from press_core.errors import (
    HyperparameterError,
    PressError,
    ScopeError,
    UnsupportedCacheError,
    UnsupportedInputError,
    UnsupportedModelError,
)
from press_core.eviction import Eviction
from press_core.files.files import CacheFileError
from press_core.files.saving import SavedCache, about_cache, load_cache, save_cache
from press_core.model.sites import AttentionSite
from press_core.press import Press
from press_core.probe import attention_sites
from press_core.running.chunks import prefill
from press_core.scope import Scope
from press_core.traits import Evicts, Needs, Phase

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
    "kept_positions",
    "load_cache",
    "prefill",
    "save_cache",
]
