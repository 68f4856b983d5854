"""KVzap (Jégou and Jeblick, arXiv 2601.07891): hidden states tell which tokens will matter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, mse_loss

from press_core.call import AttentionCall
from press_core.fields import choice
from press_core.learned.calibration import Calibration, learned, of_layers, sized
from press_core.learned.running import Batch, Examples, Scores, TaughtPress, taught
from press_core.scoring import RatioScorer
from press_core.select import upcast
from press_core.tiles import rows_at_once
from press_core.traits import Needs

SMALLEST_SCORE = 1e-8
"""Scores below are taken for this one, for their logarithm is learned."""


@dataclass(frozen=True, eq=False, repr=False)
class KVzapRegressor(Calibration):
    """Per layer, a function from hidden states to the logarithm of a score per KV head.

    Linear, or with one hidden layer of `h` GELUs.

    Attributes:
        weight: `(L, H_kv, D)`, or `(L, H_kv, h)` behind a hidden layer.
        bias: `(L, H_kv)`.
        hidden_weight, hidden_bias: `(L, h, D)` and `(L, h)`, or None.
    """

    kind = "a KVzap regressor"
    file_names = ("kvzap-mlp.safetensors", "kvzap-linear.safetensors")

    weight: Tensor = sized("layers kv_heads width")
    bias: Tensor = sized("layers kv_heads")
    hidden_weight: Tensor | None = sized("layers width hidden_size", default=None)
    hidden_bias: Tensor | None = sized("layers width", default=None)

    @property
    def model_type(self) -> Literal["linear", "mlp"]:
        return "linear" if self.hidden_weight is None else "mlp"

    @property
    def file_name(self) -> str:
        return f"kvzap-{self.model_type}.safetensors"

    def dims(self) -> dict[str, str]:
        linear = {"weight": "layers kv_heads hidden_size", "bias": "layers kv_heads"}
        return linear if self.model_type == "linear" else super().dims()

    @classmethod
    def published(cls, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
        names = {"weight": "weight", "bias": "bias"}
        if "layers.0.weight" not in tensors:
            hidden = {"hidden_weight": "0.weight", "hidden_bias": "0.bias"}
            names = {"weight": "2.weight", "bias": "2.bias", **hidden}
        return {field: of_layers(tensors, name) for field, name in names.items()}


@dataclass
class KVzap(TaughtPress, RatioScorer):
    """Keeps what a small regressor on the hidden states finds important (arXiv 2601.07891).

    Attributes:
        model_type: which regressor to look for where none is given: "linear", or "mlp" with one
            hidden layer.
        regressor: the regressor of the model (see `fit`), or a file, a folder or a hub id. None:
            the file `kvzap-mlp.safetensors` (or `kvzap-linear.safetensors`) beside the model, or
            what is published for it on the hub.
    """

    model_type: Literal["linear", "mlp"] = choice("mlp", ("linear", "mlp"))
    regressor: KVzapRegressor | str | Path | None = learned(KVzapRegressor)

    independent = True
    needs = Needs.FORWARD

    def file_names(self) -> tuple[str, ...]:
        return (f"kvzap-{self.model_type}.safetensors",)

    def hub_id(self, model_name: str) -> str:
        return f"nvidia/KVzap-{self.model_type}-{model_name.split('/')[-1]}"

    @classmethod
    def fit(
        cls,
        model: Any,
        token_batches: Iterable[Batch],
        scores: Scores | None = None,
        *,
        model_type: Literal["linear", "mlp"] = "mlp",
        hidden_dim: int | None = None,
        max_tokens: int = 32_768,
        steps: int = 2_000,
        seed: int = 0,
    ) -> KVzapRegressor:
        """Learn to tell the scores of tokens from their hidden states.

        The same seed gives the same regressor on the same device.

        Args:
            model: left as it was.
            token_batches: token ids `(B, S)`, or dicts with `input_ids` and `attention_mask` where
                rows are padded on the left; those rows are scored one by one.
            scores: what to learn; their logarithm is learned. None: the scores of KVzip+.
            model_type: "linear" (ridge regression), or "mlp" (AdamW).
            hidden_dim: width of the hidden layer; None: an eighth of the hidden states'.
            max_tokens: tokens to learn from, at most; their hidden states are held in memory.
            steps: of AdamW.
            seed: of what the hidden layer starts from, and of the batches of tokens.

        Returns:
            The regressor, float32: to hand over as `regressor`, or to save beside the model.

        Raises:
            CalibrationError: if there is no token to learn from, or if scores have another shape.
        """
        plus = {"kvzip_plus_normalization": True}
        examples = cls.examples(model, token_batches, scores, max_tokens, **plus)
        return fit_regressor(examples, model_type, hidden_dim, steps, seed)

    def score(self, call: AttentionCall) -> Tensor:
        return kvzap_scores(call, call.prepared(self))


def kvzap_scores(call: AttentionCall, regressor: KVzapRegressor) -> Tensor:
    """Logarithm of the score that the regressor of the layer gives each key's token.

    A hidden layer is computed in the precision of the hidden states, what follows in float32.

    Returns:
        `(B, H_kv, S)`, float32.
    """
    states = call.hidden_states
    parts = states.split(rows_at_once(states, states[:, :1].numel()), dim=1)
    scores = [_logarithms(part, regressor, call.site.layer_idx) for part in parts]
    return call.align_to_keys(torch.cat(scores, dim=1).mT)


def _logarithms(states: Tensor, regressor: KVzapRegressor, layer: int) -> Tensor:
    """Of tokens with hidden states `(B, q, D)`, `(B, q, H_kv)`."""
    if regressor.hidden_weight is not None and regressor.hidden_bias is not None:
        hidden = regressor.hidden_weight[layer].to(states), regressor.hidden_bias[layer].to(states)
        states = gelu(linear(states, *hidden))
    states = upcast(states)
    weight, bias = regressor.weight[layer].to(states), regressor.bias[layer].to(states)
    return linear(states, weight, bias)


# ---- learning ------------------------------------------------------------------------------------


def fit_regressor(
    examples: Examples,
    model_type: Literal["linear", "mlp"],
    hidden_dim: int | None,
    steps: int,
    seed: int,
) -> KVzapRegressor:
    """The regressor that comes closest to the examples, layer by layer.

    Raises:
        CalibrationError: if there are none.
    """

    def learn(states: Tensor, targets: Tensor) -> list[Tensor]:
        x = _Standard.of(states)
        y = _Standard.of(targets.clamp(min=SMALLEST_SCORE).log())
        if model_type == "linear":
            layers = [_ridge(x.values, y.values)]
        else:
            width = hidden_dim or max(1, states.shape[1] // 8)
            layers = _mlp(x.values, y.values, width, steps, seed)
        # What was standardised is folded into the weights; outputs come first.
        weight, bias = layers[0]
        layers[0] = weight * y.scale.unsqueeze(-1), bias * y.scale + y.mean
        weight, bias = layers[-1]
        layers[-1] = weight / x.scale, bias - (weight / x.scale) @ x.mean
        return [x for layer in layers for x in layer]

    names = ("weight", "bias", "hidden_weight", "hidden_bias")
    return KVzapRegressor(**dict(zip(names, examples.taught(learn), strict=False)))


class _Standard(NamedTuple):
    """Columns of mean zero and variance one, and what they were.

    Attributes:
        values: `(n, columns)` float32.
        mean, scale: `(columns,)` float64.
    """

    values: Tensor
    mean: Tensor
    scale: Tensor

    @classmethod
    def of(cls, columns: Tensor) -> _Standard:
        scale, mean = torch.std_mean(columns.double(), dim=0, correction=0)
        scale = torch.where(scale > 0, scale, 1.0)
        return cls(((columns - mean) / scale).float(), mean, scale)


def _ridge(x: Tensor, y: Tensor, penalty: float = 1e-3) -> tuple[Tensor, Tensor]:
    """Weight `(H_kv, D)` and bias `(H_kv,)` of the ridge regression, in closed form, float64."""
    inputs, targets = x.double(), y.double()
    gram = inputs.mT @ inputs / len(inputs)
    gram.diagonal().add_(penalty)
    weight = torch.linalg.solve(gram, inputs.mT @ targets / len(inputs)).mT
    return weight, weight.new_zeros(len(weight))


def _mlp(x: Tensor, y: Tensor, width: int, steps: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of the output and of the hidden layer, float64, from `steps` of AdamW."""
    generator = torch.Generator().manual_seed(seed)
    (n, n_in), n_out = x.shape, y.shape[1]
    start = [
        torch.randn(n_out, width, generator=generator) * width**-0.5,
        torch.zeros(n_out),
        torch.randn(width, n_in, generator=generator) * n_in**-0.5,
        torch.zeros(width),
    ]

    def loss_of(parameters: Sequence[Tensor], rows: Tensor) -> Tensor:
        weight, bias, hidden_weight, hidden_bias = parameters
        states = gelu(linear(x[rows], hidden_weight, hidden_bias))
        return mse_loss(linear(states, weight, bias), y[rows])

    learned = [x.double() for x in taught(start, loss_of, n, steps, generator)]
    return [(learned[0], learned[1]), (learned[2], learned[3])]
