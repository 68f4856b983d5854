"""What `python -m experiments` imports when it is used, and not before.

`transformers` imports hqq wherever that is installed, and hqq imports the compiler of torch: more
seconds than a trace takes. Here the module that `transformers` imports stands in for hqq's, whose
class for quantized caches it imports when something of it is asked for.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_NAME, _CLASS = "hqq.core.quantize", "Quantizer"


class _Late(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever looks through all modules does not want this one
            raise AttributeError(name)
        return _LateClass() if name == _CLASS else getattr(_imported(), name)


class _LateClass:
    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_imported(), _CLASS), name)


def _imported() -> ModuleType:
    if isinstance(sys.modules.get(_NAME), _Late):
        del sys.modules[_NAME]
    return import_module(_NAME)


def import_hqq_late() -> None:
    """Let hqq be imported by whatever uses it; without effect if it is imported already."""
    sys.modules.setdefault(_NAME, _Late(_NAME))
