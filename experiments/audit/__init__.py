"""An auditor: what does a hook, a patch or a library touch, for whom, and what does it leave?

```python
from experiments.audit import audit

result = audit(press(model), model)     # a context manager, or a callable
result.counts()                         # by reach: while open, while running, left
print(result.to_markdown())
```
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
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
"""When a change is seen: while the scope is open; only while a call runs in it; after it."""

_ABSENT = object()
_COLUMNS = ["when", "reach", "how", "kind", "owner", "name", "before", "after"]

Look = Callable[[], None]
Run = Callable[[Any, Look], Any]
"""`run(model, look)`: calls the model, and `look` from somewhere inside the call."""


@dataclass(frozen=True)
class Change:
    """One thing that is not as it was.

    Attributes:
        how: "added", "changed" or "removed".
        place: where.
        before, after: what was and is there, in a few words.
    """

    how: str
    place: Place
    before: str
    after: str


@dataclass(frozen=True)
class Audit:
    """What a mechanism touched.

    Attributes:
        open: what differs while the scope is open.
        running: what differs in the middle of a call, and not between calls.
        left: what still differs afterwards.
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
        """Changes by reach (rows) and by when they are seen (columns)."""
        counted = self.table().groupby(["reach", "when"]).size().unstack(fill_value=0)
        return counted.reindex(index=list(REACHES), columns=list(WHEN), fill_value=0)

    def by_kind(self) -> pd.DataFrame:
        """Changes of one kind counted: `when`, `reach`, `how`, `kind`, `changes`, `example`."""
        table = self.table()
        table["example"] = table["owner"] + "." + table["name"]
        grouped = table.groupby(["when", "reach", "how", "kind"], sort=False)
        return grouped["example"].agg(changes="size", example="first").reset_index()

    def to_markdown(self) -> str:
        """The counts, and then every change, as two Markdown tables."""
        return "\n\n".join(
            markdown_table(list(table.columns), list(table.itertuples(index=False)), left=None)
            for table in (self.counts().reset_index(), self.table())
        )


def audit(subject: Any, model: nn.Module, run: Run | None = None) -> Audit:
    """What `subject` touches on `model` and anywhere else in the process, and what it leaves.

    ```python
    print(audit(KnormPress(0.5)(model), model).to_markdown())
    ```

    Snapshots are taken before, inside, in the middle of a call inside, and after. The model is run
    once beforehand, so that nothing counts that any first call does.

    Args:
        subject: a context manager; or a callable, which is called once: there is then no inside,
            and what it did is what it left.
        run: calls the model, and the function that it is given in the middle of the call. By
            default a decoder of `transformers` is run on a few tokens, and any other not at all.

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
    running = differences(called_before, called)
    return Audit(seen, tuple(c for c in running if c.place not in places), left)


def forward(model: PreTrainedModel, look: Look) -> None:
    """A forward of a few tokens, with a look around as the first layer stores its keys.

    The look is taken by the cache, so that it needs neither a hook nor a patch; it comes before the
    attention function is called.
    """
    device = "cpu" if model.device.type == "meta" else model.device  # weights may be offloaded
    ids = torch.arange(3, 27, device=device).remainder(model.config.vocab_size)
    with torch.no_grad():
        model(ids[None], past_key_values=_LookingCache(look), use_cache=True)


class _LookingCache(DynamicCache):
    """Calls a function when it is written to for the first time."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        self.look: Look | None = look

    def update(self, *args: Any, **kwargs: Any) -> Any:
        look, self.look = self.look, None
        if look is not None:
            look()
        return super().update(*args, **kwargs)


def _in_call(model: nn.Module, run: Run | None) -> Snapshot:
    """A snapshot from the middle of a call; empty where there is none."""
    seen: Snapshot = {}

    def look() -> None:
        seen.update(snapshot(model))
        # The first two frames are this one's and the looker's own.
        seen.update(call_places(sys._getframe(2), _in_call.__code__))

    if run is not None:
        run(model, look)
    return seen


# ---- differences -------------------------------------------------------------------------------


def differences(before: Snapshot, after: Snapshot) -> tuple[Change, ...]:
    """What was added, changed or removed from one snapshot to the other.

    What lies inside of an added or exchanged submodule is not listed again, nor what lies inside of
    a class or a Python module that one of the snapshots does not reach.
    """
    values = {p: (before.get(p, _ABSENT), after.get(p, _ABSENT)) for p in before | after}
    changed = {place: pair for place, pair in values.items() if not same(*pair)}
    submodules = (place for place in changed if place.kind == "submodule")
    exchanged = {f"{place.owner}.{place.name}".removeprefix(".") for place in submodules}
    known = {place.owner for place in before} & {place.owner for place in after}

    def counts(place: Place) -> bool:
        function = place.name.removesuffix(".__code__")
        if function != place.name and place._replace(name=function) in changed:
            return False  # another function, so of course other code
        if place.reach == INSTANCE:
            inside = place.owner
            return not any(inside == path or inside.startswith(f"{path}.") for path in exchanged)
        return place.kind not in ("class attribute", "module global") or place.owner in known

    return tuple(_change(place, *pair) for place, pair in changed.items() if counts(place))


def _change(place: Place, before: Any, after: Any) -> Change:
    how = "added" if before is _ABSENT else "removed" if after is _ABSENT else "changed"
    return Change(how, place, _described(before), _described(after))


def _described(value: Any) -> str:
    """What a value is, in a few words and in one line."""
    if value is _ABSENT:
        return ""
    if isinstance(value, (str, int, float, torch.dtype)):
        text = str(value)
    elif isinstance(value, Tensor):
        text = f"{type(value).__name__} {tuple(value.shape)}"
    else:
        name = getattr(value, "__qualname__", None) or getattr(value, "co_name", None)
        home = getattr(value, "__module__", None)
        text = ".".join(filter(None, (home, name))) if name else f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."
