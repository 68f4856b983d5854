"""What else is done to models: everything that a press has to get along with.

Each companion is a context manager: entered with a model it changes that (or the way it is run),
yields what to run in its place, and undoes the change in the way that its library offers.

```python
with COMPANIONS["PEFT LoRA"].used(model) as run:
    logits = run(input_ids, past_key_values=cache).logits
```
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from experiments.companions import libraries, of_torch
from experiments.companions.of_torch import Runs


@dataclass(frozen=True)
class Companion:
    """Something else that is done to a model.

    Attributes:
        name: as in `COMPANIONS`.
        used: as above.
        tolerance: largest difference of logits, as a share of the largest, that its own arithmetic
            may make where it is not repeated exactly.
        answers: what it is asked in place of the logits of a cached context, if it has no cache.
        is_slow: whether a single call takes seconds.
    """

    name: str
    used: Callable[[Any], AbstractContextManager[Runs]]
    tolerance: float = 1e-5
    answers: bool = False
    is_slow: bool = False


COMPANIONS: dict[str, Companion] = {
    companion.name: companion
    for companion in (
        Companion("nothing else", of_torch.nothing),
        Companion("accelerate hook", libraries.accelerate_hook),
        Companion("accelerate cpu offload", libraries.cpu_offload),
        Companion("PEFT LoRA", libraries.lora),
        Companion("PEFT LoRA, merged", libraries.merged_lora),
        Companion("quanto int8 weights", libraries.int8_weights),
        Companion("wrapped layers, as FSDP does", of_torch.wrapped_layers),
        Companion("replicas, as DataParallel makes", of_torch.replica),
        Companion("torch.func.functional_call", of_torch.functional),
        Companion("autocast to bfloat16", of_torch.autocast, tolerance=0.05),
        Companion("inference mode", of_torch.inference),
        Companion("checkpointing and backward", of_torch.gradients, answers=True),
        Companion("torch.export", of_torch.exported, answers=True),
        Companion("torch.compile", of_torch.compiled, is_slow=True),
    )
}
"""All companions by name; the first is none."""

__all__ = ["COMPANIONS", "Companion"]
