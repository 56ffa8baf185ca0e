"""Evaluating models on data: what is accepted, applied and refused; several processes give the result of one."""

import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hydra_ensembles.calibrate import calibrate
from hydra_ensembles.data.batching import batches
from hydra_ensembles.data.dataset import ImageDataset
from hydra_ensembles.errors import CheckpointError, ConfigError, DataError, HydraWarning
from hydra_ensembles.evaluation.evaluate import evaluate, evaluate_logits
from hydra_ensembles.evaluation.running import AnswerStore, Runner
from hydra_ensembles.familiarity import fit_familiarity
from hydra_ensembles.metrics.conformal import Reference
from hydra_ensembles.model.config import Sharing
from hydra_ensembles.model.metadata import Calibration, Metadata
from hydra_ensembles.overlap import sample_keys
from hydra_ensembles.preprocessing import ImagePreprocessing
from processes import by_two_ranks, count_calls
from random_ensembles import noisy, small

CLASSES = 4
HEADS = (((0, 1), (1, 2)), ((0, 2), (0, 1, 2)), ((1,), (2,)))  # [member][layer]
NAMES = ("ant", "bee", "cat <b>", "dog & fox")


def tiny_ensemble(kind="image"):
    blocks = {"width": 12, "heads": 3, "head_dim": 4, "mlp_width": 16}
    config = small(kind, CLASSES, sharing=Sharing(stem=True, mlp=True), text={"vocabulary": 30}, **blocks)
    preprocessing = None if kind == "text" else ImagePreprocessing((8, 8))
    metadata = Metadata("made here", NAMES, preprocessing, history=("made", "tested"))
    return noisy(replace(config, heads=HEADS), noise=0.5, metadata=metadata)


def image_batches(sizes=(8, 8, 8, 3), seed=0, scale=1.0):
    draw = torch.Generator().manual_seed(seed)
    pixels = [scale * torch.randn(size, 3, 8, 8, generator=draw) for size in sizes]
    return [(some, torch.randint(CLASSES, (len(some),), generator=draw)) for some in pixels]


def text_batches(sizes=(6, 5), seed=0):
    draw = torch.Generator().manual_seed(seed)
    ids = [torch.randint(30, (size, 7), generator=draw) for size in sizes]
    masks = [(torch.arange(7)[None] < torch.randint(3, 8, (size, 1), generator=draw)).long() for size in sizes]
    labels = [torch.randint(CLASSES, (size,), generator=draw) for size in sizes]
    names = ("input_ids", "attention_mask", "labels")
    return [dict(zip(names, batch, strict=True)) for batch in zip(ids, masks, labels, strict=True)]


OOD = {"near": {"close": image_batches((5, 6), seed=5)}, "far": {"noise": image_batches((7,), seed=6, scale=5.0)}}
CALIBRATION = Calibration(temperature=(2.0, 1.0, 0.5), threshold=0.3)


def test_an_interrupted_evaluation_goes_on_and_is_the_same(tmp_path, monkeypatch):
    model, data, calls = tiny_ensemble(), image_batches(), []
    count_calls(monkeypatch, Runner, "_answer", lambda: calls.append(1), lambda: len(calls) == 6)
    options = {"progress": False, "gallery": 2, "keep_logits": True}
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, data, OOD, output=tmp_path, **options)
    found = evaluate(model, data, OOD, output=tmp_path, **options)
    assert len(calls) == 6 + 2  # seven batches, five of them saved before
    expected = evaluate(model, data, OOD, **options)
    assert (found.numbers(), found.gallery, found.figures) == (expected.numbers(), expected.gallery, expected.figures)
    evaluate(model, image_batches(seed=1), OOD, output=tmp_path, **options)
    assert len(calls) == 8 + 7 + 4  # new data are run, known data are not


def test_answers_of_another_neighbour_or_precision_are_not_taken(tmp_path):
    """Neither setting is visible in the weights or stored features."""
    model, data = tiny_ensemble(), image_batches()
    near, far = (fit_familiarity(model, data, "knn", neighbours=count) for count in (1, 5))
    foreign = {"noise": image_batches((7,), seed=6, scale=5.0)}
    evaluate(near, image_batches(seed=1), foreign, output=tmp_path / "knn", progress=False)
    with pytest.raises(CheckpointError, match="neighbours was 1 and is 5"):
        evaluate(far, image_batches(seed=1), foreign, output=tmp_path / "knn", progress=False)
    evaluate(model, data, output=tmp_path / "plain", progress=False)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CheckpointError, match="autocast"):
        evaluate(model, data, output=tmp_path / "plain", progress=False)


def whole(data):
    return [torch.cat(parts) for parts in zip(*data, strict=True)]


@torch.no_grad()
def logits_and_labels(model, data):
    return torch.cat([model(x) for x, _ in data], dim=1), whole(data)[1]


class Named(nn.Sequential):
    """A model called like those of transformers, by keywords; a plain tensor is the first argument."""

    def forward(self, pixel_values=None, labels=None):
        return SimpleNamespace(logits=self[0](pixel_values.clone()))


def test_answers_to_texts_that_differ_in_their_segments_alone_are_kept_apart(tmp_path):
    ids, segments = torch.ones(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)
    one, other = ({"input_ids": ids, "token_type_ids": segments + shift} for shift in (0, 1))
    with AnswerStore(tmp_path, tiny_ensemble(), {}, "a test") as kept:
        assert kept.key(one, sample_keys(one)) != kept.key(other, sample_keys(other))


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
    assert (found.numbers(), found.figures) == (expected.numbers(), expected.figures)
    assert found.samples == {"id": 27, "ood.close": 11, "ood.noise": 7, "shift.blur": 9}
    assert torch.equal(found.logits.id.logits, logits_and_labels(model, data)[0])
    by_name = [{"pixel_values": inputs, "labels": labels, "index": labels} for inputs, labels in data]
    for around in (Named(model), nn.DataParallel(Named(model))):
        assert evaluate(around, by_name, OOD, shift, progress=False).id == found.id
    assert (found.model.heads, found.model.class_names) == (HEADS, NAMES)
    assert found.model.parameters == model.describe().parameters


def test_saved_calibration_is_applied_and_can_be_replaced_and_copies_are_said():
    plain, data = tiny_ensemble(), image_batches()
    calibrated = plain.with_metadata(calibration=CALIBRATION)
    found = evaluate(calibrated, data, OOD, progress=False)
    assert found.model.calibration == CALIBRATION
    assert found.numbers() == evaluate(plain, data, OOD, progress=False, calibration=CALIBRATION).numbers()
    assert found.id != evaluate(plain, data, OOD, progress=False).id
    with pytest.warns(HydraWarning, match="27 of the 54 samples of the in-distribution set 'id'"):
        evaluate(plain, [*data, *data], progress=False)


def test_both_thresholds_are_told_apart():
    """Accepted samples pass both thresholds; each is reported by name, with the share that passes it alone."""
    data = image_batches((40,), seed=4)
    known = fit_familiarity(tiny_ensemble(), image_batches((60,), seed=2), ("knn", "vim"))
    known = calibrate(known, image_batches((60,), seed=3), share=0.7)
    found = evaluate(known, data, OOD, progress=False)
    p, foreign = known.predict(data[0][0]), known.predict(OOD["far"]["noise"][0][0])
    sure, familiar = p.score("msp") <= p.threshold, p.score("knn") <= p.unfamiliarity.threshold
    said = found.selective
    assert (said.score, said.threshold) == ("msp", p.threshold)
    assert (said.familiarity, said.familiarity_threshold) == ("knn", p.unfamiliarity.threshold)
    for share, passed in ((said.sure, sure), (said.familiar, familiar), (said.accepted, sure & familiar)):
        assert share == pytest.approx(passed.double().mean().item(), abs=1e-6)
    noise = found.ood["noise"]
    unsure, unfamiliar = foreign.score("msp") > p.threshold, foreign.score("knn") > p.unfamiliarity.threshold
    for share, declined in ((noise.unsure, unsure), (noise.unfamiliar, unfamiliar), (noise.abstained, ~foreign.accept)):
        assert share == pytest.approx(declined.double().mean().item(), abs=1e-6)
    numbers = found.numbers()
    assert numbers["far.abstained"] == numbers["ood.noise.abstained"] == noise.abstained
    assert numbers["all.unfamiliar"] == (noise.unfamiliar + found.ood["close"].unfamiliar) / 2
    assert {"knn:far.auroc", "vim:far.auroc"} < numbers.keys()  # fitted scores are reported by default


def test_an_optimized_ensemble_is_evaluated_as_the_one_it_was_made_from():
    calibrated, data = tiny_ensemble().with_metadata(calibration=CALIBRATION), image_batches()
    fast = calibrated.optimize()
    found, expected = evaluate(fast, data, progress=False, device="cpu"), evaluate(calibrated, data, progress=False)
    assert found.numbers().keys() == expected.numbers().keys()
    for name, number in expected.numbers().items():
        assert found.numbers()[name] == pytest.approx(number, rel=1e-4, abs=1e-6), name
    assert found.model == expected.model


@pytest.mark.parametrize(
    "around", [nn.DataParallel, partial(torch.compile, backend="eager"), torch.optim.swa_utils.AveragedModel]
)
def test_what_lies_around_an_ensemble_takes_nothing_from_it(around):
    """Calibration and familiarity belong to the wrapped ensemble; for a user's own wrapper, a warning says so."""
    data = image_batches()
    calibrated = fit_familiarity(tiny_ensemble(), data, "knn").with_metadata(calibration=CALIBRATION)
    expected = evaluate(calibrated, data, OOD, scores=("knn",), progress=False)
    found = evaluate(around(calibrated), data, OOD, scores=("knn",), progress=False)
    assert (found.numbers(), found.model) == (expected.numbers(), expected.model)
    with pytest.warns(HydraWarning, match="Sequential holds an ensemble that is calibrated"):
        evaluate(nn.Sequential(calibrated), data, progress=False)


def test_any_callable_with_two_axes_counts_as_one_member():
    linear = nn.Linear(3 * 8 * 8, CLASSES)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), linear).train()
    found = evaluate(model, image_batches(), OOD, progress=False)
    assert (found.model.kind, found.model.members, found.model.parameters) == ("callable", 1, 3 * 64 * 4 + 4)
    assert all(module.training for module in model.modules())  # training mode is restored
    flat = evaluate(lambda x: linear(x.flatten(1)), image_batches(), OOD, progress=False)
    assert flat.numbers() == found.numbers()


def test_texts_come_as_mappings_and_streams_are_read_once():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(text_batches())

    stream, gone = DataLoader(Stream(), batch_size=None), iter(text_batches((4,), seed=3))
    found = evaluate(tiny_ensemble("text"), stream, {"gone": gone}, gallery=2, progress=False)
    assert (found.model.kind, found.gallery[0].kind) == ("text", "text")
    assert found.samples == {"id": 11, "ood.gone": 4}


def test_data_sets_are_put_in_batches_with_the_models_preprocessing():
    pillow = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
    pictures = [pillow.fromarray(array) for array in pixels]
    dataset = ImageDataset(pictures, [i % CLASSES for i in range(12)], NAMES, name="pictures")
    model = tiny_ensemble()
    first, rest = dataset.select(range(8)), dataset.select(range(8, 12))
    found = evaluate(model, first, {"rest": rest}, batch_size=5, progress=False)
    prepared, other = (batches(part, model.metadata.preprocessing, 5) for part in (first, rest))
    assert found.id_name == "pictures"
    assert found == evaluate(model, prepared, {"rest": other}, progress=False)


def test_samples_that_a_loader_leaves_out_are_said():
    cut = DataLoader(TensorDataset(*whole(image_batches())), 8, drop_last=True)
    with pytest.warns(HydraWarning, match="set 'id' left out 3 of 27"):
        assert evaluate(tiny_ensemble(), cut, progress=False).id.samples == 24
    with pytest.warns(HydraWarning, match="validation left out 3 of 27"):
        calibrate(tiny_ensemble(), cut, familiarity=None)


def test_the_gallery_holds_the_extremes():
    model, data = tiny_ensemble(), image_batches()
    found = evaluate(model, data, OOD, progress=False, gallery=3)
    images, labels = whole(data)
    prediction = model.predict(images)
    order = prediction.score("msp").sort(stable=True).indices
    wrong = [i for i in order.tolist() if prediction.label[i] != labels[i]][:3]
    shelves = {"sure": order[:3].tolist(), "unsure": order.flip(0)[:3].tolist(), "wrong": wrong}
    for shelf, expected in shelves.items():
        assert [one.index for one in found.gallery if (one.set, one.shelf) == ("id", shelf)] == expected
    foreign = {(item.shelf, item.label) for item in found.gallery if item.set == "noise"}
    assert foreign == {("sure", None), ("unsure", None)}


@pytest.mark.parametrize(
    ("model", "arguments", "token"),
    [
        (None, (image_batches(), {"void": []}), "'void' has no samples"),
        (None, (image_batches(), {"o": image_batches((8,))[0]}), "set 'o' must be batches.*got one batch"),
        (lambda x: torch.randn(2, len(x), 4 if len(x) == 8 else 5), (image_batches(),), "'id'.*5 classes"),
    ],
)
def test_errors_name_the_set(model, arguments, token):
    with pytest.raises(DataError, match=token):
        evaluate(model or tiny_ensemble(), *arguments, progress=False)


def test_probabilities_in_place_of_logits_are_warned_of():
    logits, labels = torch.randn(3, 8, 4), torch.arange(8) % 4
    with pytest.warns(HydraWarning, match="softmax"):
        evaluate_logits(logits.softmax(-1), labels)
    trained = 8 * torch.nn.functional.one_hot(labels, 4) - 4 + logits
    with pytest.warns(HydraWarning, match="sigmoids"):
        evaluate_logits(trained.sigmoid(), labels)
    with warnings.catch_warnings(action="error"):
        for quiet in (logits.abs(), logits.log_softmax(-1), trained, torch.rand(3, 8, 4)):
            evaluate_logits(quiet, labels)


def test_thresholds_that_accept_fewer_than_they_promise_are_told():
    """As when the calibration data were easier, or trained the model; with few samples it may be chance."""
    reference = Reference.of(torch.linspace(0, 0.2, 200))  # scores of confident inputs
    calibration = Calibration(threshold=0.19, reference=reference)
    batches = [(torch.randn(60, 4), torch.arange(60) % 3)]
    sure, unsure = (
        lambda inputs, scale=scale: scale * torch.eye(3)[torch.arange(len(inputs)) % 3] for scale in (9, 1.5)
    )
    with pytest.warns(HydraWarning, match=r"^0 % of the 60 samples .* sure enough .* the 95 % promised"):
        evaluate(unsure, batches, calibration=calibration, progress=False)
    with warnings.catch_warnings(action="error"):
        evaluate(sure, batches, calibration=calibration, progress=False)


def test_a_model_that_does_not_choose_one_class_is_refused():
    model, data = torch.nn.Linear(4, 3), [(torch.randn(6, 4), torch.arange(6) % 3)]
    model.config = SimpleNamespace(problem_type="multi_label_classification")
    with pytest.raises(ConfigError, match="multi_label_classification"):
        evaluate(model, data, progress=False)


def test_two_processes_give_the_numbers_of_one():
    model, data = tiny_ensemble(), image_batches()

    def run(rank):
        return evaluate(model, data, OOD, progress=False, gallery=4)

    alone = run(0)
    for found in (one.result() for one in by_two_ranks(run)):
        assert (found.provenance.processes, replace(found, provenance=alone.provenance)) == (2, alone)


def test_processes_with_other_samples_are_refused_and_stop_when_one_fails():
    """Different samples, as from a stream that splits itself between processes."""
    for refused in by_two_ranks(lambda rank: evaluate(tiny_ensemble(), image_batches()[rank:], progress=False)):
        assert "rank 1 has different samples in set 'id'" in str(refused.exception())

    def failing(inputs):
        raise RuntimeError("out of memory")

    models = tiny_ensemble(), failing
    both = by_two_ranks(lambda rank: evaluate(models[rank], image_batches(), progress=False))
    healthy, failed = (one.exception() for one in both)
    assert isinstance(failed, RuntimeError)
    assert isinstance(healthy, DataError)
    assert "out of memory" in str(healthy)
