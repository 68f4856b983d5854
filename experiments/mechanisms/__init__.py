"""The ladder: one press, installed at every level at which a transformer lets itself be changed.

```python
press = LADDER["class patch"].press(0.5)
with press(model):
    model(input_ids, past_key_values=cache)
```

All evict the keys of largest norm after the prefill of each layer. `hooks` and `patches` are the
two mechanisms of this project. The others are what else is done or could be done, each in its
plainest form: reversible, unless its name says otherwise, and without a look at whose call it is,
so that what is measured is how far the mechanism reaches by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from experiments.mechanisms.class_patch import class_patch, permanent_class_patch
from experiments.mechanisms.function_mode import function_mode
from experiments.mechanisms.function_patch import function_patch
from experiments.mechanisms.instance import plain_hook, plain_patch
from experiments.mechanisms.interface import attention_interface
from experiments.mechanisms.press import HookPress, Opens, PatchPress
from experiments.mechanisms.registry import registry_patch

CACHE, TENSORS, FRAME = "the cache", "its tensors", "the caller's frame"


@dataclass(frozen=True)
class Rung:
    """One level of the ladder.

    Attributes:
        name: as in `LADDER`.
        press: `press(compression_ratio, score=knorm_scores)`: the press, to be opened on a model.
        what: what it does, in a few words.
        finds: what it evicts through: the cache that the module was given; the tensors that the
            cache holds, so that the cache counts what is left as all that it has seen; or the frame
            of its caller, one forward late.
        reverts: whether leaving the scope takes it off again.
    """

    name: str
    press: Callable[..., Opens]
    what: str
    finds: str = CACHE
    reverts: bool = True


LADDER: dict[str, Rung] = {
    rung.name: rung
    for rung in (
        Rung("hooks", HookPress, "hooks_impl: hooks on each attention module"),
        Rung("plain hook", plain_hook, "a closure as forward hook"),
        Rung("patches", PatchPress, "patch_impl: reversible wrapper of each module's forward"),
        Rung("plain instance patch", plain_patch, "a closure assigned to each module's forward"),
        Rung(
            "attention interface",
            attention_interface,
            "an attention function, registered, and the model's attn_implementation",
            TENSORS,
        ),
        Rung(
            "function mode",
            function_mode,
            "a TorchFunctionMode around scaled_dot_product_attention",
            TENSORS,
        ),
        Rung(
            "registry patch",
            registry_patch,
            "a wrapper of what the attention registry hands out",
            TENSORS,
        ),
        Rung("class patch", class_patch, "a reversible wrapper of the attention class's forward"),
        Rung(
            "function patch",
            function_patch,
            "a reversible wrapper of the modeling file's apply_rotary_pos_emb",
            FRAME,
        ),
        Rung(
            "permanent class patch",
            permanent_class_patch,
            "a forward assigned to the attention class for good",
            reverts=False,
        ),
    )
}
"""The rungs by name, from the narrowest to the widest."""

__all__ = ["CACHE", "FRAME", "LADDER", "TENSORS", "Rung"]
