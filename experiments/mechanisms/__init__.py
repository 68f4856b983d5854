"""One press, installed at every level at which a transformer can be changed.

```python
press = MECHANISMS["class patch"].press(0.5)
with press(model):
    model(input_ids, past_key_values=cache)
```

All evict the keys of largest norm after the prefill of each layer. `hooks` and `patches` are the
two mechanisms of this project. The others are what else is done or could be done, each in its
plainest form: reversible, unless its name says otherwise, and without asking whose call it is, so
that one sees how far the mechanism reaches by itself.
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
class Mechanism:
    """One way to install the press.

    Attributes:
        name: as in `MECHANISMS`.
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


MECHANISMS: dict[str, Mechanism] = {
    mechanism.name: mechanism
    for mechanism in (
        Mechanism("hooks", HookPress, "hooks_impl: hooks on each attention module"),
        Mechanism("plain hook", plain_hook, "a closure as forward hook"),
        Mechanism("patches", PatchPress, "patch_impl: reversible wrapper of each module's forward"),
        Mechanism(
            "plain instance patch", plain_patch, "a closure assigned to each module's forward"
        ),
        Mechanism(
            "attention interface",
            attention_interface,
            "an attention function, registered, and the model's attn_implementation",
            TENSORS,
        ),
        Mechanism(
            "function mode",
            function_mode,
            "a TorchFunctionMode around scaled_dot_product_attention",
            TENSORS,
        ),
        Mechanism(
            "registry patch",
            registry_patch,
            "a wrapper of what the attention registry hands out",
            TENSORS,
        ),
        Mechanism(
            "class patch", class_patch, "a reversible wrapper of the attention class's forward"
        ),
        Mechanism(
            "function patch",
            function_patch,
            "a reversible wrapper of the modeling file's apply_rotary_pos_emb",
            FRAME,
        ),
        Mechanism(
            "permanent class patch",
            permanent_class_patch,
            "a forward assigned to the attention class for good",
            reverts=False,
        ),
    )
}
"""All mechanisms by name, from the one that reaches least to the one that reaches most."""

OURS = ("hooks", "patches")
"""The two mechanisms of this project."""

__all__ = ["CACHE", "FRAME", "MECHANISMS", "OURS", "TENSORS", "Mechanism"]
