"""KVgrad (openreview cg1wTCJjjk): what the last hidden states would miss most."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.errors import PressError, UnsupportedModelError
from press_core.gradients import differentiable
from press_core.model.probe import run_aside, verified_sites
from press_core.model.sites import AttentionSite, output_weight
from press_core.press import Press
from press_core.presses.kvzip import KVzip, replay_attention
from press_core.replay import Replay, Row, projected_value_norms


@dataclass
class KVgrad(KVzip):
    """Keeps what the last hidden states would change most without (openreview cg1wTCJjjk).

    The context is repeated as by KVzip, and each chunk goes once forward and once backward. What a
    key and its value write into the residual stream is the attention that they get times the norm
    of the projected value; what that matters is the norm of the gradient there, of the squared
    norms of the states that the last layer leaves, before the final norm. The score is the largest
    product over the queries of the replay and of the group.

    Gradients of parameters are not computed, and nothing that was there before requires a gradient
    afterwards. The scope of the caller may be `torch.no_grad` or `torch.inference_mode`. Fused
    attention on a GPU may add up gradients in any order; `torch.use_deterministic_algorithms(True)`
    gives the same bits every time.

    Attributes:
        compression_ratio: share of the tokens of all heads that is evicted, in [0, 1).
        layerwise: share one budget over the heads of each layer, rather than of the model.
        n_sink: first tokens, always kept.
        chunk_size: tokens to be repeated at a time.
        prompts: what asks the model to repeat; None: in the words of the tokenizer that lies beside
            the model.
    """

    kvzip_plus_normalization: ClassVar[bool] = False  # type: ignore[misc]
    chunk_size: int = 512

    def bind(self, model: Any) -> Press:
        if any(parameter.is_inference() for parameter in model.parameters()):
            raise UnsupportedModelError(
                f"{type(self).__name__} needs gradients, which the parameters of this "
                f"{type(model).__name__} have no room for, as they were made inside "
                "torch.inference_mode(); load the model outside of it"
            )
        self._try_out(model)
        return super().bind(model)

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        output_weight(site)

    def score_row(self, row: Row) -> dict[int, Tensor]:
        assert row.scope.model is not None
        received: dict[int, list[Tensor]] = {}
        calls: dict[int, AttentionCall] = {}

        def see(call: AttentionCall) -> None:
            calls[call.site.layer_idx] = call

        sites = row.scope.sites
        with (
            differentiable(self, row.scope.model, sites) as differentiate,
            self.watch_attention(row, see),
        ):
            for replay in self.replays(row):
                # Inside of this block no tensor of inference mode is made, but for those given.
                norms = differentiate(partial(row.run, input_ids=replay.ids.clone()))
                with torch.no_grad():
                    for site, of_site in zip(sites, norms, strict=True):
                        call = calls.pop(site.layer_idx)
                        of_chunk = self._received(call, replay, of_site, row.length)
                        received.setdefault(site.layer_idx, []).append(of_chunk)
        return {layer: self.whole(of_chunks) for layer, of_chunks in received.items()}

    def _received(
        self, call: AttentionCall, replay: Replay, sensitivities: Tensor, length: int
    ) -> Tensor:
        """`replay_attention`, weighted by what queries and values are worth."""
        values = call.values[:, :, replay.start : replay.stop]
        factors = projected_value_norms(call, values), sensitivities
        return replay_attention(call, replay, self.n_sink, length, lambda *_: factors)

    def _try_out(self, model: Any) -> None:
        """Refuse a model that no gradient comes back from.

        Raises:
            UnsupportedModelError: with the cause.
        """
        sites = verified_sites(model)
        try:
            with differentiable(self, model, sites) as differentiate:
                differentiate(lambda: run_aside(model, sites))
        except (RuntimeError, NotImplementedError, PressError) as error:
            raise UnsupportedModelError(
                f"{type(self).__name__} gets no gradient of {type(model).__name__} "
                f"({sites[0].attn_implementation} attention), as "
                f"{' '.join(str(error).split())[:200]}; KVzipPress needs none"
            ) from error
