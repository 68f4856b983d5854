"""Graphs that torch.compile has made of a model, and that miss hooks registered since."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from press_core.model.sites import AttentionSite


def may_break() -> bool:
    """Whether torch.compile is tracing and graph breaks are allowed; `torch.export` allows none."""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting()


def may_be_replayed(tensor: Tensor) -> bool:
    """Whether this runs in a graph that CUDA graphs may replay, with `tensor` in it.

    They are recorded again for each value of an int that a graph is given or changes.
    """
    return torch.compiler.is_compiling() and tensor.is_cuda


def stay_in_place(*tensors: Tensor) -> None:
    """Let CUDA graphs read and write these tensors where they are: they would copy them."""
    if not torch.compiler.is_compiling():
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor, guard=False)


def compile_nothing() -> Callable[[], Any]:
    """Run all code of this thread eagerly; returns the function that turns compiling on again."""
    set_eval_frame = sys.modules["torch._dynamo.eval_frame"].set_eval_frame
    return partial(set_eval_frame, set_eval_frame(None))


def n_compiled() -> int:
    """How many graphs `torch.compile` has made in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    return 0 if dynamo is None else dynamo.utils.counters["stats"]["unique_graphs"]


def forget_graphs(sites: list[AttentionSite]) -> None:
    """Make `torch.compile` compile attention modules like these again at their next call.

    A compiled graph ignores hooks that were registered later: torch leaves out their guards
    (`torch._dynamo.config.skip_nnmodule_hook_guards`, True by default). Graphs belong to the code
    of a function, so other models with the same code are compiled again, too.
    """
    for code in graphs_of(sites):
        sys.modules["torch._dynamo"].eval_frame.reset_code(code)


def graphs_of(sites: list[AttentionSite]) -> Iterator[CodeType]:
    """Code objects whose graphs contain attention modules like these and may miss hooks."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None or not dynamo.config.skip_nnmodule_hook_guards:
        return
    # The graph breaks at a hook, and the children of the module are compiled separately.
    names = {site.name.rpartition(".")[2] for site in sites}
    names |= {name for site in sites for name, _ in site.module.named_children()}
    members = {f"_modules['{name}']" for name in names}
    for code in _compiled():
        entries = dynamo.eval_frame._debug_get_cache_entry_list(code)
        guards = [str(entry.guard_manager) for entry in entries]
        if any(member in text for text in guards for member in members):
            yield code


def _compiled() -> list[CodeType]:
    """All code objects that were compiled in this process and still exist."""
    frames = sys.modules["torch._dynamo.convert_frame"]
    references = *frames.input_codes.seen, *frames.output_codes.seen
    return [code for reference in references if (code := reference()) is not None]
