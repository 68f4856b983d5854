"""KVzap (Jégou and Jeblick, arXiv 2601.07891): hidden states tell which tokens will matter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, mse_loss

from press_core.blocks import rows_at_once
from press_core.calibration import (
    Batch,
    Calibration,
    CalibrationError,
    check_fits,
    find,
    require_given,
)
from press_core.call import AttentionCall
from press_core.examples import Examples, Scores, taught
from press_core.model.sites import AttentionSite
from press_core.press import Needs, Press, RatioScorer, require
from press_core.select import upcast

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

    kind: ClassVar[str] = "a KVzap regressor"
    file_names: ClassVar[tuple[str, ...]] = ("kvzap-mlp.safetensors", "kvzap-linear.safetensors")

    weight: Tensor
    bias: Tensor
    hidden_weight: Tensor | None = None
    hidden_bias: Tensor | None = None

    @property
    def model_type(self) -> Literal["linear", "mlp"]:
        return "linear" if self.hidden_weight is None else "mlp"

    @property
    def file_name(self) -> str:
        return f"kvzap-{self.model_type}.safetensors"

    def check(self) -> None:
        fits = self.weight.dim() == 3 and self.bias.shape == self.weight.shape[:2]
        hidden, bias = self.hidden_weight, self.hidden_bias
        if hidden is not None and bias is not None:
            behind = (self.weight.shape[0], self.weight.shape[-1]) if fits else None
            fits = hidden.dim() == 3 and hidden.shape[:2] == bias.shape == behind
        elif hidden is not bias:
            fits = False
        if not fits:
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in self.tensors.items())
            raise CalibrationError(
                f"{shapes}: they must be weight (L, H_kv, D) and bias (L, H_kv), or weight "
                "(L, H_kv, h), bias (L, H_kv), hidden_weight (L, h, D) and hidden_bias (L, h)"
            )

    @property
    def sizes(self) -> dict[str, int]:
        layers, heads, width = self.weight.shape
        if self.hidden_weight is not None:
            width = self.hidden_weight.shape[-1]
        return {"layers": layers, "kv_heads": heads, "hidden_size": width}

    @classmethod
    def published(cls, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        n_layers = len({name.split(".")[1] for name in tensors})
        names = {"weight": "weight", "bias": "bias"}
        if "layers.0.weight" not in tensors:
            hidden = {"hidden_weight": "0.weight", "hidden_bias": "0.bias"}
            names = {"weight": "2.weight", "bias": "2.bias", **hidden}
        return {
            field: torch.stack([tensors[f"layers.{i}.{name}"] for i in range(n_layers)])
            for field, name in names.items()
        }


@dataclass
class KVzap(RatioScorer):
    """Keeps what a small regressor on the hidden states finds important (arXiv 2601.07891).

    Attributes:
        model_type: which regressor to look for where none is given: "linear", or "mlp" with one
            hidden layer.
        regressor: the regressor of the model (see `fit`), or a file, a folder or a hub id. None:
            the file `kvzap-mlp.safetensors` (or `kvzap-linear.safetensors`) beside the model, or
            what is published for it on the hub.
    """

    model_type: Literal["linear", "mlp"] = "mlp"
    regressor: KVzapRegressor | str | Path | None = None

    independent = True
    needs = Needs.FORWARD

    teacher: ClassVar[Callable[..., Any]]
    """Makes the press whose `scores` are learned, KVzip."""

    def validate(self) -> None:
        super().validate()
        require(self, "model_type", self.model_type in ("linear", "mlp"), '"linear" or "mlp"')
        require_given(self, "regressor", KVzapRegressor)

    def bind(self, model: Any) -> Press:
        regressor = find(
            KVzapRegressor,
            self.regressor,
            model,
            fit=f"{type(self).__name__}.fit(model, token_batches, model_type={self.model_type!r})",
            hub_id=lambda name: f"nvidia/KVzap-{self.model_type}-{name.split('/')[-1]}",
            file_name=f"kvzap-{self.model_type}.safetensors",
        )
        return replace(self, regressor=regressor, model_type=regressor.model_type)

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        assert isinstance(self.regressor, KVzapRegressor)
        check_fits(self.regressor, site)

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
        if scores is None:
            scores = cls.teacher(kvzip_plus_normalization=True).bind(model).scores
        examples = Examples.of(model, token_batches, scores, cls.collector, max_tokens)
        return fit_regressor(examples, model_type, hidden_dim, steps, seed)

    def score_tokens(self, call: AttentionCall) -> Tensor:
        return kvzap_scores(call, self.regressor)


def kvzap_scores(call: AttentionCall, regressor: KVzapRegressor | str | Path | None) -> Tensor:
    """Logarithm of the score that the regressor of the layer gives each key's token.

    A hidden layer is computed in the precision of the hidden states, what follows in float32.

    Returns:
        `(B, H_kv, S)`, float32.
    """
    assert isinstance(regressor, KVzapRegressor)
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
    examples.require_some()
    learned: dict[int, tuple[Tensor, ...]] = {}
    for layer, states in examples.states.items():
        log = [scores.clamp(min=SMALLEST_SCORE).log() for scores in examples.targets[layer]]
        x, y = _Standard.of(states), _Standard.of(log)
        if model_type == "linear":
            learned[layer] = _ridge(x, y)
        else:
            width = hidden_dim or max(1, x.values.shape[1] // 8)
            learned[layer] = _mlp(x, y, width, steps, seed)
    names = ("weight", "bias", "hidden_weight", "hidden_bias")
    return KVzapRegressor(**dict(zip(names, examples.stacked(learned), strict=False)))


@dataclass
class _Standard:
    """Columns of mean zero and variance one, and what they were.

    Attributes:
        values: `(n, columns)` float32.
        mean, scale: `(columns,)` float64.
    """

    values: Tensor
    mean: Tensor
    scale: Tensor

    @classmethod
    @torch.inference_mode(False)  # a tensor of that mode could not be learned from
    def of(cls, parts: list[Tensor]) -> _Standard:
        columns = torch.cat(parts)
        scale, mean = torch.std_mean(columns.double(), dim=0, correction=0)
        scale = torch.where(scale > 0, scale, 1.0)
        return cls(((columns - mean) / scale).float(), mean, scale)


def _unscaled(weight: Tensor, bias: Tensor, x: _Standard) -> tuple[Tensor, Tensor]:
    """Weights of standardised inputs as weights of the inputs as they were, float64."""
    weight = weight.double() / x.scale
    return weight, bias.double() - weight @ x.mean


def _rescaled(weight: Tensor, bias: Tensor, y: _Standard) -> tuple[Tensor, Tensor]:
    """Weights whose outputs are the targets as they were."""
    weight, bias = weight.double(), bias.double()
    return weight * y.scale.unsqueeze(-1), bias * y.scale + y.mean


def _ridge(x: _Standard, y: _Standard, penalty: float = 1e-3) -> tuple[Tensor, Tensor]:
    """Weight `(H_kv, D)` and bias `(H_kv,)` of the ridge regression, in closed form."""
    inputs, targets = x.values.double(), y.values.double()
    gram = inputs.mT @ inputs / len(inputs)
    gram.diagonal().add_(penalty)
    weight = torch.linalg.solve(gram, inputs.mT @ targets / len(inputs)).mT
    weight, bias = _rescaled(weight, torch.zeros(len(weight)), y)
    return _unscaled(weight, bias, x)


def _mlp(x: _Standard, y: _Standard, width: int, steps: int, seed: int) -> tuple[Tensor, ...]:
    """Weight, bias, hidden weight and hidden bias, from `steps` steps of AdamW."""
    generator = torch.Generator().manual_seed(seed)
    (n, n_in), n_out = x.values.shape, y.values.shape[1]
    start = [
        torch.randn(n_out, width, generator=generator) * width**-0.5,
        torch.zeros(n_out),
        torch.randn(width, n_in, generator=generator) * n_in**-0.5,
        torch.zeros(width),
    ]

    def loss_of(parameters: Sequence[Tensor], rows: Tensor) -> Tensor:
        weight, bias, hidden_weight, hidden_bias = parameters
        states = gelu(linear(x.values[rows], hidden_weight, hidden_bias))
        return mse_loss(linear(states, weight, bias), y.values[rows])

    weight, bias, hidden_weight, hidden_bias = taught(start, loss_of, n, steps, generator)
    return *_rescaled(weight, bias, y), *_unscaled(hidden_weight, hidden_bias, x)
