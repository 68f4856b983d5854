"""Learned tokens and a low-rank adapter (LoRA) of linear layers, for one pass of a press."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from press_core.errors import UnsupportedModelError
from press_core.files.tensors import read
from press_core.learned.calibration import Calibration, CalibrationError, floats
from press_core.model.decoder import decoder_of
from press_core.model.sites import AttentionSite
from press_core.probe import attention_sites
from press_core.replay.rows import in_this_thread

N_TOKENS = 8
"""Tokens that restore."""

F = TypeVar("F", bound="RestoreAdapter")


@dataclass(frozen=True, eq=False, repr=False)
class RestoreAdapter(Calibration):
    """Embeddings, and what is added to linear layers while they run.

    Attributes:
        embeddings: `(n, D)`.
        down, up: by the name of a linear layer within the decoder, `(r, D_in)` and `(D_out, r)`: it
            puts out `up @ down @ x` more.
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
        down = {f"down.{name}": f"rank:{name} in:{name}" for name in self.down}
        up = {f"up.{name}": f"out:{name} rank:{name}" for name in self.up}
        return {"embeddings": "tokens hidden_size", **down, **up}

    def check(self) -> None:
        super().check()
        if self.down.keys() != self.up.keys():
            odd = ", ".join(sorted(self.down.keys() ^ self.up.keys()))
            raise CalibrationError(f"{odd:.200}: each layer needs both down and up")

    @property
    def tensors(self) -> dict[str, Tensor]:
        parts = {f"down.{name}": x for name, x in self.down.items()}
        parts |= {f"up.{name}": x for name, x in self.up.items()}
        return {"embeddings": self.embeddings, **parts}

    @classmethod
    def of(cls: type[F], tensors: Mapping[str, Tensor]) -> F:
        parts: dict[str, dict[str, Tensor]] = {"down": {}, "up": {}}
        for name, tensor in tensors.items():
            part, _, layer = name.partition(".")
            if layer:
                parts[part][layer] = tensor
        return cls(tensors["embeddings"], parts["down"], parts["up"])

    @classmethod
    def published(cls, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
        """An adapter as PEFT saves it, and embeddings; its scaling is multiplied into `up`."""
        _, embeddings, config = (folder / name for name in cls.published_files)
        about = json.loads(config.read_text())
        odd = [name for name in ("use_dora", "rank_pattern", "alpha_pattern") if about.get(name)]
        if about.get("peft_type") != "LORA" or about.get("bias", "none") != "none" or odd:
            what = ", ".join(odd) or f"{about.get('peft_type')} with bias={about.get('bias')}"
            raise CalibrationError(
                f"{str(folder)!r} holds an adapter of another kind than LoRA: {what}"
            )
        rank = about["r"] ** 0.5 if about.get("use_rslora") else about["r"]
        parts = {"A": ("down", 1.0), "B": ("up", about["lora_alpha"] / rank)}
        adapter = {"embeddings": floats(read(embeddings)[1], embeddings)["restore_embeddings"]}
        for name, tensor in tensors.items():
            layer, _, part = name.removesuffix(".weight").rpartition(".lora_")
            if part in parts:
                field, factor = parts[part]
                adapter[f"{field}.{layer.removeprefix('base_model.model.')}"] = tensor * factor
        return adapter


def first_adapter(model: Any, rank: int, seed: int) -> RestoreAdapter:
    """An adapter that adds nothing yet, and embeddings like those of the model's own tokens."""
    generator = torch.Generator().manual_seed(seed)
    embedding = model.get_input_embeddings().weight.detach().float()
    chosen = torch.randint(len(embedding), (N_TOKENS,), generator=generator)
    down, up = {}, {}
    sites = attention_sites(model)
    own = {id(child) for site in sites for child in site.module.children()}
    for name, layer in _decoder(model, sites).named_modules():
        if id(layer) in own and isinstance(layer, nn.Linear):
            n_out, n_in = layer.weight.shape
            drawn = torch.randn(rank, n_in, generator=generator) / n_in**0.5
            down[name] = drawn.to(embedding.device)
            up[name] = torch.zeros(n_out, rank, device=embedding.device)
    return RestoreAdapter(embedding[chosen.to(embedding.device)].clone(), down, up)


# ---- the adapter on its layers -------------------------------------------------------------------


def _decoder(model: nn.Module, sites: list[AttentionSite]) -> nn.Module:
    return decoder_of(model, [site.name for site in sites])


def adapted_layers(
    model: nn.Module, sites: list[AttentionSite], adapter: RestoreAdapter
) -> dict[str, nn.Module]:
    """The layers that `adapter` is made for, by its names: within the decoder, or within the model.

    Raises:
        UnsupportedModelError: if the model has none of those names and shapes.
    """
    width = model.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
    if adapter.sizes["hidden_size"] != width:
        raise UnsupportedModelError(
            f"embeddings of width {adapter.sizes['hidden_size']} cannot serve "
            f"{type(model).__name__}, whose tokens have {width}; fit some to this model"
        )
    named = dict(model.named_modules()) | dict(_decoder(model, sites).named_modules())
    for name, down in adapter.down.items():
        wanted = len(adapter.up[name]), down.shape[1]
        found = getattr(named.get(name), "weight", torch.empty(0)).shape
        if found != wanted:
            raise UnsupportedModelError(
                f"the adapter is made for a layer {name!r} of weight {wanted}, and that of "
                f"{type(model).__name__} has {tuple(found)}; fit one to it"
            )
    return {name: named[name] for name in adapter.down}


@contextmanager
def adapted(
    press: Any, model: nn.Module, sites: list[AttentionSite], adapter: RestoreAdapter
) -> Iterator[None]:
    """The adapter on its layers, for this thread, by the press's mechanism."""
    with ExitStack() as stack:
        for name, layer in adapted_layers(model, sites, adapter).items():
            act = in_this_thread(_added(adapter.down[name], adapter.up[name]))
            stack.callback(press.after(layer, act).remove)
        yield


def _added(down: Tensor, up: Tensor) -> Callable[[tuple[Any, ...], Tensor], Tensor]:
    def act(args: tuple[Any, ...], output: Tensor) -> Tensor:
        states: Tensor = args[0]
        return output + (states.to(down.dtype) @ down.mT @ up.mT).to(output.dtype)

    return act
