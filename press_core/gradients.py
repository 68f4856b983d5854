"""Gradients at what attention modules put out, seen by the mechanism of a press."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from press_core.errors import UnsupportedInputError
from press_core.model.decoder import last_layer
from press_core.model.sites import AttentionSite
from press_core.press import Press
from press_core.replay import in_this_thread
from press_core.select import upcast


@dataclass
class _Forward:
    """What was seen of one forward: the outputs of attention modules by layer, the last states."""

    outputs: dict[int, Tensor] = field(default_factory=dict)
    last: list[Tensor] = field(default_factory=list)


@contextmanager
def differentiable(
    press: Press, model: nn.Module, sites: list[AttentionSite]
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
    seen = _Forward()

    def see_attention(site: AttentionSite, _: Any, output: Any) -> None:
        states = _states(output)
        if not states.requires_grad:  # no parameter does: what can be gone back from begins here
            states.requires_grad_()
        seen.outputs[site.layer_idx] = states

    def see_last(_: Any, output: Any) -> None:
        seen.last.append(_states(output))

    def differentiate(run: Callable[[], Any]) -> list[Tensor]:
        seen.outputs.clear()
        seen.last.clear()
        run()
        try:
            return _sensitivities(seen, sites)
        finally:
            seen.outputs.clear()
            seen.last.clear()

    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for site in sites:
            act = in_this_thread(partial(see_attention, site))
            stack.callback(press.after(site.module, act).remove)
        layer = last_layer(model, sites)
        stack.callback(press.after(layer, in_this_thread(see_last)).remove)
        yield differentiate


def _states(output: Any) -> Tensor:
    """The hidden states that a module puts out, alone or as the first of several."""
    states = output[0] if isinstance(output, tuple) else output
    assert isinstance(states, Tensor)
    return states


def _sensitivities(seen: _Forward, sites: list[AttentionSite]) -> list[Tensor]:
    """Norms of the gradient of the last states' squared norms, at the outputs of `sites`."""
    missing = [site.name for site in sites if site.layer_idx not in seen.outputs]
    if missing or len(seen.last) != 1:
        raise UnsupportedInputError(
            f"the output of {', '.join(missing) or 'the last layer'} was not seen once in a forward"
        )
    objective = upcast(seen.last[0]).square().sum()
    outputs = [seen.outputs[site.layer_idx] for site in sites]
    gradients = torch.autograd.grad(objective, outputs)
    norms = [upcast(gradient[0]).norm(dim=-1).detach() for gradient in gradients]
    if not all(bool(x.isfinite().all()) for x in norms):
        raise UnsupportedInputError(
            f"gradients in {outputs[0].dtype} are beyond its range; run the model in bfloat16 or "
            "float32"
        )
    return norms
