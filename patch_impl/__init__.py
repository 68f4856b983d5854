"""KV-cache compression installed by reversible patches of the attention forwards."""

from patch_impl.mechanism import BasePress, ScorerPress
from patch_impl.presses import *  # noqa: F403 - every press is listed once, where it is declared
from patch_impl.presses import PRESSES
from press_core import AttentionCall, Eviction, Evicts, Needs, Phase

__all__ = [
    "PRESSES",
    "AttentionCall",
    "BasePress",
    "Eviction",
    "Evicts",
    "Needs",
    "Phase",
    "ScorerPress",
]
__all__.extend(PRESSES)
