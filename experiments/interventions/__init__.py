"""What else is done to models: what libraries touch, and what a press has to get along with.

Each intervention is described once, as a scope that is entered with a model, yields what to run in
its place, and undoes the change in the way that its library offers.

```python
with COMPANIONS["PEFT LoRA"].scope(model) as run:
    logits = run(input_ids, past_key_values=cache).logits
```

`python -m experiments.interventions` audits those of the libraries that the running environment
has, each in a process of its own, and prints JSON.
"""

from experiments.interventions import (
    of_accelerate,
    of_kvpress,
    of_liger,
    of_nnsight,
    of_peft,
    of_quanto,
    of_torch,
    of_transformer_lens,
)
from experiments.interventions.intervention import Intervention, Library

LIBRARIES = (
    Library("kvpress", "kvpress", of_kvpress.INTERVENTIONS),
    Library("accelerate", "accelerate", of_accelerate.INTERVENTIONS),
    Library("peft", "peft", of_peft.INTERVENTIONS),
    Library("liger-kernel", "liger_kernel.transformers", of_liger.INTERVENTIONS),
    Library("transformer-lens", "transformer_lens", of_transformer_lens.INTERVENTIONS),
    Library("nnsight", "nnsight", of_nnsight.INTERVENTIONS),
)
"""What is audited."""

NOTHING = of_torch.NOTHING
COMPANIONS: dict[str, Intervention] = {
    done.companion: done
    for done in (
        NOTHING,
        *of_accelerate.INTERVENTIONS,
        *of_peft.INTERVENTIONS,
        *of_quanto.INTERVENTIONS,
        *of_torch.INTERVENTIONS,
    )
    if done.companion
}
"""What presses are tried beside, by name; the first is nothing."""

__all__ = ["COMPANIONS", "LIBRARIES", "NOTHING", "Intervention", "Library"]
