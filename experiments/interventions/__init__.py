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

from contextlib import nullcontext

from experiments.interventions import libraries, of_torch
from experiments.interventions.intervention import Intervention, Library
from experiments.interventions.libraries import LIBRARIES

NOTHING = "nothing else"
COMPANIONS = {NOTHING: Intervention(nullcontext), **libraries.COMPANIONS, **of_torch.COMPANIONS}
"""What presses are tried beside, by name."""

__all__ = ["COMPANIONS", "LIBRARIES", "NOTHING", "Intervention", "Library"]
