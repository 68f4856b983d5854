"""KV-cache compression installed by reversible patches of the attention forwards."""

from patch_impl.mechanism import BasePress, ScorerPress
from patch_impl.presses import *  # noqa: F403 - one list of the presses is enough
from patch_impl.presses import PRESSES
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
    *PRESSES,
]
