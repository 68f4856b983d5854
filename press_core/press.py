"""What a press is: hyperparameters, what it needs, when it acts, what it evicts, its formula."""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum, Flag, auto
from math import isnan
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor, nn

from press_core.errors import HyperparameterError, PressError, UnsupportedModelError
from press_core.eviction import Eviction
from press_core.model.sites import AttentionSite
from press_core.select import Amount, Tokens, is_amount, n_kept, ratio_of, top_positions

if TYPE_CHECKING:
    from press_core.call import AttentionCall
    from press_core.model.forward import AttentionForward, DecoderForward
    from press_core.scope import Scope, ScopeState


class Needs(Flag):
    """What the formula of a press reads of a model, beyond keys and values."""

    NOTHING = 0
    QUERIES = auto()
    """The exact queries."""
    ROPE = auto()
    """Rotary position embeddings."""
    FORWARD = auto()
    """The hidden states of all tokens that it scores: it cannot score them again later."""
    HIDDEN_STATES = auto()
    """Those of its calls, be they of all tokens or of the latest alone."""


class Evicts(Enum):
    """What a press takes out of a cache layer."""

    NOTHING = "nothing"
    TOKENS = "tokens"
    """As many of each KV head."""
    PER_HEAD = "tokens, per head"
    """Other tokens, and another number, of each KV head."""
    CHANNELS = "channels"
    """Channels of the keys."""

    @property
    def needs_attention(self) -> bool:
        """Whether what is left can be read only by an attention function of its own."""
        return self is Evicts.PER_HEAD or self is Evicts.CHANNELS


class Phase(Flag):
    """When a press acts."""

    NEVER = 0
    PREFILL = auto()
    """After each attention forward that brings a context into an empty layer."""
    DECODING = auto()
    """After all other attention forwards."""
    BEFORE_DECODING = auto()
    """Before them."""
    DECODER = auto()
    """Before and after each forward of the whole decoder."""


class Removable(Protocol):
    """What installing something hands back: a hook's handle, a patch."""

    def remove(self) -> None: ...


@dataclass
class Press:
    """A compression policy: hyperparameters and the formula, whatever installs it.

    ```python
    with press(model):
        model(input_ids, past_key_values=cache)
    handle = press.register(model); handle.remove()    # the same without a block
    ```

    A press holds no state of a run: one press may be open on several models, in several threads or
    twice on one model (the inner scope acts first).

    Attributes:
        mechanism: class attribute; what installs it, "hooks" or "patches".
        needs: class attribute; what it reads of the model.
        evicts: class attribute; what it takes out of a layer.
        phases: class attribute; when it acts.
        row_by_row: class attribute; whether rows of a batch may keep different numbers of tokens.
        buffered_tokens: class attribute; of how many of the last tokens it wants the hidden states
            and queries while decoding.
        rerotates: class attribute; whether kept keys get other positions.
        remembers: class attribute; whether it keeps something of each token; see `remember`.
        reads_states: class attribute; whether it reads keys, values or queries, rather than where
            tokens stand alone.
        alike_per_head: class attribute; whether every KV head keeps the same tokens.
        compares_key_norms: class attribute; whether it goes by the norms of keys alone.
        spans_layers: class attribute; whether layers share its budget, so that it evicts when all
            of them have run.
        prunes_chunks: class attribute; whether it prunes after every chunk of a prefill in chunks,
            rather than once all of it is there.
        acts_here: class attribute; whether forwards of this thread are its business.
    """

    mechanism: ClassVar[str] = ""
    needs: ClassVar[Needs] = Needs.NOTHING
    evicts: ClassVar[Evicts] = Evicts.TOKENS
    phases: ClassVar[Phase] = Phase.PREFILL
    row_by_row: ClassVar[bool] = False
    buffered_tokens: ClassVar[int] = 0
    rerotates: ClassVar[bool] = False
    remembers: ClassVar[bool] = False
    reads_states: ClassVar[bool] = True
    alike_per_head: ClassVar[bool] = False
    compares_key_norms: ClassVar[bool] = False
    spans_layers: ClassVar[bool] = False
    prunes_chunks: ClassVar[bool] = False
    acts_here: ClassVar[bool] = True
    collector: ClassVar[type[Collector]]
    """Shows the calls of a model to a function, by the same mechanism."""

    # ---- hyperparameters -------------------------------------------------------------------------

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check the fields; called when the press is made and whenever a scope opens.

        Raises:
            HyperparameterError: naming the field, its value and what is allowed.
        """
        check_types(self)

    def with_ratio(self, compression_ratio: Amount) -> Press:
        """A copy of this press that evicts another share of the tokens.

        Args:
            compression_ratio: in [0, 1), or the `Tokens` to keep.

        Raises:
            HyperparameterError: if it cannot be told a ratio.
        """
        if "compression_ratio" not in {field.name for field in fields(self)}:
            raise HyperparameterError(
                f"{type(self).__name__} cannot be told a compression ratio; wrap a press with the "
                "field compression_ratio"
            )
        return replace(self, compression_ratio=compression_ratio)  # type: ignore[call-arg]

    def with_budget(self, tokens: int) -> Press:
        """A copy of this press that keeps so many tokens of whatever it is given.

        Args:
            tokens: of each KV head; on average, where heads or layers differ. Contexts of no more
                tokens are left whole.

        Raises:
            HyperparameterError: if it cannot be told how much to keep.
        """
        return self.with_ratio(Tokens(tokens))

    @property
    def amount(self) -> Amount:
        """What it is told to evict, a share of the tokens or all but so many; 0: nothing told."""
        return 0.0

    def ratio_of(self, length: int) -> float:
        """Share of `length` tokens that it is told to evict."""
        return ratio_of(length, self.amount)

    # ---- opening it on a model -------------------------------------------------------------------

    def __call__(self, model: nn.Module) -> Scope:
        """The scope `with press(model): ...`; nothing is installed before it is entered."""
        from press_core.scope import Scope

        return Scope(self, model)

    def register(self, model: nn.Module) -> Scope:
        """Open the scope at once; `remove()` on what is returned closes it (again: no effect)."""
        scope = self(model)
        scope.open()
        return scope

    def remove(self) -> None:
        """Close the scope of this press that was opened last, if it is open."""
        if self.last_scope is not None:
            self.last_scope.close()

    @property
    def last_scope(self) -> ScopeState | None:
        """What the scope of this press that was opened last has learned; None: there was none."""
        return vars(self).get("_last_scope")

    @property
    def compression_count(self) -> int:
        """How often a layer was pruned (the most of all layers) in the scope opened last."""
        return 0 if self.last_scope is None else self.last_scope.compression_count

    @property
    def evicted_ratio(self) -> float:
        """Share of the tokens that was really evicted in the scope opened last.

        Of those that a layer had seen when it was pruned last, over all layers, heads and rows. Of
        every press: `compression_ratio` is the same of one that is not told a ratio and, once it
        has run, of a composition; elsewhere that is a field, which says what the press is told.
        """
        return 0.0 if self.last_scope is None else self.last_scope.compression_ratio

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_last_scope"}

    def post_init_from_model(self, model: nn.Module) -> None:
        """Fill in what depends on the model; called when a scope opens."""

    def bind(self, model: nn.Module) -> Press:
        """The press as it acts on `model`: itself, or a copy with what depends on the model."""
        return self

    def check_site(self, site: AttentionSite) -> None:
        """Refuse an attention module that the press cannot work on, before anything is installed.

        Raises:
            UnsupportedModelError: saying what is missing and what to use instead.
        """
        for need in self.needs_of_a_site():
            if need in site.refusals:
                raise UnsupportedModelError(
                    f"{type(self).__name__} needs {_NEEDS[need]}, and {site.refusals[need]}"
                )
        if Needs.ROPE in self.needs and site.rotary is None:
            raise UnsupportedModelError(
                f"{type(self).__name__} needs rotary position embeddings, and "
                f"{type(site.module).__name__} ({site.name}) has none; SnapKVPress and KnormPress "
                "work on any model"
            )
        if self._moves_earlier_keys and site.rotary is not None and site.rotary.in_3d:
            raise UnsupportedModelError(
                f"{type(self).__name__} rotates keys of earlier forwards, and "
                f"{type(site.module).__name__} ({site.name}) gives images positions in three "
                "dimensions, which nobody knows any more then; KeyRerotationPress can rotate those "
                "of the context as it comes"
            )

    @property
    def _moves_earlier_keys(self) -> bool:
        return Phase.BEFORE_DECODING in self.phases and Needs.ROPE in self.needs

    def needs_of_a_site(self) -> Iterator[str]:
        """What it takes for granted of an attention module: keys of `AttentionSite.refusals`."""
        if self.evicts is not Evicts.NOTHING:
            yield "tokens"
        if self.reads_states or not self.alike_per_head:
            yield "own tokens"
        if self.reads_states:
            yield "states"
        if self.compares_key_norms:
            yield "key norms"
        if Needs.ROPE in self.needs:
            yield "rope"
        if self.evicts.needs_attention:
            yield "heads"

    def install(self, scope: ScopeState) -> None:
        """Install the press on the model of `scope`, which takes it off again."""
        raise NotImplementedError

    def after(self, module: nn.Module, act: Callable[[tuple[Any, ...], Any], Any]) -> Removable:
        """Call `act(args, output)` after each forward of `module`, by this press's mechanism.

        What it returns stands for the output, unless it is None.

        Returns:
            What takes it off again.
        """
        raise NotImplementedError

    @property
    def is_at_attention(self) -> bool:
        """Whether it has to be told of each attention forward: to act, or to help with reading.

        What a press around the decoder leaves of tokens may differ from layer to layer, which the
        model's one mask does not fit.
        """
        return bool(self.phases & ~Phase.DECODER) or self.evicts is Evicts.TOKENS

    @property
    def reads_queries(self) -> bool:
        """Whether it reads the queries of the attention forwards that it is told of."""
        return Needs.QUERIES in self.needs and bool(self.phases & ~Phase.DECODER)

    @property
    def in_own_words(self) -> bool:
        """Whether a subclass decides in the words of its mechanism, and may read what they tell."""
        return False

    @property
    def reads_hidden_states(self) -> bool:
        """Whether it reads the hidden states of its calls."""
        return bool(self.needs & (Needs.FORWARD | Needs.HIDDEN_STATES)) or self.in_own_words

    @property
    def reads_forwards(self) -> bool:
        """Whether it reads anything of the forwards that brought the tokens: not keys alone."""
        return Needs.QUERIES in self.needs or self.reads_hidden_states

    # ---- deciding --------------------------------------------------------------------------------

    def is_long_enough(self, length: int) -> bool:
        """Whether a context of `length` tokens is long enough; a shorter one is left whole."""
        return True

    def budget(self, call: AttentionCall) -> int:
        """How many of the tokens of `call` each KV head keeps, on average where heads differ."""
        return call.budget or call.length

    def evicts_of(self, length: int) -> bool:
        """Whether it may evict something of a context of `length` tokens."""
        return self.is_long_enough(length)

    def leaves_whole(self, call: AttentionCall) -> bool:
        """Whether there is nothing to choose."""
        length = call.length
        return self.budget(call) >= length or not self.is_long_enough(length)

    def decide(self, call: AttentionCall) -> Eviction:
        """The formula: what is left of `call`."""
        raise NotImplementedError(f"{type(self).__name__} says nowhere what it keeps")

    def evict(self, call: AttentionCall) -> Eviction:
        """`decide`, or what a subclass put in its place in the words of its mechanism."""
        raise NotImplementedError

    def remember(self, call: AttentionCall) -> Mapping[str, Tensor]:
        """What to keep of each token, asked after each forward in whose phase the press acts.

        Kept with the cache layer for as long as the scope is open; tokens that are evicted or taken
        back take theirs along. `call.memory` then holds it.

        Args:
            call: the forward, whose `memory` is what was returned last, zeros for new tokens (and
                empty the first time).

        Returns:
            By name, `(B, H_kv, S)`, the same names each time.
        """
        return {}

    def is_due(self, n_steps: int, n_new: int) -> bool:
        """Whether to prune after `n_steps` decoding steps, the last of `n_new` tokens."""
        return True

    # ---- acting around forwards ------------------------------------------------------------------

    def before_attention(self, scope: ScopeState, forward: AttentionForward) -> None:
        """Called before each attention forward on a filled layer, in `Phase.BEFORE_DECODING`."""

    def before_decoder(self, scope: ScopeState, forward: DecoderForward) -> DecoderForward:
        """Called before each forward of the decoder, in `Phase.DECODER`.

        Returns:
            The forward with the arguments that the decoder is to get.
        """
        return forward

    def after_decoder(self, scope: ScopeState, forward: DecoderForward, output: Any) -> None:
        """Called after each forward of the decoder, in `Phase.DECODER`."""


@dataclass
class TokenScorer(Press):
    """A press that gives each token a score and keeps the best.

    Attributes:
        independent: class attribute; whether a token's score depends on no other token.
    """

    independent: ClassVar[bool] = False

    def score_tokens(self, call: AttentionCall) -> Tensor:
        """The formula: scores `(B, H_kv, S)`, floating point, the higher the better."""
        raise NotImplementedError(f"{type(self).__name__} says nowhere how it scores tokens")

    def token_scores(self, call: AttentionCall) -> Tensor:
        """`score_tokens`, or what a subclass put in its place in the words of its mechanism."""
        raise NotImplementedError

    def decide(self, call: AttentionCall) -> Eviction:
        if self.leaves_whole(call):
            return Eviction.nothing(call)
        return Eviction.keep(call, top_positions(self.token_scores(call), self.budget(call)))

    def checked(self, call: AttentionCall, scores: Any) -> Tensor:
        """`scores` as `score` returned them, if tokens can be ranked by them.

        Raises:
            PressError: naming the press and what it should have returned.
        """
        expected, name = tuple(call.keys.shape[:3]), type(self).__name__
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            given = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
            raise PressError(
                f"{name}.score returned {given}; scores are a floating-point tensor "
                f"(B, H_kv, S), here {expected}"
            )
        if scores.shape != expected:
            raise PressError(
                f"{name}.score returned scores of shape {tuple(scores.shape)}; one is due for each "
                f"KV head and token, (B, H_kv, S), here {expected}"
            )
        # NaN would be the best of all. The sum tells in a third of the time that there is none.
        if isnan(scores.sum()) and bool(scores.isnan().any()):
            raise PressError(
                f"{name}.score returned NaN for some tokens of {call.site.name}, which has no rank "
                "among numbers; -inf evicts a token first, inf last"
            )
        return scores


@dataclass
class RatioPress(Press):
    """A press that is told what share of the tokens to evict.

    Attributes:
        compression_ratio: share of the tokens that each KV head evicts, in [0, 1); or the `Tokens`
            that it keeps.
    """

    compression_ratio: Amount = 0.0

    def validate(self) -> None:
        super().validate()
        fits = is_amount(self.compression_ratio)
        require(self, "compression_ratio", fits, "a number in [0, 1), or the Tokens to keep")

    @property
    def amount(self) -> Amount:
        return self.compression_ratio

    def evicts_of(self, length: int) -> bool:
        return super().evicts_of(length) and n_kept(length, self.compression_ratio) < length

    def budget(self, call: AttentionCall) -> int:
        return call.budget or n_kept(call.context_length, self.compression_ratio)


@dataclass
class MeasuredPress(Press):
    """A press that is not told a ratio: what it evicts is known when it has."""

    @property
    def compression_ratio(self) -> float:
        """Share of the tokens that was evicted in the scope opened last."""
        return self.evicted_ratio


@dataclass
class RatioScorer(RatioPress, TokenScorer):
    """Keeps, per KV head, the `n = max(1, int(S * (1 - compression_ratio)))` best-scored tokens."""


@dataclass
class Collector(Press):
    """Shows the call of every attention module to a function, and evicts nothing.

    Attributes:
        see: what to show it to; rows of different padding are shown one after the other, without.
        reads: what the calls are to hold.
        decoding: whether to show forwards that find their layer filled, rather than prefills.
        thread: whose forwards are shown; None: all.
    """

    see: Callable[[AttentionCall], Any]
    reads: Needs = Needs.QUERIES
    decoding: bool = False
    thread: int | None = None

    evicts = Evicts.NOTHING

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return self.reads

    @property
    def phases(self) -> Phase:  # type: ignore[override]
        return Phase.DECODING if self.decoding else Phase.PREFILL

    @property
    def acts_here(self) -> bool:  # type: ignore[override]
        return self.thread is None or self.thread == threading.get_ident()

    def decide(self, call: AttentionCall) -> Eviction:
        self.see(call)
        return Eviction.nothing(call)


_NEEDS = {
    "tokens": "a cache that can lose tokens",
    "own tokens": "heads that can keep tokens of their own",
    "states": "the keys and values of each head",
    "key norms": "keys of different norms",
    "rope": "rotary position embeddings",
    "heads": "heads that can keep different numbers of tokens",
}
"""What a press takes for granted of an attention module, in words."""


def require(press: Any, field: str, holds: bool, allowed: str) -> None:
    """Raise a `HyperparameterError` about `field` of `press` unless `holds`."""
    if not holds:
        value = getattr(press, field)
        raise HyperparameterError(
            f"{type(press).__name__}({field}={_shown(value)}): {field} must be {allowed}"
        )


_PLAIN: dict[str, tuple[type, ...]] = {
    "int": (Integral,),
    "float": (Real,),
    "bool": (bool,),
    "str": (str,),
    "None": (type(None),),
}
"""By annotation, the types of the values that a field takes."""

_NAMES = {"int": "a whole number", "float": "a number", "bool": "True or False", "str": "a string"}


def check_types(press: Any) -> None:
    """Refuse values of other types than the fields of `press` are annotated with.

    Fields of plain types alone, for others have their press to check them; but no field is a model.

    Raises:
        HyperparameterError: naming the field, its value and what was meant.
    """
    for field in fields(press):
        value, name = getattr(press, field.name), type(press).__name__
        if isinstance(value, nn.Module) and value is not field.default:
            meant = "a press is made first and opened on the model then"
            require(press, field.name, False, f"no model: {meant}, as in {name}(...)(model)")
        types = _plain_types(field.type)
        if types is None or value is field.default:
            continue
        is_bool = isinstance(value, bool) and "bool" not in types
        fits = not is_bool and isinstance(value, tuple(t for n in types for t in _PLAIN[n]))
        allowed = " or ".join(_NAMES.get(n, n) for n in types)
        require(press, field.name, fits, f"{allowed}, not a {type(value).__name__}")


def _plain_types(annotation: Any) -> list[str] | None:
    """The names of which `annotation` is the union; None if one of them is not plain."""
    written = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if written.startswith("Literal["):
        return ["str"]
    names = [name.strip() for name in written.split("|")]
    return names if all(name in _PLAIN for name in names) else None


def _shown(value: Any) -> str:
    """`value` in an error message: a model or a table has no place there."""
    if isinstance(value, nn.Module):
        return f"<a {type(value).__name__}>"
    return reprlib.repr(value)
