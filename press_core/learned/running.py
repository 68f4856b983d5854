"""Running a model to learn about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from press_core.call import AttentionCall
from press_core.learned.calibration import CalibrationError
from press_core.model.decoder import device_of
from press_core.model.sites import AttentionSite, n_layers_of
from press_core.traits import Needs

Batch = Tensor | Mapping[str, Tensor]
"""Token ids `(B, S)` int64, or `input_ids` and `attention_mask` of a left-padded batch."""


def run(model: nn.Module, token_batches: Iterable[Batch], collector: Any) -> None:
    """Run `model` on all batches inside the scope of `collector`, without the head on top.

    Rows of a padded batch get the positions that they have by themselves.
    """
    body = getattr(model, "base_model", model)
    with collector(model), torch.no_grad():
        for batch in token_batches:
            inputs = batch if isinstance(batch, Mapping) else {"input_ids": batch}
            mask = inputs.get("attention_mask")
            if mask is not None and "position_ids" not in inputs:
                positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
                inputs = {**inputs, "position_ids": positions}
            device = device_of(model)
            body(**{name: x.to(device) for name, x in inputs.items()}, use_cache=True)


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
        self._counts: dict[int, int] = {}
        self._sums: dict[int, tuple[Tensor, ...]] = {}

    def add(self, site: AttentionSite, n: int, *sums: Tensor) -> None:
        """Take in the sums over `n` more queries, texts or the like."""
        layer, self.n_layers = site.layer_idx, n_layers_of(site)
        before = self._sums.get(layer)
        self._sums[layer] = sums if before is None else tuple(map(torch.add, before, sums))
        self._counts[layer] = self._counts.get(layer, 0) + n

    def stacked(self, unseen: float = 0.0, because: str = "") -> list[Tensor]:
        """The means of all layers, `(L, ...)` float64 on the CPU.

        Args:
            unseen: what stands for layers that no press works on.
            because: why there may be nothing to learn from, for the error.

        Raises:
            CalibrationError: if nothing was taken in.
        """
        if not any(self._counts.values()):
            raise CalibrationError(f"token_batches holds no token to learn from{because}")
        means = {
            layer: [x.cpu() / max(1, self._counts[layer]) for x in sums]
            for layer, sums in self._sums.items()
        }
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


def query_moments(
    collector: Callable[..., Any],
    model: Any,
    token_batches: Iterable[Batch],
    queries_of: Callable[[AttentionCall], Tensor],
    reads: Needs,
) -> list[Tensor]:
    """First and second moment of queries, `(L, H, d)` and `(L, H, d, d)` float64 on the CPU.

    Args:
        queries_of: the queries `(B, H, n, d)` of a call.
        reads: what that needs.

    Raises:
        CalibrationError: if there was no query at all.
    """
    means = LayerMeans()

    def see(call: AttentionCall) -> None:
        of_head = queries_of(call).double().transpose(0, 1).flatten(1, 2)  # (H, B * n, d)
        means.add(call.site, of_head.shape[1], of_head.sum(dim=1), of_head.mT @ of_head)

    run(model, token_batches, collector(see, reads=reads))
    return means.stacked()
