"""Models as transformers, timm and sentence-transformers save them: opened, and their tensors read one by one."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from .._utils import library
from ..errors import CheckpointError, ConfigError, ConversionError
from ..files import expanded, read_object
from .core import Found

_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_CLASSIFIERS = ("ForImageClassification", "ForImageClassificationWithTeacher", "ForSequenceClassification")
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")


def opened_source(
    source: str,
    weights: Path | None = None,
    options: Mapping[str, Any] | None = None,
    language: bool = False,
    bare: bool = False,
    classes: int = 0,
) -> tuple[Any, Any, Path | None]:
    """A model of another library, its processor, and the folder with the weights of a model of transformers.

    `source` is a folder, `timm:NAME` or `hub:OWNER/NAME`; `weights` and `options` are those of a timm model. `language`
    asks for a language model instead of a classifier; a `bare` model is taken, too, or gets a classifier of `classes`.
    """
    kind, _, name = source.partition(":")
    folder = expanded(source)
    if kind == "timm":
        return _timm(name, weights, options or {}), None, None
    if kind == "hub":
        place, hub = f"hf-hub:{name}", library("huggingface_hub", extra="transformers")
        config = read_object(Path(hub.hf_hub_download(name, "config.json")))
    elif folder.is_dir():
        name, place = str(folder), f"local-dir:{folder}"
        if (folder / "modules.json").is_file():
            sentences = library("sentence_transformers", extra="transformers")
            return sentences.SentenceTransformer(name, device="cpu", trust_remote_code=False), None, None
        if (folder / "adapter_config.json").is_file():
            raise ConversionError(f"{source} holds an adapter; load it on its base, or he.fuse(base, adapters=[...])")
        config = read_object(folder / "config.json")
    else:
        raise CheckpointError(f"no model {source!r}; give a folder, timm:NAME or hub:OWNER/NAME")
    if "architecture" in config and not config.get("architectures"):
        return _timm(place, weights, options or {}), None, None
    if weights is not None or options:
        raise ConfigError(f"{source} brings its own weights and settings; leave out --weights and --option")
    return *_transformers(name, config, language, bare, classes), None if kind == "hub" else folder


def _timm(name: str, weights: Path | None, options: Mapping[str, Any]) -> Any:
    """A timm model with its pretrained weights, or with those of a file, which determine the number of classes."""
    timm = library("timm", extra="timm")
    if weights is None:
        if "num_classes" in options:
            raise ConfigError("num_classes alone gives an untrained classifier; give your own --weights, too")
        return timm.create_model(name, pretrained=True, **options).eval()
    state = load_file(expanded(weights))  # never pickle files, which can run code
    classes = [len(state[key]) for key in ("head.weight", "head.fc.weight") if key in state]
    model = timm.create_model(name, **({"num_classes": classes[0]} if classes else {}), **options).eval()
    model.load_state_dict(state)
    return model


def _transformers(source: str, config: Mapping[str, Any], language: bool, bare: bool, classes: int) -> tuple[Any, Any]:
    """A classifier of transformers, a language model or a bare one, with its tokenizer or image processor."""
    transformers = library("transformers", extra="transformers")
    if config.get("auto_map"):
        advice = "if you trust it, load it in Python and give it to he.convert(model, processor=...)"
        raise CheckpointError(f"{source} brings code of its own (auto_map), which is never run here; {advice}")
    if config.get("quantization_config"):
        raise ConversionError(f"{source} is quantised; give the model it was made of, or model.dequantize()")
    names = [str(name) for name in config.get("architectures") or ()]
    tasks = _LANGUAGE_MODELS if language else _CLASSIFIERS
    chosen = next((name for name in names if name.endswith(tasks) and hasattr(transformers, name)), None)
    more: dict[str, Any] = {}
    if chosen is None and classes:
        chosen, more = "AutoModelForSequenceClassification", {"num_labels": classes}
    if chosen is None and bare:
        chosen = "AutoModel"
    if chosen is None:  # loaded as one, it would get an untrained classifier
        advice = "fine-tune it by AutoModelFor…Classification; of a CLIP model, he.zero_shot makes one in Python"
        raise ConversionError(f"{source} is a {' or '.join(names)}, which has no trained classifier; {advice}")
    reader = transformers.AutoTokenizer if "vocab_size" in config else transformers.AutoImageProcessor
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    model = getattr(transformers, chosen).from_pretrained(source, dtype="auto", trust_remote_code=False, **more).eval()
    if shown:
        transformers.utils.logging.enable_progress_bar()
    try:
        processor = reader.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError):
        return model, None
    tokens = "vocab_size" in config
    empty = tokens and processor.get_vocab().keys() <= set(processor.all_special_tokens)  # made without files
    return model, None if empty else processor


def stored_tensors(folder: Path, found: Found) -> dict[str, Tensor | Callable[[], Tensor]]:
    """The tensors of a model, from the safetensors files of its folder where these have them under its names.

    Each is read when it is used, and its file is closed again, so that memory holds what is used, and no whole file.
    """
    index = folder / _INDEX
    files = set(read_object(index)["weight_map"].values()) if index.is_file() else {_WEIGHTS}
    stored = dict[str, tuple[Path, Tensor]]()
    for path in (folder / file for file in files if (folder / file).is_file()):
        with safe_open(path, "pt") as file:
            stored |= {key: (path, file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    above = f"{getattr(found.model, 'base_model_prefix', '')}."  # the file may be of the model with or without a head
    tensors = dict(found.tensors)
    by_place = dict[int, Callable[[], Tensor]]()
    for name, tensor in found.tensors.items():
        assert isinstance(tensor, Tensor)
        for key in (name, name.removeprefix(above), above + name):
            path, same = stored.get(key, (folder, None))
            if same is not None and (same.shape, same.dtype) == (tensor.shape, tensor.dtype):
                tensors[name] = by_place[tensor.data_ptr()] = partial(_read, path, key)
                break
    for name, tensor in found.tensors.items():  # tied ones are stored under one name
        if tensors[name] is tensor and isinstance(tensor, Tensor) and tensor.data_ptr() in by_place:
            tensors[name] = by_place[tensor.data_ptr()]
    return tensors


def _read(path: Path, key: str) -> Tensor:
    with safe_open(path, "pt") as file:
        tensor: Tensor = file.get_tensor(key)
        return tensor
