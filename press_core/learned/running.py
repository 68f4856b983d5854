"""Running a model to learn about it: means over texts, and the scores of tokens by their states."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from press_core.call import AttentionCall
from press_core.learned.calibration import CalibrationError, LearnedPress
from press_core.model.decoder import device_of
from press_core.model.sites import AttentionSite, n_layers_of
from press_core.traits import Needs

Batch = Tensor | Mapping[str, Tensor]
"""Token ids `(B, S)` int64, or `input_ids` and `attention_mask` of a left-padded batch."""


def run(model: nn.Module, token_batches: Iterable[Batch], collector: Any) -> None:
    """Run `model` on all batches inside the scope of `collector`, without the head on top."""
    body = getattr(model, "base_model", model)
    with collector(model), torch.no_grad():
        for ids in rows_alone(token_batches):
            body(input_ids=ids.to(device_of(model)), use_cache=True)


def rows_alone(token_batches: Iterable[Batch]) -> Iterator[Tensor]:
    """Token ids `(b, S)` without padding: batches that have none, and else row by row."""
    for batch in token_batches:
        if not isinstance(batch, Mapping):
            yield batch
            continue
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        if mask is None or bool(mask.all()):
            yield ids
        else:
            yield from (row[keep.bool()][None] for row, keep in zip(ids, mask, strict=True))


class LayerMeans:
    """Means of what the layers of a model make of texts, kept where each layer is.

    Attributes:
        n_layers: of the whole model.
    """

    def __init__(self) -> None:
        self.n_layers = 0
        self._sums: dict[int, tuple[Any, ...]] = {}  # first how many there were

    def add(self, site: AttentionSite, n: int, *sums: Tensor) -> None:
        """Take in the sums over `n` more queries, texts or the like."""
        layer, self.n_layers = site.layer_idx, n_layers_of(site)
        now, before = (n, *sums), self._sums.get(layer)
        if n:
            self._sums[layer] = now if before is None else tuple(map(add, before, now))

    def stacked(self, unseen: float = 0.0, because: str = "") -> list[Tensor]:
        """The means of all layers, `(L, ...)` float64 on the CPU.

        Args:
            unseen: what stands for layers that no press works on.
            because: why there may be nothing to learn from, for the error.

        Raises:
            CalibrationError: if nothing was taken in.
        """
        if not self._sums:
            raise CalibrationError(f"token_batches holds no token to learn from{because}")
        means = {layer: [x.cpu() / n for x in sums] for layer, (n, *sums) in self._sums.items()}
        return stacked(means, self.n_layers, unseen)


@torch.inference_mode(False)  # gradients are to flow through what is learned, too
def stacked(
    by_layer: Mapping[int, Sequence[Tensor]], n_layers: int, unseen: float = 0.0
) -> list[Tensor]:
    """Tensors by layer as tensors `(n_layers, ...)` over all layers, float64."""
    some = next(iter(by_layer.values()))
    whole = [torch.full((n_layers, *x.shape), unseen, dtype=torch.float64) for x in some]
    for layer, tensors in by_layer.items():
        for of_all, tensor in zip(whole, tensors, strict=True):
            of_all[layer] = tensor
    return whole


# ---- scores of tokens, from their hidden states --------------------------------------------------

Scores = Callable[[Any, Tensor], Sequence[Tensor]]
"""From a model and token ids `(B, S)` to positive scores `(B, H_kv, S)` for each of its layers.

Those of layers that no press works on are not looked at, nor are tokens of infinite score.
"""


class Examples:
    """Hidden states and the scores of their tokens, by layer.

    Attributes:
        max_tokens: how many are taken in, at most.
        states: by layer, `(n, D)` each.
        targets: by layer, `(n, H_kv)` float32 each.
        site: of a layer that they are of.
    """

    site: AttentionSite

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.states: dict[int, list[Tensor]] = {}
        self.targets: dict[int, list[Tensor]] = {}

    @property
    def n_tokens(self) -> int:
        """How many there are."""
        return max((sum(map(len, of_layer)) for of_layer in self.states.values()), default=0)

    def add(self, scores: Sequence[Tensor], call: AttentionCall) -> None:
        """Take in the hidden states of a layer, with `scores` `(B, H_kv, S)` for each layer."""
        self.site, layer = call.site, call.site.layer_idx
        found, shape = [tuple(x.shape) for x in scores], tuple(call.keys.shape[:3])
        if len(found) != n_layers_of(self.site) or found[layer] != shape:
            raise CalibrationError(
                f"scores of shapes {found} for a model of {n_layers_of(self.site)} layers: "
                f"that of layer {layer} must be {shape}"
            )
        states, targets = self.states.setdefault(layer, []), self.targets.setdefault(layer, [])
        room = self.max_tokens - sum(map(len, states))
        scored = scores[layer].detach().float().mT.flatten(0, 1)
        finite = scored.isfinite().all(dim=-1).nonzero()[:room, 0]
        states.append(call.hidden_states.detach().flatten(0, 1)[finite].cpu())
        targets.append(scored[finite].cpu())

    @torch.inference_mode(False)  # a tensor of that mode could not be learned from
    def taught(self, learn: Callable[[Tensor, Tensor], Sequence[Tensor]]) -> list[Tensor]:
        """What is learned layer by layer, stacked over all layers; float32.

        Args:
            learn: from states `(n, D)` and targets `(n, H_kv)` to what is learned.

        Raises:
            CalibrationError: if there is no token to learn from.
        """
        if not self.n_tokens:
            raise CalibrationError("token_batches holds no token to learn from")
        learned = {
            layer: learn(torch.cat(states), torch.cat(self.targets[layer]))
            for layer, states in self.states.items()
        }
        return [x.float() for x in stacked(learned, n_layers_of(self.site))]


@dataclass
class TaughtPress(LearnedPress):
    """A press that has learned the scores of another from hidden states.

    Attributes:
        teacher: class attribute; makes the press whose `scores` are learned, KVzip.
        of_teacher: class attribute; the fields of that.
        learn: class attribute; from `Examples`, `steps`, a `seed` and what else `fit` was told to
            what is learned.
    """

    teacher: ClassVar[Callable[..., Any]]
    of_teacher: ClassVar[Mapping[str, Any]] = {}
    learn: ClassVar[Callable[..., Any]]

    @classmethod
    def fit(
        cls,
        model: Any,
        token_batches: Iterable[Batch],
        scores: Scores | None = None,
        *,
        max_tokens: int = 32_768,
        steps: int = 2_000,
        seed: int = 0,
        **shape: Any,
    ) -> Any:
        """Learn to tell the scores of tokens from their hidden states.

        The same seed teaches the same on the same device.

        Args:
            model: left as it was.
            token_batches: token ids `(B, S)`, or dicts with `input_ids` and `attention_mask` where
                rows are padded on the left; those rows are scored one by one.
            scores: what to learn: KVzap their logarithm, Fast KVzip scores in [0, 1]. None: the
                scores of KVzip+ and of KVzip, which need the model's tokenizer; without one,
                `KVzipPress(prompts=...).scores`.
            max_tokens: tokens to learn from, at most; their hidden states are held in memory.
            steps: of AdamW.
            seed: of what the learned numbers start from, and of the batches of tokens.
            shape: of what is learned. For KVzap `model_type`, "mlp" or "linear" (ridge regression),
                and `hidden_dim`, the width of the hidden layer (None: an eighth of the hidden
                states'). For Fast KVzip `rank`, channels of the gate's queries and keys, and
                `n_base`, keys that those of tokens are compared with (16 each, as in the paper).

        Returns:
            What was learned, float32: to hand over as the field of the press, or to save beside the
            model.

        Raises:
            CalibrationError: if there is no token to learn from, or if scores have another shape.
            TypeError: if what is learned has no such `shape`.
        """
        inspect.signature(cls.learn).bind(None, **shape)  # before the model is run for long
        scored = cls.teacher(**cls.of_teacher).scores if scores is None else scores
        examples = Examples(max_tokens)
        for ids in rows_alone(token_batches):
            ids = ids.to(device_of(model))
            see = partial(examples.add, scored(model, ids))
            run(model, [ids], cls.collector(see, reads=Needs.NOTHING))
            if examples.n_tokens >= max_tokens:
                break
        return cls.learn(examples, steps=steps, seed=seed, **shape)


def taught(
    start: Sequence[Tensor],
    loss_of: Callable[[Sequence[Tensor], Tensor], Tensor],
    n_tokens: int,
    steps: int,
    generator: torch.Generator,
) -> list[Tensor]:
    """Parameters after some steps of AdamW, whose rate falls to zero along a cosine.

    Args:
        start: the parameters to begin with; left as they are.
        loss_of: the loss of parameters on some tokens, given by their indices `(n,)` int64.
        n_tokens: how many there are.
        generator: draws the tokens of each step.
    """
    parameters = [parameter.clone().requires_grad_() for parameter in start]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    with torch.enable_grad():
        for _ in range(steps):
            rows = torch.randint(n_tokens, (min(512, n_tokens),), generator=generator)
            loss = loss_of(parameters, rows)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return [parameter.detach() for parameter in parameters]
