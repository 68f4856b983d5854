"""KVzip (Kim et al., arXiv 2505.23416) and KVgrad (openreview cg1wTCJjjk).

KVzip scores keys by the attention that they receive while the model repeats the context, KVgrad
also by the gradient of the last hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from press_core.attention import attention_tiles
from press_core.budget import n_together
from press_core.call import AttentionCall
from press_core.errors import PressError, UnsupportedInputError, UnsupportedModelError, first_line
from press_core.fields import count, limited
from press_core.model.decoder import last_layer, tokenizer_of
from press_core.model.sites import AttentionSite, output_weight
from press_core.probe import attention_sites, run_aside
from press_core.replay.rows import ReplayPress, Row, in_this_thread
from press_core.scope import InstalledPress
from press_core.select import best_first, upcast
from press_core.traits import Evicts

FIRST = "\n\nRepeat the previous context exactly."
NEXT = "\n\nRepeat the part of the previous context exactly, starting with"
N_STARTING = 8
"""Number of last tokens of the previous chunk that a prompt quotes, to say where to start."""


@dataclass(frozen=True)
class RepeatPrompts:
    """The prompts that ask the model to repeat its context, as token ids.

    Attributes:
        first: the prompt for the first chunk.
        following: the prompt for each other chunk; the last tokens of the previous chunk are
            appended to it.
        suffix: tokens between the prompt and the repeated chunk, such as the end of a chat
            template's user turn.
        prefix: tokens before a context in the chat template; as far as a context begins with them,
            they are always kept, and not repeated.
    """

    first: Sequence[int]
    following: Sequence[int]
    suffix: Sequence[int] = ()
    prefix: Sequence[int] = ()

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> RepeatPrompts:
        """The prompts of the paper, encoded by `tokenizer` with its chat template, if any."""

        def ids(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        if not getattr(tokenizer, "chat_template", None):
            return cls(ids(FIRST), ids(NEXT), ids("\n"))
        content = "<<the context>>"
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        before, _, after = text.partition(content)
        return cls(ids(FIRST), ids(NEXT), ids(after), ids(before))

    def replays(self, context: Tensor, chunk_size: int) -> Replays:
        """The tokens to run for each chunk of `context` `(S,)`: prompt, suffix and the chunk."""
        previous: list[int] | None = None
        both = zip(context[:-1].tolist(), self.prefix, strict=False)  # leaves a token to repeat
        n_before = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
        for start in range(n_before, len(context), chunk_size):
            chunk = context[start : start + chunk_size].tolist()
            prompt = self.first if previous is None else [*self.following, *previous]
            ids = torch.tensor([[*prompt, *self.suffix, *chunk]], device=context.device)
            yield ids, slice(start, start + len(chunk))
            previous = chunk[-N_STARTING:]


Replays = Iterator[tuple[Tensor, slice]]
"""For each chunk of a context, the token ids to run, `(1, m)` int64, and the chunk's slice."""

Observer = Callable[[AttentionCall, slice, Tensor | None], None]
"""Gets a call of a replay, the slice of the repeated chunk, and query factors `(m,)` or None."""


@dataclass
class KVzip(ReplayPress):
    """Keeps the keys that the model attends to when it repeats its context (arXiv 2505.23416).

    After the prefill, the model is prompted to repeat the context, chunk by chunk (teacher-forced).
    A key's score is the maximum attention that it receives meanwhile, over all queries of its GQA
    group. Heads share a budget and keep different numbers of tokens. Rows of a batch are replayed
    one by one. Paper: Kim et al.

    Attributes:
        compression_ratio: share of the tokens of all heads that is evicted, in [0, 1), or the
            `Tokens` that a head keeps on average.
        layerwise: share a budget over the heads of each layer, instead of the whole model.
        n_sink: number of first tokens (attention sinks), always kept; with a smaller budget, the
            first of them in all heads.
        kvzip_plus_normalization: multiply attention by the norm of the projected value, and divide
            it by the norm of the query's hidden state (KVzip+).
        chunk_size: number of context tokens to repeat in one forward.
        prompts: the prompts that ask the model to repeat, as token ids. None: made with the
            tokenizer beside the model.
    """

    layerwise: bool = False
    n_sink: int = count(4)
    kvzip_plus_normalization: bool = False
    chunk_size: int = count(2048, 1)
    prompts: RepeatPrompts | None = limited(
        None, lambda x: x is None or isinstance(x, RepeatPrompts), "RepeatPrompts or None"
    )

    evicts = Evicts.PER_HEAD

    def prepare(self, model: Any) -> Any:
        """A tuple of the prompts, to which subclasses append.

        Raises:
            PressError: if there are no prompts and no tokenizer beside the model.
        """
        if self.prompts is not None:
            return (self.prompts,)
        instead = f"use {type(self).__name__}(prompts=RepeatPrompts(...)) with token ids"
        return (RepeatPrompts.from_tokenizer(tokenizer_of(model, instead)),)

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        if self.kvzip_plus_normalization:
            output_weight(site)

    def score_row(self, row: Row) -> Tensor:
        received: list[list[Tensor]] = [[] for _ in row.scope.sites]

        def observe(call: AttentionCall, chunk: slice, factors: Tensor | None) -> None:
            of_chunk = self.replay_attention(call, chunk, row, factors)
            received[call.site.place.depth].append(of_chunk)

        prompts = row.scope.prepared(self)[0]
        self.replay(row, prompts.replays(row.tokens, self.chunk_size), observe)
        parts = [torch.cat(of_chunks, dim=-1).to(row.tokens.device) for of_chunks in received]
        scores = torch.cat(parts)
        n_before = row.length - scores.shape[-1]  # the chat template is always kept
        return pad(scores, (n_before, 0), value=float("inf"))

    def replay(self, row: Row, replays: Replays, observe: Observer) -> None:
        """Run each replay after the context of `row`, and pass its attention calls to `observe`."""
        chunk: slice

        def with_factors(call: AttentionCall) -> None:
            factors = None
            if self.kvzip_plus_normalization:
                norms = upcast(call.hidden_states[0]).norm(dim=-1)
                factors = (1 / norms).nan_to_num(posinf=0)  # 0 for a zero state
            observe(call, chunk, factors)

        with self.watch_attention(row, with_factors), torch.no_grad():
            for ids, chunk in replays:  # noqa: B007
                row.run(input_ids=ids)

    def replay_attention(
        self, call: AttentionCall, chunk: slice, row: Row, factors: Tensor | None
    ) -> Tensor:
        """Maximum attention that each key of the repeated chunk receives from its group's queries.

        Queries attend to the first `n_sink` tokens, the chunk and the replay itself.

        Args:
            call: the replay, over all keys.
            chunk: slice of the context that is repeated.
            row: the row that is replayed.
            factors: `(m,)`, multiplies the attention of each query; that of each key is then also
                multiplied by the norm of its projected value. None: plain attention.

        Returns:
            `(1, H_kv, chunk)`, float32.
        """
        n_before = min(self.n_sink, chunk.start)
        visible = slice(n_before), chunk, slice(row.length, None)
        seen = call.replace(keys=torch.cat([call.keys[:, :, part] for part in visible], dim=2))
        most = torch.zeros_like(upcast(call.keys[:, :, chunk, 0]))
        norms = None if factors is None else projected_value_norms(call, chunk)
        for heads, rows, weights in attention_tiles(seen, call.queries()):
            # (1, heads, G, rows, chunk)
            weights = weights[..., n_before : n_before + most.shape[-1]]
            if norms is not None and factors is not None:
                weights = weights * norms[:, heads].unsqueeze(3) * factors[rows, None]
            most[:, heads] = torch.maximum(most[:, heads], weights.amax(dim=(2, 3)))
        return most

    def choose(self, scores: Tensor, n_joining: int = 0) -> Tensor:
        """Which tokens of a row each head keeps, `(L, H_kv, S)` bool.

        Args:
            scores: `(L, H_kv, S)`.
            n_joining: number of tokens that are added to every head within its budget. With none,
                every head keeps at least one token of the context.
        """
        best, length = best_first(scores, 1), scores.shape[-1]
        heads = scores if self.layerwise else scores.flatten(0, 1)[None]
        # Token by token: with a budget below the sinks, all heads keep the first ones.
        shared = heads.mT.clone(memory_format=torch.contiguous_format)
        shared[:, : self.n_sink] = float("inf")
        n = n_together([length] * shared.shape[-1], self.amount, n_joining)
        chosen = best_first(shared.flatten(1)[None], n).view(shared.shape).mT.reshape(scores.shape)
        return chosen if n_joining else chosen | (best & ~chosen.any(dim=-1, keepdim=True))


def projected_value_norms(call: AttentionCall, chunk: slice) -> Tensor:
    """L2 norm of each value of the chunk after the output projection of each query head.

    Returns:
        `(1, H_kv, G, chunk)`, float32.
    """
    values = upcast(call.values[:, :, chunk])
    n_kv, d = values.shape[1], values.shape[-1]
    weight = upcast(output_weight(call.site))
    per_head = weight.view(weight.shape[0], n_kv, -1, d).permute(1, 2, 3, 0)  # (H_kv, G, d, D)
    return (values.unsqueeze(2) @ per_head).norm(dim=-1)


# ---- KVgrad ------------------------------------------------------------------------------------

LAST = "the last layer"


@dataclass
class KVgrad(KVzip):
    """Keeps the keys and values to which the last hidden states are most sensitive (cg1wTCJjjk).

    The context is repeated as in KVzip, with one forward and one backward pass per chunk. The score
    is the maximum of `A_pc * ‖W_o v_c‖₂ * ‖∂Φ/∂a_p‖₂` over the queries `p` of the replay and the
    GQA group. `A_pc` is the attention of `p` to the key `c`, `a_p` the attention output written to
    the residual stream, and `Φ` the sum of the squared norms of the last layer's output, before the
    final norm. Paper: openreview cg1wTCJjjk.

    Parameters get no gradients, and no tensor that existed before requires a gradient afterwards.
    The caller may be in `torch.no_grad` or `torch.inference_mode`. Fused attention kernels on GPUs
    may accumulate gradients in any order; `torch.use_deterministic_algorithms(True)` makes results
    bit-identical between runs.

    Attributes:
        compression_ratio: share of the tokens of all heads that is evicted, in [0, 1), or the
            `Tokens` that a head keeps on average.
        layerwise: share a budget over the heads of each layer, instead of the whole model.
        n_sink: number of first tokens (attention sinks), always kept; with a smaller budget, the
            first of them in all heads.
        chunk_size: number of context tokens to repeat in one forward.
        prompts: the prompts that ask the model to repeat, as token ids. None: made with the
            tokenizer beside the model.
    """

    # As in KVzip+, scores include the norm of the projected value, here times that of the gradient.
    kvzip_plus_normalization: ClassVar[bool] = True  # type: ignore[misc]
    chunk_size: int = count(512, 1)

    def prepare(self, model: Any) -> Any:
        """A tuple of the prompts.

        Raises:
            UnsupportedModelError: if the model yields no gradient, with the cause.
        """
        sites = attention_sites(model)
        try:
            gradient_norms(self, model, sites, partial(run_aside, model))
        except (RuntimeError, NotImplementedError, PressError) as error:
            raise UnsupportedModelError(
                f"{type(self).__name__} gets no gradient of {type(model).__name__} "
                f"({sites[0].attn_implementation} attention): {first_line(error)}; load the model "
                "outside of torch.inference_mode(), or use KVzipPress, which needs none"
            ) from error
        return super().prepare(model)

    def replay(self, row: Row, replays: Replays, observe: Observer) -> None:
        sites, model = row.scope.sites, row.scope.model
        calls: list[AttentionCall] = []
        watched = self.watch_attention(row, calls.append)
        with watched, torch.inference_mode(False), torch.no_grad():
            for ids, chunk in replays:
                norms = gradient_norms(self, model, sites, partial(row.run, input_ids=ids))
                for call in calls:
                    with torch.autocast(call.keys.device.type, enabled=False):
                        observe(call, chunk, norms[call.site.name])
                calls.clear()


def gradient_norms(
    press: InstalledPress, model: nn.Module, sites: list[AttentionSite], run: Callable[[], Any]
) -> dict[str, Tensor]:
    """Gradient norms at the outputs of `sites`, by the site's name, `(m,)` float32 each.

    The gradient is that of the summed squared norms of the last layer's output.

    Args:
        press: the press whose mechanism observes module outputs.
        run: runs the model once, in this thread.

    Raises:
        UnsupportedInputError: if outputs were not observed, or gradients are not finite.
    """
    if model.training and any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        raise UnsupportedInputError(
            "gradient checkpointing leaves a training model without its cache; call model.eval() "
            "or model.gradient_checkpointing_disable()"
        )
    outputs: dict[str, Tensor] = {}

    def record(name: str, _: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        # If no parameter requires gradients, the graph begins at this output.
        outputs[name] = states if states.requires_grad else states.requires_grad_()

    watched = {**{site.name: site.module for site in sites}, LAST: last_layer(model, sites)}
    with ExitStack() as stack, torch.inference_mode(False), torch.enable_grad():
        for name, module in watched.items():
            stack.callback(press.after(module, in_this_thread(partial(record, name))).remove)
        run()
        missing = [name for name in watched if name not in outputs]
        if missing:
            raise UnsupportedInputError(f"no output of {', '.join(missing)} was observed")
        objective = upcast(outputs.pop(LAST)).square().sum()
        gradients = torch.autograd.grad(objective, [*outputs.values()])
    norms = [upcast(gradient[0]).norm(dim=-1) for gradient in gradients]
    if not all(bool(x.isfinite().all()) for x in norms):
        raise UnsupportedInputError(
            f"gradients in {gradients[0].dtype} are beyond its range; use bfloat16 or float32"
        )
    return dict(zip(outputs, norms, strict=True))
