"""Averaging, counting and refusing in `fuse`, on models built from a configuration."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch

import hydra_ensembles as he
from architectures import perturbed
from hydra_ensembles.errors import ConfigError, HeadError
from hydra_ensembles.model.config import PatchStemConfig, Sharing
from hydra_ensembles.model.member_states import place_of
from random_ensembles import noisy
from random_ensembles import small as small_config

Join = Callable[[Any], he.Ensemble]
GROUPS = ("attention", "mlp", "norms", "readout")
IMAGES = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(5))


def small(seed: int = 0, **changes: Any) -> he.Ensemble:
    """A small model, equal for equal seeds."""
    return noisy(small_config(classes=5, width=24, layers=3, heads=4, head_dim=6, mlp_width=48, **changes), seed)


def moved(ensemble: he.Ensemble, seed: int, groups: tuple[str, ...]) -> he.Ensemble:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in ensemble.named_parameters():
            if place_of(name)[0] in groups:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return ensemble


def tuned(base: he.Ensemble, member: int, groups: tuple[str, ...] = GROUPS) -> he.Ensemble:
    """A copy with two heads pruned and weights moved away from the base, as fine-tuning does."""
    return moved(he.prune(base, [(0, member % 4), (1, (member + 1) % 4)]), 100 + member, groups)


@pytest.mark.parametrize(("members", "group"), [(8, "mlp"), (3, "norms"), (3, "readout"), (3, "stem")])
@torch.no_grad()
def test_what_is_fused_is_the_arithmetic_mean(members: int, group: str) -> None:
    parts = [tuned(small(), m, ("stem", *GROUPS)) for m in range(members)]
    settings: dict[str, Any] = {"stem": "separate", "mlp": "separate", group: "mean"}
    fused = he.fuse(parts, **settings)
    names = [name for name, _ in fused.named_parameters() if place_of(name)[0] == group]
    assert names
    for name in names:
        mean = sum(part.get_parameter(name).double() for part in parts) / members
        assert fused.get_parameter(name).shape[0] == 1
        assert torch.allclose(fused.get_parameter(name).double(), mean, rtol=0, atol=1e-7)


def pruned(heads: list[tuple[int, int]]) -> he.Ensemble:
    return he.prune(small(), heads)


@pytest.mark.parametrize(
    ("join", "members", "settings", "token"),
    [
        (he.fuse, lambda: [moved(small(), one, ("stem",)) for one in range(2)], {}, r"differ in stem\..*average 0.8"),
        (he.fuse, lambda: [small(), small(norm_first=False)], {}, r"encoder\.norm_first: True and False"),
        (he.fuse, lambda: [pruned([(1, 0)]), small(1)], {"average": 2}, "layer 1"),
        (he.fuse, lambda: [small(), small(1)], {"average": 0.1}, "of 3 layers rounds to none"),
        (he.soup, lambda: [small(), pruned([(0, 1)])], {}, "the same heads"),
        (he.soup, lambda: [he.fuse([small()] * 2)], {}, "2 members"),
        (he.prune, lambda: pruned([(0, 1)]), {"heads": [(0, 1)]}, "does not exist|was pruned"),
        (he.prune, lambda: he.fuse([small(), pruned([(0, 1)])]), {"heads": [(0, 2)]}, "one member"),
    ],
)
def test_what_cannot_be_fused_averaged_or_pruned_is_refused(
    join: Any, members: Any, settings: dict[str, Any], token: str
) -> None:
    with pytest.raises(HeadError if join is he.prune else ConfigError, match=token):
        join(members(), **settings)


@pytest.mark.parametrize("join", [he.fuse, he.Ensemble.stack, he.soup], ids=["fuse", "stack", "soup"])
def test_members_may_have_been_trained_with_different_dropout(join: Join) -> None:
    """Fine-tunings of one model often are; it changes no answer. The first member's rates are kept."""
    rates: dict[str, Any] = {"drop_path": (0.0, 0.1, 0.2), "attention_dropout": 0.1, "readout": {"dropout": 0.3}}
    parts = [moved(small(), 1, ("mlp", "readout")), moved(small(**rates), 2, ("mlp", "readout"))]
    same = [parts[0], moved(small(), 2, ("mlp", "readout"))]
    assert torch.equal(join(parts)(IMAGES), join(same)(IMAGES))
    assert join(parts[::-1]).config.encoder.drop_path == rates["drop_path"]


@pytest.mark.parametrize("join", [he.fuse, he.Ensemble.stack, he.soup], ids=["fuse", "stack", "soup"])
def test_models_of_other_libraries_are_converted(join: Join) -> None:
    """As by `convert`; converted ensembles may be among them."""
    model = timm.create_model("test_vit", num_classes=3).eval()
    other = copy.deepcopy(model)
    torch.nn.init.normal_(other.head.weight)
    images = torch.randn(2, 3, 160, 160)
    expected = join([he.convert(model), he.convert(other)])
    assert torch.equal(join([model, he.convert(other)])(images), expected(images))


LOOKS = [he.ImagePreprocessing((8, 8), mean=(mean,) * 3, std=(0.5,) * 3) for mean in (0.5, 0.4)]


@pytest.mark.parametrize("join", [he.fuse, he.Ensemble.stack, he.soup])
@pytest.mark.parametrize(
    ("name", "first", "other", "unknown", "with_unknown"),
    [("labels", tuple("abcde"), tuple("edcba"), (), ()), ("preprocessing", *LOOKS, None, LOOKS[0])],
)
def test_members_of_other_class_names_or_preprocessing_are_refused(
    join: Join, name: str, first: Any, other: Any, unknown: Any, with_unknown: Any
) -> None:
    one, another, neither = (small().with_metadata(**{name: value}) for value in (first, other, unknown))
    with pytest.raises(ConfigError, match=f"members 0 and 2 .*{name}"):
        join([one, neither, another])
    assert getattr(join([one, one]).metadata, name) == first
    assert all(getattr(join(two).metadata, name) == with_unknown for two in ([one, neither], [neither, one]))


ALL, PRUNED = (((tuple(range(first, 12)),) * 12,) for first in (0, 4))
THREE = tuple((tuple(range(m, m + 8)),) * 12 for m in range(3))


@pytest.mark.parametrize(
    ("heads", "sharing", "parameters", "multiply_adds"),
    [
        (ALL, Sharing(), 86_567_656, 17_563_828_224),
        (PRUNED, Sharing(), 77_121_256, 15_466_260_480),
        (THREE, Sharing(stem=True, mlp=True, norms=True), 116_463_288, 46_167_570_432),
        (THREE, Sharing(stem=True, mlp=True), 116_540_088, 46_167_570_432),
    ],
)
def test_counts_of_a_configuration(heads: Any, sharing: Sharing, parameters: int, multiply_adds: int) -> None:
    """ViT-B/16 with 1,000 classes: the integers behind the paper's Table 7 (docs/paper_map.md)."""
    config = small_config(classes=1000, width=768, layers=12, heads=12, head_dim=64, mlp_width=3072)
    config = replace(config, stem=PatchStemConfig((16, 16), (14, 14)), heads=heads, sharing=sharing)
    with torch.device("meta"):
        described = he.Ensemble(config).describe()
    assert (described.parameters, described.multiply_adds) == (parameters, multiply_adds)


def test_a_soup_is_the_mean_of_all_weights() -> None:
    models = [small(seed) for seed in (1, 2, 3)]
    soup = he.soup(models)
    assert soup.num_members == 1
    for name, tensor in soup.state_dict().items():
        torch.testing.assert_close(tensor, sum(one.state_dict()[name] for one in models) / 3)


@pytest.mark.parametrize("mlp", ["separate", "mean"])
def test_a_mean_trunk_is_a_soup_below_and_the_members_above(mlp: Any) -> None:
    """Each output equals that of the member with the soup's stem and first layers."""
    models = [small(seed) for seed in range(3)]
    fused, mixed, inputs = he.fuse(models, mlp=mlp, average=2), he.soup(models).state_dict(), torch.randn(4, 3, 4, 4)
    assert (fused.config.trunk, fused.num_members) == (2, 3)
    above = he.fuse(models, stem="separate", mlp=mlp)
    with torch.no_grad():
        got = fused(inputs)
        for index in range(3):
            state = dict(above.member(index).state_dict())
            for name in state:
                group, layer = place_of(name)
                if group == "stem" or (layer is not None and layer < 2):
                    state[name] = mixed[name]
            alone = he.Ensemble.from_state(models[index].config, state)
            torch.testing.assert_close(got[index], alone(inputs)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("join", "apart"),
    [
        (he.soup, True),
        (lambda models: he.fuse(models, stem="separate"), True),
        (lambda models: he.fuse(models, stem="mean", mlp="separate"), True),
        (lambda models: he.fuse(models, mlp="separate", average=1), True),
        (lambda models: he.fuse(models, stem="separate", mlp="separate", readout="mean"), False),
        (he.Ensemble.stack, False),
    ],
)
def test_the_mean_of_models_that_have_no_common_start_is_warned_of(join: Any, apart: bool) -> None:
    """Only where layers are averaged; one warning, however many layers and members are unrelated."""
    kin = [perturbed(small(), seed) for seed in range(3)]
    for models, expected in ((kin, 0), ([*kin[:2], small(7)], int(apart))):
        with warnings.catch_warnings(record=True, action="always") as said:
            join(models)
        assert len([one for one in said if "cosine" in str(one.message)]) == expected


@pytest.mark.parametrize(("average", "layers"), [(0.8, 2), (0.5, 2), (0.34, 1), (0.0, 0)])
def test_a_share_of_the_layers_or_their_number_is_averaged(average: float, layers: int) -> None:
    """The share is rounded to whole layers, of three; the result equals asking for their number."""
    members = [moved(small(), seed, ("mlp",)) for seed in range(2)]
    found = he.fuse(members, mlp="separate", average=average)
    assert found.config.trunk == layers
    assert torch.equal(found(IMAGES), he.fuse(members, mlp="separate", average=layers)(IMAGES))


def test_layers_begun_anew_in_one_member_are_strangers() -> None:
    """If fine-tuning reinitialises the last block, only the other blocks have a common start."""
    other, drawn = small(), small(9).state_dict()
    other.load_state_dict({name: one for name, one in drawn.items() if place_of(name)[1] == 2}, strict=False)
    with pytest.warns(he.HydraWarning, match="layer 2"):
        he.soup([small(), other])
