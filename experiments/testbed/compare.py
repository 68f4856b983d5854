"""One model, one input, two presses: do both leave the same bits?

```python
inputs = Inputs.random(model.config.vocab_size, lengths=(64, 40), question=5, steps=2)
difference = compare(model, hooks_impl.SnapKVPress(0.5), patch_impl.SnapKVPress(0.5), inputs)
print(difference or "the same bits")
```

Bits are compared, not numbers: a NaN equals itself, and 0.0 does not equal -0.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

import hooks_impl
import patch_impl
from experiments.testbed.families import VOCABULARY
from press_core import PressError, RaggedLayer
from press_core.scope import InstalledPress

Presses = InstalledPress | Sequence[InstalledPress]
"""A press, or presses for nested scopes, the outermost first."""


class PressPair(NamedTuple):
    """The same press with both mechanisms."""

    hook: InstalledPress
    patch: InstalledPress


def pair(name: str, **fields: Any) -> PressPair:
    """The press registered as `name`, with both mechanisms and the same fields.

    A field that is a pair, or a list of pairs, is replaced by the press of the same mechanism.

    Raises:
        KeyError: if no press has that name.
        HyperparameterError: if a field is out of range.
    """
    hook = {field: of_mechanism(value, 0) for field, value in fields.items()}
    patch = {field: of_mechanism(value, 1) for field, value in fields.items()}
    return PressPair(hooks_impl.PRESSES[name](**hook), patch_impl.PRESSES[name](**patch))


def of_mechanism(value: Any, side: int) -> Any:
    """`value` with pairs replaced by their press of one mechanism: 0 for hooks, 1 for patches."""
    if isinstance(value, PressPair):
        return value[side]
    if isinstance(value, list) and any(isinstance(item, PressPair) for item in value):
        return [of_mechanism(item, side) for item in value]
    return value


@dataclass(frozen=True)
class Inputs:
    """The inputs of the forwards in a scope: the context to prune, and the forwards after it.

    Attributes:
        context: `(B, S)` int64 token ids.
        following: token ids of the forwards after the prefill, each `(B, q)` int64: a question of
            several tokens, then decode steps of one token.
        attention_mask: `(B, S)` int64, 0 at left padding; None without padding.
    """

    context: Tensor
    following: tuple[Tensor, ...] = ()
    attention_mask: Tensor | None = None

    @classmethod
    def random(
        cls,
        vocab_size: int,
        lengths: Sequence[int],
        question: int = 4,
        steps: int = 2,
        seed: int = 0,
        distinct: bool = False,
    ) -> Inputs:
        """Random token ids of 3 and more, which excludes padding, start and end tokens.

        Args:
            vocab_size: number of token ids, more than 3.
            lengths: tokens of each row; shorter rows are padded on the left.
            question: tokens of the forward after the prefill; 0 for none.
            steps: decode steps after that, of one token each.
            distinct: draw no token twice within a row's context (`max(lengths) <= vocab_size - 3`).
        """
        generator = torch.Generator().manual_seed(seed)
        batch, longest = len(lengths), max(lengths)

        def drawn(width: int) -> Tensor:
            return torch.randint(3, vocab_size, (batch, width), generator=generator)

        context = drawn(longest)
        if distinct:
            rows = [torch.randperm(vocab_size - 3, generator=generator) for _ in lengths]
            context = 3 + torch.stack(rows)[:, :longest]
        following = [drawn(width) for width in [question] * (question > 0) + [1] * steps]
        padding = longest - torch.tensor(lengths)
        mask = (torch.arange(longest) >= padding[:, None]).long() if padding.any() else None
        return cls(context, tuple(following), mask)

    def with_delimiter(self, token_id: int, question: int) -> Inputs:
        """The same inputs with the token `token_id` in the context of each row, `question` tokens
        before its end, or after the first token in shorter rows."""
        last, mask = self.context.shape[1] - 1, self.attention_mask
        lengths = (torch.ones_like(self.context) if mask is None else mask).sum(dim=-1)
        place = last - (lengths - 1).clamp(max=question)
        at = torch.arange(len(place)), place.clamp(max=last - 1)
        context = self.context.index_put(at, torch.tensor(token_id))
        mask = None if mask is None else mask.index_put(at, torch.tensor(1))
        return replace(self, context=context, attention_mask=mask)

    @property
    def n_tokens(self) -> int:
        """Number of tokens in all forwards, without padding."""
        context = self.context.numel() if self.attention_mask is None else self.attention_mask.sum()
        return int(context) + sum(ids.numel() for ids in self.following)

    def forwards(self, device: torch.device) -> Iterator[dict[str, Tensor]]:
        """Arguments of each forward, with the masks and positions that `generate` would pass."""
        past = 0
        for ids in (self.context, *self.following):
            arguments = {"input_ids": ids}
            past += ids.shape[1]
            if self.attention_mask is not None:
                new = torch.ones(len(ids), past - self.context.shape[1], dtype=torch.int64)
                mask = torch.cat((self.attention_mask, new), dim=1)
                positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
                arguments |= {"attention_mask": mask, "position_ids": positions}
            yield {name: tensor.to(device) for name, tensor in arguments.items()}


class LayerState(NamedTuple):
    """The contents of a cache layer at one moment.

    Attributes:
        kind: class name of the layer.
        seen: number of tokens that the layer has seen.
        positions: `(B, H_kv, n_pruned)` int32, see `PrunedLayer`; None if nothing was pruned or the
            press did not report kept positions. Heads of different lengths are right-aligned.
        keys, values: `(B, H_kv, n, d)`.
    """

    kind: str
    seen: int
    positions: Tensor | None
    keys: Tensor
    values: Tensor

    def position(self, row: int, head: int, slot: int) -> int:
        """Position in the sequence, padding included, of the token in `slot`.

        Without reported positions, and for tokens appended after pruning, it is computed from the
        number of slots after it.
        """
        if self.positions is not None and slot < self.positions.shape[-1]:
            return int(self.positions[row, head, slot])
        return slot + self.seen - self.keys.shape[2]


_NAMES = ("kinds of layer", "tokens seen", "kept positions", "keys", "values")
"""Names of the fields of a `LayerState` in a `Difference`."""


class Trace(NamedTuple):
    """The results of a run.

    Attributes:
        pruned: the layers of the cache after the prefill.
        final: the layers of the cache at the end.
        logits: `(B, q, vocabulary)` for each forward.
    """

    pruned: list[LayerState]
    final: list[LayerState]
    logits: list[Tensor]


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs.

    Attributes:
        where: what differs, and when.
        hook_value, patch_value: the values of the two runs.
        layer, row, head: indices of the first difference; None if they do not apply.
        position: position in the sequence, padding included; None if it does not apply.
    """

    where: str
    hook_value: int | float | str
    patch_value: int | float | str
    layer: int | None = None
    row: int | None = None
    head: int | None = None
    position: int | None = None

    def __str__(self) -> str:
        indices = {name: getattr(self, name) for name in ("layer", "row", "head", "position")}
        named = ", ".join(f"{name} {at}" for name, at in indices.items() if at is not None)
        first = f" differ first at {named}" if named else " differ"
        return f"{self.where}{first}: hook {self.hook_value}, patch {self.patch_value}"


def compare(
    model: PreTrainedModel, hook: Presses, patch: Presses, inputs: Inputs
) -> Difference | None:
    """Run `model` on `inputs` inside the scope of one press, then of the other, and compare.

    The cache after the prefill (kind of each layer, tokens seen, slots, positions, keys, values),
    the logits of every forward, and the cache at the end are compared bit for bit.

    Args:
        model: unchanged afterwards.
        hook, patch: the press with each mechanism, or the same number of presses for nested scopes,
            the outermost first.

    Returns:
        The first difference, or None. A press error with only one mechanism is a difference too.

    Raises:
        PressError: if both mechanisms raise it.
    """
    runs: list[Trace | PressError] = []
    for presses in (hook, patch):
        try:
            runs.append(run(model, presses, inputs))
        except PressError as refusal:
            runs.append(refusal)
    first, second = runs
    if isinstance(first, Trace) and isinstance(second, Trace):
        return next(_differences(first, second), None)
    if isinstance(first, PressError) and type(first) is type(second):
        raise first
    ends = ("runs" if isinstance(r, Trace) else f"{type(r).__name__}: {r}" for r in runs)
    return Difference("refusals", next(ends), next(ends))


def run(model: PreTrainedModel, presses: Presses, inputs: Inputs) -> Trace:
    """Run `model` on `inputs` inside the scope of `presses`.

    Torch's global generator is seeded with 0 for the run and restored afterwards.
    """
    pruned: list[LayerState] = []
    logits = []
    cache = DynamicCache(config=model.config)
    with ExitStack() as scopes, torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        for press in presses if isinstance(presses, Sequence) else [presses]:
            scopes.enter_context(press(model))
        for arguments in inputs.forwards(model.device):
            logits.append(model(**arguments, past_key_values=cache, use_cache=True).logits)
            pruned = pruned or _states(cache)
    return Trace(pruned, _states(cache), logits)


def _states(cache: Cache) -> list[LayerState]:
    """States without copies of tensors, as layers replace their tensors when they grow."""
    return [_state(layer) for layer in cache.layers]


def _state(layer: Any) -> LayerState:
    # Layers with linear attention have no states, and those that share another's no length.
    states: list[Any] = [getattr(layer, name, None) for name in ("keys", "values", "positions")]
    keys, values, positions = states
    if isinstance(layer, RaggedLayer):
        keys, values, positions = layer.dense()
    seen = int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else 0
    return LayerState(type(layer).__name__, seen, positions, keys, values)


def _differences(hook: Trace, patch: Trace) -> Iterator[Difference]:
    """All differences, in the order in which they arose."""
    yield from _between_caches("after the prefill", hook.pruned, patch.pruned)
    past = 0
    for index, logits in enumerate(zip(hook.logits, patch.logits, strict=False)):
        forward = f"forward {index} after the prefill" if index else "the prefill"
        if at := _first_unequal(*logits):
            mine, theirs = (float(of_one[tuple(at)]) for of_one in logits)
            place = {"row": at[0], "position": past + at[1]}
            yield Difference(f"logits of {forward}", mine, theirs, **place)
        past += logits[0].shape[1]
    yield from _between_caches("at the end", hook.final, patch.final)


def _between_caches(
    when: str, hook: list[LayerState], patch: list[LayerState]
) -> Iterator[Difference]:
    if len(hook) != len(patch):
        yield Difference(f"numbers of layers {when}", len(hook), len(patch))
    for layer, states in enumerate(zip(hook, patch, strict=False)):
        for what, *of_both in zip(_NAMES, *states, strict=True):
            both: list[Any] = of_both
            kinds = [each if isinstance(each, (int, str)) else _shape(each) for each in both]
            if kinds[0] != kinds[1]:
                shapes = "" if kinds == both else "shapes of the "
                yield Difference(f"{shapes}{what} {when}", kinds[0], kinds[1], layer)
            elif isinstance(both[0], Tensor) and (at := _first_unequal(*both)):
                values = [of_one[tuple(at)].item() for of_one in both]
                position = states[0].position(*at[:3])
                if what == "kept positions":
                    # Only one run kept the smaller position; -1 marks an empty slot.
                    position = max(values) if min(values) < 0 else min(values)
                found = values[0], values[1], layer, at[0], at[1], position
                yield Difference(f"{what} {when}", *found)


def _shape(states: Tensor | None) -> str:
    return "none" if states is None else f"{tuple(states.shape)} {states.dtype}"


def _first_unequal(hook: Tensor, patch: Tensor) -> list[int] | None:
    """Index of the first element whose bits differ, in the order of the dimensions."""
    first, second = (states.contiguous().view(torch.uint8) for states in (hook, patch))
    if torch.equal(first, second):
        return None
    *at, byte = (first != second).nonzero()[0].tolist()
    return [*at, byte // hook.element_size()]


# ---- a model's response against the expected one -------------------------------------------------


@dataclass(frozen=True)
class Response:
    """Logits of some forwards, and the contents of the cache after them.

    Attributes:
        logits: `(1, q, vocabulary)` for each forward; any tensors if the model returns no logits.
        states: keys and values of each layer of the cache, `(1, H_kv, n, d)`.
        seen: number of tokens that each layer has seen; empty if not compared.
    """

    logits: Sequence[Tensor]
    states: Sequence[Tensor] = ()
    seen: Sequence[int] = ()

    def difference(self, other: Response, tolerance: float = 0.0) -> str:
        """A short description of how `other` differs; empty if it does not.

        Args:
            tolerance: allowed difference of numbers, as a share of the largest; 0 for equal values.
        """
        mine, theirs = ([states.shape for states in each.states] for each in (self, other))
        if mine != theirs:
            slots = ([shape[2] for shape in shapes[::2]] for shapes in (theirs, mine))
            return "layers hold {} slots, not {}".format(*slots)
        if self.seen != other.seen:
            return f"has seen {max(other.seen)} tokens, not {max(self.seen)}"
        for what in ("logits", "states"):
            for own, its in zip(getattr(self, what), getattr(other, what), strict=True):
                off = float((own - its).abs().max() / own.abs().max())
                if not (torch.equal(own, its) or off <= tolerance):
                    return f"{what} off by {off:.2g} of the largest"
        return ""


def states_of(cache: Cache) -> list[Tensor]:
    """Copies of the keys and values of each layer; ragged layers are padded to the longest head."""
    return [states.clone() for layer in _states(cache) for states in (layer.keys, layer.values)]


def random_tokens(length: int) -> Tensor:
    """Random token ids `(1, length)`, the same on every call."""
    return Inputs.random(VOCABULARY, [length]).context
