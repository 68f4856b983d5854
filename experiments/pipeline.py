"""Answer questions about long contexts: compress a context once, ask many questions about it.

```python
answerer = ContextAnswerer(*load_model("facts-llama"))
answerer("river alice tea stone of", ["? alice"], press=SnapKVPress(0.5), max_new_tokens=1)

pipe = pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer)  # of transformers
pipe("river alice tea stone of", question="? alice", press=SnapKVPress(0.5), max_new_tokens=1)
```

Both do the same. Importing this module registers the pipeline `"kv-press-text-generation"` in
`transformers`; no other module of this project does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import AutoModelForCausalLM, Pipeline
from transformers.pipelines import PIPELINE_REGISTRY

from experiments import UserError
from experiments.answers.answerer import Answered, ContextAnswerer
from experiments.answers.kept import SavedContext
from experiments.answers.prompts import questions_of, texts_of

__all__ = ["TASK", "Answered", "ContextAnswerer", "KVPressTextGenerationPipeline", "SavedContext"]

TASK = "kv-press-text-generation"


class KVPressTextGenerationPipeline(Pipeline):
    """`ContextAnswerer` as a pipeline of `transformers`.

    ```python
    pipe(context, question="? alice", press=press)["answer"]
    pipe(context, questions=["? alice", "? bob"], press=press)["answers"]
    pipe([context, context], questions=[["? alice"], ["? bob"]], press=press, batch_size=2)

    saved = ContextAnswerer(model, tokenizer).save(context, "a.safetensors", press=press)
    pipe(saved, question="? bob")
    ```

    Options are those of `ContextAnswerer.__call__`, given to the call or to the constructor.
    Contexts may also be a generator or a dataset of texts, or of mappings with "context" and, if
    the call has no questions, "questions".
    """

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def __call__(
        self,
        inputs: Any,
        question: str | None = None,
        questions: Sequence[Any] | None = None,
        **options: Any,
    ) -> Any:
        """Answer one question (`{"answer": ...}`) or several (`{"answers": [...]}`) per context.

        Without a question the model continues the context: `{"answer": ...}` for texts, `answers`
        for mappings, generators and datasets.
        """
        if question is not None and questions is not None:
            raise UserError("both question and questions were given; give one of the two")
        asked = questions if question is None else [question]
        single = questions is None and not (question is None and _have_questions(inputs))
        if isinstance(inputs, (list, tuple)) and not _have_questions(inputs):
            texts = texts_of("contexts", inputs)
            pairs = zip(texts, questions_of(len(texts), asked), strict=True)
            inputs, asked = [{"context": text, "questions": own} for text, own in pairs], None
        return super().__call__(inputs, questions=asked, single=single, **options)

    def _sanitize_parameters(
        self, questions: Any = None, single: bool = False, **options: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return {"questions": questions}, options, {"single": single}

    def preprocess(self, item: Any, questions: Any = None) -> dict[str, Any]:
        """One context with its questions, as text: the answerer tokenizes and pads it."""
        if not isinstance(item, Mapping):
            item = {"context": item}
        if "context" not in item or "question" in item:
            raise UserError(
                f"an item has {list(item)!r:.60}; give 'context' and, if it asks any, 'questions'"
            )
        own = item.get("questions")
        if questions is not None and own is not None:
            raise UserError("both an item and the call have questions; give those of one of them")
        return {"contexts": item["context"], "questions": questions if own is None else own}

    def _forward(self, inputs: dict[str, Any], **options: Any) -> dict[str, Any]:
        answer = ContextAnswerer(self.model, self.tokenizer)
        return {"answers": answer(inputs["contexts"], inputs["questions"], **options)}

    def postprocess(self, outputs: dict[str, Any], single: bool = False) -> dict[str, Any]:
        return {"answer": outputs["answers"][0]} if single else outputs


def _have_questions(inputs: Any) -> bool:
    """Whether the items may hold their own questions: mappings, generators and datasets."""
    first = inputs[0] if isinstance(inputs, (list, tuple)) and inputs else inputs
    return not isinstance(first, (str, list, tuple, SavedContext))


if TASK not in PIPELINE_REGISTRY.get_supported_tasks():
    PIPELINE_REGISTRY.register_pipeline(
        TASK, pipeline_class=KVPressTextGenerationPipeline, pt_model=AutoModelForCausalLM
    )
