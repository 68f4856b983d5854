"""quanto: linear layers replaced by ones whose weights have eight bits.

The library offers no way back; what was there before is put back by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from experiments.interventions.intervention import Intervention


@contextmanager
def int8_weights(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    from optimum.quanto import freeze, qint8, quantize

    former = [
        (module, dict(module._modules), dict(module._parameters)) for module in model.modules()
    ]
    quantize(model, weights=qint8)
    freeze(model)
    try:
        yield model
    finally:
        for module, children, parameters in former:
            module._modules.update(children)
            module._parameters.update(parameters)


INTERVENTIONS = (Intervention(int8_weights, companion="quanto int8 weights"),)
