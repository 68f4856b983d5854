"""What a press says: its fields, its traits, its budget and its formula."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import reduce
from inspect import getattr_static
from operator import or_
from typing import Any, ClassVar

from torch import Tensor, nn

from press_core.budget import Amount, Tokens, n_kept, ratio_of
from press_core.call import AttentionCall
from press_core.copies import copied
from press_core.errors import HyperparameterError, UnsupportedModelError
from press_core.eviction import Eviction
from press_core.fields import amount_field, check_fields, require
from press_core.forward import Arguments, Forward
from press_core.model.sites import AttentionSite
from press_core.tally import Tally
from press_core.traits import Evicts, Needs, Phase


@dataclass
class Press:
    """A compression policy: hyperparameters and the formula, whatever installs it.

    A press holds no state of a run: one press may be open on several models, in several threads or
    twice on one model (the inner scope acts first). A press with presses in its fields is a
    composition: what it does not declare is what its parts declare together.

    Attributes:
        mechanism: class attribute; what installs it, "hooks" or "patches".
        needs: class attribute; what it reads of the model.
        evicts: class attribute; what it takes out of a layer.
        phases: class attribute; when it acts.
        row_by_row: class attribute; whether rows of a batch may keep different numbers of tokens.
        told: class attribute; the field that says how much to evict, if there is one of that name.
        whole_up_to: class attribute; fields of numbers of tokens: a context of no more than all of
            these together is left whole.
    """

    mechanism: ClassVar[str] = ""
    told: ClassVar[str] = "compression_ratio"
    whole_up_to: ClassVar[tuple[str, ...]] = ()

    # ---- traits: class attributes of most presses, properties where they depend on fields --------

    @property
    def needs(self) -> Needs:
        return Needs.of_parts(part.needs for part in self.parts)

    @property
    def evicts(self) -> Evicts:
        return max([part.evicts for part in self.parts] or [Evicts.TOKENS])

    @property
    def phases(self) -> Phase:
        together = reduce(or_, (part.phases for part in self.parts), Phase.NEVER)
        return together or Phase.PREFILL

    @property
    def row_by_row(self) -> bool:
        return any(part.row_by_row for part in self.parts)

    @property
    def observed_phases(self) -> Phase:
        """When it is told of attention forwards: whenever it acts."""
        return self.phases

    # ---- fields ----------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check the fields; called when the press is made and whenever a scope opens.

        Raises:
            HyperparameterError: naming the field, its value and what is allowed.
        """
        check_fields(self, Press)
        for name, part in self._named_parts():
            ours = part.mechanism == self.mechanism
            require(self, name, ours, f"a press installed by {self.mechanism}, as this one is")
            holds_this = any(inner is self for inner in part.everything())
            require(self, name, not holds_this, "no press that holds this one")
            part.validate()

    @property
    def parts(self) -> Iterator[Press]:
        """The presses that it holds."""
        return (part for _, part in self._named_parts())

    def everything(self) -> list[Press]:
        """Itself, its parts, their parts and so on."""
        found: list[Press] = [self]
        for press in found:  # which grows meanwhile
            found += [part for part in press.parts if all(part is not known for known in found)]
        return found

    def _named_parts(self) -> Iterator[tuple[str, Press]]:
        for name, value in vars(self).items():
            for part in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(part, Press):
                    yield name, part

    def with_ratio(self, compression_ratio: Amount) -> Press:
        """A copy of this press that evicts another share of the tokens.

        Args:
            compression_ratio: in [0, 1), or the `Tokens` to keep.

        Raises:
            HyperparameterError: if it cannot be told a ratio.
        """
        if self.told not in {field.name for field in fields(self)}:
            raise HyperparameterError(
                f"{type(self).__name__} cannot be told a compression ratio; wrap a press with the "
                "field compression_ratio"
            )
        changed = self.changed(**{self.told: compression_ratio})
        vars(changed)["prepared_as"] = vars(self).get("prepared_as", id(self))
        return changed

    def with_budget(self, tokens: int) -> Press:
        """A copy of this press that keeps so many tokens of whatever it is given.

        Args:
            tokens: of each KV head; on average, where heads or layers differ. Contexts of no more
                tokens are left whole.

        Raises:
            HyperparameterError: if it cannot be told how much to keep.
        """
        return self.with_ratio(Tokens(tokens))

    def changed(self, **values: Any) -> Press:
        """A copy of this press, with all that its class has put there, and other fields."""
        changed = copied(self, **values)
        for of_original in ("_last_scope", "prepared_as"):
            vars(changed).pop(of_original, None)
        changed.validate()
        return changed

    # ---- budget ----------------------------------------------------------------------------------

    @property
    def amount(self) -> Amount:
        """What it is told to evict, a share of the tokens or all but so many; 0: nothing told."""
        return vars(self).get(self.told, 0.0)

    @property
    def requested_ratio(self) -> float:
        """Share of the tokens that it is told to evict; 0 where it is not told one."""
        return 0.0 if isinstance(self.amount, Tokens) else float(self.amount)

    def is_long_enough(self, length: int) -> bool:
        """Whether a context of `length` tokens is long enough; a shorter one is left whole."""
        own = length > sum(getattr(self, name) for name in self.whole_up_to)
        return own and all(part.is_long_enough(length) for part in self.parts)

    def keeps(self, length: int) -> int:
        """How many of a context of `length` tokens each KV head keeps, on average over layers."""
        own = n_kept(length, self.amount) if self.is_long_enough(length) else length
        return min([own, *(part.keeps(length) for part in self.parts)])

    def budget(self, call: AttentionCall) -> int:
        """How many of the tokens of `call` each KV head keeps, on average where heads differ.

        All of them where there is nothing to choose.
        """
        if not self.is_long_enough(call.length):
            return call.length
        return min(call.length, call.budget or n_kept(call.context_length, self.amount))

    def ratio_of(self, length: int) -> float:
        """Share of `length` tokens that it is told to evict."""
        return ratio_of(length, self.amount)

    @property
    def buffered_tokens(self) -> int:
        """Of how many of the last tokens it wants hidden states and queries while decoding."""
        return max((part.buffered_tokens for part in self.parts), default=0)

    def is_due(self, n_steps: int, n_new: int) -> bool:
        """Whether to prune after `n_steps` decoding steps, the last of `n_new` tokens."""
        return True

    def is_awaited(self, n_steps: int, n_new: int, n_buffered: int) -> bool:
        """Whether this step is to be observed: it is due, or what it brings is needed when one is.

        Steps that are not awaited cost next to nothing.

        Args:
            n_buffered: its `buffered_tokens`.
        """
        return n_buffered > 0 or self.is_due(n_steps, n_new)

    # ---- the formula -----------------------------------------------------------------------------

    def compress(self, call: AttentionCall) -> Eviction:
        """The formula: what is left of `call`."""
        raise NotImplementedError(
            f"{type(self).__name__} says nowhere what it keeps: give it a compress, or a score"
        )

    def evict(self, call: AttentionCall) -> Eviction:
        """What is left of `call`, as `compress` returns it."""
        return Eviction.of(call, self.compress(call))

    def remember(self, call: AttentionCall) -> Mapping[str, Tensor]:
        """What to keep of each token, asked after each forward in whose phase the press acts.

        Kept with the cache layer for as long as the scope is open; tokens that are evicted or taken
        back take theirs along. `call.memory` then holds it. For presses that need `Needs.MEMORY`.

        Args:
            call: the forward, whose `memory` is what was returned last, zeros for new tokens (and
                empty the first time).

        Returns:
            By name, `(B, H_kv, S)`, the same names each time.
        """
        phase = Phase.DECODING if call.when.decoding else Phase.PREFILL
        acting = (p for p in self.parts if phase in p.phases and Needs.MEMORY in p.needs)
        return {name: x for part in acting for name, x in part.remember(call).items()}

    # ---- around the decoder ----------------------------------------------------------------------

    def before_decoder(self, scope: Any, forward: Forward) -> Arguments:
        """Called before each forward of the decoder, in `Phase.BEFORE_DECODER`.

        Returns:
            The arguments that the decoder is to get.
        """
        for part in self.parts:
            if Phase.BEFORE_DECODER in part.phases:
                forward.given = part.before_decoder(scope, forward)
        return forward.given

    def after_decoder(self, scope: Any, forward: Forward, output: Any) -> None:
        """Called after a forward of the decoder that completed a context, in `AFTER_DECODER`."""
        for part in self.parts:
            if Phase.AFTER_DECODER in part.phases:
                part.after_decoder(scope, forward, output)

    # ---- the model -------------------------------------------------------------------------------

    def post_init_from_model(self, model: nn.Module) -> None:
        """Fill in what depends on the model; called when a scope opens."""
        for part in self.parts:
            part.post_init_from_model(model)

    def prepare(self, model: nn.Module) -> Any:
        """What it has to know of the model, found when a scope opens: `call.prepared(self)`."""
        return None

    def check_site(self, site: AttentionSite) -> None:
        """Refuse an attention module that the press cannot work on, before anything is installed.

        Raises:
            UnsupportedModelError: saying what is missing and what to use instead.
        """
        name = type(self).__name__
        for need in self.site_needs():
            if need in site.refusals:
                raise UnsupportedModelError(
                    f"{name} needs {_NEEDS[need]}, and {site.refusals[need]}"
                )
        moves_earlier = Phase.BEFORE_DECODING in self.phases and Needs.ROPE in self.needs
        if moves_earlier and site.rotary is not None and site.rotary.in_3d:
            raise UnsupportedModelError(
                f"{name} rotates keys of earlier forwards, and {site.name} gives images positions "
                "in three dimensions, which nobody knows any more then; KeyRerotationPress can "
                "rotate those of the context as it comes"
            )
        for part in self.parts:
            part.check_site(site)

    def site_needs(self) -> list[str]:
        """What it takes for granted of an attention module: keys of `AttentionSite.refusals`."""
        reads_states = Needs.POSITIONS_ALONE not in self.needs
        needs = {
            "tokens": self.evicts is not Evicts.NOTHING,
            "own tokens": reads_states or Needs.SAME_FOR_ALL_HEADS not in self.needs,
            "states": reads_states,
            "key norms": Needs.KEY_NORMS in self.needs,
            "rope": Needs.ROPE in self.needs,
            "heads": self.evicts.needs_attention,
        }
        return [need for need, is_needed in needs.items() if is_needed]

    # ---- what a run came to ----------------------------------------------------------------------

    @property
    def last_run(self) -> Tally | None:
        """What the scope of this press that was opened last came to; None: there was none."""
        scope = vars(self).get("_last_scope")
        return None if scope is None else scope.tally

    @property
    def compression_count(self) -> int:
        """How often a layer was pruned (the most of all layers) in the scope opened last."""
        return 0 if self.last_run is None else self.last_run.compression_count

    @property
    def evicted_ratio(self) -> float:
        """Share of the tokens that was really evicted in the scope opened last.

        Of those that a layer had seen when it was pruned last, over all layers, heads and rows. Of
        every press: `compression_ratio` is the same of one that is not told a ratio and, once it
        has run, of a composition; elsewhere that is a field, which says what the press is told.
        """
        return 0.0 if self.last_run is None else self.last_run.compression_ratio

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name != "_last_scope"}


def also_needs(cls: type[Press], more: Needs) -> None:
    """Let a class of presses need more than it declares."""
    declared: Any = getattr_static(cls, "needs")
    if isinstance(declared, Needs):
        cls.needs = declared | more  # type: ignore[assignment, method-assign]
    else:
        cls.needs = property(lambda self: declared.fget(self) | more)  # type: ignore[assignment]


@dataclass
class RatioPress(Press):
    """A press that is told what share of the tokens to evict.

    Attributes:
        compression_ratio: share of the tokens that each KV head evicts, in [0, 1); or the `Tokens`
            that it keeps.
    """

    compression_ratio: Amount = amount_field()


@dataclass
class MeasuredPress(Press):
    """A press that holds no ratio: what it evicts is known when it has."""

    @property
    def compression_ratio(self) -> float:
        """Share of the tokens that was evicted in the scope opened last; before, what is asked."""
        run = self.last_run
        return self.requested_ratio if run is None or not run.n_forwards else run.compression_ratio

    @compression_ratio.setter
    def compression_ratio(self, ratio: Amount) -> None:
        vars(self).pop("_last_scope", None)
        vars(self).update(vars(self.with_ratio(ratio)))


_NEEDS = {
    "tokens": "a cache that can lose tokens",
    "own tokens": "heads that can keep tokens of their own",
    "states": "the keys and values of each head",
    "key norms": "keys of different norms",
    "rope": "rotary position embeddings",
    "heads": "heads that can keep different numbers of tokens",
}
"""What a press takes for granted of an attention module, in words."""
