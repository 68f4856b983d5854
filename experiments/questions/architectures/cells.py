"""One cell of the sweep: a press, by one mechanism, on one model under one set of conditions."""

import copy
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import hooks_impl
import patch_impl
from experiments.framework.wording import in_one_line
from experiments.questions.architectures import reference
from experiments.questions.architectures.decoders import with_image
from experiments.questions.architectures.reference import FullRun, Layer, call_at
from press_core import PressError

LENGTH, PADDING, RATIO = 24, 8, 0.5
MECHANISMS = {"hook": hooks_impl, "patch": patch_impl}
TOLERANCE = 2e-3
"""Largest difference of logits, in standard deviations, that counts as rounding."""

OUTCOMES = (
    *("right", "refused at open", "refused late", "crash", "wrong", "false warning"),
    "not applicable",
)


@dataclass(frozen=True)
class Subject:
    """A press of the sweep.

    Attributes:
        make: makes the press from `hooks_impl` or `patch_impl`.
        scores: the expected scores, by which it should choose; None if it should evict nothing.
        headwise: whether heads share one budget.
        moves: whether it rerotates kept keys to new positions.
    """

    make: Callable[[Any], Any]
    scores: Callable[..., Tensor] | None
    headwise: bool = False
    moves: bool = False


# ---- the expected scores of each press, computed from a full run ---------------------------------


def sinks_and_recent(run: FullRun, layer: Layer) -> Tensor:
    """StreamingLLM: the first four tokens, then the most recent ones."""
    scores = torch.arange(layer.length, dtype=torch.float32)
    scores[:4] = float("inf")
    return scores.expand(layer.keys.shape[:3])


def key_norms(run: FullRun, layer: Layer) -> Tensor:
    """Knorm: keys of small norm score high."""
    return -layer.keys.norm(dim=-1)


def lag_variation(run: FullRun, layer: Layer, sink: int = 2, lag: int = 4) -> Tensor:
    """LagKV: the variation of a block's keys and values, scaled by the range of the next block."""
    scores = torch.full(layer.keys.shape[:3], float("inf"))
    n_blocks = (layer.length - sink) // lag
    for head in range(layer.keys.shape[1]):
        for block in range(n_blocks - 1):
            start, end = sink + block * lag, sink + (block + 1) * lag
            total = torch.zeros(lag)
            for states in (layer.keys[0, head], layer.values[0, head]):
                next_block = states[end : end + lag]
                low, high = next_block.amin(dim=0), next_block.amax(dim=0)
                scaled = (states[start:end] - low) / (high - low)
                total += scaled.std(dim=-1).softmax(dim=0) / 2
            scores[0, head, start:end] = total.argsort().argsort() / lag
    return scores


def window_votes(run: FullRun, layer: Layer, window: int = 4) -> Tensor:
    """SnapKV: the mean attention of the last queries, pooled over neighbouring keys."""
    assert layer.call.weights is not None
    before = layer.length - window
    votes = layer.call.weights[:, :, -window:, :before].float().mean(dim=2)
    pooled = avg_pool1d(layer.grouped(votes), 5, stride=1, padding=2)
    return pad(pooled, (0, window), value=float("inf"))


def expected_attention(run: FullRun, layer: Layer, sink: int = 2, future: int = 4) -> Tensor:
    """ExpectedAttention: the expected attention of Gaussian queries at future positions.

    Queries are averaged over the future positions, by running the attention module at each.
    """
    given = layer.call.arguments.get("position_ids")
    start = layer.length if given is None else int(given.max()) + 1
    if run.rope_delta is not None:
        start = layer.length + run.rope_delta
    positions = range(start, start + future)
    queries = torch.stack([call_at(run, layer, p).query for p in positions]).mean(dim=0)
    queries = queries[:, :, sink:].double()
    mean = queries.mean(dim=2)
    centred = queries - mean.unsqueeze(2)
    covariance = centred.mT @ centred / queries.shape[2]
    keys = layer.keys[:, layer.heads, sink:].double()
    d = keys.shape[-1]
    logits = (keys @ mean.unsqueeze(-1)).squeeze(-1) / d**0.5
    logits = logits + ((keys @ covariance) * keys).sum(dim=-1) / (2 * d)
    scores = layer.grouped(logits.softmax(dim=-1)) * layer.values[:, :, sink:].norm(dim=-1)
    return pad(scores, (sink, 0), value=float("inf"))


SUBJECTS = {
    "nothing evicted": Subject(lambda of: of.KnormPress(0.0), None),
    "StreamingLLM": Subject(lambda of: of.StreamingLLMPress(RATIO), sinks_and_recent),
    "Knorm": Subject(lambda of: of.KnormPress(RATIO), key_norms),
    "LagKV": Subject(lambda of: of.LagKVPress(RATIO, n_sink=2, lag_size=4), lag_variation),
    "SnapKV": Subject(lambda of: of.SnapKVPress(RATIO, window_size=4), window_votes),
    "ExpectedAttention": Subject(
        lambda of: of.ExpectedAttentionPress(RATIO, n_future_positions=4, n_sink=2),
        expected_attention,
    ),
    "KeyRerotation(Knorm)": Subject(
        lambda of: of.KeyRerotationPress(of.KnormPress(RATIO)), key_norms, moves=True
    ),
    "AdaKV(SnapKV)": Subject(
        lambda of: of.AdaKVPress(of.SnapKVPress(RATIO, window_size=4)), window_votes, headwise=True
    ),
}
"""The presses of the sweep by name, one for each kind of input that a press can read."""


class Cell(NamedTuple):
    """One press, by one mechanism, under one set of conditions.

    Attributes:
        attention: the attention implementation.
        cache: "default" (the model creates its cache) or "DynamicCache()".
        padded: whether the context is a row of a left-padded batch.
    """

    press: str
    mechanism: str
    attention: str
    cache: str
    padded: bool


def cells() -> Iterator[Cell]:
    """All cells of one model; batches are padded only with the default cache."""
    conditions = [("default", False), ("DynamicCache()", False), ("default", True)]
    every = itertools.product(("eager", "sdpa"), conditions, MECHANISMS, SUBJECTS)
    for attention, (cache, padded), mechanism, press in every:
        yield Cell(press, mechanism, attention, cache, padded)


class NotApplicableError(Exception):
    """The model does not support what a cell tests, even without a press."""


class Bench:
    """One model with its full run and its reference logits, shared by all cells.

    Args:
        image: whether the context contains an image.

    Raises:
        NotApplicableError: if the model does not run on text (and the image) alone.
    """

    def __init__(self, model: Any, image: bool = False) -> None:
        self.image = image
        generator = torch.Generator().manual_seed(1)
        ids = 5 + torch.randperm(90, generator=generator)[: LENGTH + 4][None]
        ids = with_image(model, ids) if image else ids
        self.ids, self.steps = ids[:, :LENGTH], [ids[:, LENGTH:-1], ids[:, -1:]]
        self._with_positions = True
        once = lru_cache(None)
        self._failure = once(self._find_failure)
        self._scores = once(lambda formula, index: formula(self.run, self.run.layers[index]))
        self._model = once(self._find_model)
        self._known: dict[tuple[Any, ...], list[Tensor]] = {}
        try:
            self.run = reference.run_in_full(model, self.ids)
            self.plain = self._logits(model, None)[0]
        except Exception as error:
            what = "text and an image" if image else "text alone"
            raise NotApplicableError(f"does not run on {what}: {in_one_line(error)}") from error

    def distinct(self, cells: Iterable[Cell]) -> Iterable[Cell]:
        """`cells` without repetitions: the model's own cache may be like a `DynamicCache()`."""
        layers = getattr(self.run.cache, "layers", [None])
        alike = all(type(layer) is DynamicLayer for layer in layers)
        return dict.fromkeys(cell._replace(cache="default") if alike else cell for cell in cells)

    def outcome(self, cell: Cell) -> tuple[str, str]:
        """One of `OUTCOMES` for `cell`, and the reason, empty if it is right."""
        if reason := self._failure(cell.attention, cell.cache, cell.padded):
            return "not applicable", reason
        model = self._model(cell.attention)
        scope = SUBJECTS[cell.press].make(MECHANISMS[cell.mechanism])(model)
        try:
            scope.open()
        except PressError as error:
            return "refused at open", in_one_line(error)
        except Exception as error:
            return "crash", f"at open: {in_one_line(error)}"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                wrong = self._inside(cell, model, scope)
            except PressError as error:
                return "refused late", in_one_line(error)
            except Exception as error:
                return "crash", in_one_line(error)
            finally:
                scope.remove()
        if wrong:
            return "wrong", wrong
        ours = [str(w.message) for w in caught if "Press" in str(w.message)]
        return ("false warning", ours[0]) if ours else ("right", "")

    # ---- the model without a press ---------------------------------------------------------------

    def _find_model(self, attention: str) -> Any:
        model: Any = copy.deepcopy(self.run.model)
        model.set_attn_implementation(attention)
        return model

    def _find_failure(self, attention: str, cache: str, padded: bool) -> str:
        """How the model without a press fails under these conditions; empty if it does not."""
        what = "padding" if padded else f"{attention} attention, {cache} cache"
        differs = f"{what} makes a difference without a press too"
        try:
            model = self._model(attention)
            if not padded:
                logits, _ = self._logits(model, _cache(cache))
                return "" if _difference(logits, self.plain) < TOLERANCE else differs
            for with_positions in (False,) if self.image else (True, False):
                self._with_positions = with_positions
                if not self._padded_apart(model):
                    return ""
            return differs
        except Exception as error:
            return f"without a press: {in_one_line(error)}"

    def _logits(self, model: Any, cache: Any) -> tuple[list[Tensor], Any]:
        """The logits of the context and of each step, and a copy of the cache after the context."""
        first = reference.feed(model, self.ids, cache)
        left = copy.deepcopy(reference.cache_of(first))
        steps = [reference.feed(model, ids, reference.cache_of(first)) for ids in self.steps]
        return [first.logits, *(step.logits for step in steps)], left

    def _padded_apart(self, model: Any) -> str:
        """How the padded row of a batch differs from that row alone; empty if it does not."""
        short = self.ids[:, PADDING:]
        batch = torch.cat((self.ids, torch.cat((0 * self.ids[:, :PADDING], short), dim=1)))
        mask = torch.ones_like(batch)
        mask[1, :PADDING] = 0
        together = self._padded_logits(model, batch, mask)
        alone = self._padded_logits(model, short, torch.ones_like(short))
        difference = _difference([row[1:, -1:] for row in together], [row[:, -1:] for row in alone])
        off = f"a padded row is off by {difference:.2g} deviations"
        return off if difference > TOLERANCE else ""

    def _padded_logits(self, model: Any, ids: Tensor, mask: Tensor) -> list[Tensor]:
        cache, logits = None, []
        for new in (ids, self.steps[0].expand(len(ids), -1)):
            if cache is not None:
                mask = torch.cat((mask, torch.ones_like(new)), dim=1)
            more = {"attention_mask": mask}
            accepted = inspect.signature(type(model).forward).parameters
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -new.shape[1] :]
            delta = getattr(getattr(model, "model", None), "rope_deltas", None)
            if self.image and cache is not None and delta is not None:
                more["position_ids"] = positions + delta  # as `generate` passes them
            elif self._with_positions and "position_ids" in accepted:
                more["position_ids"] = positions
            output = reference.feed(model, new, cache, **more)
            cache = reference.cache_of(output)
            logits.append(output.logits)
        return logits

    # ---- the model with a press ------------------------------------------------------------------

    def _inside(self, cell: Cell, model: Any, scope: Any) -> str:
        """What is wrong with the model's results in the open `scope`; empty if nothing is."""
        if cell.padded:
            return self._padded_apart(model)
        logits, cache = self._logits(model, _cache(cell.cache))
        scope.remove()
        if _difference(logits[:1], self.plain[:1]) > TOLERANCE:
            return "the logits of the context itself have changed"
        subject = SUBJECTS[cell.press]
        try:
            kept = self._kept(cache)
        except LookupError as error:
            return str(error)
        if wrong := self._wrongly_kept(subject, kept):
            return wrong
        expected = self._expected(kept, subject.moves) if kept else self.plain[1:]
        difference = _difference(logits[1:], expected)
        return f"logits are off by {difference:.2g} deviations" if difference > TOLERANCE else ""

    def _kept(self, cache: Any) -> dict[int, Tensor]:
        """The kept tokens of each layer that has evicted some."""
        left = {
            index: reference.tokens_left(layer, reference.layers_of(cache)[index])
            for index, layer in self.run.layers.items()
        }
        return {index: kept for index, kept in left.items() if not kept.all()}

    def _wrongly_kept(self, subject: Subject, kept: dict[int, Tensor]) -> str:
        if subject.scores is None:
            return "evicts at ratio 0" if kept else ""
        if not kept:
            return "evicts nothing"
        n = max(1, int(LENGTH * (1 - RATIO)))
        for index, of_layer in kept.items():
            scores = self._scores(subject.scores, index)
            if wrong := reference.wrongly_kept(of_layer, scores, n, subject.headwise):
                return f"layer {index}: {wrong}"
        return ""

    def _expected(self, kept: dict[int, Tensor], moves: bool) -> list[Tensor]:
        key = moves, *((index, left.numpy().tobytes()) for index, left in kept.items())
        if key not in self._known:
            self._known[key] = reference.logits_after(self.run, kept, self.steps, moves)
        return self._known[key]


def _cache(name: str) -> Any:
    return DynamicCache() if name == "DynamicCache()" else None


def _difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference of logits, in standard deviations of the expected ones."""
    return max(
        float((f - e).abs().max() / e.std()) if f.isfinite().all() else float("inf")
        for f, e in zip(found, expected, strict=True)
    )
