"""A Hydra Ensemble from a BERT classifier of transformers.

    python examples/hf_bert.py                                  # offline: a small BERT, trained here in seconds
    python examples/hf_bert.py --model textattack/bert-base-uncased-SST-2 --reviews reviews.csv --others news.csv

The CSV files have the columns `text` and `label` (labels of `--others` are not read). Whatever the model, the part
that makes the ensemble is the same; see `make_ensemble`.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

import hydra_ensembles as he
from hydra_ensembles import data

Labelled = list[tuple[str, int]]


# start: ensemble
def make_ensemble(model: Any, tokenizer: Any, reviews: Any, others: Any, prune: int, output: Path) -> he.Ensemble:
    """From a live model and two sets of texts to a fused, calibrated ensemble that reads strings."""
    base = he.convert(model, processor=tokenizer, labels=["negative", "positive"])
    batches = [data.batches(texts, base.metadata.preprocessing, batch_size=32) for texts in (reviews, others)]
    config = he.HydraConfig(members=3, prune=prune, strategy="sampled")  # draws from the circuit for both goals
    hydra = he.build(base, config, id=batches[0], ood=batches[1], output=output / "run")
    hydra.save_pretrained(output / "model")
    return hydra


# end: ensemble


def made_up_reviews() -> Labelled:
    """Sentences from a few words, for a model that is trained in seconds; on the last words opinions differ."""
    kinds = {1: "wonderful moving clever honest bright", 0: "dull clumsy boring hollow stale", -1: "long quiet strange"}
    words = [(word, label) for label, group in kinds.items() for word in group.split()]
    nouns, frames = "film plot cast score ending", ("the {} was {}", "i found the {} {}", "a {} that is {}")
    choices = enumerate(itertools.product(frames, nouns.split(), words))
    return [
        (frame.format(noun, word), label if label >= 0 else index // 2 % 2)
        for index, (frame, noun, (word, label)) in choices
    ]


def made_up_questions() -> Labelled:
    """Sentences of another kind, for the circuits."""
    things, places = "river bridge station tower market", "london cairo lima oslo kyoto"
    frames = ("how old is the {} of {}", "which {} is nearest to {}", "where in {1} is the {0}")
    combinations = itertools.product(frames, things.split(), places.split())
    return [(frame.format(thing, place), 0) for frame, thing, place in combinations]


def small_bert(reviews: Labelled, known: Labelled) -> tuple[Any, Any]:
    """A BERT of transformers with four layers and a tokenizer for these texts, trained for a few epochs."""
    words = sorted({word for text, _ in [*reviews, *known] for word in text.split()})
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=16, **names)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    config = transformers.BertConfig(vocab_size=len(vocabulary), max_position_embeddings=16, num_labels=2, **sizes)
    model = transformers.BertForSequenceClassification(config)
    batch = tokenizer([text for text, _ in reviews], padding=True, return_tensors="pt")
    labels = torch.tensor([label for _, label in reviews])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(20):
        for rows in torch.randperm(len(labels)).split(32):
            loss = model(**{name: tensor[rows] for name, tensor in batch.items()}, labels=labels[rows]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval(), tokenizer


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hub id or folder of a two-class BERT; default: a small one trained here")
    parser.add_argument("--reviews", type=Path, help="CSV with `text` and `label`: held-out texts of the task")
    parser.add_argument("--others", type=Path, help="CSV with `text`: texts unlike those of the task")
    parser.add_argument("--prune", type=int, default=4, help="heads each member loses")
    parser.add_argument("--output", type=Path, default=Path("hydra-bert"), help="folder for run and model")
    options = parser.parse_args()
    reviews: Any = made_up_reviews() if options.reviews is None else data.load(options.reviews)
    others: Any = made_up_questions() if options.others is None else data.load(options.others, labels="optional")
    if options.model is None:
        model, tokenizer = small_bert(reviews[::2], others)
        reviews = reviews[1::2]  # held out
    else:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(options.model, trust_remote_code=False)
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
    hydra = make_ensemble(model, tokenizer, reviews, others, options.prune, options.output)
    texts = ["the ending was wonderful", "i found the cast stale", "the plot was strange", "where in oslo is the tower"]
    p = hydra.predict(texts)
    for row, text in enumerate(texts):
        said = f"{p.names()[row]:9} confidence {p.confidence[row]:.2f}  epistemic {p.epistemic[row]:.4f}"
        print(f"{said}  {'accept' if p.accept is not None and p.accept[row] else 'abstain':8} {text}")
    print(f"saved to {options.output / 'model'}")


if __name__ == "__main__":
    main()
