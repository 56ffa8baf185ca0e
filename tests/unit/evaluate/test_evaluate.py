"""Running models over data: what is accepted, what is applied, what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import CLASSES, HEADS, NAMES, image_batches, text_batches, tiny_ensemble
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hydra_ensembles.data.batching import batches
from hydra_ensembles.data.dataset import ImageDataset
from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.evaluation.evaluate import evaluate, evaluate_logits
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.model.metadata import Calibration

OOD = {"near": {"close": image_batches((5, 6), seed=5)}, "far": {"noise": image_batches((7,), seed=6, scale=5.0)}}


def logits_and_labels(model, data):
    with torch.no_grad():
        return torch.cat([model(x) for x, _ in data], dim=1), torch.cat([y for _, y in data])


def test_evaluate_is_evaluate_logits_of_the_models_answers():
    model, data = tiny_ensemble(), image_batches()
    shift = {"blur": image_batches((9,), seed=8)}
    found = evaluate(model, data, OOD, shift, progress=False, scores=("entropy",), keep_logits=True)
    expected = evaluate_logits(
        *logits_and_labels(model, data),
        {group: {name: logits_and_labels(model, one)[0] for name, one in sets.items()} for group, sets in OOD.items()},
        {"blur": logits_and_labels(model, shift["blur"])},
        scores=("entropy",),
    )
    assert found.numbers() == expected.numbers()
    assert found.figures == expected.figures
    assert found.samples == {"id": 27, "ood.close": 11, "ood.noise": 7, "shift.blur": 9}
    assert torch.equal(found.logits.id.logits, logits_and_labels(model, data)[0])
    wrapped = evaluate(lambda inputs: SimpleNamespace(logits=model(inputs)), data, OOD, shift, progress=False)
    assert wrapped.id == found.id  # an answer with logits is looked into
    info = found.model
    assert (info.kind, info.members, info.classes, info.class_names) == ("image", 3, CLASSES, NAMES)
    assert (info.heads, info.heads_label, info.history) == (HEADS, "1.8x3", ("made", "tested"))
    assert info.parameters == model.describe().parameters


def test_saved_calibration_is_applied_and_can_be_replaced():
    calibration = Calibration(temperature=(2.0, 1.0, 0.5), threshold=0.3)
    plain, data = tiny_ensemble(), image_batches()
    calibrated = plain.with_metadata(calibration=calibration)
    found = evaluate(calibrated, data, OOD, progress=False)
    assert found.selective is not None
    assert found.model.calibration == calibration
    assert found.numbers() == evaluate(plain, data, OOD, progress=False, calibration=calibration).numbers()
    assert found.id != evaluate(plain, data, OOD, progress=False).id
    prediction = calibrated.predict(torch.cat([x for x, _ in data]))
    assert found.selective.accepted == pytest.approx(prediction.accept.float().mean().item(), abs=1e-6)
    with pytest.raises(DataError, match="temperature"):  # the logits overflow
        evaluate(plain, data, calibration=Calibration(temperature=(1e-38,)), progress=False)


def test_any_callable_with_two_axes_counts_as_one_member():
    linear = nn.Linear(3 * 8 * 8, CLASSES)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), linear).train()
    found = evaluate(model, image_batches(), OOD, progress=False)
    assert (found.model.kind, found.model.members, found.model.parameters) == ("callable", 1, 3 * 64 * 4 + 4)
    assert all(module.training for module in model.modules())  # dropout was off and is on again
    flat = evaluate(lambda x: linear(x.flatten(1)), image_batches(), OOD, progress=False)
    assert flat.numbers() == found.numbers()


def test_texts_come_as_mappings():
    model = tiny_ensemble("text")
    found = evaluate(model, text_batches(), {"other": text_batches((4,), seed=3)}, progress=False, gallery=2)
    assert found.model.kind == "text"
    assert found.id.samples == 11
    assert found.gallery[0].kind == "text"
    assert found.gallery[0].content.startswith("token ids ")


def test_one_pass_over_each_set_and_streams_are_fine(capsys):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(image_batches())

    found = evaluate(tiny_ensemble(), DataLoader(Stream(), batch_size=None), {"gone": iter(OOD["far"]["noise"])})
    assert found.id.samples == 27
    assert found.ood["gone"].samples == 7
    assert "id" in capsys.readouterr().err  # the progress bar names the set


def test_data_sets_are_put_in_batches_with_the_models_preprocessing():
    pillow = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
    pictures = [pillow.fromarray(array) for array in pixels]
    dataset = ImageDataset(pictures, [i % CLASSES for i in range(12)], NAMES, name="pictures")
    model = tiny_ensemble()
    first, rest = dataset.select(range(8)), dataset.select(range(8, 12))
    found = evaluate(model, first, {"rest": rest}, batch_size=5, progress=False)
    assert evaluate(model.optimize(), first, {"rest": rest}, progress=False).samples == found.samples
    prepared, other = (batches(part, model.metadata.preprocessing, 5) for part in (first, rest))
    assert found.id_name == "pictures"
    assert found == evaluate(model, prepared, {"rest": other}, progress=False)
    for twice in (first, prepared, batches(first, model.metadata.preprocessing, 3), dataset.select(range(7, -1, -1))):
        with pytest.raises(DataError, match=r"'same'.*'pictures'"):
            evaluate(model, first, {"rest": rest, "same": twice}, progress=False)
    with pytest.raises(ConfigError, match=r"'pictures'.*preprocess"):
        evaluate(lambda x: x, dataset, progress=False)


def test_loaders_over_one_data_set_may_read_different_things_but_one_loader_does_not():
    inputs, labels = (torch.cat(parts) for parts in zip(*image_batches(), strict=True))
    data = TensorDataset(inputs, labels)
    loader, other = DataLoader(data, batch_size=9, sampler=range(18)), DataLoader(data, sampler=range(18, 27))
    assert evaluate(tiny_ensemble(), loader, {"rest": other}, progress=False).ood["rest"].samples == 9
    with pytest.raises(DataError, match=r"'b'.*'id'"):
        evaluate(tiny_ensemble(), loader, {"b": loader}, progress=False)
    with pytest.raises(DataError, match=r"'b'.*'a'"):
        evaluate(tiny_ensemble(), loader, {"near": {"a": other}, "far": {"b": other}}, progress=False)


def test_inputs_come_in_the_dtype_of_the_model():
    data = [(images.double(), labels) for images, labels in image_batches()]
    models = {"bfloat16": tiny_ensemble().to(torch.bfloat16), "float32": tiny_ensemble().optimize()}
    for dtype, model in models.items():
        assert evaluate(model, data, progress=False).provenance.dtype == dtype


def test_the_gallery_holds_the_extremes():
    model, data = tiny_ensemble(), image_batches()
    found = evaluate(model, data, OOD, progress=False, gallery=3)
    prediction = model.predict(torch.cat([x for x, _ in data]))
    labels = torch.cat([y for _, y in data])
    order = prediction.score("msp").sort(stable=True).indices
    shelves = {
        shelf: [i.index for i in found.gallery if (i.set, i.shelf) == ("id", shelf)]
        for shelf in ("sure", "unsure", "wrong")
    }
    assert shelves["sure"] == order[:3].tolist()
    assert shelves["unsure"] == order.flip(0)[:3].tolist()
    assert shelves["wrong"] == [i for i in order.tolist() if prediction.label[i] != labels[i]][:3]
    ood_items = [item for item in found.gallery if item.set == "noise"]
    assert {item.shelf for item in ood_items} == {"sure", "unsure"}
    assert all(item.label is None for item in ood_items)
    assert found.gallery[0].content.startswith("data:image/jpeg;base64,")
    assert found.gallery[0].confidence == pytest.approx(prediction.confidence[order[0]].item(), abs=1e-6)


def test_every_logit_is_looked_at_once(monkeypatch):
    """One finiteness pass over the member logits; what is made of them is trusted."""
    looked, look = [], torch.isfinite
    monkeypatch.setattr(torch, "isfinite", lambda values: looked.append(values.shape) or look(values))
    found = evaluate(tiny_ensemble(), image_batches(), OOD, {"fog": image_batches((9,), seed=8)}, progress=False)
    members, classes = found.model.members, found.model.classes
    assert sum(shape[1] for shape in looked if len(shape) == 3) == sum(found.samples.values())
    assert all(shape[0] == members and shape[2] == classes for shape in looked if len(shape) == 3)
    assert all(len(shape) == 1 for shape in looked if len(shape) != 3)  # the likelihood of each sample


def broken(model, batch):
    """The model, but its answer to one batch holds a NaN."""
    calls = iter(range(100))

    def answer(inputs):
        logits = model(inputs).clone()
        if next(calls) == batch:
            logits[0, 1, 2] = float("nan")
        return logits

    return answer


def with_labels(label):
    return [(x, torch.full_like(y, label)) for x, y in image_batches()]


@pytest.mark.parametrize(
    ("model", "arguments", "token"),
    [
        (None, ([],), "'id' has no batches"),
        (None, (image_batches(), {"void": []}), "'void' has no batches"),
        (None, (with_labels(1),), "'id'.*27 labels are 1"),
        (None, (with_labels(CLASSES),), "batch 0 of set 'id'.*4 classes"),
        (None, ([x for x, _ in image_batches()],), "batch 0 of set 'id' has no labels"),
        (None, (image_batches(), None, {"fog": [x for x, _ in image_batches()]}), "'fog' has no labels"),
        (broken(tiny_ensemble(), 2), (image_batches(),), "'id'.*1 of 96 member logits.*batch 2"),
        (broken(tiny_ensemble(), 5), (image_batches(), OOD), "'close'.*1 of 72 member logits.*batch 1"),
        (lambda x: x[:, 0, 0, :2].T, (image_batches(),), "'id'.*batch 0"),
        (lambda x: "yes", (image_batches(),), "'id'.*str"),
        (lambda x: torch.randn(2, len(x), 4 if len(x) == 8 else 5), (image_batches(),), "'id'.*5 classes"),
    ],
)
def test_errors_name_the_set(model, arguments, token):
    with pytest.raises(DataError, match=token):
        evaluate(model or tiny_ensemble(), *arguments, progress=False)


def test_labels_of_ood_sets_are_not_read():
    inputs = OOD["far"]["noise"][0][0]  # [7, 3, 8, 8]
    names = tuple(f"{row}.png" for row in range(7))
    expected = evaluate(tiny_ensemble(), image_batches(), {"noise": [inputs]}, progress=False)
    forms = {
        "file names": [(inputs, names)],
        "floating point": [(inputs, torch.rand(7))],
        "masks": [(inputs, torch.zeros(7, 8, 8, dtype=torch.long))],
        "in a mapping": [{"pixel_values": inputs, "label": names}],
        "none": DataLoader(TensorDataset(inputs), batch_size=7),
    }
    for form, data in forms.items():
        found = evaluate(tiny_ensemble(), image_batches(), {"noise": data}, progress=False, gallery=1)
        assert found.numbers() == expected.numbers(), form
    with pytest.raises(DataError, match="batch 0 of set 'id'"):
        evaluate(tiny_ensemble(), forms["file names"], progress=False)


def headless() -> Ensemble:
    model = tiny_ensemble()
    config = replace(model.config, readout=replace(model.config.readout, num_classes=0))
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("readout.classifier.")}
    return Ensemble.from_state(config, state, model.metadata)


def test_an_optimized_ensemble_is_evaluated_as_the_one_it_was_made_from():
    calibrated, data = (
        tiny_ensemble().with_metadata(calibration=Calibration(temperature=(2.0, 1.0, 0.5), threshold=0.3)),
        image_batches(),
    )
    found, expected = (evaluate(model, data, progress=False) for model in (calibrated.optimize(), calibrated))
    assert found.numbers().keys() == expected.numbers().keys()
    for name, number in expected.numbers().items():
        assert found.numbers()[name] == pytest.approx(number, rel=1e-4, abs=1e-6), name
    assert found.selective is not None
    assert found.model == expected.model
    assert found.provenance.hardware == expected.provenance.hardware


def never(inputs):
    raise AssertionError("the model ran")


@pytest.mark.parametrize(
    ("settings", "token"),
    [
        ({"score": "doubt"}, "doubt"),
        ({"scores": ("energy", "doubt")}, "doubt"),
        ({"scores": "energy"}, "energy"),
        ({"convention": "mine"}, "convention='mine'"),
        ({"bootstrap": -1}, "bootstrap=-1"),
        ({"gallery": -1}, "gallery=-1"),
    ],
)
def test_unknown_settings_are_refused_before_the_run(settings, token):
    with pytest.raises(ConfigError, match=token):
        evaluate(never, image_batches(), progress=False, **settings)


def test_another_device_and_a_missing_classifier_are_refused():
    fast = tiny_ensemble().optimize()
    assert evaluate(fast, image_batches(), progress=False, device="cpu").model.members == 3
    with pytest.raises(ConfigError, match=r"cpu.*meta"):
        evaluate(fast, image_batches(), progress=False, device=torch.device("meta"))
    with pytest.raises(ConfigError, match="no classifier"):
        evaluate(headless().optimize(), image_batches(), progress=False)
