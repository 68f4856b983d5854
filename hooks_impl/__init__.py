"""KV-cache compression installed by PyTorch's own hooks, for the length of a `with` block."""

from hooks_impl.kvpress import SUPPORTED_MODELS, is_prefilling, observed, queries
from hooks_impl.mechanism import BasePress, ScorerPress
from hooks_impl.presses import *  # noqa: F403 - every press is listed once, where it is declared
from hooks_impl.presses import PRESSES
from press_core import AttentionCall, Eviction, Evicts, Needs, Phase

__all__ = [
    "PRESSES",
    "SUPPORTED_MODELS",
    "AttentionCall",
    "BasePress",
    "Eviction",
    "Evicts",
    "Needs",
    "Phase",
    "ScorerPress",
    "is_prefilling",
    "observed",
    "queries",
]
__all__.extend(PRESSES)
