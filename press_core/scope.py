"""Opening a press on a model, and taking it off again."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from press_core.errors import HyperparameterError, ScopeError, UnsupportedModelError
from press_core.model.sites import AttentionSite, attention_sites
from press_core.select import n_kept

if TYPE_CHECKING:
    from press_core.call import AttentionCall


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
        mechanism: class attribute; how it installs itself, "hooks" or "patches".
        uses_queries: class attribute; whether the press reads the exact queries.
        uses_rope: class attribute; whether it needs rotary position embeddings.
        scores_tokens: class attribute; whether it gives each token a score, with a method `score`.
        scores_alone: class attribute; whether a token's score depends on no other token.
        scores_once: class attribute; whether it can do so only together with the forward of all
            these tokens.
        evicts: class attribute; what it evicts: "tokens" (as many of each head), "heads" (other
            tokens, and another number, of each head), "channels" or "nothing" in the prefill.
        acts_in_prefill, acts_in_decoding: class attributes; after which forwards it prunes: those
            that find their layer empty, and all others.
        n_remembered: class attribute; of how many of the last tokens it wants the hidden states and
            queries while decoding.
        decides_per_row: class attribute; whether rows of a batch may keep different numbers.
        needs_attention: class attribute; whether attention itself has to honour what it keeps.
    """

    mechanism = ""
    uses_queries = False
    uses_rope = False
    scores_tokens = False
    scores_alone = False
    scores_once = False
    evicts = "tokens"
    acts_in_prefill = True
    acts_in_decoding = False
    n_remembered = 0
    decides_per_row = False
    needs_attention = False

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

    def resolve(self, model: nn.Module) -> Press:
        """The press as it acts on `model`: itself, or a copy with what depends on the model."""
        return self

    def with_ratio(self, compression_ratio: float) -> Press:
        """A copy of this press that evicts another share of the tokens.

        Raises:
            HyperparameterError: if it cannot be told a ratio.
        """
        if "compression_ratio" not in getattr(self, "__dataclass_fields__", {}):
            raise HyperparameterError(
                f"{type(self).__name__} cannot be told a compression ratio; wrap a press with the "
                "field compression_ratio"
            )
        return replace(self, compression_ratio=compression_ratio)  # type: ignore[call-arg]

    def compress(self, *args: Any, **kwargs: Any) -> Any:
        """What stays of a call; see the `BasePress` of the mechanism."""
        raise NotImplementedError

    def score(self, *args: Any, **kwargs: Any) -> Any:
        """A score for each token of a call; see the `ScorerPress` of the mechanism."""
        raise NotImplementedError

    def is_due(self, n_steps: int, length: int) -> bool:
        """Whether to prune after `n_steps` decoding steps, of `length` tokens in the layer."""
        return True

    def before(self, forward: Any) -> None:
        """Called before each forward of an attention module; see `press_core.steps.Forward`."""

    def check_site(self, site: AttentionSite) -> None:
        """Refuse an attention module that the press cannot work on, before anything is installed.

        Raises:
            UnsupportedModelError: saying what is missing and what to use instead.
        """
        check_rope(self, site)

    def acts_on(self, length: int) -> bool:
        """Whether a context of `length` tokens is long enough; a shorter one is left whole."""
        return True

    def budget(self, call: AttentionCall) -> int:
        """How many of the tokens of `call` each KV head keeps, on average where heads differ."""
        return call.target or call.length

    def install_on(
        self, model: nn.Module, sites: list[AttentionSite], run: Run
    ) -> Iterator[Removable]:
        """Install the press on a model, yielding what takes it off again."""
        for site in sites:
            yield from self.install(site, run)

    def install(self, site: AttentionSite, run: Run) -> Iterator[Removable]:
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

    def budget(self, call: AttentionCall) -> int:
        return call.target or n_kept(call.length, self.compression_ratio)


def check_rope(press: Press, site: AttentionSite) -> None:
    """Refuse a module without the rotary position embeddings that `press` needs.

    Raises:
        UnsupportedModelError: naming both.
    """
    if press.uses_rope and site.rotary is None:
        raise UnsupportedModelError(
            f"{type(press).__name__} needs rotary position embeddings, and "
            f"{type(site.module).__name__} ({site.name}) has none; SnapKVPress and KnormPress "
            "work on any model"
        )


def require(press: Any, field: str, holds: bool, allowed: str) -> None:
    """Raise a `HyperparameterError` about `field` of `press` unless `holds`."""
    if not holds:
        raise HyperparameterError(
            f"{type(press).__name__}({field}={getattr(press, field)!r}): {field} must be {allowed}"
        )


@dataclass
class Run:
    """What one scope accumulates while it is open.

    Attributes:
        n_sites: attention modules that the press is installed on.
        layers: per layer, how many tokens the layer had seen when it was pruned last, and how many
            of them each KV head kept, on average.
        n_compressions: per layer, how often it was pruned.
        seen: depths of the sites whose forwards were seen.
        patches: what stands in the place of the sites' forwards, in their order, and can be lost.
        key: tells this run from all others of the process.
    """

    n_sites: int = 0
    layers: dict[int, tuple[float, float]] = field(default_factory=dict)
    n_compressions: dict[int, int] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    patches: list[Any] = field(default_factory=list)
    key: int = field(default_factory=itertools.count().__next__)

    def record(self, layer_idx: int, seen: float, kept: float) -> None:
        """Note that a layer was pruned: of `seen` tokens each KV head keeps `kept` on average."""
        self.layers[layer_idx] = seen, kept
        self.n_compressions[layer_idx] = self.n_compressions.get(layer_idx, 0) + 1

    @property
    def passed_by(self) -> list[int]:
        """Depths of sites that were never seen, though later ones were."""
        return sorted(set(range(max(self.seen, default=0))) - self.seen)

    @property
    def compression_ratio(self) -> float:
        """Share of the tokens that was evicted, over all layers."""
        seen = self.n_sites * max((seen for seen, _ in self.layers.values()), default=0)
        evicted = sum(seen - kept for seen, kept in self.layers.values())
        return evicted / seen if seen else 0.0


LOST = (
    "somebody has put back what this scope had patched (as accelerate's remove_hook_from_module "
    "does with a forward that it had replaced before), and nothing was pruned there since; take "
    "such changes off before the scope opens, or make them inside of it"
)
"""What is said of a scope some of whose patches are gone."""

PASSED_BY = (
    "nothing was pruned there, as their attention ran without this press being told; a module "
    "that calls `attention.forward(...)` in place of `attention(...)` goes past its hooks: use the "
    "press of the same name from patch_impl"
)
"""What is said of a scope that saw later layers run, but not these."""

_latest: dict[int, Run] = {}


def latest_run(press: Press) -> Run:
    """The run of the scope of `press` that was opened last (an empty one where there is none)."""
    return _latest.get(id(press)) or Run()


def _remember(press: Press, run: Run) -> None:
    # Beside the press, not on it: opening a scope does not change what a press is.
    if id(press) not in _latest:
        weakref.finalize(press, _latest.pop, id(press), None)
    _latest[id(press)] = run


class Scope:
    """The time during which a press is installed on a model.

    Entering installs it, leaving (in whatever way) takes exactly that off again, in any order with
    other scopes. A scope can be opened again once it is closed. It acts on the model whichever
    thread runs it.
    """

    def __init__(self, press: Press, model: nn.Module) -> None:
        self.press, self.model = press, model
        self.run = Run()
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
                check_rope(self.press, site)
            press = self.press.resolve(self.model)
            for site in sites:
                press.check_site(site)
            run = Run(len(sites))
            with ExitStack() as installed:
                for removable in press.install_on(self.model, sites, run):
                    installed.callback(removable.remove)
                self._installed = installed.pop_all()
            self.run = run
            _remember(self.press, run)

    def remove(self) -> None:
        """Take the press off the model; without effect on a scope that is not open."""
        with self._lock:
            installed, self._installed = self._installed, None
        if installed is not None:
            name = type(self.press).__name__
            if any(patch.is_lost for patch in self.run.patches):
                warnings.warn(f"{name}: {LOST}", RuntimeWarning, stacklevel=2)
            elif passed := self.run.passed_by:
                warnings.warn(f"{name}, layers {passed}: {PASSED_BY}", RuntimeWarning, stacklevel=2)
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
