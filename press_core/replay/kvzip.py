"""KVzip (Kim et al., arXiv 2505.23416) and KVgrad (openreview cg1wTCJjjk).

Keep what it takes to repeat the context; or what the last hidden states would miss most meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
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
"""Tokens of the chunk before that tell where to start."""


@dataclass(frozen=True)
class RepeatPrompts:
    """What asks the model to repeat its context, as token ids.

    Attributes:
        first: asks for the first chunk.
        following: asks for a later one; the last tokens of the chunk before it come after.
        suffix: comes before the chunk itself, such as the end of a chat template's user turn.
        n_prefix: tokens at the beginning of a context that belong to the template.
    """

    first: Sequence[int]
    following: Sequence[int]
    suffix: Sequence[int] = ()
    n_prefix: int = 0

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> RepeatPrompts:
        """The prompts of the paper, in the words and the chat template of `tokenizer`."""

        def ids(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        if not getattr(tokenizer, "chat_template", None):
            return cls(ids(FIRST), ids(NEXT), ids("\n"))
        content = "the context"
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        before, after = text.split(content, 1)
        return cls(ids(FIRST), ids(NEXT), ids(after), len(ids(before)))

    def replays(self, context: Tensor, chunk_size: int) -> Replays:
        """What to run for each chunk of `context` `(S,)`."""
        previous: list[int] | None = None
        n_before = min(self.n_prefix, len(context) - 1)  # something is there to be repeated
        for start in range(n_before, len(context), chunk_size):
            chunk = context[start : start + chunk_size].tolist()
            asking = self.first if previous is None else [*self.following, *previous]
            ids = torch.tensor([[*asking, *self.suffix, *chunk]], device=context.device)
            yield ids, slice(start, start + len(chunk))
            previous = chunk[-N_STARTING:]


Replays = Iterator[tuple[Tensor, slice]]
"""What to run for each chunk of a context, `(1, m)` int64; and where the chunk lies."""

See = Callable[[AttentionCall, slice, Tensor | None], None]
"""Is shown a call of a replay, the chunk that is repeated, and a factor of each query, or None."""


@dataclass
class KVzip(ReplayPress):
    """Keeps what the model attends to when it repeats its context (arXiv 2505.23416).

    After the prefill of a context the model is asked to repeat it, chunk by chunk; a key's score is
    the most attention that it gets meanwhile from any query of its group. Rows of a batch are
    replayed one by one.

    Attributes:
        compression_ratio: share of the tokens of all heads that is evicted, in [0, 1).
        layerwise: share one budget over the heads of each layer, rather than of the model.
        n_sink: first tokens, always kept.
        kvzip_plus_normalization: weight attention by the norm of the projected value, over that of
            the hidden state (KVzip+).
        chunk_size: tokens to be repeated at a time.
        prompts: what asks the model to repeat; None: in the words of the tokenizer that lies beside
            the model.
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
        """What asks the model to repeat; subclasses add what else they have to know."""
        if self.prompts is not None:
            return (self.prompts,)
        instead = f"hand over {type(self).__name__}(prompts=RepeatPrompts(...)) in token ids"
        return (RepeatPrompts.from_tokenizer(tokenizer_of(model, instead)),)

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        if self.kvzip_plus_normalization:
            output_weight(site)

    def score_row(self, row: Row) -> Tensor:
        received: list[list[Tensor]] = [[] for _ in row.scope.sites]

        def see(call: AttentionCall, chunk: slice, of_queries: Tensor | None) -> None:
            of_chunk = self.replay_attention(call, chunk, row, of_queries)
            received[call.site.place.depth].append(of_chunk)

        prompts = row.scope.prepared(self)[0]
        self.replay(row, prompts.replays(row.tokens, self.chunk_size), see)
        parts = [torch.cat(of_chunks, dim=-1).to(row.tokens.device) for of_chunks in received]
        scores = torch.cat(parts)
        n_before = row.length - scores.shape[-1]  # of the template: each answer needs those
        return pad(scores, (n_before, 0), value=float("inf"))

    def replay(self, row: Row, replays: Replays, see: See) -> None:
        """Run what asks for each chunk after the context of `row`, and show `see` what happens."""
        chunk: slice

        def weigh(call: AttentionCall) -> None:
            plus, states = self.kvzip_plus_normalization, call.hidden_states[0]
            see(call, chunk, 1 / upcast(states).norm(dim=-1) if plus else None)

        with self.watch_attention(row, weigh), torch.no_grad():
            for ids, chunk in replays:  # noqa: B007
                row.run(input_ids=ids)

    def replay_attention(
        self, call: AttentionCall, chunk: slice, row: Row, of_queries: Tensor | None
    ) -> Tensor:
        """The most attention that each key of the repeated chunk gets from any query of its group.

        Queries see the first `n_sink` tokens, the chunk and the replay itself.

        Args:
            call: the replay, over all keys.
            chunk: where the tokens that are repeated lie in the context.
            row: whose context that is.
            of_queries: `(m,)`, by which to multiply the attention of each query, and that of each
                key by the norm of its projected value; None: attention as it is.

        Returns:
            `(1, H_kv, chunk)`, float32.
        """
        n_before = min(self.n_sink, chunk.start)
        seen = slice(n_before), chunk, slice(row.length, None)
        keys = torch.cat([call.keys[:, :, part] for part in seen], dim=2)
        most = torch.zeros_like(upcast(call.keys[:, :, chunk, 0]))
        of_keys = None if of_queries is None else projected_value_norms(call, chunk)
        for tile in attention_tiles(call.site, call.queries(), keys):
            # (1, heads, G, rows, chunk)
            weights = tile.weights[..., n_before : n_before + most.shape[-1]]
            if of_keys is not None and of_queries is not None:
                weights = (
                    weights * of_keys[:, tile.heads].unsqueeze(3) * of_queries[tile.rows, None]
                )
            most[:, tile.heads] = torch.maximum(most[:, tile.heads], weights.amax(dim=(2, 3)))
        return most

    def choose(self, scores: Tensor, n_joining: int = 0) -> Tensor:
        """Which tokens of a row each head keeps, `(L, H_kv, S)` bool, from its scores.

        Args:
            n_joining: tokens that join every head, and are to have room; if there are any, a head
                may lose all others.
        """
        best, length = best_first(scores, 1), scores.shape[-1]
        raised = scores.clone()
        raised[..., : self.n_sink] = float("inf")
        shared = raised.flatten(1) if self.layerwise else raised.flatten()[None]
        n = n_together([length] * (shared.shape[-1] // length), self.amount, n_joining)
        chosen = best_first(shared[None], n)[0].view(scores.shape)
        return chosen if n_joining else chosen | (best & ~chosen.any(dim=-1, keepdim=True))


def projected_value_norms(call: AttentionCall, chunk: slice) -> Tensor:
    """L2 norm of each value of the chunk after the output projection, for each query head.

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

    # The norm of the projected value counts here, too: times that of the gradient.
    kvzip_plus_normalization: ClassVar[bool] = True  # type: ignore[misc]
    chunk_size: int = count(512, 1)

    def prepare(self, model: Any) -> Any:
        """What asks the model to repeat.

        Raises:
            UnsupportedModelError: for a model that no gradient comes back from, with the cause.
        """
        sites = attention_sites(model)
        try:
            gradient_norms(self, model, sites, partial(run_aside, model))
        except (RuntimeError, NotImplementedError, PressError) as error:
            raise UnsupportedModelError(
                f"{type(self).__name__} gets no gradient of {type(model).__name__} "
                f"({sites[0].attn_implementation} attention), as "
                f"{first_line(error)}; load the model outside of torch.inference_mode(), or use "
                "KVzipPress, which needs none"
            ) from error
        return super().prepare(model)

    def replay(self, row: Row, replays: Replays, see: See) -> None:
        sites, model = row.scope.sites, row.scope.model
        calls: list[AttentionCall] = []
        watched = self.watch_attention(row, calls.append)
        with watched, torch.inference_mode(False), torch.no_grad():
            for ids, chunk in replays:
                norms = gradient_norms(self, model, sites, partial(row.run, input_ids=ids))
                for call in calls:
                    see(call, chunk, norms[call.site.name])
                calls.clear()


def gradient_norms(
    press: InstalledPress, model: nn.Module, sites: list[AttentionSite], run: Callable[[], Any]
) -> dict[str, Tensor]:
    """Norms of the gradient at what each of `sites` puts out, by its name `(m,)` each, float32.

    Args:
        press: whose mechanism sees what modules put out.
        run: runs the model once, in this thread.

    Raises:
        UnsupportedInputError: if no gradient comes back, or none that is finite.
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

    watched = {**{site.name: site.module for site in sites}, LAST: last_layer(model, sites)}
    with ExitStack() as stack, torch.inference_mode(False), torch.enable_grad():
        for name, module in watched.items():
            stack.callback(press.after(module, in_this_thread(partial(see, name))).remove)
        run()
        missing = [name for name in watched if name not in outputs]
        if missing:
            raise UnsupportedInputError(
                f"the output of {', '.join(missing)} was not seen in a forward"
            )
        objective = upcast(outputs.pop(LAST)).square().sum()
        gradients = torch.autograd.grad(objective, [*outputs.values()])
    # Of the last states' squared norms.
    norms = [upcast(gradient[0]).norm(dim=-1) for gradient in gradients]
    if not all(bool(x.isfinite().all()) for x in norms):
        raise UnsupportedInputError(
            f"gradients in {gradients[0].dtype} are beyond its range; run the model in bfloat16 or "
            "float32"
        )
    return dict(zip(outputs, norms, strict=True))
