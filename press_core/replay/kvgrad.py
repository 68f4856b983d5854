"""KVgrad (openreview cg1wTCJjjk): what the last hidden states would miss most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from press_core.call import AttentionCall
from press_core.errors import PressError, UnsupportedInputError, UnsupportedModelError
from press_core.fields import count
from press_core.model.decoder import last_layer
from press_core.model.sites import AttentionSite, output_weight
from press_core.probe import attention_sites, run_aside
from press_core.replay.kvzip import KVzip, RepeatPrompts, projected_value_norms, replay_attention
from press_core.replay.rows import Row, in_this_thread
from press_core.select import upcast

LAST = "the last layer"


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
    chunk_size: int = count(512, 1)

    def prepare(self, model: Any) -> RepeatPrompts:
        if any(parameter.is_inference() for parameter in model.parameters()):
            raise UnsupportedModelError(
                f"{type(self).__name__} needs gradients, which the parameters of this "
                f"{type(model).__name__} have no room for, as they were made inside "
                "torch.inference_mode(); load the model outside of it"
            )
        self._try_out(model)
        return super().prepare(model)

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        output_weight(site)

    def score_row(self, row: Row) -> dict[int, Tensor]:
        received: dict[int, list[Tensor]] = {}
        calls: dict[int, AttentionCall] = {}

        def see(call: AttentionCall) -> None:
            calls[call.site.layer_idx] = call

        sites, model = row.scope.sites, row.scope.model
        assert model is not None
        with differentiable(self, model, sites) as differentiate, self.watch_attention(row, see):
            for replay in self.replays(row):
                # Inside of this block no tensor of inference mode is made, but for those given.
                norms = differentiate(partial(row.run, input_ids=replay.ids.clone()))
                with torch.no_grad():
                    for site, of_queries in zip(sites, norms, strict=True):
                        call = calls.pop(site.layer_idx)
                        factors = projected_value_norms(call, replay), of_queries
                        of_chunk = replay_attention(call, replay, self.n_sink, row.length, factors)
                        received.setdefault(site.layer_idx, []).append(of_chunk)
        return {layer: self.whole(row, of_chunks) for layer, of_chunks in received.items()}

    def _try_out(self, model: Any) -> None:
        """Refuse a model that no gradient comes back from.

        Raises:
            UnsupportedModelError: with the cause.
        """
        sites = attention_sites(model)
        try:
            with differentiable(self, model, sites) as differentiate:
                differentiate(lambda: run_aside(model))
        except (RuntimeError, NotImplementedError, PressError) as error:
            raise UnsupportedModelError(
                f"{type(self).__name__} gets no gradient of {type(model).__name__} "
                f"({sites[0].attn_implementation} attention), as "
                f"{' '.join(str(error).split())[:200]}; KVzipPress needs none"
            ) from error


@contextmanager
def differentiable(
    press: Any, model: nn.Module, sites: list[AttentionSite]
) -> Iterator[Callable[[Callable[[], Any]], list[Tensor]]]:
    """While it is open, forwards of this thread can be gone back from.

    Args:
        press: whose mechanism sees what modules put out.

    Yields:
        From a function that runs the model once to the norms of the gradient at what each of
        `sites` puts out, `(m,)` each, float32.
    """
    if model.training and any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        raise UnsupportedInputError(
            "gradient checkpointing leaves a training model without its cache; call model.eval() "
            "or model.gradient_checkpointing_disable()"
        )
    outputs: dict[str, Tensor] = {}

    def see(name: str, _: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        if not states.requires_grad:  # no parameter does: what can be gone back from begins here
            states.requires_grad_()
        outputs[name] = states

    def differentiate(run: Callable[[], Any]) -> list[Tensor]:
        try:
            run()
            return _sensitivities(outputs, [site.name for site in sites])
        finally:
            outputs.clear()

    watched = {LAST: last_layer(model, sites), **{site.name: site.module for site in sites}}
    with ExitStack() as stack, torch.inference_mode(False), torch.enable_grad():
        for name, module in watched.items():
            stack.callback(press.after(module, in_this_thread(partial(see, name))).remove)
        yield differentiate


def _sensitivities(outputs: dict[str, Tensor], names: list[str]) -> list[Tensor]:
    """Norms of the gradient of the last states' squared norms, at the outputs of these modules."""
    missing = [name for name in (*names, LAST) if name not in outputs]
    if missing:
        raise UnsupportedInputError(f"the output of {', '.join(missing)} was not seen in a forward")
    objective = upcast(outputs[LAST]).square().sum()
    gradients = torch.autograd.grad(objective, [outputs[name] for name in names])
    norms = [upcast(gradient[0]).norm(dim=-1).detach() for gradient in gradients]
    if not all(bool(x.isfinite().all()) for x in norms):
        raise UnsupportedInputError(
            f"gradients in {gradients[0].dtype} are beyond its range; run the model in bfloat16 or "
            "float32"
        )
    return norms
