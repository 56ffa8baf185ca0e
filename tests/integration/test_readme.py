"""The Python code of README and quickstart runs as printed."""

import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import hydra_ensembles as he
from architectures import perturbed, timm_model

SAMPLES = 33
ROOT = Path(__file__).resolve().parents[2]
README, QUICKSTART = ROOT / "README.md", ROOT / "docs" / "quickstart.md"


def blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def my_timm_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures in two folders, and a trained checkpoint of a smaller model than the text names."""
    pixels = torch.empty(200, 3, 1, 1)
    for index in range(len(pixels)):
        place = folder / "pictures" / ("dark" if index % 2 else "light")
        place.mkdir(parents=True, exist_ok=True)
        colour = (index, 255 - index, 60 if index % 2 else 200)
        Image.new("RGB", (40, 36), colour).save(place / f"{index}.png")
        pixels[index, :, 0, 0] = torch.tensor(colour) / 127.5 - 1
    create = timm.create_model
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}

    def create_small(name: str, **settings: Any) -> torch.nn.Module:
        return create(name, **small, **settings)

    model = create_small("vit_small_patch16_224", num_classes=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    light = 1 - torch.arange(len(pixels)) % 2  # classes in alphabetical order
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(pixels.expand(-1, -1, 32, 32)), light).backward()
        optimizer.step()
    save_file(model.state_dict(), folder / "mine.safetensors")
    monkeypatch.setattr(timm, "create_model", create_small)


def fine_tunings(count: int) -> list[torch.nn.Module]:
    """Models of twelve layers that are close together, like fine-tunings of one model."""
    made = [timm_model("vit_base_patch16_224", depth=12) for _ in range(count)]
    for index, one in enumerate(made):
        one.load_state_dict(made[0].state_dict())
        perturbed(one, index, 0.01)
    return made


@pytest.mark.ci
def test_the_readme_code_runs(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As copied by a user, with a small model and small loaders under the text's names."""
    monkeypatch.chdir(tmp_path)
    model = timm_model("vit_base_patch16_224", depth=3)
    generator = torch.Generator().manual_seed(0)
    images, others = (torch.randn(SAMPLES, 3, 32, 32, generator=generator) * scale for scale in (1.0, 1.3))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attn" in name:  # makes the heads matter, so that circuits for different scores differ
                parameter.mul_(4)
        labels = model(images).argmax(1)
    labels[::3] = torch.randint(0, 5, (SAMPLES // 3,), generator=generator)  # a model with many mistakes
    names: dict[str, Any] = {
        "model": model,
        "models": fine_tunings(3),
        "images": images[:4],
        "id_loader": [(images[i : i + 16], labels[i : i + 16]) for i in range(0, SAMPLES, 16)],
        "ood_loader": [(others[i : i + 16], labels[:16]) for i in range(0, SAMPLES, 16)],
        "train_loader": [(images[i : i + 16].flip(3), labels[i : i + 16]) for i in range(0, SAMPLES, 16)],
    }
    my_timm_model(tmp_path, monkeypatch)
    mine, ensembles = blocks(README)
    again, several, steps = blocks(QUICKSTART)
    assert mine == again
    exec(mine, {})
    assert re.match(r"\['(dark|light)'\] tensor\(\[(.*\n)+of the accepted answers", capsys.readouterr().out)
    saved = he.load(tmp_path / "my-model")
    assert saved.promise.risk == 0.05
    assert saved.metadata.familiarity is not None, "two reasons to decline"
    exec("import hydra_ensembles as he\n" + ensembles, names)
    assert (names["soup"].num_members, names["deep"].num_members, names["hydra"].num_members) == (1, 3, 3)
    assert (tmp_path / "run" / "ensemble").exists()
    exec("import hydra_ensembles as he\n" + several, few := dict(names))
    assert (few["hydra"].num_members, few["hydra"].config.trunk) == (3, 10)
    exec(steps, names)
    assert "heads kept" in capsys.readouterr().out
