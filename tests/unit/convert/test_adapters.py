"""Adapters of peft: one merged by `convert`, and folders of models read one tensor at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_cases import alike, refused
from torch import Tensor

import hydra_ensembles as he
from architectures_decoders import texts
from architectures_transformers import save_tokenizer
from hydra_ensembles.errors import ConversionError
from lora_models import SEQUENCES, TRANSPOSED, adapted, bert, gpt2, llama

ATTENTION: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
CASES: dict[str, Callable[[], Any]] = {
    "attention": lambda: adapted(llama(), **ATTENTION),
    "everything": lambda: adapted(llama(), target_modules="all-linear"),
    "with-head": lambda: adapted(llama(), **ATTENTION, **SEQUENCES),
    "dora": lambda: adapted(llama(), **ATTENTION, use_dora=True),
    "rslora": lambda: adapted(llama(), **ATTENTION, use_rslora=True),
    "biases": lambda: adapted(llama(attention_bias=True), **ATTENTION, bias="lora_only"),
    "ia3": lambda: adapted(llama(), kind="IA3Config", **SEQUENCES),
    "gpt2": lambda: adapted(gpt2(), **TRANSPOSED),
    "bert": lambda: adapted(bert(), target_modules=["query", "value"], **SEQUENCES),
    "half": lambda: adapted(llama().bfloat16(), **ATTENTION, **SEQUENCES),
}


def state(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:Careful, disabling adapter layers with bias")
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_an_adapter_is_merged_and_its_model_left_alone(case: str) -> None:
    model = CASES[case]()
    inputs = texts()
    with model.disable_adapter():
        without = model(**inputs).logits
    before, trains = state(model), [one.requires_grad for one in model.parameters()]
    expected = model(**inputs).logits
    found = he.convert(model)
    assert (expected - without).abs().max() > 1e-2
    alike(found(inputs)[0].float(), expected.float(), 4e-2 if case == "half" else 2e-5)
    assert found.dtype == expected.dtype
    assert [one.requires_grad for one in model.parameters()] == trains
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(model).items())
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=0, atol=0)


@torch.no_grad()
def test_an_adapter_of_a_language_model_answers_with_label_words(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(tmp_path)
    model = adapted(llama("LlamaForCausalLM"), **ATTENTION)
    judge = he.convert(model, labels={"yes": "a", "no": "b"}, tokenizer=tokenizer)
    rows = [tokenizer.encode(word, add_special_tokens=False)[0] for word in "ab"]
    given = texts()
    last = given["attention_mask"].sum(1) - 1
    expected = model(**given).logits[torch.arange(3), last][:, rows]
    alike(judge(given)[0].log_softmax(-1), expected.log_softmax(-1), 2e-5)


def word_tokenizer(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    save_tokenizer(folder / "words")
    return transformers.AutoTokenizer.from_pretrained(folder / "words")


def test_what_cannot_be_merged_is_refused() -> None:
    refused(adapted(llama(), kind="PromptTuningConfig", num_virtual_tokens=2, **SEQUENCES), "PROMPT_TUNING.*LoRA")
    broken = adapted(llama(), **ATTENTION)
    next(one for name, one in broken.named_parameters() if "lora_B" in name).data.fill_(float("nan"))
    refused(broken, "peft cannot merge.*NaN")
    quantised = adapted(llama(), **ATTENTION)
    quantised.config.quantization_config = {"load_in_4bit": True}
    refused(quantised, "quantised; load its base without quantisation")


# --- folders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["LlamaForSequenceClassification", "BertForSequenceClassification"])
@torch.no_grad()
def test_a_folder_is_converted_as_the_model_in_it(kind: str, tmp_path: Path) -> None:
    model = llama() if kind.startswith("Llama") else bert()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = he.convert(model)
    for given in (tmp_path, str(tmp_path)):
        found = he.convert(given)
        assert found.config == expected.config
        assert all(torch.equal(one, found.state_dict()[name]) for name, one in expected.state_dict().items())


def test_a_folder_of_a_language_model_has_words_or_a_new_classifier(tmp_path: Path) -> None:
    model = llama("LlamaForCausalLM", tie_word_embeddings=True).bfloat16()
    model.save_pretrained(tmp_path / "model")
    word_tokenizer(tmp_path).save_pretrained(tmp_path / "model")
    judge = he.convert(tmp_path / "model", labels={"yes": "a", "no": "b"})
    assert judge.dtype == torch.bfloat16
    assert judge.metadata.preprocessing is not None
    assert he.convert(tmp_path / "model", num_labels=3).num_classes == 3
    with pytest.raises(ConversionError, match="no trained classifier"):
        he.convert(tmp_path / "model")


def test_files_that_are_not_what_is_loaded_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process replaces the weights between the answers and the reading."""
    from hydra_ensembles.convert import folders

    llama().save_pretrained(tmp_path)
    read = folders._read

    def other(path: Path, key: str) -> Tensor:
        return read(path, key) * 1.1

    monkeypatch.setattr(folders, "_read", other)
    with pytest.raises(ConversionError, match=r"answers of the converted model differ"):
        he.convert(tmp_path)


def test_quantised_folders_and_those_of_adapters_are_refused(tmp_path: Path) -> None:
    adapted(llama(), **ATTENTION).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConversionError, match=r"holds an adapter.*he\.fuse"):
        he.convert(tmp_path / "adapter")
    model = llama()
    model.save_pretrained(tmp_path / "model")
    settings = (tmp_path / "model/config.json").read_text()
    (tmp_path / "model/config.json").write_text(settings.replace("{", '{"quantization_config": {"bits": 4},', 1))
    with pytest.raises(ConversionError, match="quantised; give the model it was made of"):
        he.convert(tmp_path / "model")
