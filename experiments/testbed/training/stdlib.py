"""Training of the model that ships in ``experiments/models/stdlib-neox``.

    python -m experiments.testbed.training.stdlib --output DIR

A small GPT-NeoX learns the sources of Python's standard library, `experiments.testbed.stdlib_text`,
from sequences of 256 tokens that always begin with ``<bos>``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from experiments.testbed.sinks import attention_to_first
from experiments.testbed.stdlib_text import (
    BOS,
    HELD_OUT_EVERY,
    PAD,
    SPECIAL_TOKENS,
    UNK,
    build_tokenizer,
    corpus,
    token_stream,
)
from experiments.testbed.training.common import (
    Output,
    Seed,
    Threads,
    set_threads,
    update,
    write_card,
)

VOCABULARY = 2048
LENGTH = 256
"""Tokens in a training sequence, ``<bos>`` included."""
ROWS = 32
"""Sequences in a step."""
LEARNING_RATE = 1e-2
WARM_UP = 1 / 7
"""Share of the steps."""
WEIGHT_DECAY = 0.1

PAD_ID, BOS_ID, UNK_ID = (SPECIAL_TOKENS.index(token) for token in (PAD, BOS, UNK))
IGNORED = -100
"""Label that `cross_entropy` leaves out."""
OBSERVED_EVERY = 20
"""Steps between two looks at a model that is trained."""

Objective = Callable[[PreTrainedModel, Tensor, int], Tensor]


def build_model() -> GPTNeoXForCausalLM:
    """The untrained model: 0.86 M float32 parameters, drawn from torch's global generator."""
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
        },
        use_parallel_residual=True,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=BOS_ID,
    )
    return GPTNeoXForCausalLM(config)


@dataclass(frozen=True)
class Run:
    """How a training went."""

    seed: int
    steps: int
    minutes: float
    threads: int
    train_tokens: int
    held_out_tokens: int
    train_unknown: float
    held_out_unknown: float


@dataclass(frozen=True)
class Measures:
    """What was measured on held-out text. Losses are in nats per token, unknown ones left out."""

    loss: float
    sink: list[float]
    """By layer, the attention that queries in the second half of a sequence pay to ``<bos>``."""
    sample: str


@dataclass(frozen=True)
class Text:
    """The tokenizer, and the streams of ids ``(tokens,)`` to train on and held out."""

    tokenizer: PreTrainedTokenizerFast
    train: Tensor
    held_out: Tensor

    @classmethod
    def load(cls) -> Text:
        """The text of this machine's Python."""
        tokenizer = build_tokenizer(corpus("train"), VOCABULARY)
        streams = token_stream(tokenizer, "train"), token_stream(tokenizer, "held-out")
        return cls(tokenizer, *streams)


def blocks(stream: Tensor) -> Tensor:
    """Cut a stream ``(tokens,)`` into sequences ``(rows, LENGTH)``, ``<bos>`` before each."""
    rows = len(stream) // (LENGTH - 1)
    return _begin(stream[: rows * (LENGTH - 1)].view(rows, LENGTH - 1))


def _begin(rows: Tensor) -> Tensor:
    return torch.cat([rows.new_full((len(rows), 1), BOS_ID), rows], dim=1)


def _draw(stream: Tensor, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(stream) - LENGTH + 2, (ROWS, 1), generator=generator)
    return _begin(stream[starts + torch.arange(LENGTH - 1)])


def _targets(tokens: Tensor) -> Tensor:
    """What each token but the last should predict; unknown words are no target."""
    targets = tokens[:, 1:]
    return targets.masked_fill(targets == UNK_ID, IGNORED)


def _loss(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return loss_of(logits, tokens)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Nats per known target of ``tokens`` ``(rows, n + 1)``, under the logits of the first n."""
    return cross_entropy(logits.flatten(0, 1), _targets(tokens).flatten(), ignore_index=IGNORED)


def _rate(step: int, steps: int, peak: float) -> float:
    """The learning rate at a step: a linear warm-up times a cosine that falls to zero."""
    warm_up = min(1.0, (step + 1) / (WARM_UP * steps))
    return peak * warm_up * 0.5 * (1 + math.cos(math.pi * step / steps))


def _optimizer(model: PreTrainedModel) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},  # biases and norms are not to shrink
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))


def train(
    output: Output,
    *,
    seed: Seed = 0,
    steps: Annotated[int, typer.Option(help="Updates, of 32 sequences of 256 tokens each.")] = 700,
    checkpoints: Annotated[
        Path | None, typer.Option(help="Folder for the model after every quarter of the steps.")
    ] = None,
    threads: Threads = None,
    progress: bool = True,
) -> None:
    """Train the model, evaluate it, and save it with its tokenizer and model card.

    The same seed gives the same model as long as Python, torch and its number of threads are the
    same.
    """
    set_threads(threads)
    text = Text.load()
    model, run = fit(text, seed, steps, checkpoints=checkpoints, progress=progress)
    save(model, text.tokenizer, output)
    measures = evaluate(model, text.tokenizer, text.held_out)
    write_card("stdlib", output, run, figures(model, run, measures))


def fit(
    text: Text,
    seed: int,
    steps: int,
    *,
    model: GPTNeoXForCausalLM | None = None,
    peak: float = LEARNING_RATE,
    objective: Objective | None = None,
    observe: Callable[[PreTrainedModel, int], None] | None = None,
    checkpoints: Path | None = None,
    progress: bool = True,
) -> tuple[GPTNeoXForCausalLM, Run]:
    """A model that is trained on a text, and how that went.

    Args:
        model: What to begin with, and to change; None: an untrained one.
        peak: The learning rate after the warm-up.
        objective: What the model is to lower, of a batch and the number of a step; None: its loss.
        observe: Called every `OBSERVED_EVERY` steps, with how many there were.
        checkpoints: Folder to save the model to after every quarter of the steps.
    """
    start = time.monotonic()
    torch.manual_seed(seed)
    model = model or build_model()
    optimizer = _optimizer(model)
    generator = torch.Generator().manual_seed(seed)
    held_out = math.nan
    model.train()
    with tqdm(desc="training", unit="step", total=steps, disable=not progress) as bar:
        for step in range(steps):
            tokens = _draw(text.train, generator)
            loss = objective(model, tokens, step) if objective else _loss(model, tokens)
            update(model, optimizer, loss, _rate(step, steps, peak))
            if step % 100 == 99:
                held_out = held_out_loss(model, text.held_out[: 64 * LENGTH])
            if observe is not None and (step + 1) % OBSERVED_EVERY == 0:
                observe(model, step + 1)
            if checkpoints is not None and (step + 1) % max(1, steps // 4) == 0:
                save(model, text.tokenizer, checkpoints)
            bar.update()
            bar.set_postfix(train=loss.item(), held_out=held_out, refresh=False)
    run = Run(
        seed=seed,
        steps=steps,
        minutes=(time.monotonic() - start) / 60,
        threads=torch.get_num_threads(),
        train_tokens=len(text.train),
        held_out_tokens=len(text.held_out),
        train_unknown=float((text.train == UNK_ID).float().mean()),
        held_out_unknown=float((text.held_out == UNK_ID).float().mean()),
    )
    return model, run


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save a model together with its tokenizer."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.inference_mode()
def held_out_loss(model: PreTrainedModel, stream: Tensor) -> float:
    """Nats per token on a stream ``(tokens,)`` cut into blocks, unknown words left out."""
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for tokens in blocks(stream).split(ROWS):
        known = int((_targets(tokens) != IGNORED).sum())
        total += float(_loss(model, tokens)) * known
        count += known
    model.train(was_training)
    return total / count


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, held_out: Tensor
) -> Measures:
    """Measure a model on the held-out stream ``(tokens,)``."""
    model.eval()
    attention = attention_to_first(model, blocks(held_out)[:ROWS])
    return Measures(
        loss=held_out_loss(model, held_out),
        sink=attention.groupby("layer")["share"].mean().tolist(),
        sample=_sample(model, tokenizer),
    )


def _sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> str:
    torch.manual_seed(0)
    prompt = tokenizer("def ", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=150, do_sample=True, temperature=0.7)
    return str(tokenizer.decode(output[0], skip_special_tokens=True)).strip()


def figures(model: PreTrainedModel, run: Run, measures: Measures) -> dict[str, Any]:
    """What the model card says of the training and of what was measured."""
    return {
        "config": model.config,
        "parameters": model.num_parameters() / 1e6,
        "vocabulary": VOCABULARY - len(SPECIAL_TOKENS),
        "every": HELD_OUT_EVERY,
        "tokens": ROWS * LENGTH,
        "epochs": run.steps * ROWS * LENGTH / run.train_tokens,
        "length": LENGTH,
        "rate": LEARNING_RATE,
        "decay": WEIGHT_DECAY,
        "measures": measures,
        "perplexity": math.exp(measures.loss),
        "sink": ", ".join(f"{share:.2%}" for share in measures.sink),
        "even": 1 / (0.75 * LENGTH),
        "verdict": _verdict(measures.sink),
    }


def _verdict(sink: list[float]) -> str:
    # Ten times an even share: far above chance, and still far below what large models show.
    if max(sink) < 10 / (0.75 * LENGTH):
        return (
            "No layer has made it an attention sink,\nso this model is no example of a window that "
            "fails once the first tokens have left it."
        )
    return "So it has become an attention sink."


if __name__ == "__main__":
    typer.run(train)
