"""A transformers BERT classifier that reads strings and knows when to abstain: alone, or with pruned members.

    python examples/hf_bert.py              # offline: a small BERT, trained here in seconds; --prune 2 makes members
    python examples/hf_bert.py --model textattack/bert-base-uncased-SST-2 --reviews reviews.csv

The CSV files have the columns `text` and `label` (labels of `--others` are not read).
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
def make_ensemble(model: Any, tokenizer: Any, reviews: Any) -> he.Ensemble:
    """One model, with a temperature and two reasons to decline, from held-out labelled texts."""
    base = he.convert(model, processor=tokenizer, labels=["negative", "positive"])
    return he.calibrate(base, data.batches(reviews, base.metadata.preprocessing, batch_size=32))


# end: ensemble
# start: prune
def prune_and_train(base: he.Ensemble, sets: dict[str, Any], prune: int, output: Path) -> he.Ensemble:
    """Copies of one model, each without `prune` heads, then fine-tuned; `sets` are id, ood and train."""
    batches = {name: data.batches(one, base.metadata.preprocessing, batch_size=32) for name, one in sets.items()}
    recipe = he.Recipe(learning_rate=1e-5, epochs=3, train_groups=("attention", "mlp", "norms", "readout"))
    config = he.HydraConfig(prune=prune, shared_layers=0, strategy="sampled", recipe=recipe)  # drawn from one circuit
    return he.build(base, config, **batches, output=output)


# end: prune


def made_up_reviews() -> Labelled:
    """Sentences from a few words, for a model that is trained in seconds; the last words are ambiguous."""
    kinds = {1: "wonderful moving clever honest bright", 0: "dull clumsy boring hollow stale", -1: "long quiet strange"}
    words = [(word, label) for label, group in kinds.items() for word in group.split()]
    nouns, frames = "film plot cast score ending", ("the {} was {}", "i found the {} {}", "a {} that is {}")
    choices = enumerate(itertools.product(frames, nouns.split(), words))
    return [
        (frame.format(noun, word), label if label >= 0 else index // 2 % 2)
        for index, (frame, noun, (word, label)) in choices
    ]


def made_up_questions() -> Labelled:
    """OOD sentences, for circuits."""
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
    parser.add_argument("--train", type=Path, help="CSV with `text` and `label`: training texts, for pruned members")
    parser.add_argument("--prune", type=int, default=0, help="heads each member loses; default: nothing is pruned")
    parser.add_argument("--output", type=Path, default=Path("hydra-bert"), help="folder for run and model")
    options = parser.parse_args()
    made, others = made_up_reviews(), options.others and data.load(options.others, labels="optional")
    sets: dict[str, Any] = {"id": made[1::2], "train": made[::2], "ood": others or made_up_questions()}
    if options.model is None:
        model, tokenizer = small_bert(sets["train"], sets["ood"])
    else:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(options.model, trust_remote_code=False)
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
        sets |= {"id": data.load(options.reviews)} | ({"train": data.load(options.train)} if options.prune else {})
    hydra = make_ensemble(model, tokenizer, sets["id"])
    if options.prune:
        hydra = prune_and_train(hydra, sets, options.prune, options.output / "run")
    hydra.save_pretrained(options.output / "model")
    texts = ["the ending was wonderful", "i found the cast stale", "the plot was strange", "where in oslo is the tower"]
    p = hydra.predict(texts)
    for row, text in enumerate(texts):
        print(f"{p.names()[row]:9} {p.confidence[row]:.2f}  {'abstain' if p.reason[row] else 'accept':8} {text}")
    print(f"saved to {options.output / 'model'}")


if __name__ == "__main__":
    main()
