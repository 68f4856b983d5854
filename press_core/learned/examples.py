"""Learning the scores of tokens from their hidden states, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.learned.calibration import CalibrationError
from press_core.learned.running import Batch, rows_alone, run, stacked
from press_core.model.decoder import device_of
from press_core.model.sites import AttentionSite, n_layers_of
from press_core.traits import Needs

Scores = Callable[[Any, Tensor], Sequence[Tensor]]
"""From a model and token ids `(B, S)` to positive scores `(B, H_kv, S)` for each of its layers.

Those of layers that no press works on are not looked at, nor are tokens of infinite score.
"""


class Examples:
    """Hidden states and the scores of their tokens, by layer.

    Attributes:
        max_tokens: how many are taken in, at most.
        n_tokens: how many there are.
        states: by layer, `(n, D)` each.
        targets: by layer, `(n, H_kv)` float32 each.
        site: of a layer that they are of.
    """

    site: AttentionSite

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens, self.n_tokens = max_tokens, 0
        self.states: dict[int, list[Tensor]] = {}
        self.targets: dict[int, list[Tensor]] = {}
        self._seen: list[AttentionCall] = []

    @classmethod
    def of(
        cls,
        model: Any,
        token_batches: Iterable[Batch],
        scores: Scores,
        collector: Callable[..., Any],
        max_tokens: int,
    ) -> Examples:
        """What `model` makes of some texts, with the `scores` of their tokens.

        Raises:
            CalibrationError: if scores have another shape.
        """
        examples = cls(max_tokens)
        for ids in rows_alone(token_batches):
            ids = ids.to(device_of(model))
            run(model, [ids], collector(examples.see, reads=Needs.NOTHING))
            examples.label(scores(model, ids))
            if examples.full:
                break
        return examples

    @property
    def full(self) -> bool:
        return self.n_tokens >= self.max_tokens

    def see(self, call: AttentionCall) -> None:
        """Take in the hidden states of a layer, to be labelled."""
        self._seen.append(call)

    def label(self, scores: Sequence[Tensor]) -> None:
        """Add the tokens seen last, with their scores `(B, H_kv, S)` for each layer."""
        n_before = self.n_tokens
        for call in self._seen:
            self.site, layer = call.site, call.site.layer_idx
            found, shape = [tuple(x.shape) for x in scores], tuple(call.keys.shape[:3])
            if len(found) != n_layers_of(self.site) or found[layer] != shape:
                raise CalibrationError(
                    f"scores of shapes {found} for a model of {n_layers_of(self.site)} layers: "
                    f"that of layer {layer} must be {shape}"
                )
            targets = scores[layer].detach().float().mT.flatten(0, 1)
            finite = targets.isfinite().all(dim=-1).nonzero()[: self.max_tokens - n_before, 0]
            states = call.hidden_states.detach().flatten(0, 1)[finite]
            self.states.setdefault(layer, []).append(states.cpu())
            self.targets.setdefault(layer, []).append(targets[finite].cpu())
            self.n_tokens = n_before + len(finite)
        self._seen.clear()

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


def taught(
    start: Sequence[Tensor],
    loss_of: Callable[[Sequence[Tensor], Tensor], Tensor],
    n_tokens: int,
    steps: int,
    generator: torch.Generator,
    batch: int = 512,
) -> list[Tensor]:
    """Parameters after some steps of AdamW, whose rate falls to zero along a cosine.

    Args:
        start: the parameters to begin with; left as they are.
        loss_of: the loss of parameters on some tokens, given by their indices `(batch,)` int64.
        n_tokens: how many there are.
        generator: draws the tokens of each step.
    """
    parameters = [parameter.clone().requires_grad_() for parameter in start]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    with torch.enable_grad():
        for _ in range(steps):
            rows = torch.randint(n_tokens, (min(batch, n_tokens),), generator=generator)
            loss = loss_of(parameters, rows)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return [parameter.detach() for parameter in parameters]
