"""RestoreKV (arXiv 2608.01247): a few learned tokens summarize the context before eviction."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, pad

from press_core.budget import Tokens, is_amount
from press_core.errors import UnsupportedModelError
from press_core.fields import require_given, require_whole
from press_core.files.files import read
from press_core.forward import Forward, cache_of, with_cache
from press_core.learned.calibration import Calibration, CalibrationError, LearnedPress, learned
from press_core.learned.running import Batch, rows_alone
from press_core.model.decoder import decoder_of, device_of
from press_core.probe import attention_sites
from press_core.replay.kvzip import KVzip, RepeatPrompts
from press_core.replay.rows import Row, States, in_this_thread
from press_core.scope import ScopeState
from press_core.select import upcast

N_TOKENS = 8
"""Number of learned tokens (restore tokens)."""

AMOUNTS = (
    lambda x: hasattr(x, "__getitem__") and len(x) > 0 and all(map(is_amount, x)),
    "a list of numbers in [0, 1), or of the Tokens to keep, at least one",
)
"""Arguments of `require_given` for the ratios to train at: the check and its description."""


@dataclass(frozen=True, eq=False, repr=False)
class RestoreAdapter(Calibration):
    """The embeddings of the restore tokens, and the LoRA adapter that is active while they run.

    Attributes:
        embeddings: `(n, D)`.
        down, up: by the name of a linear layer within the decoder, `(r, D_in)` and `(D_out, r)`:
            `up @ down @ x` is added to its output.
    """

    kind = "a RestoreKV adapter"
    file_names = ("restorekv.safetensors",)
    published_files = (
        *("adapter_model.safetensors", "restore_embeddings.safetensors", "adapter_config.json"),
    )

    embeddings: Tensor
    down: Mapping[str, Tensor]
    up: Mapping[str, Tensor]

    def dims(self) -> dict[str, str]:
        dims = {"embeddings": "tokens hidden_size"}
        for name in {**self.down, **self.up}:  # each layer needs both
            rank = f"rank:{name}"
            dims |= {f"down.{name}": f"{rank} in:{name}", f"up.{name}": f"out:{name} {rank}"}
        return dims

    @property
    def tensors(self) -> dict[str, Tensor]:
        parts = {f"down.{name}": x for name, x in self.down.items()}
        parts |= {f"up.{name}": x for name, x in self.up.items()}
        return {"embeddings": self.embeddings, **parts}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> RestoreAdapter:
        down, up = (
            {name.removeprefix(part): x for name, x in tensors.items() if name.startswith(part)}
            for part in ("down.", "up.")
        )
        return cls(tensors["embeddings"], down, up)

    @classmethod
    def published(cls, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
        """The tensors of a LoRA adapter saved by PEFT, and the embeddings beside it.

        The adapter's scaling is folded into `up`.

        Raises:
            ValueError: if the adapter is not plain LoRA.
        """
        _, embeddings, config = (folder / name for name in cls.published_files)
        about = json.loads(config.read_text())
        odd = any(about.get(name) for name in ("use_dora", "rank_pattern", "alpha_pattern"))
        if odd or about.get("peft_type") != "LORA" or about.get("bias", "none") != "none":
            raise ValueError("it holds an adapter of another kind than LoRA")
        rank = about["r"] ** 0.5 if about.get("use_rslora") else about["r"]
        parts = {"A": ("down", 1.0), "B": ("up", about["lora_alpha"] / rank)}
        adapter = {"embeddings": read(embeddings)[1]["restore_embeddings"]}
        for name, tensor in tensors.items():
            name = name.removeprefix("base_model.model.").removesuffix(".weight")
            layer, _, part = name.rpartition(".lora_")
            if part in parts:
                field, factor = parts[part]
                adapter[f"{field}.{layer}"] = upcast(tensor) * factor
        return adapter


def first_adapter(model: Any, rank: int, seed: int) -> RestoreAdapter:
    """The initial adapter: it adds zero, and its embeddings are those of random tokens."""
    require_whole(0, seed=seed)
    generator = torch.Generator().manual_seed(int(seed))
    embedding = model.get_input_embeddings().weight.detach().float()
    chosen = torch.randint(len(embedding), (N_TOKENS,), generator=generator, device="cpu")
    down, up = {}, {}
    sites = attention_sites(model)
    own = {id(child) for site in sites for child in site.module.children()}
    for name, layer in decoder_of(model, [site.name for site in sites]).named_modules():
        if id(layer) in own and isinstance(layer, nn.Linear):
            n_out, n_in = layer.weight.shape
            drawn = torch.randn(rank, n_in, generator=generator, device="cpu")
            down[name] = (drawn / n_in**0.5).to(embedding)
            up[name] = embedding.new_zeros(n_out, rank)
    return RestoreAdapter(embedding[chosen.to(embedding.device)].clone(), down, up)


# ---- the adapter on its layers -------------------------------------------------------------------


def _added(down: Tensor, up: Tensor, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """The adapter's contribution added to the `output` of a linear layer."""
    given = args[0].to(down.dtype)  # layers may be on several devices
    return output + (given @ down.to(given.device).mT @ up.to(given.device).mT).to(output.dtype)


# ---- the press ----------------------------------------------------------------------------------


@dataclass
class RestoreKV(KVzip, LearnedPress):
    """Keeps what KVzip keeps, and eight learned tokens that summarize the context (2608.01247).

    Before KVzip evicts, eight learned embeddings are run after the context, in one pass over the
    full cache with a LoRA adapter active. Their keys and values are added to every head, and KVzip
    evicts eight more tokens per head to make room. New tokens keep the positions that they would
    have without these. The eight always stay; contexts of at most eight tokens are not pruned.

    Attributes:
        compression_ratio: share of the tokens of all heads that is evicted, in [0, 1), or the
            `Tokens` that a head keeps on average, the eight included.
        layerwise: share a budget over the heads of each layer, instead of the whole model.
        n_sink: number of first tokens (attention sinks), kept as long as there is room.
        kvzip_plus_normalization: score with KVzip+; see `KVzip`.
        chunk_size: number of context tokens to repeat in one forward.
        prompts: the prompts that ask the model to repeat, as token ids. None: made with the
            tokenizer beside the model.
        adapter: embeddings and adapter of the model (see `fit`), their file, folder or hub id.
            None: the file `restorekv.safetensors` beside the model, or the one published for it on
            the hub.
    """

    adapter: RestoreAdapter | str | Path | None = learned(RestoreAdapter)

    def hub_id(self, model_name: str) -> str:
        suffix = "_plus" if self.kvzip_plus_normalization else ""
        return f"higokri/RestoreKV-{model_name.split('/')[-1]}{suffix}"

    def prepare(self, model: Any) -> Any:
        """The prompts, the adapter, and by name the linear layers that it is added to.

        The layers are found by their names within the decoder, or within the model.

        Raises:
            UnsupportedModelError: if the model has no layers of these names and shapes, or is
                tensor-parallel.
        """
        sites = attention_sites(model)
        if sites[0].ranks.size > 1:
            raise UnsupportedModelError(
                f"{type(self).__name__} adds an adapter to whole linear layers, and those of "
                f"{sites[0].name} are split over ranks (tensor parallelism); use KVzipPress"
            )
        adapter = LearnedPress.prepare(self, model)
        decoder = decoder_of(model, [site.name for site in sites])
        named = dict(model.named_modules()) | dict(decoder.named_modules())
        for name, down in adapter.down.items():
            wanted = len(adapter.up[name]), down.shape[1]
            found = getattr(named.get(name), "weight", torch.empty(0)).shape
            if found != wanted:
                raise UnsupportedModelError(
                    f"the adapter is made for a layer {name!r} with weight {wanted}, and that of "
                    f"{type(model).__name__} has {tuple(found)}; fit one to it"
                )
        return *KVzip.prepare(self, model), adapter, {name: named[name] for name in adapter.down}

    # ---- rows ------------------------------------------------------------------------------------

    def decide(self, row: Row) -> tuple[Tensor, list[States]]:
        n, amount = len(row.scope.prepared(self)[1].embeddings), self.compression_ratio
        evicts = row.length > max(n, amount.n if isinstance(amount, Tokens) else 0)
        shape = len(row.scope.sites), row.scope.sites[0].num_kv_heads, row.length
        kept = row.tokens.new_ones(shape, dtype=torch.bool)
        if evicts:
            kept = self.choose(self.score_row(row), n_joining=n)
        # A row that is not pruned does not keep the restore tokens.
        return pad(kept, (0, n), value=evicts), self.restored(row)

    def restored(self, row: Row) -> list[States]:
        """Keys and values of the restore tokens for `row`, by layer."""
        scope, (_, adapter, layers) = row.scope, row.scope.prepared(self)
        embedding = scope.model.get_input_embeddings()
        with ExitStack() as stack:
            for name, layer in layers.items():
                act = in_this_thread(partial(_added, adapter.down[name], adapter.up[name]))
                stack.callback(self.after(layer, act).remove)
            cache = row.alone()
            row.run(cache, inputs_embeds=adapter.embeddings[None].to(embedding.weight.dtype))
            new = slice(-len(adapter.embeddings), None)
            filled = [cache.layers[site.layer_idx] for site in scope.sites]
            return [(layer.keys[:, :, new], layer.values[:, :, new]) for layer in filled]

    def after_decoder(self, scope: ScopeState, forward: Forward, output: Any) -> None:
        wanted = any(x.requires_grad for x in scope.prepared(self)[1].tensors.values())
        with torch.set_grad_enabled(torch.is_grad_enabled() or wanted):
            super().after_decoder(scope, forward, output)

    # ---- learning --------------------------------------------------------------------------------

    @classmethod
    def fit(
        cls,
        model: Any,
        token_batches: Iterable[Batch],
        *,
        compression_ratios: tuple[float, ...] = (0.75, 0.9, 0.95),
        n_following: int = 32,
        rank: int = 8,
        learning_rate: float = 5e-3,
        n_batches: int | None = None,
        prompts: RepeatPrompts | None = None,
        seed: int = 0,
        **fields: Any,
    ) -> RestoreAdapter:
        """Train embeddings and adapter by self-distillation from the full to the pruned cache.

        Each row is a context and its continuation. The continuation is predicted over the full
        cache (teacher) and over what the press keeps of it (student), and the KL divergence between
        the two is minimized, with one optimizer step per row. The model is not changed.

        Args:
            model: the model to calibrate, in eval mode.
            token_batches: token ids `(B, S)`, or dicts with `input_ids` and `attention_mask` for
                left-padded batches.
            compression_ratios: ratios to train at, one per row, in rotation.
            n_following: number of tokens at the end of each row that are its continuation.
            rank: rank of the LoRA adapter on the linear layers of the attention modules.
            learning_rate: learning rate of AdamW.
            n_batches: number of batches; the rate then falls to zero on a cosine schedule. None:
                the rate is constant.
            prompts: see the press.
            seed: seeds the initial embeddings and adapter.
            fields: other fields of the press.

        Returns:
            Embeddings and adapter, float32: pass them as `adapter`, or save them beside the model.

        Raises:
            CalibrationError: if no row is long enough to have a context.
            HyperparameterError: naming the argument, its value and what is allowed.
        """
        given = {} if n_batches is None else {"n_batches": n_batches}
        require_whole(1, n_following=n_following, rank=rank, **given)
        require_given(*AMOUNTS, compression_ratios=compression_ratios)
        with torch.inference_mode(False), torch.enable_grad():
            started = first_adapter(model, rank, seed)
            learned_parts = {name: x.requires_grad_() for name, x in started.tensors.items()}
            press: Any = cls(prompts=prompts, adapter=RestoreAdapter.of(learned_parts), **fields)
            press = press.changed(only_thread=threading.get_ident())
            # Adam normalizes each gradient entry: one rate suits embeddings and adapter.
            optimizer = torch.optim.AdamW(learned_parts.values(), learning_rate, weight_decay=0.0)
            n_rows = 0
            for done, row in _rows(token_batches, n_batches, n_following + N_TOKENS):
                optimizer.param_groups[0]["lr"] = learning_rate * (1 + math.cos(math.pi * done)) / 2
                pruner = press.with_ratio(compression_ratios[n_rows % len(compression_ratios)])
                parts = row.to(device_of(model)).split([row.shape[1] - n_following, n_following], 1)
                optimizer.zero_grad()
                loss = distillation_loss(model, pruner, *parts)
                loss.backward(inputs=[*learned_parts.values()])
                optimizer.step()
                n_rows += 1
            if not n_rows:
                raise CalibrationError(
                    f"token_batches holds no row of more than {n_following + N_TOKENS} tokens "
                    f"(n_following={n_following} and a context)"
                )
            return RestoreAdapter.of({name: x.detach() for name, x in learned_parts.items()})


def _rows(
    token_batches: Iterable[Batch], n_batches: int | None, longer_than: int
) -> Iterator[tuple[float, Tensor]]:
    """Progress through the batches in [0, 1) (0 if `n_batches` is None), and rows `(1, S)`.

    Rows of at most `longer_than` tokens are left out.
    """
    for index, batch in enumerate(islice(token_batches, n_batches)):
        for ids in rows_alone([batch]):
            if ids.shape[1] > longer_than:
                done = 0.0 if n_batches is None else index / n_batches
                yield from ((done, row[None].clone()) for row in ids)  # no inference tensors


def distillation_loss(model: Any, press: Any, context: Tensor, following: Tensor) -> Tensor:
    """KL divergence of predictions over a pruned context from those over the full context.

    Args:
        context, following: token ids of the context and of its continuation, `(1, S)` and `(1, m)`.

    Returns:
        The Kullback-Leibler divergence in nats, averaged over the tokens of `following`.
    """
    with torch.no_grad():
        cache = cache_of(model(context, use_cache=True))
        teacher = model(following, **with_cache(model, cache)).logits[0].log_softmax(dim=-1)
    with press(model):
        with torch.no_grad():
            cache = cache_of(model(context, use_cache=True))
        student = model(following, **with_cache(model, cache)).logits[0].log_softmax(dim=-1)
    return kl_div(student, teacher, log_target=True, reduction="batchmean")
