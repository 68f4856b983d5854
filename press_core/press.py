"""The base class of all presses: fields, traits, budget and formula."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, fields
from functools import reduce
from numbers import Integral
from operator import or_
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor, nn

from press_core import errors
from press_core.budget import Amount, Tokens, n_kept, ratio_of
from press_core.call import AttentionCall
from press_core.eviction import Eviction, memory_of
from press_core.fields import amount_field, check_fields, native, require
from press_core.forward import Arguments, Forward
from press_core.model.sites import NEEDS, AttentionSite
from press_core.tally import Tally
from press_core.traits import Evicts, Needs, Phase

_TRAITS = dict(needs=Needs, evicts=Evicts, phases=Phase, row_by_row=bool, buffered_tokens=Integral)
"""The types of what a press says of itself."""


@dataclass
class Press:
    """A compression policy: hyperparameters and a formula, independent of the mechanism.

    A press holds no run state: one press may be open on several models, in several threads or twice
    on one model. A press that holds presses in its fields is a composition: traits that it does not
    declare are combined from those of its parts.

    Attributes:
        mechanism: class attribute; what installs the press, "hooks" or "patches".
        needs: class attribute; what the press reads of the model.
        evicts: class attribute; what the press removes from a cache layer.
        phases: class attribute; when the press acts.
        row_by_row: class attribute; whether rows of a batch may keep different numbers of tokens.
        ratio_field: class attribute; name of the field for how much to evict, if there is one.
        whole_up_to: class attribute; names of fields that hold numbers of tokens: a context no
            longer than their sum is not pruned.
    """

    mechanism: ClassVar[str] = ""
    ratio_field: ClassVar[str] = "compression_ratio"
    whole_up_to: ClassVar[tuple[str, ...]] = ()

    # ---- traits: class attributes of most presses, properties if they depend on fields -----------

    @property
    def needs(self) -> Needs:
        return Needs.of_parts(part.needs for part in self.parts)

    @property
    def all_needs(self) -> Needs:
        """Its needs and those of its parts, also if its class declares only what it adds."""
        of_parts = Needs.of_parts(part.all_needs for part in self.parts)
        return self.needs | (of_parts & ~Needs.ONLY)

    @property
    def evicts(self) -> Evicts:
        return max([part.evicts for part in self.parts] or [Evicts.TOKENS])

    @property
    def phases(self) -> Phase:
        """When its parts act; in chunks, after the last one: each prunes what others have left."""
        together = reduce(or_, (part.phases for part in self.parts), Phase.NEVER)
        return together & ~Phase.CHUNKS or Phase.PREFILL

    @property
    def row_by_row(self) -> bool:
        return any(part.row_by_row for part in self.parts)

    @property
    def observed_phases(self) -> Phase:
        """The phases in which the press is called after attention forwards: those it acts in."""
        return self.phases

    # ---- fields ----------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check the fields; called on construction, when a scope opens and at each prefill.

        Raises:
            HyperparameterError: with the field, its value and what is allowed.
        """
        check_fields(self, Press, _TRAITS)
        for name, part in self._named_parts():
            same = part.mechanism == self.mechanism
            require(self, name, same, f"a press installed by {self.mechanism}, as this one is")
            holds_this = any(inner is self for inner in part.everything())
            require(self, name, not holds_this, "no press that holds this one")
            part.validate()
        for name, kind in _TRAITS.items():
            require(self, name, isinstance(getattr(self, name), kind), f"of type {kind.__name__}")

    @property
    def parts(self) -> Iterator[Press]:
        """The presses in its fields."""
        return (part for _, part in self._named_parts())

    def everything(self) -> list[Press]:
        """The press, its parts, their parts and so on."""
        found: list[Press] = [self]
        for press in found:  # the loop appends to the list
            found += [part for part in press.parts if all(part is not known for known in found)]
        return found

    def _named_parts(self) -> Iterator[tuple[str, Press]]:
        for name, value in vars(self).items():
            values = list(value.values()) if isinstance(value, dict) else value
            for part in values if isinstance(values, (list, tuple)) else [value]:
                if isinstance(part, Press):
                    yield name, part

    def with_ratio(self, compression_ratio: Amount) -> Press:
        """A copy of this press that evicts a different share of the tokens.

        Args:
            compression_ratio: in [0, 1), or the `Tokens` to keep.

        Raises:
            HyperparameterError: if the press has no field for a ratio, or its class fixes it.
        """
        names = [field.name for field in fields(self)]
        if self.ratio_field not in names:
            raise errors.HyperparameterError(
                f"{type(self).__name__} takes no compression ratio; its fields: {', '.join(names)}"
            )
        changed = self.changed(**{self.ratio_field: compression_ratio})
        is_set = changed.amount == native(compression_ratio)
        require(self, self.ratio_field, is_set, "set by a field of the press, not computed")
        return changed

    def with_budget(self, tokens: int) -> Press:
        """A copy of this press that keeps `tokens` tokens of a context of any length.

        Args:
            tokens: per KV head; on average, where heads or layers differ. Contexts no longer than
                that are not pruned.

        Raises:
            HyperparameterError: if the press has no field for a ratio.
        """
        return self.with_ratio(Tokens(tokens))

    def changed(self, **values: Any) -> Press:
        """A copy with other fields, all attributes, and what this press prepares for a scope."""
        changed = copy(self)
        vars(changed).update(values)
        vars(changed).setdefault("prepared_as", SimpleNamespace(press=self))
        changed.validate()
        return changed

    # ---- budget ----------------------------------------------------------------------------------

    @property
    def amount(self) -> Amount:
        """How much to evict: a share of the tokens, or the `Tokens` to keep; 0 without a field."""
        return vars(self).get(self.ratio_field) or 0.0

    @property
    def requested_ratio(self) -> float:
        """Share of the tokens to evict; 0 if the press has no such field, or holds `Tokens`."""
        return 0.0 if isinstance(self.amount, Tokens) else float(self.amount)

    def is_long_enough(self, length: int) -> bool:
        """Whether a context of `length` tokens is long enough to be pruned."""
        own = length > sum(getattr(self, name) for name in self.whole_up_to)
        return own and all(part.is_long_enough(length) for part in self.parts)

    def keeps(self, length: int) -> int:
        """How many of `length` tokens a KV head keeps, on average: by its ratio, or overridden."""
        own = n_kept(length, self.amount) if self.is_long_enough(length) else length
        return min(own, reduce(lambda n, part: part.keeps(n), self.parts, length))

    def acts_on(self, length: int) -> bool:
        """Whether the press may evict some of `length` tokens; yes if it does not say how many."""
        cls, given = type(self), vars(self).get(self.ratio_field)
        says = cls.keeps is not Press.keeps or cls.amount is not Press.amount
        if not says and given is None and not any(self.parts):
            return self.evicts is not Evicts.NOTHING and self.is_long_enough(length)
        return self.keeps(length) < length or any(part.acts_on(length) for part in self.parts)

    def budget(self, call: AttentionCall) -> int:
        """How many tokens of `call` a KV head keeps, on average; all if the context is short."""
        if not self.is_long_enough(call.length):
            return call.length
        return min(call.length, n_kept(call.context_length, self.amount_of(call)))

    def amount_of(self, call: AttentionCall) -> Amount:
        """How much of `call` to evict: the budget that a press around this one sets comes first."""
        return Tokens(call.budget) if call.budget else self.amount

    def ratio_of(self, call: AttentionCall) -> float:
        """Share of the tokens of `call` to evict."""
        return ratio_of(call.length, self.amount_of(call))

    @property
    def buffered_tokens(self) -> int:
        """Number of latest tokens whose hidden states and queries are buffered while decoding."""
        return max((part.buffered_tokens for part in self.parts), default=0)

    def is_due(self, n_steps: int, n_new: int) -> bool:
        """Whether to prune after `n_steps` decode steps, the last of which added `n_new` tokens."""
        decoding = (part for part in self.parts if part.phases & Phase.DECODING)
        return all(part.is_due(n_steps, n_new) for part in decoding)

    def is_awaited(self, n_steps: int, n_new: int, n_buffered: int) -> bool:
        """Whether to observe a decode step: pruning is due, or `n_buffered` tokens are buffered."""
        return n_buffered > 0 or self.is_due(n_steps, n_new)

    # ---- the formula -----------------------------------------------------------------------------

    def compress(self, call: AttentionCall) -> Eviction:
        """The formula: what to keep of `call`."""
        raise NotImplementedError(f"{type(self).__name__} implements neither compress nor score")

    def evict(self, call: AttentionCall) -> Eviction:
        """The result of `compress` for `call`, as an `Eviction`.

        Raises:
            PressError: if it evicts something that the press does not declare.
            UnsupportedInputError: if the press reads hidden states that were not buffered.
        """
        try:
            eviction = Eviction.of(call, self.compress(call))
        except (RuntimeError, TypeError, NotImplementedError) as error:
            if not (call.hidden_states.is_meta and "meta" in str(error)):
                raise
            raise errors.UnsupportedInputError(
                f"{type(self).__name__} reads hidden states of {call.site.name} that were not "
                "buffered; declare `needs = Needs.HIDDEN_STATES` in the press that reads them"
            ) from error
        if self.evicts < eviction.evicts:
            raise errors.PressError(
                f"{type(self).__name__} evicts what it does not declare: set `evicts = "
                f"Evicts.{eviction.evicts.name}` in the class"
            )
        return eviction

    def remember(self, call: AttentionCall) -> Mapping[str, Tensor]:
        """Per-token values to store; called after each forward in a phase in which the press acts.

        They are stored with the cache layer while the scope is open, evicted or rolled back with
        their tokens, and given back in `call.memory`. For presses that declare `Needs.MEMORY`.

        Args:
            call: the forward. Its `memory` is what was returned last, with zeros for new tokens
                (empty the first time).

        Returns:
            By name, `(B, H_kv, S)`, with the same names each time.
        """
        phase = Phase.DECODING if call.when.decoding else Phase.PREFILL
        return memory_of((part for part in self.parts if part.phases & phase), call)

    # ---- around the decoder ----------------------------------------------------------------------

    def before_decoder(self, scope: Any, forward: Forward) -> Arguments:
        """Called before each forward of the decoder, in `Phase.BEFORE_DECODER`.

        Returns:
            The arguments to call the decoder with.
        """
        for part in self.parts:
            if part.phases & Phase.BEFORE_DECODER:
                forward.given = part.before_decoder(scope, forward)
        return forward.given

    def after_decoder(self, scope: Any, forward: Forward, output: Any) -> None:
        """Called after a forward of the decoder that completed a context, in `AFTER_DECODER`."""
        for part in self.parts:
            if part.phases & Phase.AFTER_DECODER:
                part.after_decoder(scope, forward, output)

    # ---- the model -------------------------------------------------------------------------------

    def post_init_from_model(self, model: nn.Module) -> None:
        """Set fields that depend on the model; called when a scope opens."""
        for part in self.parts:
            part.post_init_from_model(model)

    def prepare(self, model: nn.Module) -> Any:
        """Model-dependent data, computed when a scope opens; a formula reads `call.prepared`."""
        return None

    def check_site(self, site: AttentionSite) -> None:
        """Raise if the press cannot work on an attention module, before anything is installed.

        Raises:
            UnsupportedModelError: with what is missing and what to use instead.
        """
        name = type(self).__name__
        for need in self.site_needs():
            if why := site.refusal(need):
                raise errors.UnsupportedModelError(f"{name} needs {NEEDS[need]}, and {why}")
        moves_earlier = self.phases & Phase.BEFORE_DECODING and self.all_needs & Needs.ROPE
        if moves_earlier and site.rotary_in_3d is not None:
            raise errors.UnsupportedModelError(
                f"{name} rotates keys of earlier forwards, but {site.name} gives images positions "
                "in three dimensions, which are not stored; use KeyRerotationPress, in the prefill"
            )
        for part in self.parts:
            part.check_site(site)

    def site_needs(self) -> list[str]:
        """What the press requires of an attention module: see `AttentionSite.refusal`."""
        reads_states = not self.needs & Needs.POSITIONS_ALONE
        needs = {
            "tokens": self.evicts is not Evicts.NOTHING,
            "own tokens": reads_states or not self.needs & Needs.SAME_FOR_ALL_HEADS,
            "states": reads_states,
            "key norms": self.needs & Needs.KEY_NORMS,
            "rope": self.needs & Needs.ROPE,
            "unrotated keys": self.needs & Needs.UNROTATED_KEYS,
            "later queries": self.needs & Needs.LATER_QUERIES,
            "heads": self.evicts.needs_attention,
            "attention": self.evicts.needs_attention,
            f"queries by {self.mechanism}": self.needs & Needs.QUERIES,
        }
        return [need for need, is_needed in needs.items() if is_needed]

    # ---- results of a run ------------------------------------------------------------------------

    @property
    def last_run(self) -> Tally | None:
        """The tally of the scope of this press that was opened last; None: no scope was opened."""
        return vars(self).get("_last_run")

    @property
    def compression_count(self) -> int:
        """How often a layer was pruned (the most of all layers) in the scope opened last."""
        return 0 if self.last_run is None else max(self.last_run.compressions.values(), default=0)

    @property
    def evicted_ratio(self) -> float:
        """Share of the tokens that was actually evicted in the scope opened last.

        Relative to the tokens that a layer had seen when it was last pruned, over all layers, heads
        and rows. Every press has it. `compression_ratio` is the requested share in most presses;
        in one without that field, and in a composition that has run, it is the same as this.
        """
        return 0.0 if self.last_run is None else self.last_run.compression_ratio

    def __getstate__(self) -> dict[str, Any]:
        return {n: x for n, x in vars(self).items() if n not in ("_last_run", "_last_scope")}


@dataclass
class RatioPress(Press):
    """A press with a field for the share of the tokens to evict.

    Attributes:
        compression_ratio: share of the tokens that each KV head evicts, in [0, 1); or the `Tokens`
            that it keeps.
    """

    compression_ratio: Amount = amount_field()

    @property
    def amount(self) -> Amount:
        return getattr(self, self.ratio_field)  # which may be a property of a user's class


class MeasuredPress(Press):
    """A press without a field for a ratio: its compression ratio is measured in a run."""

    @property
    def compression_ratio(self) -> float:
        """Share of the tokens evicted in the scope opened last; the requested one before a run."""
        run = self.last_run
        if run is None or run.n_forwards == run.n_before:  # no forward since the ratio was set
            return self.requested_ratio
        return run.compression_ratio

    @compression_ratio.setter
    def compression_ratio(self, ratio: Amount) -> None:
        vars(self).update(vars(self.with_ratio(ratio)))
        if self.last_run is not None:
            self.last_run.n_before = self.last_run.n_forwards
