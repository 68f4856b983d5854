"""Load the models that experiments run on: shipped with the repository, local or from the hub."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from experiments import UserError, refusing
from press_core.errors import first_line

SHIPPED: tuple[str, ...] = ("facts-llama", "stdlib-neox", "stdlib-neox-sink")
"""Short names of the models that come with the repository."""

_SHIPPED = f"a shipped model ({', '.join(SHIPPED)})"
_MODELS = Path(__file__).parent / "models"
_OF_THE_REPOSITORY = ("revision", "subfolder", "local_files_only", "trust_remote_code")

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


class ModelNotFoundError(UserError):
    """The given name matches no model."""


def load_model(
    name: str,
    *,
    dtype: torch.dtype | str = torch.float32,
    attn_implementation: str | None = None,
    device: torch.device | str | None = None,
    **model_kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in eval mode, and its tokenizer.

    Args:
        name: a short name from `SHIPPED`, the path of a folder that `save_pretrained` wrote, or the
            id of a model on the hub, which is downloaded if it is not in the local cache.
        dtype: dtype of the loaded weights, or its name, such as "bfloat16"; the stored weights are
            converted.
        attn_implementation: "eager", "sdpa", "flex_attention" and so on; None: "sdpa", or "eager"
            if the model does not support that.
        device: device of the model; the CPU by default. "auto" spreads it over all available
            devices, and over memory and disk if it does not fit (needs accelerate).
        model_kwargs: further arguments of `from_pretrained`.

    Raises:
        ModelNotFoundError: if `name` is none of the three, or the hub cannot be reached.
        UserError: if the model or its tokenizer cannot be loaded, or the device cannot be used.
    """
    given = {"dtype": dtype, "attn_implementation": attn_implementation, **model_kwargs}
    spread = {"device_map": "auto"} if device == "auto" else {}
    folder = local_folder(name)
    bars = logging.is_progress_bar_enabled()
    if folder is not None:  # local files load fast; only a download shows a progress bar
        logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder or name, **given, **spread)
        tokenizer = AutoTokenizer.from_pretrained(folder or name, **of_the_repository(given))
    except Exception as error:
        if folder is None and isinstance(error, OSError):
            raise ModelNotFoundError(
                f"cannot load a model called {name!r}: it is neither {_SHIPPED} nor an existing "
                "folder, and the hub gave no such model (no network, no such id, or no permission);"
                f" the cause was: {first_line(error)}"
            ) from error
        asked = ", ".join(f"{argument}={value!r}" for argument, value in given.items())
        raise UserError(f"cannot load {name} with {asked}: {first_line(error)}") from error
    finally:
        if bars:
            logging.enable_progress_bar()
    with refusing(f"cannot put the model on the device {device!r}", RuntimeError, AssertionError):
        return (model if spread or device is None else model.to(device)).eval(), tokenizer


def has_attention(name: str, implementation: str) -> bool:
    """Whether a model, named as for `load_model`, supports an attention implementation."""
    with suppress(OSError, ValueError, ImportError), torch.device("meta"):
        config = AutoConfig.from_pretrained(local_folder(name) or name)
        AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        return True
    return False


def of_the_repository(given: dict[str, Any]) -> dict[str, Any]:
    """Those arguments of `from_pretrained` that tokenizers and configurations take, too."""
    return {name: given[name] for name in _OF_THE_REPOSITORY if name in given}


def short_name(name: str) -> str:
    """Name of a model in tables: of a path the last folder, else `name` itself."""
    return Path(name).resolve().name if Path(name).is_dir() else name


def local_folder(name: str) -> Path | None:
    """Folder in which a model is stored; None if `name` can only be a hub id.

    Raises:
        ModelNotFoundError: if `name` is neither such a folder nor a possible hub id, or if the
            folder has no tokenizer, for which some releases of transformers create an empty one.
    """
    folder = _MODELS / name if name in SHIPPED else Path(os.path.expanduser(name))
    has_tokenizer = any("token" in path.name or "vocab" in path.name for path in folder.glob("*"))
    if has_tokenizer and (folder / "config.json").is_file():
        return folder
    if name in SHIPPED or folder.exists() or not _HUB_ID.fullmatch(name):
        raise ModelNotFoundError(
            f"there is no folder {str(folder)!r} with a config.json and a tokenizer, as "
            "save_pretrained of the model and of its tokenizer write them; give "
            f"{_SHIPPED}, the path of such a folder, or a hub id such as owner/model"
        )
    return None
