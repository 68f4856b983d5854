"""KV-cache compression installed by PyTorch's own hooks, for the length of a `with` block."""

from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel

from hooks_impl.mechanism import BasePress, ScorerPress, observed, queries
from hooks_impl.presses import PRESSES
from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.press import Evicts, Needs, Phase

if TYPE_CHECKING:
    from hooks_impl.presses import *  # noqa: F403

SUPPORTED_MODELS = (PreTrainedModel,)
"""For programs that ask `isinstance(model, SUPPORTED_MODELS)`, as of kvpress: any model may be.

Whether a press fits the one at hand is found out when it is opened, and said if it does not.
"""


def is_prefilling(cache_position: Tensor, q_len: int) -> bool:
    """Whether a forward of `q_len` tokens at `cache_position` `(q_len,)` found an empty cache.

    For presses that ask it in a `forward_hook` of their own. `transformers` passes
    `cache_position` on up to 5.2.
    """
    return bool(cache_position[-1] < q_len)


globals().update(PRESSES)  # every press is listed once, where it is declared

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
    *PRESSES,
]
