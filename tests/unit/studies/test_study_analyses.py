"""Every analysis runs on a small task, equals plain computation, and is shown next to the paper's numbers."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from published import published
from small_studies import CPU, SmallFolder, small_vit
from torch.nn import functional as F
from typer.testing import CliRunner

import hydra_ensembles as he
from architectures import timm_model
from hydra_ensembles.heads import Head
from random_ensembles import noisy, small
from studies.__main__ import app
from studies.analyses import analysis, diversity, noise, registry, seeds
from studies.analyses.gates import expand, gates_after, measure, pruning_step, weight_terms
from studies.analyses.registry import ANALYSES
from studies.results import pyplot
from studies.seed import Seed
from studies.task import Task

HEADS = [Head(0, 1), Head(1, 0), Head(1, 3)]
TASK = "vision-cifar100"
ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results"
LAYERS, EACH = 3, 4  # layers, heads per layer


class SmallTask(Task):
    """Uses a ViT of width 16 instead of the pretrained model."""

    def start(self) -> he.Ensemble:
        return small_vit(LAYERS, EACH)


def small_settings() -> dict[str, Any]:
    """The real settings with counts that run in seconds."""
    plain = json.loads(json.dumps(registry.with_analyses()))
    plain |= {"circuits": 12, "taylor_batches": 1}
    plain["tasks"][TASK] |= {"input_size": 8, "train": ["train-0"]}
    plain["tasks"][TASK]["training"] |= {"epochs": 1, "batch_size": 20}
    plain["tasks"][TASK]["recovery"] |= {"prune": 3, "batch_size": 20, "last_blocks": 2}
    plain["analyses"] |= {
        "training": {**plain["analyses"]["training"], "steps": 2, "warmup": 0, "rates": {TASK: 0.01}},
        "noise": {**plain["analyses"]["noise"], "images": 30, "batch": 15, "probes": 2, "random": 2},
        "separation": {"samples": 40, "heads": 2, "points": 5},
        "overlap": {"draws": 50},
        "shares": [0.25, 0.5],
        "diversity": {"steps": 2, "pool": 2.0, "tasks": {TASK: {"prune": 0.33333, "dropout": 0.1}}},
        "members": {"counts": [1, 2, 4], "pool": 2.7, "batches": [2]},
        "stability": {"sizes": [10, 20, 1000], "draws": 2, "score": "avg"},
        "abstaining": {"share": 0.9, "counts": [20, 10_000]},
    }
    return plain


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Seed:
    """A seed whose models are trained once for all tests in this file."""
    return Seed(SmallTask(TASK, small_settings(), SmallFolder(), CPU), 0, tmp_path_factory.mktemp("runs"))


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "DRAWS", 50)


RUN = [name for name, one in ANALYSES.items() if one.run is not None]
LONG = ("stability", "distance")  # many circuit extractions


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.slow) if one in LONG else one for one in RUN])
def test_every_analysis_runs_and_is_stored_and_shown(name: str, seed: Seed, tmp_path: Path, monkeypatch) -> None:
    found = registry.analysed(name, [seed])
    registry.store(found, tmp_path)
    again = registry.load(name, TASK, tmp_path)
    assert again == json.loads(json.dumps(found))
    assert ANALYSES[name].table(again) in registry.blocks(tmp_path)[f"analysis_{name}_{TASK}"]
    drawn = ANALYSES[name].figure(again)
    assert any(one.lines for one in drawn.axes)
    pyplot().close(drawn)
    monkeypatch.setattr(registry, "device_name", lambda _: "another")
    monkeypatch.setattr(registry, "versions", lambda: {"torch": "another"})
    later = registry.analysed(name, [seed])  # loaded, not recomputed, and said to be made where it was
    assert all(later[key] == again[key] for key in ("seeds", "device", "versions"))


def test_numbers_are_those_of_the_model(seed: Seed) -> None:
    """Accuracy and disagreement against plain computation on the whole test set."""
    task, model = seed.task, he.Ensemble.stack(seed.singles)
    found = analysis.measured(seed, model)
    inputs, labels = task.inside("report").batch(torch.arange(60), False)
    with torch.no_grad():
        probs = model(inputs).softmax(-1)
    assert found["accuracy"] == pytest.approx((probs.mean(0).argmax(-1) == labels).double().mean().item())
    answers = probs.argmax(-1)
    pairs = [(answers[i] != answers[j]).double().mean().item() for i, j in ((0, 1), (0, 2), (1, 2))]
    assert found["disagreement"] == pytest.approx(sum(pairs) / 3, abs=1e-6)


def test_members_that_differ_in_nothing_agree(seed: Seed) -> None:
    """Members of the variant without any source of diversity are equal; each single source makes them differ."""
    rows = registry.analysed("diversity", [seed])["seeds"]["0"]["rows"]
    assert rows["free: nothing"]["all.mutual_information"] == pytest.approx(0.0, abs=1e-6)
    assert rows["free: nothing"]["accuracy"] == pytest.approx(rows["one member"]["accuracy"])
    for title in ("heads", "order", "noise", "heads, order and noise"):
        assert rows[f"free: {title}"]["all.mutual_information"] > 1e-7
    made = {path.name for path in (seed.folder / "models").iterdir() if path.name.startswith("diversity-")}
    assert len(made) == 1 + 2 * len(diversity.VARIANTS)  # each once: the first member is common to all variants


def test_side_by_side_is_one_by_one(seed: Seed) -> None:
    """Members trained together on the same batches equal members trained alone."""
    task, base = seed.task, seed.base
    pruned = [he.prune(base, [(0, 1)]), he.prune(base, [(1, 0), (2, 2)])]
    together = analysis.side_by_side(seed, "check", lambda: pruned)
    recipe = analysis.few_steps(task, seed=seed.derived("check"))
    for start, one in zip(pruned, together, strict=True):
        alone = he.finetune(start, task.lessons(recipe), recipe, progress=False)
        for name, tensor in alone.state_dict().items():
            torch.testing.assert_close(one.state_dict()[name], tensor, rtol=1e-3, atol=1e-5)


def gated_problem() -> tuple[he.Ensemble, list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    model: he.Ensemble = he.convert(timm_model("vit_base_patch16_224")).double()
    with torch.no_grad():
        for layer in model.encoder.layers:
            layer.attention.out.mul_(3)  # makes the heads matter
    images = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    return model, list(zip(images.split(4), labels.split(4), strict=True)), labels


def test_gates_are_pruning_and_what_the_expansion_leaves_is_of_third_order() -> None:
    model, batches, labels = gated_problem()
    expansion, step = expand(model, batches), pruning_step(model, HEADS)

    def loss(share: float) -> float:
        return measure(model, gates_after(model, step, share), batches)["loss"]

    def left(share: float) -> float:
        second = share * expansion.gradient @ step + share**2 * expansion.second_order(step)
        return abs(loss(share) - expansion.value - second.item())

    with torch.no_grad():
        pruned = torch.cat([he.prune(model, HEADS)(images)[0] for images, _ in batches])
    assert loss(1.0) == pytest.approx(F.cross_entropy(pruned, labels).item(), rel=1e-10)
    assert expansion.value == pytest.approx(loss(0.0), rel=1e-12)
    assert left(0.1) > 1e-10  # the remainder is measurable
    assert left(0.1) / left(0.05) == pytest.approx(8.0, rel=0.25)  # halving the step divides it by eight


def test_terms_in_weights_are_derivatives_along_the_step() -> None:
    """Gradient and curvature along the step that sets all head weights to zero, against finite differences."""
    model, batches, labels = gated_problem()
    found = weight_terms(model, batches, {"some": pruning_step(model, HEADS)}, probes=1)

    def loss(share: float) -> float:
        moved = he.Ensemble.from_state(model.config, model.state_dict())
        with torch.no_grad():
            for head in HEADS:
                attention = moved.encoder.layers[head.layer].attention
                for weight in (attention.qkv, attention.qkv_bias, attention.out):
                    weight[head.head] *= 1 - share
            return F.cross_entropy(torch.cat([moved(images)[0] for images, _ in batches]), labels).item()

    h = 1e-3
    assert found.first["some"] == pytest.approx((loss(h) - loss(-h)) / (2 * h), rel=1e-4)
    assert found.second["some"] == pytest.approx((loss(h) - 2 * loss(0.0) + loss(-h)) / (2 * h * h), rel=1e-3)


def test_traces_of_heads_are_those_of_the_hessian() -> None:
    """Against the full Hessian of a model with one head of width one."""
    config = small(classes=2, width=2, layers=1, heads=1, head_dim=1, mlp_width=2, qkv_bias=False)
    model = noisy(config, noise=1.0).double()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(5, 3, 8, 8, dtype=torch.float64, generator=generator)
    labels = torch.tensor([0, 1, 0, 1, 1])
    found = weight_terms(model, [(images, labels)], {}, probes=150)
    names = [f"encoder.layers.0.attention.{part}" for part in ("qkv", "out")]
    parts = [model.get_parameter(name).detach() for name in names]

    def loss(*values: torch.Tensor) -> torch.Tensor:
        given = dict(zip(names, values, strict=True))
        return F.cross_entropy(torch.func.functional_call(model, given, (images,))[0], labels)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        blocks = torch.autograd.functional.hessian(loss, tuple(parts))
    traces = [blocks[i][i].reshape(one.numel(), one.numel()).trace() for i, one in enumerate(parts)]
    scale = sum(blocks[i][j].square().sum() for i in (0, 1) for j in (0, 1)).sqrt().item()
    assert found.weights == 8
    assert found.traces.item() == pytest.approx(sum(traces).item(), abs=0.2 * scale)


def test_seeds_are_read_from_stored_studies() -> None:
    found, study = registry.read_stored("seeds", TASK, RESULTS / "studies"), published(TASK)
    right = [study.columns("Single", seed)["cifar100|correct"].mean() for seed in study.seeds("Single")]
    assert [one["rows"]["Single"]["accuracy"] for one in found["seeds"].values()] == pytest.approx(right)
    shown = seeds.seeds_table(found)
    assert f"{100 * np.mean(right):.2f} ± {100 * np.std(right, ddof=1):.2f}" in shown
    assert "*92.15*" in shown  # the paper's


def test_trainings_have_the_rates_that_half_b_chose() -> None:
    """An unvalidated rate silently ruins members: rates must equal those of the stored studies."""
    known = registry.with_analyses()["analyses"]
    for name, rate in known["training"]["rates"].items():
        stored = RESULTS / "studies" / name / "study.json"
        if stored.exists():
            choices = json.loads(stored.read_text())["choices"]
            if "CircAvg" in choices:
                assert rate == choices["CircAvg"]["setting"]["rate"]
            held_out = {one["setting"]["rate"]: one["accuracy"] for one in choices["MC Dropout"]["measured"]}
            assert held_out[known["diversity"]["tasks"][name]["dropout"]] > max(held_out.values()) - 0.02
    assert (RESULTS / "studies" / TASK / "study.json").exists()


def test_what_other_settings_left_in_a_run_folder_is_not_read(seed: Seed) -> None:
    before = registry.analysed("overlap", [seed])["seeds"]["0"]
    settings = {**small_settings(), "analyses": {**small_settings()["analyses"], "overlap": {"draws": 3}}}
    other = Seed(SmallTask(TASK, settings, SmallFolder(), CPU), 0, seed.study.parent)
    found = registry.analysed("overlap", [other])["seeds"]["0"]
    assert found["chance"] != before["chance"]
    assert found["pairs"] == before["pairs"]  # rankings do not depend on the draws
    assert registry.analysed("overlap", [seed])["seeds"]["0"] == before


STORED = registry.stored(RESULTS / "analyses")


def test_every_stored_analysis_has_the_figure_of_its_numbers() -> None:
    """If this fails, run `python benchmarks/tables.py`, which draws it on a CPU."""
    assert {one["analysis"] for one in STORED} == set(ANALYSES)
    assert not [f"{one['analysis']}-{one['task']}" for one in registry.undrawn(RESULTS / "analyses")]
    assert len(list(registry.FIGURES.glob("*.svg"))) == len(STORED)  # no stale figures


def map_rows() -> list[list[str]]:
    """The cells of the paper map's rows."""
    _, _, tables = (ROOT / "docs" / "paper_map.md").read_text().partition("\n## 1.")
    lines = [line for line in tables.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in re.split(r" \| ", line.strip("| "))] for line in lines]
    return [row for row in rows if row[0] != "item"]


def whole(status: str) -> bool:
    """Whether a status, apart from the remark in its final brackets, calls all of an item done."""
    return re.sub(r" \(.+\)$", "", status) in ("done", "done on a stand-in")


def test_the_paper_map_calls_done_what_has_results() -> None:
    """A row that names analyses or studies is done only if all their results are stored."""
    seen = set[str]()
    for item, _, command, status in map_rows():
        named = re.findall(r"`analyse (\w+)(?: --task ([\w-]+))?`", command)
        assert {name for name, _ in named} <= set(ANALYSES), item
        seen |= {name for name, _ in named}
        missing = [name for name, task in named if not list((RESULTS / "analyses").glob(f"{name}-{task or '*'}.json"))]
        studies = re.findall(r"`study ([\w-]+)", command)
        missing += [name for name in studies if not (RESULTS / "studies" / name / "study.json").exists()]
        assert not (whole(status) and re.search("not (run|measured|asked)|never run", status)), item
        said = status.startswith(("done in part", "not measured", "impossible here"))
        assert said or not missing, f"{item}: {missing} have no results, but the status is {status!r}"
    assert seen == set(ANALYSES)  # each analysis has a row


def test_the_command_makes_tables_and_figures_again_from_results(seed: Seed, tmp_path: Path) -> None:
    registry.store(registry.analysed("shares", [seed]), tmp_path)
    options = ["--task", TASK, "--results", str(tmp_path), "--figures", str(tmp_path), "--from-results"]
    made = CliRunner().invoke(app, ["analyse", "shares", *options])
    assert made.exit_code == 0, made.output
    assert "heads removed" in made.output
    assert not registry.undrawn(tmp_path, tmp_path)
    registry.store({**registry.load("shares", TASK, tmp_path), "seconds": -1.0}, tmp_path)  # an impossible value
    assert registry.undrawn(tmp_path, tmp_path)  # the figure no longer matches the numbers
