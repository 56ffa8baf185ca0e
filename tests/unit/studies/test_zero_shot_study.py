"""All stages of the zero-shot study on a small model: what they leave, when test sets are opened, what it becomes."""

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import typer
from click.testing import Result
from small_study import CPU
from small_zero_shot import SmallDual, run_small, small_recipe, small_store
from typer.testing import CliRunner

import hydra_ensembles as he
from hydra_ensembles.errors import ConfigError, DataError
from studies import __main__ as command
from studies import zero_shot
from studies.seed_folder import SeedFolder
from studies.zero_shot import study as opening
from studies.zero_shot.answers import image_embeddings, logits_of, text_embeddings
from studies.zero_shot.costs import classifier
from studies.zero_shot.fixed import Fixed
from studies.zero_shot.methods import BOTH, FAMILIES, HYDRA, IMAGE, IMAGE_TUNED, METHODS
from studies.zero_shot.seed_models import ZeroShotModels
from studies.zero_shot.shared_sets import SharedSets
from studies.zero_shot.test_sets import open_test_sets

BEFORE_TESTS = ("dual", "rank", "tune")
REPORTED_ONLY = ("images/caltech101", "images/pets", "images/mnist", "images/eurosat", "images/dtd10")


@dataclass(frozen=True)
class Run:
    """A finished run of one seed: its folders, and what the command printed."""

    output: Path
    results: Path
    tables: str

    @property
    def places(self) -> list[str]:
        """Options of the command that name the folders."""
        return ["--output", str(self.output), "--results", str(self.results), "--device", "cpu"]


def command_line(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(command.study)
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Stages up to `tune` by function, the others by the command, on a small model and small data."""
    folder, store = tmp_path_factory.mktemp("zero-shot"), small_store()
    output, results = folder / "runs", folder / "results"
    run_small(small_recipe(), store, output, stages=BEFORE_TESTS)
    assert not {source for source, _ in store.opened} & set(REPORTED_ONLY)
    assert ("images/tinyimagenet", "test") not in store.opened
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(opening, "Store", lambda data, cifar: store)
        patched.setattr(opening, "TrainedDual", SmallDual)
        patched.setattr(opening, "load_zero_shot_recipe", lambda suite, tiny: small_recipe())
        places = Run(output, results, "").places
        printed = command_line("zero-shot", "--tiny", *places)
        assert printed.exit_code == 0, printed.stderr
        assert ("images/tinyimagenet", "test") in store.opened
        yield Run(output, results, printed.stdout[printed.stdout.index("### zero-shot: about") :])


def models_of(output: Path, seed: int = 0) -> ZeroShotModels:
    recipe, store = small_recipe(), small_store()
    folder = SeedFolder(output, recipe, seed)
    return ZeroShotModels(recipe, seed, SmallDual(store, recipe, CPU), SharedSets(store, recipe.counts), folder, CPU)


def test_every_method_is_evaluated_on_every_set(run: Run) -> None:
    facts = json.loads((run.output / "zero-shot" / "seed-0" / "evaluated.json").read_text())
    assert facts["methods"] == {name: list(one.units) for name, one in METHODS.items()}
    assert list(facts["units"]) == [unit for family in FAMILIES for unit in family.units]
    assert list(facts["tasks"]) == [
        *("cifar100", "caltech101", "pets", "dtd10", "scene15", "eurosat", "cifar10", "tinyimagenet")
    ]
    assert [name for name, one in facts["tasks"].items() if one["domain"] == "seen"] == ["cifar10", "tinyimagenet"]
    assert list(facts["detections"]["tinyimagenet"]["near"]) == ["cifar100", "caltech101"]
    assert list(facts["detections"]["cifar100"]["near"]) == ["cifar10", "tinyimagenet"]
    assert set(facts["temperatures"]) == {name for name, one in METHODS.items() if one.calibrated}


def test_members_lose_heads_of_the_right_towers(run: Run) -> None:
    models, recipe = models_of(run.output), small_recipe()
    for family in FAMILIES:
        heads = models.heads(family)
        assert len(heads) == family.members
        assert len({frozenset(one) for one in heads}) == family.members
    assert {head.tower for one in models.heads(IMAGE) for head in one} == {"image"}
    assert all(len(one) == recipe.prune for one in models.heads(BOTH))
    locked, tuned = models.members(IMAGE)[1], models.members(IMAGE_TUNED)[1]
    for name, tensor in locked.image.state_dict().items():
        assert torch.equal(tensor, tuned.image.state_dict()[name])
    assert any(
        not torch.equal(tensor, tuned.text.state_dict()[name]) for name, tensor in locked.text.state_dict().items()
    )


def test_members_in_turn_are_the_fused_ensemble(run: Run) -> None:
    """What is stored member by member is what the one ensemble answers whose cost is measured."""
    models = models_of(run.output)
    images = models.sets.calibration()
    samples = models.samples(images.images, 8)
    fused = classifier(models, METHODS[HYDRA], images.names)
    assert fused.num_members == 3
    assert fused.config.sharing.mlp
    expected = torch.cat([fused(batch) for batch, _ in samples.evaluation(4)], dim=1)
    found = torch.cat(
        [
            logits_of(
                member, image_embeddings(member, samples), text_embeddings(member, images.names, models.templates)
            )
            for member in models.members(BOTH)
        ]
    )
    torch.testing.assert_close(found, expected.detach(), atol=1e-4, rtol=1e-4)


def test_the_dual_encoder_is_saved_for_others(run: Run) -> None:
    saved = he.DualEncoder.from_pretrained(run.output / "zero-shot" / "seed-0" / "dual")
    assert torch.equal(saved.logit_scale, models_of(run.output).dual.logit_scale)


def test_a_second_run_makes_nothing_again(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    store = small_store()
    run_small(small_recipe(), store, run.output)
    assert [line for line in capsys.readouterr().out.splitlines() if ": stage " not in line] == []
    assert store.opened == []


def test_test_sets_ask_for_what_was_fixed(run: Run, tmp_path: Path) -> None:
    recipe, store = small_recipe(), small_store()
    with pytest.raises(DataError, match="run the stage `tune` first"):
        run_small(recipe, store, tmp_path, stages=["evaluate"])
    assert not store.opened
    path = run.output / "zero-shot" / "seed-0" / "fixed.json"
    fixed = Fixed.load(path)
    with pytest.raises(DataError, match="before any test set is opened"):
        open_test_sets(replace(recipe, prune=3), SharedSets(store, recipe.counts), fixed)
    assert not store.opened
    plain = json.loads(path.read_text())
    plain["fixed"]["calibrated_on"] += 1
    (tmp_path / "changed.json").write_text(json.dumps(plain))
    with pytest.raises(DataError, match="was changed after it was written"):
        Fixed.load(tmp_path / "changed.json")


def test_one_function_opens_test_sets_and_one_stage_calls_it() -> None:
    callers: dict[str, set[str]] = {"open_test_sets": set(), "tasks": set(), "detections": set()}
    for path in sorted(Path(zero_shot.__file__).parent.glob("*.py")):
        for function in [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]:
            for node in ast.walk(function):
                if not isinstance(node, ast.Call):
                    continue
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                of_sets = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "sets"
                if name == "open_test_sets" or (name in callers and of_sets):
                    callers[name].add(f"{path.stem}.{function.name}")
    opener = {"test_sets.open_test_sets"}
    assert callers == {"open_test_sets": {"evaluating.evaluate"}, "tasks": opener, "detections": opener}


def test_unknown_stages_and_seeds_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stages .'train'. do not exist"):
        run_small(small_recipe(), small_store(), tmp_path, stages=["train"])
    with pytest.raises(ConfigError, match=r"seeds .7. are not all"):
        run_small(small_recipe(), small_store(), tmp_path, seeds=[7])


def test_tables_come_out_the_same_from_run_and_results(run: Run, tmp_path: Path) -> None:
    for name in ("main", "tasks", "first", "second", "variants", "heads", "claims"):
        assert f"### zero-shot: {name}" in run.tables
    assert "| BayesVLM | later |" in run.tables
    again = command_line("zero-shot", "--from-results", "--results", str(run.results))
    assert again.exit_code == 0, again.stderr
    assert again.stdout == run.tables
    assert command_line("zero-shot", "--tiny", "--collect", *run.places).stdout == run.tables
    for file in run.results.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    facts = json.loads((tmp_path / "zero-shot.json").read_text())
    facts["rows"]["Single"]["task.pets.accuracy"][0] += 0.01
    (tmp_path / "zero-shot.json").write_text(json.dumps(facts))
    wrong = command_line("zero-shot", "--from-results", "--results", str(tmp_path))
    assert wrong.exit_code == 2
    assert "come out different" in wrong.stderr


def test_options_of_this_study_belong_to_it() -> None:
    result = command_line("text-sst2", "--model", "x")
    assert result.exit_code == 2
    assert "belong to the study 'zero-shot'" in result.stderr
    result = command_line("zero-shot", "--suite", "none")
    assert result.exit_code == 2
    assert "no suite 'none'" in result.stderr
