"""Decoders of transformers as classifiers: equal answers, whatever the padding; label words; refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import hydra_ensembles as he
from architectures import ArchitectureCase
from architectures_decoders import CASES, GRANITE, GROUPED, PAD, PLAIN, texts
from architectures_transformers import transformers_model
from hydra_ensembles.errors import ConversionError, DataError, HydraWarning


def apart(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_answers_equal_whatever_the_length_and_the_side_of_padding(case: ArchitectureCase) -> None:
    model = case.build()
    ensemble = he.convert(model)
    for tokens in (1, 2, 7, 64, 65, 200, 512):
        for left in (False, True):
            inputs = texts(tokens, left)
            if left and ensemble.config.stem.learned_positions:  # the original counts padding: compare with texts alone
                rows = [ids[mask.bool()][None] for ids, mask in zip(*inputs.values(), strict=True)]
                expected = torch.cat([model(row).logits for row in rows])
            else:
                expected = case.logits(model, inputs)
            assert apart(ensemble(inputs)[0], expected) <= 2e-5, (tokens, left)


WORDS = ("safe", "unsafe", "bad", "good", "is", "this", "text", "answer")


def language_model(settings: dict[str, Any] = PLAIN, name: str = "LlamaForCausalLM") -> Any:
    return transformers_model(name, settings)


def word_tokenizer(chat: bool = False, pad: str | None = "[PAD]") -> Any:
    """A tokenizer of 60 words; of a word that it does not know, it knows the letters."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ("[UNK]", "[BOS]", "[EOS]", "[PAD]", *WORDS, "[user]", "[model]")
    ids = {word: index for index, word in enumerate(names + tuple(f"w{i}" for i in range(60 - len(names))))}
    core = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    known = {"pad_token": pad, "additional_special_tokens": ["[user]", "[model]"]}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", **known)
    if chat:
        made.chat_template = "{% for m in messages %}[user] {{ m['content'] }} {% endfor %}[model]"
    return made


@pytest.mark.parametrize("chat", [False, True])
@torch.no_grad()
def test_label_words_answer_with_the_probabilities_of_the_language_model(chat: bool, tmp_path: Path) -> None:
    model, tokenizer = language_model(), word_tokenizer(chat)
    labels = {"safe": "safe", "unsafe": ["unsafe", "bad"]}
    judge = he.convert(model, labels=labels, tokenizer=tokenizer, template="is this {text} answer")
    texts = ["good text", "this is bad bad bad text w5"]
    around = "[user] is this {} answer [model]" if chat else "is this {} answer"
    given = tokenizer([around.format(text) for text in texts], return_tensors="pt", padding=True)
    words = model(**given).logits[:, -1].softmax(-1)[:, tokenizer.convert_tokens_to_ids(["safe", "unsafe", "bad"])]
    expected = torch.stack([words[:, 0], words[:, 1] + words[:, 2]], dim=1)
    answer = judge.predict(texts)
    assert apart(answer.log_probs, (expected / expected.sum(1, keepdim=True)).log()) <= 2e-5
    judge.save_pretrained(tmp_path)
    assert torch.equal(he.load(tmp_path).predict(texts).log_probs, answer.log_probs)
    assert answer.names() == [["safe", "unsafe"][row] for row in expected.argmax(1).tolist()]


@torch.no_grad()
def test_label_words_are_weighed_against_texts_without_content() -> None:
    settings: dict[str, Any] = {
        "labels": {"safe": ["safe", "good"], "unsafe": "unsafe"},
        "tokenizer": word_tokenizer(),
        "template": "is this {text} answer",
    }
    plain, empty = he.convert(language_model(), **settings), ["", "w9"]
    even = he.convert(language_model(), empty=empty, **settings)
    divided = plain.predict(["good text", "bad"]).probs / plain.predict(empty).probs.mean(0)
    assert apart(even.predict(["good text", "bad"]).probs, divided / divided.sum(1, keepdim=True)) <= 2e-5
    with pytest.raises(ConversionError, match="label words"):
        he.convert(_llama(), empty=[""])


@torch.no_grad()
def test_granite_answers_with_label_words_at_its_own_scales() -> None:
    model = language_model({**GROUPED, **GRANITE, "logits_scaling": 3.0}, "GraniteForCausalLM")
    tokenizer = word_tokenizer()
    judge = he.convert(model, labels={"yes": "good", "no": "bad"}, tokenizer=tokenizer)
    given = tokenizer(["this is good", "w5 w6 w7 w8 text"], return_tensors="pt", padding=True)
    expected = model(**given).logits[:, -1, tokenizer.convert_tokens_to_ids(["good", "bad"])]
    assert apart(judge(dict(given))[0], expected) <= 2e-5


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_bfloat16_answers_stay_the_originals(case: ArchitectureCase) -> None:
    model: Any = case.build()
    for parameter in model.parameters():  # as loaded in bfloat16: rotations stay in float32
        parameter.data = parameter.data.bfloat16()
    ids = torch.randint(4, 60, (1000, 24), generator=torch.Generator().manual_seed(0))
    theirs, mine = model(input_ids=ids).logits.float(), he.convert(model)(ids)[0].float()
    assert torch.cosine_similarity(theirs, mine).min() >= 0.999
    first, second = theirs.topk(2).values.unbind(1)
    tied = first - second <= theirs.abs().max() * 2**-7
    assert ((theirs.argmax(1) == mine.argmax(1)) | tied).all()


def test_gradients_equal_in_training() -> None:
    model: Any = next(case for case in CASES if case.name.endswith("-gemma3")).build().train()
    ensemble = he.convert(model).train()
    inputs, labels = texts(), torch.tensor([0, 1, 2])
    F.cross_entropy(model(**inputs).logits, labels).backward()
    F.cross_entropy(ensemble(inputs)[0], labels).backward()
    grads = {name: one.grad for name, one in ensemble.named_parameters() if one.grad is not None}
    layer, mine = model.model.layers[0], "encoder.layers.0."
    pairs = [  # what is shifted or rescaled at conversion, and what is stored once per group
        (grads["stem.words"][0] * model.config.hidden_size**0.5, model.model.embed_tokens.weight.grad),
        (grads[f"{mine}post_norm1.weight"][0], layer.post_attention_layernorm.weight.grad),
        (grads[f"{mine}attention.query"].flatten(0, 2), layer.self_attn.q_proj.weight.grad),
        (grads[f"{mine}attention.key_value"][:, 0].flatten(0, 1), layer.self_attn.k_proj.weight.grad),
        (grads[f"{mine}mlp.down.weight"][0], layer.mlp.down_proj.weight.grad),
        (grads["readout.classifier.weight"][0], model.score.weight.grad),
    ]
    assert all(apart(actual, expected) <= 1e-4 for actual, expected in pairs)


def test_label_words_that_cannot_be_told_apart_or_read_are_refused() -> None:
    model, tokenizer = language_model(), word_tokenizer()
    with pytest.warns(HydraWarning, match="several tokens"):
        judge = he.convert(model, labels={"yes": "good text", "no": "bad"}, tokenizer=tokenizer, template="{text} is")
    assert judge.metadata.labels == ("yes", "no")
    with pytest.raises(DataError, match="template"):
        judge.predict("bad " * 512)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"labels": {"yes": "good", "no": ["bad", "good"]}}, "tell them apart"),
        ({"labels": {"yes": "good"}}, "two labels"),
        ({"tokenizer": word_tokenizer(pad=None)}, "padding token"),
        ({"tokenizer": None}, "tokenizer"),
        ({"template": "no place"}, "template"),
        ({"model": language_model({**PLAIN, "vocab_size": 3000})}, "vocabulary"),
        ({"model": transformers_model("LlamaForSequenceClassification", PLAIN)}, "language model"),
    ]
    for change, said in refused:
        settings = {"labels": {"yes": "good", "no": "bad"}, "tokenizer": tokenizer, "model": model, **change}
        with pytest.raises(ConversionError, match=said):
            he.convert(settings.pop("model"), **settings)


def _llama(**changes: Any) -> Any:
    return transformers_model("LlamaForSequenceClassification", {**PLAIN, **changes})


def _quantised(model: Any) -> Any:
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    return model


_EXPERTS = {**PLAIN, "num_local_experts": 2, "num_key_value_heads": 4}
_T5 = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "pad_token_id": PAD}
_MAMBA = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
_BART = {"vocab_size": 60, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": PAD}
_BART |= {f"{part}_{name}": 4 for part in ("encoder", "decoder") for name in ("attention_heads", "ffn_dim")}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no padding token": (lambda: he.convert(_llama(pad_token_id=None)), "pad_token_id is None"),
    "a tokenizer without padding": (lambda: he.convert(_llama(), processor=word_tokenizer(pad=None)), "padding token"),
    "another vocabulary": (lambda: he.convert(_llama(vocab_size=3000), processor=word_tokenizer()), "other vocabulary"),
    "a larger vocabulary": (lambda: he.convert(_llama(vocab_size=50), processor=word_tokenizer()), "word embeddings"),
    "quantised": (lambda: he.convert(_quantised(_llama())), r"dequantize\(\) first"),
    "quantised, label words": (
        lambda: he.convert(
            _quantised(language_model()), labels={"yes": "good", "no": "bad"}, tokenizer=word_tokenizer()
        ),
        "quantised",
    ),
    "a regression": (lambda: he.convert(_llama(problem_type="regression")), "regression"),
    "a language model": (lambda: he.convert(language_model()), "labels="),
    "experts": (lambda: he.convert(transformers_model("MixtralForSequenceClassification", _EXPERTS)), "experts"),
    "state space": (lambda: he.convert(transformers_model("MambaForCausalLM", _MAMBA)), "state-space"),
    "encoder-decoder": (
        lambda: he.convert(transformers_model("BartForSequenceClassification", _BART)),
        "with a decoder",
    ),
    "T5": (lambda: he.convert(transformers_model("T5ForSequenceClassification", _T5)), "relative positions"),
    "rows beyond the window": (lambda: he.convert(_llama())(torch.full((1, 513), 5)), "takes 1 to 512"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_or_read_is_refused_in_a_sentence(case: str) -> None:
    call, said = REFUSED[case]
    with pytest.raises((ConversionError, DataError), match=said):
        call()


def test_texts_beyond_the_window_are_cut_with_a_warning() -> None:
    base = he.convert(_llama(), processor=word_tokenizer())
    with pytest.warns(HydraWarning, match="the rest is ignored"):
        base.predict("bad " * 520)
