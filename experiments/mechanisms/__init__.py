"""One press, installed at every level at which a transformer can be changed.

```python
press = MECHANISMS["class patch"](0.5)
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

import hooks_impl
import patch_impl
from experiments.mechanisms.forwards import (
    Opens,
    class_patch,
    permanent_class_patch,
    plain_hook,
    plain_patch,
)
from experiments.mechanisms.functions import attention_interface, registry_patch

MECHANISMS: dict[str, Callable[[float], Opens]] = {
    "hooks": hooks_impl.KnormPress,
    "plain hook": plain_hook,
    "patches": patch_impl.KnormPress,
    "plain instance patch": plain_patch,
    "attention interface": attention_interface,
    "registry patch": registry_patch,
    "class patch": class_patch,
    "permanent class patch": permanent_class_patch,
}
"""From a compression ratio to the press, by name: from what reaches least to what reaches most."""

OURS = ("hooks", "patches")
"""The two mechanisms of this project."""

TRIED: dict[str, Opens] = {
    **{name: make(0.5) for name, make in MECHANISMS.items()},
    **{
        f"{name}, {press}": opens
        for name, package in zip(OURS, (hooks_impl, patch_impl), strict=True)
        for press, opens in (
            ("SnapKV", package.SnapKVPress(0.5, window_size=4)),
            ("AdaKV", package.AdaKVPress(package.KnormPress(0.5))),
        )
    },
}
"""Every mechanism at ratio 0.5, and ours with presses that read queries, or keep heads apart."""

__all__ = ["MECHANISMS", "OURS", "TRIED", "Opens"]
