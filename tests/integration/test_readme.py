"""The Python of the README runs as it stands."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from architectures import timm_model

README = Path(__file__).resolve().parents[2] / "README.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_readme_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copied as a user would, with a small model and small loaders under the names the text uses."""
    monkeypatch.chdir(tmp_path)
    model = timm_model("vit_base_patch16_224", depth=4)
    generator = torch.Generator().manual_seed(0)
    images, others = (torch.randn(96, 3, 32, 32, generator=generator) * scale for scale in (1.0, 1.3))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attn" in name:  # let the heads matter, so that circuits for different goals differ
                parameter.mul_(4)
        labels = model(images).argmax(1)
    labels[::3] = torch.randint(0, 5, (32,), generator=generator)  # a model that makes many mistakes
    names: dict[str, Any] = {
        "model": model,
        "images": images[:4],
        "id_loader": [(images[i : i + 32], labels[i : i + 32]) for i in range(0, 96, 32)],
        "ood_loader": [(others[i : i + 32], labels[:32]) for i in range(0, 96, 32)],
    }
    found = blocks()
    assert len(found) == 2
    for code in found:
        exec(code, names)
    assert "heads kept" in capsys.readouterr().out
    assert (tmp_path / "my-hydra" / "model.safetensors").exists()
    assert (tmp_path / "run" / "summary.json").exists()
    assert names["p"].label.shape == (4,)
