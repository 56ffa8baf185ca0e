"""The parameter counts in docs/tables_methods.md, computed by the benchmark, equal those of the configurations."""

import re
from dataclasses import replace
from pathlib import Path

import torch

import hydra_ensembles as he
from hydra_ensembles.baselines import Packed
from hydra_ensembles.model.config import EncoderConfig, EnsembleConfig, PatchStemConfig, ReadoutConfig, Sharing

PAGE = Path(__file__).resolve().parents[3] / "docs" / "tables_methods.md"
ENCODER = EncoderConfig(width=768, layers=12, heads=12, head_dim=64, mlp_width=3072)
VIT = EnsembleConfig(PatchStemConfig((16, 16), (14, 14)), ENCODER, ReadoutConfig(num_classes=1000), ENCODER.all_heads())
LAST = Sharing(stem=True, attention=True, mlp=True, norms=True)


def members(sharing: Sharing, trunk: int = 0, count: int = 3) -> EnsembleConfig:
    return replace(VIT, heads=ENCODER.all_heads(count), sharing=sharing, trunk=trunk)


CONFIGS = {
    "Single": VIT,
    "Pruned members, 8 of 12 heads, no trunk": replace(
        VIT, heads=((tuple(range(8)),) * 12,) * 3, sharing=Sharing(stem=True, mlp=True)
    ),
    "Deep Ensemble, ": members(Sharing()),
    "Deep Ensemble of the last": members(Sharing(stem=True), trunk=9),
    "Deep Ensemble of classifiers": members(LAST),
    "LoRA-Ensemble, ": members(Sharing(stem=True, mlp=True, norms=True)),
    "LoRA-Ensemble of the last": members(Sharing(stem=True, mlp=True, norms=True), trunk=9),
    "BatchEnsemble, `batch": members(Sharing(stem=True, norms=True)),
    "BatchEnsemble of the last": members(Sharing(stem=True, norms=True), trunk=9),
    "BatchEnsemble, `scales": members(Sharing(stem=True, attention=True, mlp=True)),
    "MIMO": members(LAST),
    "Packed": Packed().narrow(VIT),
    "OBA": VIT,
    "SWAG": members(Sharing()),
    "last-layer Laplace": members(LAST, count=20),
    "MC Dropout": VIT,
}


def test_parameters_are_those_of_the_configurations():
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([\d.]+) M \| [\d.]+x \|", PAGE.read_text(), re.MULTILINE))
    with torch.device("meta"):
        for start, config in CONFIGS.items():
            found = [parameters for name, parameters in rows.items() if name.startswith(start)]
            assert found, start
            assert set(found) == {f"{he.Ensemble(config).describe().parameters / 1e6:.1f}"}, start
