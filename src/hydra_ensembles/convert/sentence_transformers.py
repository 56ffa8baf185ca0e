"""sentence-transformers: the encoder of transformers inside, with the pooling of the model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..errors import ConversionError
from ..model.config import EnsembleConfig, Pool, ReadoutConfig
from ..model.metadata import Metadata
from .core import Architecture, NamedTensors, number_of_classes, prefix_errors, refuse, run
from .processors import read_processor

POOLS: dict[str, Pool] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}


def is_sentence_model(model: object) -> bool:
    """Whether a model is of sentence-transformers: a whole one, or the module that contains its encoder."""
    return type(model).__module__.startswith("sentence_transformers.") and isinstance(model, nn.Module)


def opened(model: Any, table_of: Callable[[type], Any]) -> tuple[Architecture, nn.Module]:
    """Return the declaration of the encoder inside, with the pooling of the model, and the encoder.

    A new classifier reads the pooled features before the model normalises or truncates them.
    """
    first, *behind = model.children() if isinstance(model, nn.Sequential) else (model,)
    inner: Any = getattr(first, "auto_model", None) or getattr(first, "model", None)
    if not isinstance(inner, nn.Module):
        problem = f"a {type(first).__name__} holds no transformers encoder"
        raise ConversionError(f"sentence-transformers: {problem}; give a SentenceTransformer that begins with one")
    architecture: Architecture = table_of(type(inner))
    name = f"sentence-transformers, {architecture.name}"
    with prefix_errors(name):
        _require_plain(model, first, behind)

    def metadata(encoder: nn.Module) -> Metadata:
        tokenizer = read_processor(first.tokenizer, architecture.config(encoder, None).stem)
        base = Metadata() if behind else architecture.metadata(encoder)  # has the class names
        return replace(base, preprocessing=tokenizer, preprocessing_from="the tokenizer of the model")

    if not behind:
        return replace(architecture, name=name, metadata=metadata), inner
    pooling: Any = behind[0]
    pool = POOLS[_mode(pooling)]

    def config(encoder: nn.Module, num_labels: int | None) -> EnsembleConfig:
        cut = getattr(model, "truncate_dim", None)
        if num_labels is None and (len(behind) > 1 or cut is not None):
            change = "scaled to length one" if cut is None else f"cut to {cut} numbers (truncate_dim)"
            raise refuse(f"its embeddings are {change}", "A classifier can read the whole embedding: give num_labels=")
        bare = architecture.config(encoder, None)
        classes = number_of_classes(0, num_labels)
        last = bare.readout  # has the norm after the last block
        return replace(bare, readout=ReadoutConfig(pool, classes, norm=last.norm, norm_eps=last.norm_eps))

    def answer(encoder: nn.Module, inputs: NamedTensors, fresh: bool) -> Tensor:
        tokens = run(encoder, **inputs).last_hidden_state  # [B, T, d]
        features = {"token_embeddings": tokens, "attention_mask": inputs["attention_mask"]}
        pooled: Tensor = pooling(features)["sentence_embedding"]
        return pooled

    unread = ("readout.hidden", "readout.classifier", "readout.distillation_classifier")
    weights = {part: entry for part, entry in architecture.weights.items() if not part.startswith(unread)}
    ignored = (*architecture.ignored, "pooler.")
    declared = replace(architecture, name=name, config=config, weights=weights, ignored=ignored)
    return replace(declared, answer=answer, metadata=metadata), inner


def _require_plain(model: Any, first: Any, behind: Sequence[Any]) -> None:
    """Raise if a model processes texts before its encoder, or tokens after it, in a way that is not converted."""
    prompt = (getattr(model, "prompts", None) or {}).get(getattr(model, "default_prompt_name", None))
    if prompt:
        way = "set model.default_prompt_name = None, and add it to your texts yourself"
        raise ConversionError(f"it puts the prompt {prompt!r} before every text, which is not converted; {way}")
    if getattr(first, "do_lower_case", False):
        raise refuse("it lower-cases texts before its tokenizer does anything (do_lower_case)")
    activation = getattr(model, "activation_fn", None)  # of a CrossEncoder
    if not isinstance(activation, nn.Identity | nn.Softmax | None):
        problem = f"it answers with the {type(activation).__name__} of each class, not with a softmax"
        way = "if exactly one class is right, set model.activation_fn = torch.nn.Identity()"
        raise ConversionError(f"{problem}, as probabilities here are; {way}")
    kinds = [type(part).__name__ for part in behind]
    if kinds not in ([], ["Pooling"], ["Pooling", "Normalize"]):
        raise refuse(f"after the encoder there are {kinds}")
    if behind and _mode(behind[0]) not in POOLS:
        raise refuse(f"its pooling is {_mode(behind[0])!r}, not one of {list(POOLS)}")


def _mode(pooling: Any) -> str:
    return str(getattr(pooling, "pooling_mode", None) or pooling.get_pooling_mode_str())
