"""An auditor: what a hook, a patch or a library changes, who is affected, and what remains.

```python
from experiments.audit import audit

result = audit(press(model), model)     # a context manager, or a callable
result.counts()                         # by reach: while open, while running, left
print(result.to_markdown())
```
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from experiments.audit.snapshot import (
    CALL,
    CLASS,
    INSTANCE,
    PROCESS,
    REACHES,
    THREAD,
    Place,
    Snapshot,
    call_places,
    same,
    snapshot,
)
from experiments.framework.tables import markdown_table

__all__ = ["Audit", "Change", "Place", "audit", "differences", "snapshot"]
__all__ += ["CALL", "CLASS", "INSTANCE", "LEFT", "OPEN", "PROCESS", "REACHES", "RUNNING", "THREAD"]

OPEN, RUNNING, LEFT = WHEN = ("while open", "while running", "left")
"""When a change is visible: while the scope is open; only during a call in it; after it."""

_ABSENT = object()
_COLUMNS = ["when", "reach", "how", "kind", "owner", "name", "before", "after"]

Look = Callable[[], None]
Run = Callable[[Any, Look], Any]
"""`run(model, look)`: calls the model, and calls `look` during that call."""


@dataclass(frozen=True)
class Change:
    """A difference between two snapshots.

    Attributes:
        how: "added", "changed" or "removed".
        place: where the difference is.
        before, after: short descriptions of the old and the new value.
    """

    how: str
    place: Place
    before: str
    after: str


@dataclass(frozen=True)
class Audit:
    """The changes that a mechanism made.

    Attributes:
        open: differences while the scope is open.
        running: further differences during a call in the scope; none if `run` did not look.
        left: differences that remain after the scope.
    """

    open: tuple[Change, ...]
    running: tuple[Change, ...]
    left: tuple[Change, ...]

    def table(self) -> pd.DataFrame:
        """A row per change: `when`, `reach`, `how`, `kind`, `owner`, `name`, `before`, `after`."""
        seen = ((OPEN, self.open), (RUNNING, self.running), (LEFT, self.left))
        rows = [
            {"when": when, "how": c.how, **c.place._asdict(), "before": c.before, "after": c.after}
            for when, changes in seen
            for c in changes
        ]
        return pd.DataFrame(rows, columns=_COLUMNS)

    def counts(self) -> pd.DataFrame:
        """Number of changes by reach (rows) and by when they are visible (columns)."""
        counted = self.table().groupby(["reach", "when"]).size().unstack(fill_value=0)
        return counted.reindex(index=list(REACHES), columns=list(WHEN), fill_value=0)

    def by_kind(self) -> pd.DataFrame:
        """Number of changes by kind: `when`, `reach`, `how`, `kind`, `changes`, `example`."""
        table = self.table()
        table["example"] = table["owner"] + "." + table["name"]
        grouped = table.groupby(["when", "reach", "how", "kind"], sort=False)
        return grouped["example"].agg(changes="size", example="first").reset_index()

    def to_markdown(self) -> str:
        """The counts and all changes, as two Markdown tables."""
        return "\n\n".join(
            markdown_table(list(table.columns), list(table.itertuples(index=False)), left=None)
            for table in (self.counts().reset_index(), self.table())
        )


def audit(subject: Any, model: nn.Module, run: Run | None = None) -> Audit:
    """Audit what `subject` changes on `model` and elsewhere in the process, and what remains.

    ```python
    print(audit(KnormPress(0.5)(model), model).to_markdown())
    ```

    Snapshots are taken before the scope, inside it, during a call inside it, and after it. The
    model runs once beforehand, so that the effects of any first call are not counted.

    Args:
        subject: a context manager; or a callable, which is called once, and whose changes all count
            as left.
        run: calls the model, and during that call its second argument. By default a model of
            `transformers` runs on a few tokens, and any other model does not run.

    Raises:
        TypeError: if `subject` is neither.
    """
    if run is None and isinstance(model, PreTrainedModel):
        run = forward
    called_before = _in_call(model, run)
    before = snapshot(model)
    if not hasattr(subject, "__enter__"):
        if not callable(subject):
            raise TypeError(f"cannot audit {subject!r}: it is no context manager and no callable")
        subject()
        return Audit((), (), differences(before, snapshot(model)))
    with subject:
        opened = snapshot(model)
        called = _in_call(model, run)
    left = differences(before, snapshot(model))
    seen = differences(before, opened)
    places = {change.place for change in seen}
    running = differences(called_before, called) if called else ()
    return Audit(seen, tuple(c for c in running if c.place not in places), left)


def forward(model: PreTrainedModel, look: Look) -> None:
    """Run a forward of a few tokens, and call `look` when the first layer stores its keys.

    The cache calls `look`, so this needs neither a hook nor a patch; the attention function has not
    been called yet at that moment.
    """
    device = "cpu" if model.device.type == "meta" else model.device  # weights may be offloaded
    ids = torch.arange(3, 27, device=device).remainder(model.config.get_text_config().vocab_size)
    with torch.no_grad():
        model(ids[None], past_key_values=_LookingCache(look), use_cache=True)


class _LookingCache(DynamicCache):
    """A cache that calls a function at its first update."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        self.look: Look | None = look

    def update(self, *args: Any, **kwargs: Any) -> Any:
        look, self.look = self.look, None
        if look is not None:
            look()
        return super().update(*args, **kwargs)


def _in_call(model: nn.Module, run: Run | None) -> Snapshot:
    """A snapshot taken during a call; empty if `run` is None."""
    seen: Snapshot = {}

    def look() -> None:
        seen.update(snapshot(model))
        # The first two frames are this function and its caller.
        seen.update(call_places(sys._getframe(2), _in_call.__code__))

    if run is not None:
        run(model, look)
    return seen


# ---- differences -------------------------------------------------------------------------------


def differences(before: Snapshot, after: Snapshot) -> tuple[Change, ...]:
    """What was added, changed or removed between two snapshots.

    The contents of an added or replaced submodule are not listed, nor those of a class or a Python
    module that only one of the snapshots covers.
    """
    values = ((p, before.get(p, _ABSENT), after.get(p, _ABSENT)) for p in before | after)
    changed = {place: (old, new) for place, old, new in values if not same(old, new)}
    submodules = (place for place in changed if place.kind == "submodule")
    exchanged = {f"{place.owner}.{place.name}".removeprefix(".") for place in submodules}
    known = {place.owner for place in before} & {place.owner for place in after}

    def counts(place: Place) -> bool:
        function = place.name.partition(".__")[0]  # as in `forward.__code__`
        if function != place.name and place._replace(name=function) in changed:
            return False  # the function itself was replaced, which is listed already
        if place.reach == INSTANCE:
            inside = place.owner
            return not any(inside == path or inside.startswith(f"{path}.") for path in exchanged)
        return place.kind not in ("class attribute", "module global") or place.owner in known

    return tuple(_change(place, *pair) for place, pair in changed.items() if counts(place))


def _change(place: Place, before: Any, after: Any) -> Change:
    how = "added" if before is _ABSENT else "removed" if after is _ABSENT else "changed"
    return Change(how, place, _described(before), _described(after))


def _described(value: Any) -> str:
    """A short description of a value, in one line."""
    if value is _ABSENT:
        return ""
    if isinstance(value, (str, int, float, torch.dtype, ModuleType)):
        text = str(value)
    elif isinstance(value, Tensor):
        text = f"{type(value).__name__} {tuple(value.shape)}"
    else:
        names = [getattr(value, n, None) for n in ("__module__", "__qualname__", "co_name")]
        home, *own = [x if isinstance(x, str) else "" for x in names]
        text = ".".join(filter(None, (home, *own))) if any(own) else f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."
