"""Running a model to calibrate presses: means over texts, and scores learned from hidden states."""

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from press_core.call import AttentionCall
from press_core.fields import require_whole
from press_core.forward import current
from press_core.learned.calibration import CalibrationError, LearnedPress
from press_core.model.decoder import device_of, has_encoder
from press_core.model.sites import AttentionSite, n_layers_of
from press_core.traits import Needs

Batch = Tensor | Mapping[str, Tensor]
"""Token ids `(B, S)` int64, or `input_ids` and `attention_mask` of a left-padded batch."""


def run(model: nn.Module, token_batches: Iterable[Batch], collector: Any) -> None:
    """Run `model`, without its language-model head, on all batches in the scope of `collector`."""
    if has_encoder(model):
        raise CalibrationError(f"{type(model).__name__} has an encoder; pass a decoder-only model")
    body = getattr(model, "base_model", model)
    own = collector.changed(only_thread=threading.get_ident())
    with own(model), current.apart("pruning"), torch.no_grad():
        for ids in rows_alone(token_batches):
            body(input_ids=ids.to(device_of(model)), use_cache=True)


def rows_alone(token_batches: Iterable[Batch]) -> Iterator[Tensor]:
    """Token ids `(b, S)` without padding: whole batches if they have none, else row by row."""
    for batch in token_batches:
        given = batch if isinstance(batch, Mapping) else {"input_ids": batch}
        ids, mask = given.get("input_ids"), given.get("attention_mask")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            raise CalibrationError("pass a list of token ids (B, S) or of dicts with input_ids")
        rows = [ids]
        if mask is not None and not bool(mask.all()):
            rows = [row[keep.bool()][None] for row, keep in zip(ids, mask, strict=True)]
        yield from (row for row in rows if row.numel())


class LayerMeans:
    """Running means of tensors per layer; sums stay on the device of the layer.

    Attributes:
        n_layers: number of layers of the whole model.
    """

    def __init__(self) -> None:
        self.n_layers = 0
        self._sums: dict[int, tuple[Any, ...]] = {}  # the count, then the sums

    def add(self, site: AttentionSite, n: int, *sums: Tensor) -> None:
        """Add `sums` over `n` more samples (queries, texts) to those of the layer of `site`."""
        layer, self.n_layers = site.layer_idx, n_layers_of(site)
        new, total = (n, *sums), self._sums.get(layer)
        if n:
            self._sums[layer] = new if total is None else tuple(map(add, total, new))

    def stacked(self, unseen: float = 0.0, because: str = "") -> list[Tensor]:
        """The means of all layers, `(L, ...)` float64 on the CPU.

        Args:
            unseen: fill value for layers that presses do not work on.
            because: why there may be no samples; appended to the error message.

        Raises:
            CalibrationError: if no samples were added.
        """
        if not self._sums:
            raise CalibrationError(f"token_batches holds no token to learn from{because}")
        means = {layer: [x.cpu() / n for x in sums] for layer, (n, *sums) in self._sums.items()}
        return stacked(means, self.n_layers, unseen)


@torch.inference_mode(False)  # inference tensors would let no gradients flow through the result
def stacked(by_layer: Mapping[int, Sequence[Tensor]], n_layers: int, unseen: float) -> list[Tensor]:
    """Tensors by layer, stacked to `(n_layers, ...)` float64; `unseen` fills absent layers."""
    absent = [torch.full_like(x, unseen) for x in next(iter(by_layer.values()))]
    layers = [by_layer.get(layer, absent) for layer in range(n_layers)]
    return [torch.stack(tensors).double() for tensors in zip(*layers, strict=True)]


# ---- scores of tokens, from their hidden states --------------------------------------------------

Scores = Callable[[Any, Tensor], Sequence[Tensor]]
"""A function of a model and token ids `(B, S)` to positive scores `(B, H_kv, S)` for each layer.

Scores of layers that presses do not work on are ignored, and so are tokens with infinite scores.
"""


class Examples:
    """Training examples: hidden states and the scores of their tokens, by layer.

    Attributes:
        max_tokens: maximum number of tokens per layer.
        states: by layer, hidden states of each call, `(n, D)` on the CPU.
        targets: by layer, scores of each call, `(n, H_kv)` float32 on the CPU.
        site: the attention module that was added last.
    """

    site: AttentionSite

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.states: dict[int, list[Tensor]] = {}
        self.targets: dict[int, list[Tensor]] = {}

    @property
    def n_tokens(self) -> int:
        """Number of tokens added so far, in the layer that has the fewest."""
        return min((sum(map(len, of_layer)) for of_layer in self.states.values()), default=0)

    def add(self, scores: Sequence[Tensor], call: AttentionCall) -> None:
        """Add the hidden states of the call's layer.

        Args:
            scores: `(B, H_kv, S)` for each layer of the model.
            call: an attention call over all tokens.

        Raises:
            CalibrationError: if the scores have other shapes.
        """
        self.site, layer = call.site, call.site.layer_idx
        found = [tuple(getattr(x, "shape", ())) for x in ([] if scores is None else scores)]
        shape = tuple(call.keys.shape[:3])
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

    @torch.inference_mode(False)  # autograd cannot use inference tensors
    def fitted(self, learn: Callable[[Tensor, Tensor], Sequence[Tensor]]) -> list[Tensor]:
        """The parameters fitted to each layer's examples, stacked over all layers; float32.

        Args:
            learn: from states `(n, D)` and targets `(n, H_kv)` to the parameters of a layer.

        Raises:
            CalibrationError: if there is no token to learn from.
        """
        if not self.n_tokens:
            raise CalibrationError("token_batches holds no token to learn from")
        with torch.autocast("cpu", enabled=False), torch.device("cpu"):
            learned = {
                layer: learn(torch.cat(states), torch.cat(self.targets[layer]))
                for layer, states in self.states.items()
            }
        return [x.float() for x in stacked(learned, n_layers_of(self.site), 0.0)]


@dataclass
class TaughtPress(LearnedPress):
    """A press whose calibration predicts the scores of a teacher press from hidden states.

    Attributes:
        teacher: class attribute; makes the teacher, KVzip.
        learn: class attribute; from `Examples`, `steps`, `seed` and the keyword arguments `shape`
            of `fit` to the calibration.
    """

    teacher: ClassVar[Callable[..., Any]]
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
        """Train the calibration to predict the scores of tokens from their hidden states.

        The same seed gives the same result on the same device.

        Args:
            model: the model to calibrate; it is not changed.
            token_batches: token ids `(B, S)`, or dicts with `input_ids` and `attention_mask` for
                left-padded batches; padded rows are scored one by one.
            scores: the scores to predict: KVzap fits their logarithm, Fast KVzip scores in [0, 1].
                None: the scores of KVzip+ and of KVzip, which need the model's tokenizer; without
                a tokenizer, pass `KVzipPress(prompts=...).scores`.
            max_tokens: maximum number of tokens; their hidden states are held in memory.
            steps: number of AdamW steps.
            seed: seeds the initial parameters and the batches of tokens.
            shape: shape of the calibration. For KVzap `model_type`, "mlp" or "linear" (ridge
                regression), and `hidden_dim`, the width of the hidden layer (None: an eighth of the
                hidden size). For Fast KVzip `rank`, channels of the gate's queries and keys, and
                `n_base`, number of learned keys that a token's key is compared with (16 each, as in
                the paper).

        Returns:
            The calibration, float32: pass it to the press, or save it beside the model.

        Raises:
            CalibrationError: if there are no tokens, or if scores have the wrong shape, or values
                that the calibration cannot have.
            HyperparameterError: naming the argument, its value and what is allowed.
            TypeError: if the calibration has no such `shape` argument.
        """
        # What does not fit fails before the model is run.
        inspect.signature(cls.learn).bind(None, **shape)
        words = {name: x for name, x in shape.items() if isinstance(x, str)}
        cls(**words)
        numbers = {name: x for name, x in shape.items() if name not in words and x is not None}
        require_whole(1, **numbers)
        require_whole(0, max_tokens=max_tokens, steps=steps, seed=seed)
        scored = cls.teacher().scores if scores is None else scores
        examples = Examples(max_tokens)
        for ids in rows_alone(token_batches):
            ids = ids.to(device_of(model))
            add_states = partial(examples.add, scored(model, ids))
            run(model, [ids], cls.collector(add_states, reads=Needs.NOTHING))
            if examples.n_tokens >= max_tokens:
                break
        return cls.learn(examples, steps=steps, seed=int(seed), **shape)


def trained(
    start: Sequence[Tensor],
    loss_of: Callable[[Sequence[Tensor], Tensor], Tensor],
    n_tokens: int,
    steps: int,
    generator: torch.Generator,
) -> list[Tensor]:
    """Parameters after `steps` of AdamW with a cosine learning-rate schedule down to zero.

    Args:
        start: the initial parameters; they are not changed.
        loss_of: the loss of parameters on the tokens at some indices, `(n,)` int64.
        n_tokens: number of tokens to draw from.
        steps: number of AdamW steps, of at most 512 tokens each.
        generator: draws the tokens of each step.
    """
    parameters = [parameter.float().clone().requires_grad_() for parameter in start]
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
