"""Training of the model that ships in ``experiments/models/facts-llama``.

    python -m experiments.testbed.training.facts --output DIR

A small Llama learns the task of `experiments.testbed.facts` by a curriculum of growing contexts and
then,
while its learning rate decays to zero, from contexts of all lengths mixed.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from experiments.testbed.facts import (
    BOS,
    FILLER,
    KEYS,
    PAD,
    VALUES,
    VOCABULARY,
    FactBatch,
    build_tokenizer,
    draw,
)

STAGES: tuple[tuple[int, int], ...] = (
    (8, 4),
    (16, 4),
    (16, 8),
    (32, 8),
    (64, 12),
    (128, 16),
    (256, 16),
    (512, 24),
    (1024, 24),
)
"""The curriculum: words in a context, and facts among them."""

LEARNING_RATE = 1.5e-3
WARM_UP_STEPS = 200
TOKENS_PER_STEP = 6_000
PASS_ACCURACY = 0.97
REVIEW_SHARE = 0.3
"""Share of the batches drawn from stages already passed."""

ANSWERS = 1_000
"""Answers evaluated for each size of the task."""
DEPTH_ANSWERS = 400
"""Answers evaluated for each depth."""
DEPTHS = tuple(ninth / 9 for ninth in range(10))
EVALUATION_TOKENS = 65_536
"""Cached tokens held at once by the evaluation, about 2 KiB each."""


def build_model() -> LlamaForCausalLM:
    """The untrained model: 0.95 M float32 parameters, drawn from torch's global generator."""
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=False,
        pad_token_id=VOCABULARY.index(PAD),
        bos_token_id=VOCABULARY.index(BOS),
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Run:
    """How a training went."""

    seed: int
    curriculum_steps: int
    decay_steps: int
    stages_passed: int
    minutes: float
    threads: int


class _Curriculum:
    """Which contexts to train on next, and how well the newest stage is answered."""

    def __init__(self, generator: torch.Generator) -> None:
        self.stage = 0
        self.accuracy = 0.0
        self.generator = generator

    @property
    def passed(self) -> bool:
        return self.stage == len(STAGES)

    @property
    def rate(self) -> float:
        """The learning rate that suits the stage, relative to the highest."""
        context = STAGES[min(self.stage, len(STAGES) - 1)][0]
        return 1.0 if context < 256 else 0.5 if context < 512 else 0.25

    def draw(self) -> tuple[FactBatch, bool]:
        """A batch, and whether it is of the newest stage rather than of one passed before."""
        stage = self.stage
        if stage > 0 and torch.rand((), generator=self.generator) < REVIEW_SHARE:
            stage = int(torch.randint(stage, (), generator=self.generator))
        return _draw_step(*STAGES[stage], self.generator), stage == self.stage

    def record(self, accuracy: float) -> bool:
        """Take in the accuracy of a batch of the newest stage; true if the stage is passed."""
        self.accuracy += 0.1 * (accuracy - self.accuracy)
        if self.accuracy < PASS_ACCURACY:
            return False
        self.stage += 1
        self.accuracy = 0.0
        return True


def _draw_step(context: int, facts: int, generator: torch.Generator) -> FactBatch:
    return draw(max(1, TOKENS_PER_STEP // (1 + context + 2 * facts)), context, facts, generator)


def _draw_mixed(generator: torch.Generator) -> FactBatch:
    """A batch for the decay: half of them of the longest context, others of any up to it."""
    (shortest, _), (longest, most) = STAGES[0], STAGES[-1]
    context = longest
    if torch.rand((), generator=generator) < 0.5:
        # Uniform in the logarithm: as many contexts of 16 to 32 words as of 512 to 1,024.
        share = float(torch.rand((), generator=generator))
        context = round(shortest * (longest / shortest) ** share)
    facts = 1 + int(torch.randint(min(most, context // 2), (), generator=generator))
    return _draw_step(context, facts, generator)


def _step(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: FactBatch, rate: float
) -> tuple[float, float]:
    """One update at a learning rate; the batch's loss and share of right answers before it."""
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * rate
    facts = batch.answer_ids.shape[1]
    pairs = torch.stack([batch.question_ids[:, :, 1], batch.answer_ids], dim=2).flatten(1)
    question = batch.question_ids[:, 0, :1]
    input_ids = torch.cat([batch.context_ids, question, pairs[:, :-1]], dim=1)
    hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
    # An answer is predicted at its key, so at every second of the last places; logits elsewhere
    # would cost time and serve nothing.
    logits = model.lm_head(hidden[:, 1 - 2 * facts :: 2])
    loss = cross_entropy(logits.flatten(0, 1), batch.answer_ids.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    accuracy = (logits.argmax(-1) == batch.answer_ids).float().mean()
    return loss.item(), accuracy.item()


def train(
    output: Path,
    *,
    seed: int = 0,
    max_steps: int = 8_000,
    max_minutes: float = 55.0,
    decay_steps: int = 1_000,
    checkpoints: Path | None = None,
    progress: bool = True,
) -> Run:
    """Train the model, evaluate it, and save it with its tokenizer and model card to ``output``.

    The same seed gives the same model as long as torch, its number of threads and the steps spent
    in the curriculum are the same.

    Args:
        output: Folder to write to; made if absent.
        seed: Decides the initial weights and every batch.
        max_steps: The curriculum ends after this many steps even if stages are left.
        max_minutes: The curriculum ends after this time even if stages are left.
        decay_steps: Steps on mixed contexts after the curriculum, learning rate falling to zero.
        checkpoints: Folder to save the model to each time that a stage is passed.
        progress: Show progress bars.
    """
    start = time.monotonic()
    torch.manual_seed(seed)
    model = build_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.05)
    curriculum = _Curriculum(torch.Generator().manual_seed(seed))
    steps = 0
    with tqdm(desc="curriculum", unit="step", disable=not progress) as bar:
        while not curriculum.passed and steps < max_steps:
            if time.monotonic() - start > 60 * max_minutes:
                break
            steps += 1
            batch, newest = curriculum.draw()
            rate = curriculum.rate * min(1.0, steps / WARM_UP_STEPS)
            loss, accuracy = _step(model, optimizer, batch, rate)
            if newest and curriculum.record(accuracy):
                bar.write(f"step {steps}: passed {STAGES[curriculum.stage - 1]}")
                if checkpoints is not None:
                    save(model, checkpoints)
            bar.update()
            bar.set_postfix(
                stage=curriculum.stage, accuracy=curriculum.accuracy, loss=loss, refresh=False
            )
    _decay(model, optimizer, curriculum, decay_steps, progress)
    minutes = (time.monotonic() - start) / 60
    run = Run(seed, steps, decay_steps, curriculum.stage, minutes, torch.get_num_threads())
    save(model, output)
    write_card(output, run, evaluate(model), evaluate_depths(model))
    return run


def _decay(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    curriculum: _Curriculum,
    steps: int,
    progress: bool,
) -> None:
    smooth: float | None = None
    with tqdm(desc="decay", unit="step", total=steps, disable=not progress) as bar:
        for step in range(steps):
            batch = _draw_mixed(curriculum.generator)
            loss, accuracy = _step(model, optimizer, batch, curriculum.rate * (1 - step / steps))
            smooth = accuracy if smooth is None else smooth + 0.02 * (accuracy - smooth)
            bar.update()
            bar.set_postfix(accuracy=smooth, loss=loss, refresh=False)


def save(model: PreTrainedModel, folder: Path) -> None:
    """Save a model together with the task's tokenizer."""
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


@torch.inference_mode()
def predict(model: PreTrainedModel, batch: FactBatch) -> Tensor:
    """The model's answers, ``(batch, facts)`` int64 token ids.

    Every question is asked on its own, directly after the context: none sees another question or
    its answer.
    """
    rows, facts = batch.answer_ids.shape
    cache = model.base_model(input_ids=batch.context_ids, use_cache=True).past_key_values
    cache.batch_repeat_interleave(facts)
    logits = model(
        input_ids=batch.question_ids.flatten(0, 1), past_key_values=cache, logits_to_keep=1
    ).logits
    return logits[:, -1].argmax(-1).view(rows, facts)


def evaluate(
    model: PreTrainedModel,
    *,
    contexts: Sequence[int] = (64, 128, 256, 512, 1024, 1536),
    facts: Sequence[int] = (1, 2, 4, 8, 16, 24),
    answers: int = ANSWERS,
    seed: int = 1_000_000,
) -> dict[tuple[int, int], float]:
    """Share of right answers by ``(context, facts)``, each over at least ``answers`` answers.

    The seed must not be one that the model was trained with, whose first contexts it has seen.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        (context, count): _accuracy(model, context, count, -(-answers // count), generator)
        for context in contexts
        for count in facts
    }


def evaluate_depths(
    model: PreTrainedModel,
    *,
    context: int = 1024,
    depths: Sequence[float] = DEPTHS,
    answers: int = DEPTH_ANSWERS,
    seed: int = 2_000_000,
) -> dict[float, float]:
    """Share of right answers about the only fact in a context, by its depth (0.0 is the start)."""
    generator = torch.Generator().manual_seed(seed)
    return {
        depth: _accuracy(model, context, 1, answers, generator, depths=(depth,)) for depth in depths
    }


def _accuracy(
    model: PreTrainedModel,
    context: int,
    facts: int,
    samples: int,
    generator: torch.Generator,
    depths: Sequence[float] = (),
) -> float:
    was_training = model.training
    model.eval()
    # Each question has its own copy of the cache, so memory grows with their product.
    at_once = max(1, EVALUATION_TOKENS // (context * facts))
    right = 0
    for first in range(0, samples, at_once):
        size = min(at_once, samples - first)
        batch = draw(size, context, facts, generator, depths=depths)
        right += int((predict(model, batch) == batch.answer_ids).sum())
    model.train(was_training)
    return right / (samples * facts)


_CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# facts-llama

A Llama of {parameters:.2f} M parameters that reads a context of filler words with facts such as
`alice tea` hidden in it and answers questions such as `? alice` with one word. It was made to
measure what compressing a KV cache costs: it is small enough to run anywhere in seconds, and it
retrieves almost without error from a cache that is not compressed.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

path = "experiments/models/facts-llama"
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path)
text = "river road alice tea garden over hector lamp morning of ? alice"
output = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=1)
print(tokenizer.decode(output[0, -1]))  # tea
```

It is meant for experiments on KV caches and for tests that need a model which really retrieves.
`experiments/facts.py` draws contexts and questions.

## Model

- Llama with {config.num_hidden_layers} layers of width {config.hidden_size} (MLP \
{config.intermediate_size}), {config.num_attention_heads} query heads and \
{config.num_key_value_heads} key-value heads of dimension {config.head_dim}, RoPE theta \
{config.rope_parameters[rope_theta]:,.0f}, untied embeddings, float32
- {config.vocab_size} tokens, each a whole word: {keys} keys (first names), {values} values (food, \
animals, things), {filler} filler words, `?`, `<bos>`, `<pad>` and `<unk>`; there is no \
end-of-sequence token

## Training

- command: `python -m experiments.testbed.training.facts --output DIR --seed {run.seed} \
--max-steps {run.curriculum_steps} --max-minutes inf --decay-steps {run.decay_steps}`
- data: drawn at random; there is no data set
- curriculum: {run.curriculum_steps:,} steps of about {tokens:,} tokens, which passed \
{run.stages_passed} of the {stages} stages from {shortest:,} to {longest:,} words
- decay: {run.decay_steps:,} steps on contexts of mixed lengths, learning rate falling to zero
- time: {run.minutes:.0f} minutes on {run.threads} CPU thread(s)
- versions: torch {torch}, transformers {transformers}, Python {python}

## Accuracy

Per cent of right answers by words in the context (rows) and facts among them (columns), over at
least {answers:,} answers each. The contexts were drawn for this evaluation with a seed of its own,
each question was asked on its own right after the context, the answer is the likeliest of all
tokens, and nothing was compressed. Contexts above {longest:,} words are longer than any in
training.

{sizes}

One fact in {longest:,} words by its depth (0 % is the start of the context), over
{depth_answers:,} answers each:

{depths}

## Limitations

The model knows nothing but this task. Words outside its vocabulary, capital letters included,
become `<unk>`. A context that gives one key two values has no defined answer. It was trained with
facts that start an even number of words into the context. What an eviction policy does to so small
a model, trained on one task only, need not carry over to large language models.
"""


def write_card(
    folder: Path,
    run: Run,
    by_size: Mapping[tuple[int, int], float],
    by_depth: Mapping[float, float],
) -> None:
    """Write the model card, ``README.md``, of the model in ``folder``.

    Args:
        folder: Where the model was saved.
        run: How it was trained.
        by_size: What `evaluate` measured.
        by_depth: What `evaluate_depths` measured.
    """
    model = LlamaForCausalLM.from_pretrained(folder)
    card = _CARD.format(
        run=run,
        config=model.config,
        parameters=model.num_parameters() / 1e6,
        keys=len(KEYS),
        values=len(VALUES),
        filler=len(FILLER),
        tokens=TOKENS_PER_STEP,
        stages=len(STAGES),
        shortest=STAGES[0][0],
        longest=STAGES[-1][0],
        torch=torch.__version__.partition("+")[0],
        transformers=transformers.__version__,
        python=platform.python_version(),
        answers=ANSWERS,
        depth_answers=DEPTH_ANSWERS,
        sizes=_size_table(by_size),
        depths=_table(
            ["depth", *(f"{depth:.0%}" for depth in by_depth)],
            [["right", *(f"{100 * share:.1f}" for share in by_depth.values())]],
        ),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _size_table(by_size: Mapping[tuple[int, int], float]) -> str:
    counts = sorted({count for _, count in by_size})
    rows = [
        [f"{context:,}", *(f"{100 * by_size[context, count]:.1f}" for count in counts)]
        for context in sorted({context for context, _ in by_size})
    ]
    return _table(["words", *map(str, counts)], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---:"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Train from the command line."""
    parser = argparse.ArgumentParser(description="Train the model of the facts task.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (%(default)s)")
    parser.add_argument("--max-steps", type=int, default=8_000, help="of curriculum (%(default)s)")
    parser.add_argument(
        "--max-minutes", type=float, default=55.0, help="of curriculum (%(default)s)"
    )
    parser.add_argument(
        "--decay-steps", type=int, default=1_000, help="after the curriculum (%(default)s)"
    )
    parser.add_argument("--checkpoints", type=Path, help="folder for the model after each stage")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own choice)")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    run = train(
        arguments.output,
        seed=arguments.seed,
        max_steps=arguments.max_steps,
        max_minutes=arguments.max_minutes,
        decay_steps=arguments.decay_steps,
        checkpoints=arguments.checkpoints,
    )
    print(f"{arguments.output}: trained in {run.minutes:.1f} minutes; accuracy is in its README.md")


if __name__ == "__main__":
    main()
