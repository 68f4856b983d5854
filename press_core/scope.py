"""Opening a press on a model, and taking it off again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import Any, Protocol

from torch import nn

from press_core.errors import HyperparameterError, ScopeError, UnsupportedModelError
from press_core.sites import AttentionSite, attention_sites


class Removable(Protocol):
    """What installing something hands back: a hook's handle, a patch."""

    def remove(self) -> None: ...


@dataclass
class Press:
    """A compression policy: hyperparameters, and how to install itself on an attention module.

    ```python
    with press(model):
        model(input_ids, past_key_values=cache)
    handle = press.register(model); handle.remove()    # the same without a block
    ```

    A press holds no state of a run: one press may be open on several models, in several threads or
    twice on one model (the inner scope acts first).

    Attributes:
        uses_queries: class attribute; whether the press reads the exact queries.
        uses_rope: class attribute; whether it needs rotary position embeddings.
    """

    uses_queries = False
    uses_rope = False

    def __call__(self, model: nn.Module) -> Scope:
        """The scope `with press(model): ...`; nothing is installed before it is entered."""
        return Scope(self, model)

    def register(self, model: nn.Module) -> Scope:
        """Open the scope at once; `remove()` on what is returned closes it (again: no effect)."""
        scope = Scope(self, model)
        scope.open()
        return scope

    def validate(self) -> None:
        """Check the fields; called when the press is made and whenever a scope opens.

        Raises:
            HyperparameterError: naming the field, its value and what is allowed.
        """

    def __post_init__(self) -> None:
        self.validate()

    def post_init_from_model(self, model: nn.Module) -> None:
        """Fill in what depends on the model; called when a scope opens."""

    def check_site(self, site: AttentionSite) -> None:
        """Refuse an attention module that the press cannot work on, before anything is installed.

        Raises:
            UnsupportedModelError: saying what is missing and what to use instead.
        """
        if self.uses_rope and site.rotary is None:
            raise UnsupportedModelError(
                f"{type(self).__name__} needs rotary position embeddings, and "
                f"{type(site.module).__name__} ({site.name}) has none; SnapKVPress and KnormPress "
                "work on any model"
            )

    def install(self, site: AttentionSite) -> Iterator[Removable]:
        """Install the press on one attention module, yielding what takes it off again."""
        raise NotImplementedError


@dataclass
class Compression(Press):
    """A press that is told what share of the tokens to evict.

    Attributes:
        compression_ratio: share of the tokens that each KV head evicts, in [0, 1).
    """

    compression_ratio: float = 0.0

    def validate(self) -> None:
        require(self, "compression_ratio", 0 <= self.compression_ratio < 1, "a number in [0, 1)")

    def acts_on(self, length: int) -> bool:
        """Whether a context of `length` tokens is long enough; a shorter one is left whole."""
        return True


def require(press: Any, field: str, holds: bool, allowed: str) -> None:
    """Raise a `HyperparameterError` about `field` of `press` unless `holds`."""
    if not holds:
        raise HyperparameterError(
            f"{type(press).__name__}({field}={getattr(press, field)!r}): {field} must be {allowed}"
        )


class Scope:
    """The time during which a press is installed on a model.

    Entering installs it, leaving (in whatever way) takes exactly that off again, in any order with
    other scopes. A scope can be opened again once it is closed. It acts on the model whichever
    thread runs it.
    """

    def __init__(self, press: Press, model: nn.Module) -> None:
        self.press, self.model = press, model
        self._installed: ExitStack | None = None
        self._lock = Lock()

    def open(self) -> None:
        """Install the press.

        Raises:
            PressError: if the press does not fit the model; nothing is installed then.
            ScopeError: if this scope is open already.
        """
        with self._lock:
            if self._installed is not None:
                raise ScopeError(
                    f"this scope of {type(self.press).__name__} is open already; call the press "
                    "again, `press(model)`, for a second scope"
                )
            self.press.validate()
            self.press.post_init_from_model(self.model)
            sites = attention_sites(self.model)
            for site in sites:
                self.press.check_site(site)
            with ExitStack() as installed:
                for site in sites:
                    for removable in self.press.install(site):
                        installed.callback(removable.remove)
                self._installed = installed.pop_all()

    def remove(self) -> None:
        """Take the press off the model; without effect on a scope that is not open."""
        with self._lock:
            installed, self._installed = self._installed, None
        if installed is not None:
            installed.close()

    def __enter__(self) -> Scope:
        self.open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()
