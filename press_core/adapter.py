"""Learned tokens and a low-rank adapter (LoRA) of linear layers, for one pass of a press."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import huggingface_hub
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from press_core.calibration import Calibration, CalibrationError
from press_core.errors import UnsupportedModelError, first_line
from press_core.model.decoder import decoder_of
from press_core.model.probe import verified_sites
from press_core.model.sites import AttentionSite
from press_core.press import Press
from press_core.replay import in_this_thread

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

    kind: ClassVar[str] = "a RestoreKV adapter"
    file_names: ClassVar[tuple[str, ...]] = ("restorekv.safetensors",)

    embeddings: Tensor
    down: Mapping[str, Tensor]
    up: Mapping[str, Tensor]

    def check(self) -> None:
        if self.embeddings.dim() != 2:
            shape = tuple(self.embeddings.shape)
            raise CalibrationError(f"embeddings of shape {shape}: they must be (n, D)")
        if self.down.keys() != self.up.keys():
            odd = ", ".join(sorted(self.down.keys() ^ self.up.keys()))
            raise CalibrationError(f"{odd}: each layer needs both down and up")
        for name, down in self.down.items():
            shapes = tuple(down.shape), tuple(self.up[name].shape)
            if [len(shape) for shape in shapes] != [2, 2] or shapes[0][0] != shapes[1][1]:
                raise CalibrationError(
                    f"down and up of {name!r:.80} have the shapes {shapes[0]} and {shapes[1]}: "
                    "they must be (r, D_in) and (D_out, r)"
                )

    @property
    def sizes(self) -> dict[str, int]:
        return {"hidden_size": self.embeddings.shape[1]}

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
    def load(cls: type[F], source: str | Path, file_names: tuple[str, ...] = ()) -> F:
        """Read what `save` wrote, or an adapter of PEFT with embeddings beside it.

        Args:
            source: a file, a folder, or (a `str` only) the id of a repository on the hub.
            file_names: what the file may be called, instead of `cls.file_names`.

        Raises:
            CalibrationError: if there is no such file, or if it holds something else.
        """
        folder = Path(source).expanduser()
        if isinstance(source, str) and not folder.exists():
            folder = _downloaded(source) or folder
        if all((folder / name).is_file() for name in _PEFT):
            adapter = cls.of(_from_peft(folder))
            adapter.check_numbers()
            return adapter
        return super().load(source, file_names or cls.file_names)

    @classmethod
    def published(cls, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        raise KeyError("embeddings")


_PEFT = ("restore_embeddings.safetensors", "adapter_model.safetensors", "adapter_config.json")
"""The files of a published adapter."""


def _downloaded(source: str) -> Path | None:
    """The folder of a published adapter that was fetched from the hub, if there is one."""
    # What is on this machine is taken as it is: presses are opened often, and may be so offline.
    for offline in (True, False):
        try:
            folder = Path(
                huggingface_hub.snapshot_download(
                    source, allow_patterns=list(_PEFT), local_files_only=offline
                )
            )
        except (OSError, ValueError, RuntimeError):
            continue
        if all((folder / name).is_file() for name in _PEFT):
            return folder
    return None


def _from_peft(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter as PEFT saves it; its scaling is multiplied into `up`.

    Raises:
        CalibrationError: if the files hold something else.
    """
    embeddings, adapter, config = (folder / name for name in _PEFT)
    try:
        about = json.loads(config.read_text())
        found = load_file(adapter)
        return {"embeddings": load_file(embeddings)["restore_embeddings"], **_scaled(about, found)}
    except CalibrationError as error:
        raise CalibrationError(f"{str(folder)!r} is an adapter {error}") from None
    except _UNREADABLE as error:
        raise CalibrationError(
            f"{str(folder)!r} holds no adapter of PEFT with embeddings: {first_line(error)}"
        ) from error


_UNREADABLE = (
    *(SafetensorError, OSError, ValueError, LookupError, RuntimeError),
    *(AttributeError, TypeError, ArithmeticError),
)
"""What reading such files may raise, whatever lies in them."""


def _scaled(about: Any, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What an adapter of the configuration `about` adds, by names of `RestoreAdapter.of`.

    Raises:
        CalibrationError: if that is no low-rank product.
    """
    odd = [name for name in ("use_dora", "rank_pattern", "alpha_pattern") if about.get(name)]
    if about.get("peft_type") != "LORA" or about.get("bias", "none") != "none" or odd:
        what = ", ".join(odd) or f"{about.get('peft_type')} with bias={about.get('bias')}"
        raise CalibrationError(f"of another kind than LoRA: {what}")
    rank = about["r"] ** 0.5 if about.get("use_rslora") else about["r"]
    tensors = {}
    for name, tensor in found.items():
        layer, _, part = name.removesuffix(".weight").rpartition(".lora_")
        layer = layer.removeprefix("base_model.model.")
        if part == "A":
            tensors[f"down.{layer}"] = tensor
        elif part == "B":
            tensors[f"up.{layer}"] = tensor * (about["lora_alpha"] / rank)
    return tensors


def first_adapter(model: Any, rank: int, seed: int) -> RestoreAdapter:
    """An adapter that adds nothing yet, and embeddings like those of the model's own tokens."""
    sites, generator = verified_sites(model), torch.Generator().manual_seed(seed)
    embedding = model.get_input_embeddings().weight.detach().float()
    chosen = torch.randint(len(embedding), (N_TOKENS,), generator=generator)
    down, up = {}, {}
    for name, layer in _attention_layers(model, sites):
        n_out, n_in = layer.weight.shape
        drawn = torch.randn(rank, n_in, generator=generator) / n_in**0.5
        down[name] = drawn.to(embedding.device)
        up[name] = torch.zeros(n_out, rank, device=embedding.device)
    return RestoreAdapter(embedding[chosen.to(embedding.device)].clone(), down, up)


# ---- the adapter on its layers -------------------------------------------------------------------


def _attention_layers(
    model: nn.Module, sites: list[AttentionSite]
) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers of the attention modules, by their name within the decoder."""
    prefix = _prefix(model, sites)
    for site in sites:
        for name, child in site.module.named_children():
            if isinstance(child, nn.Linear):
                yield f"{site.name}.{name}".removeprefix(prefix), child


def _prefix(model: nn.Module, sites: list[AttentionSite]) -> str:
    """What names of modules within the decoder begin with in the whole model."""
    decoder = decoder_of(model, sites)
    name = next(name for name, module in model.named_modules() if module is decoder)
    return f"{name}." if name else ""


def _module(model: nn.Module, prefix: str, name: str) -> nn.Module:
    """The layer called `name` within the decoder, or as PEFT has it within the model."""
    try:
        return model.get_submodule(f"{prefix}{name.removeprefix(prefix)}")
    except AttributeError as error:
        raise UnsupportedModelError(
            f"the adapter is made for a layer {name!r}, which {type(model).__name__} has not; fit "
            "one to this model"
        ) from error


def check_layers(model: nn.Module, adapter: RestoreAdapter) -> None:
    """Refuse a model that `adapter` was not made for."""
    sites = verified_sites(model)
    width = model.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
    if adapter.sizes["hidden_size"] != width:
        raise UnsupportedModelError(
            f"embeddings of width {adapter.sizes['hidden_size']} cannot serve "
            f"{type(model).__name__}, whose tokens have {width}; fit some to this model"
        )
    prefix = _prefix(model, sites)
    for name in adapter.down:
        shapes = adapter.up[name].shape[0], adapter.down[name].shape[1]
        weight = getattr(_module(model, prefix, name), "weight", None)
        if not isinstance(weight, Tensor) or weight.shape != shapes:
            raise UnsupportedModelError(
                f"the adapter is made for a layer {name!r} of weight {shapes}, and that of "
                f"{type(model).__name__} has {tuple(getattr(weight, 'shape', ()))}; fit one to it"
            )


@contextmanager
def adapted(
    press: Press, model: nn.Module, sites: list[AttentionSite], adapter: RestoreAdapter
) -> Iterator[None]:
    """The adapter on its layers, for this thread, by the press's mechanism."""
    prefix = _prefix(model, sites)
    with ExitStack() as stack:
        for name, down in adapter.down.items():
            act = in_this_thread(_added(down, adapter.up[name]))
            stack.callback(press.after(_module(model, prefix, name), act).remove)
        yield


def _added(down: Tensor, up: Tensor) -> Callable[[tuple[Any, ...], Tensor], Tensor]:
    def act(args: tuple[Any, ...], output: Tensor) -> Tensor:
        states: Tensor = args[0]
        return output + (states.to(down.dtype) @ down.mT @ up.mT).to(output.dtype)

    return act


@contextmanager
def learning(adapter: RestoreAdapter) -> Iterator[None]:
    """With gradients where the adapter asks for some, and else as the caller has it."""
    wanted = any(x.requires_grad for x in adapter.tensors.values())
    with torch.set_grad_enabled(torch.is_grad_enabled() or wanted):
        yield
