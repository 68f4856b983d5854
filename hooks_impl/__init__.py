"""KV-cache compression installed by PyTorch's own hooks, for the length of a `with` block."""

from hooks_impl.mechanism import BasePress, ScorerPress, observed, queries
from hooks_impl.presses import *  # noqa: F403 - one list of the presses is enough
from hooks_impl.presses import PRESSES
from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.press import Evicts, Needs, Phase

__all__ = [
    "PRESSES",
    "AttentionCall",
    "BasePress",
    "Eviction",
    "Evicts",
    "Needs",
    "Phase",
    "ScorerPress",
    "observed",
    "queries",
    *PRESSES,
]
