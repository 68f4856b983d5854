"""KVzap (Jégou and Jeblick, arXiv 2601.07891): a regressor predicts scores from hidden states."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, mse_loss

from press_core.call import AttentionCall
from press_core.learned.calibration import Calibration, called, learned, sized
from press_core.learned.running import Examples, TaughtPress, trained
from press_core.scoring import RatioScorer
from press_core.select import upcast
from press_core.tiles import rows_at_once
from press_core.traits import Needs

SMALLEST_SCORE = 1e-8
"""Lower scores are clamped to this one before their logarithm is taken."""


@dataclass(frozen=True, eq=False, repr=False)
class KVzapRegressor(Calibration):
    """Per layer, a regressor from hidden states to the logarithm of a score per KV head.

    It is linear, or has one hidden layer of `h` GELU units.

    Attributes:
        weight: `(L, H_kv, D)`, or `(L, H_kv, h)` after a hidden layer.
        bias: `(L, H_kv)`.
        hidden_weight, hidden_bias: `(L, h, D)` and `(L, h)`, or None.
    """

    kind = "a KVzap regressor"
    file_names = ("kvzap-mlp.safetensors", "kvzap-linear.safetensors")

    weight: Tensor = sized("layers kv_heads width", "layers.*.2.weight")
    bias: Tensor = sized("layers kv_heads", "layers.*.2.bias")
    hidden_weight: Tensor | None = sized(
        "layers width hidden_size", "layers.*.0.weight", default=None
    )
    hidden_bias: Tensor | None = sized("layers width", "layers.*.0.bias", default=None)

    @property
    def model_type(self) -> Literal["linear", "mlp"]:
        return "linear" if self.hidden_weight is None else "mlp"

    @property
    def file_name(self) -> str:
        return f"kvzap-{self.model_type}.safetensors"

    def dims(self) -> dict[str, str]:
        linear = {"weight": "layers kv_heads hidden_size", "bias": "layers kv_heads"}
        return linear if self.model_type == "linear" else super().dims()

    def logarithms(self, states: Tensor, layer: int) -> Tensor:
        """Log-scores of tokens with hidden states `(B, q, D)`: `(B, q, H_kv)`, float32.

        The hidden layer runs in the precision of the hidden states, the output layer in float32.
        """
        if self.hidden_weight is not None and self.hidden_bias is not None:
            hidden = self.hidden_weight[layer].to(states), self.hidden_bias[layer].to(states)
            states = gelu(linear(states, *hidden))
        states = upcast(states)
        return linear(states, self.weight[layer].to(states), self.bias[layer].to(states))

    @classmethod
    def published(cls, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
        if "layers.0.weight" in tensors:
            return {name: called(tensors, f"layers.*.{name}") for name in ("weight", "bias")}
        return super().published(tensors, folder)


# ---- learning ------------------------------------------------------------------------------------


def fit_regressor(
    examples: Examples,
    model_type: Literal["linear", "mlp"] = "mlp",
    hidden_dim: int | None = None,
    steps: int = 2_000,
    seed: int = 0,
) -> KVzapRegressor:
    """Fit the regressors of all layers to the logarithms of the examples' scores.

    Args:
        model_type: "linear" (ridge regression in closed form) or "mlp".
        hidden_dim: width of the hidden layer; None: an eighth of the hidden size.
        steps: number of AdamW steps per layer, for "mlp".
        seed: seeds the initial parameters and the batches of tokens, for "mlp".

    Raises:
        CalibrationError: if there are no examples.
    """

    def learn(states: Tensor, targets: Tensor) -> list[Tensor]:
        x, x_mean, x_scale = _standardised(states)
        y, y_mean, y_scale = _standardised(targets.clamp(min=SMALLEST_SCORE).log())
        width = hidden_dim or max(1, states.shape[1] // 8)
        found = _ridge(x, y) if model_type == "linear" else _mlp(x, y, width, steps, seed)
        # The standardisation is folded into the weights; the output layer comes first.
        found[:2] = found[0] * y_scale.unsqueeze(-1), found[1] * y_scale + y_mean
        weight = found[-2] / x_scale
        found[-2:] = weight, found[-1] - weight @ x_mean
        return found

    return KVzapRegressor(*examples.fitted(learn))


def _standardised(columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Columns `(n, m)` z-scored, in float32; their means and deviations, `(m,)` float64."""
    scale, mean = torch.std_mean(columns.double(), dim=0, correction=0)
    scale = torch.where(scale > 0, scale, 1.0)
    return ((columns - mean) / scale).float(), mean, scale


def _ridge(x: Tensor, y: Tensor, penalty: float = 1e-3) -> list[Tensor]:
    """Weight `(H_kv, D)` and bias `(H_kv,)` of a ridge regression in closed form, float64."""
    inputs, targets = x.double(), y.double()
    gram = inputs.mT @ inputs / len(inputs)
    gram.diagonal().add_(penalty)
    weight = torch.linalg.solve(gram, inputs.mT @ targets / len(inputs)).mT
    return [weight, weight.new_zeros(len(weight))]


def _mlp(x: Tensor, y: Tensor, width: int, steps: int, seed: int) -> list[Tensor]:
    """Weight and bias of the output layer and of the hidden layer, float64, trained with AdamW."""
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

    return [x.double() for x in trained(start, loss_of, n, steps, generator)]


# ---- the press -----------------------------------------------------------------------------------


@dataclass
class KVzap(RatioScorer, TaughtPress):
    """Keeps the tokens for which a regressor predicts the highest scores (KVzap, arXiv 2601.07891).

    A small regressor per layer predicts, from a token's hidden state, the logarithm of its KVzip+
    score for each KV head. Scores are absolute and each depends on one token only, so the press
    suits a threshold: `DMSPress(KVzapPress(), threshold)`.

    Attributes:
        compression_ratio: share of the tokens that each KV head evicts, in [0, 1), or the `Tokens`
            that it keeps.
        model_type: the regressor to look for if none is given: "linear", or "mlp" with one hidden
            layer.
        regressor: the regressor of the model (see `fit`), its file, folder or hub id. None: the
            file `kvzap-mlp.safetensors` (or `kvzap-linear.safetensors`) beside the model, or the
            one published for it on the hub.
    """

    model_type: Literal["linear", "mlp"] = "mlp"
    regressor: KVzapRegressor | str | Path | None = learned(KVzapRegressor)

    independent = True
    needs = Needs.FORWARD
    learn = staticmethod(fit_regressor)

    def file_names(self) -> tuple[str, ...]:
        return (f"kvzap-{self.model_type}.safetensors",)

    def hub_id(self, model_name: str) -> str:
        return f"nvidia/KVzap-{self.model_type}-{model_name.split('/')[-1]}"

    def score(self, call: AttentionCall) -> Tensor:
        """Predicted logarithm of the score of each key's token."""
        regressor, states = call.prepared(self), call.hidden_states
        parts = states.split(rows_at_once(states, states[:, :1].numel()), dim=1)
        scores = [regressor.logarithms(part, call.site.layer_idx) for part in parts]
        return call.align_to_keys(torch.cat(scores, dim=1).mT)
