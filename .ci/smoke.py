"""What an installed wheel must be able to do: `python smoke.py EXTRA VERSION`, in an environment with that extra."""

import io
import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import torch

import hydra_ensembles as he
from hydra_ensembles.errors import MissingExtraError

EXTRA, VERSION = sys.argv[1:]
COMMAND = Path(sys.executable).with_name("hydra-ensembles")
FOLDER = Path(tempfile.mkdtemp())


class Own(torch.nn.Module):
    """A user's own classifier: images `[B, 3, 16, 16]`, three classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patchify = torch.nn.Conv2d(3, 32, 8, 8)
        self.pos = torch.nn.Parameter(torch.randn(1, 4, 32))
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", norm_first=True, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, torch.nn.LayerNorm(32), enable_nested_tensor=False)
        self.head = torch.nn.Linear(32, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits `[B, 3]`."""
        return self.head(self.encoder(self.patchify(images).flatten(2).transpose(1, 2) + self.pos).mean(1))


def hydra() -> he.Ensemble:
    """Three members of `Own`, calibrated."""
    data = [(torch.randn(16, 3, 16, 16), torch.arange(16) % 3) for _ in range(8)]
    config = he.HydraConfig(strategy="random", prune=2, shared_layers=0)
    names = {"patch": "patchify", "position": "pos", "encoder": "encoder", "classifier": "head"}
    own = he.convert(Own().eval(), declaration=he.Declaration(names, pool="mean", image_size=16))
    return he.build(own, config, id=data, progress=False)


def none() -> str:
    """Build, save, load and predict; every public name exists; features that need an extra name it."""
    images, made = torch.randn(5, 3, 16, 16), hydra()
    made.save_pretrained(FOLDER / "model")
    assert torch.equal(made(images), he.load(FOLDER / "model")(images))
    assert [name for name in he.__all__ if not hasattr(he, name)] == []
    assert he.__version__ == VERSION
    said = subprocess.run([COMMAND, "info", FOLDER / "model"], capture_output=True, text=True)
    assert said.returncode == 2, said
    assert "hydra-ensembles[cli]" in said.stderr, said
    missing = "nothing"
    try:
        he.export(made, FOLDER / "model.onnx")
    except MissingExtraError as error:
        missing = str(error)
    assert "hydra-ensembles[onnx]" in missing, missing
    return f"{made.num_members} members, saved and loaded"


def timm() -> str:
    """Convert a timm model."""
    import timm

    return str(he.convert(timm.create_model("test_vit", num_classes=3).eval()).num_layers) + " layers"


def transformers() -> str:
    """Convert a transformers model."""
    from transformers import BertConfig, BertForSequenceClassification

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    model = BertForSequenceClassification(BertConfig(vocab_size=30, **small)).eval()
    return str(he.convert(model).num_layers) + " layers"


def open_clip() -> str:
    """Convert an open_clip dual encoder."""
    import open_clip

    text = open_clip.CLIPTextCfg(width=32, heads=4, layers=2)
    vision = open_clip.CLIPVisionCfg(width=32, head_width=8, layers=2, image_size=32, patch_size=16)
    return type(he.convert(open_clip.CLIP(16, vision, text).eval())).__name__


def text() -> str:
    """Use a tokenizer that can be saved with the model."""
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "[UNK]": 1, "good": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return str(he.TextPreprocessing(tokenizer=words.to_str(), max_length=4)(["good film"])["input_ids"].tolist())


def data() -> str:
    """Load a folder of pictures, and the images inside the package."""
    from PIL import Image

    from hydra_ensembles.data import load
    from hydra_ensembles.demo import load_backbone, load_sample

    for name in ("a", "b"):
        (FOLDER / "pictures" / name).mkdir(parents=True)
        Image.new("RGB", (20, 20)).save(FOLDER / "pictures" / name / "0.png")
    assert load(FOLDER / "pictures").class_names == ("a", "b")
    said = load_backbone().predict([load_sample()["test"][0][0]])
    return f"an image of the demo is {(said.class_names or ())[int(said.label[0])]}"


def onnx() -> str:
    """Export to ONNX; the exporter compares the file with the model before naming it."""
    return he.export(hydra(), FOLDER / "model.onnx").name


def report() -> str:
    """Evaluate, and write a report."""
    sets = [[(torch.randn(9, 3, 16, 16) + shift, torch.arange(9) % 3)] for shift in (0, 1)]
    found = he.evaluate(hydra(), sets[0], {"other": sets[1]}, progress=False)
    return f"{he.write_report([found], FOLDER / 'report.html').stat().st_size // 1000} kB"


def cli() -> str:
    """Run the command: version, help, and the description of a model."""
    hydra().save_pretrained(FOLDER / "model")
    assert f"hydra-ensembles {VERSION}" in subprocess.check_output([COMMAND, "--version"], text=True)
    module = [sys.executable, "-m", "hydra_ensembles", "--version"]
    assert f"hydra-ensembles {VERSION}" in subprocess.check_output(module, text=True)
    assert "--strategy" in subprocess.check_output([COMMAND, "build", "--help"], text=True)
    facts = json.loads(subprocess.check_output([COMMAND, "info", FOLDER / "model", "--json"], text=True))
    return f"{facts['members']} members by the command"


def serve() -> str:
    """Start a server that answers over HTTP."""
    hydra().save_pretrained(FOLDER / "model")
    words = [COMMAND, "serve", FOLDER / "model", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        try:
            line = next(line for line in server.stderr or io.StringIO() if line.startswith("serving"))
            where = next(word for word in line.split() if word.startswith("http"))
            with urllib.request.urlopen(f"{where}/v2/health/ready") as answer:
                return f"answers {answer.status}"
        finally:
            server.terminate()


def ray() -> str:
    """Create the application for Ray Serve."""
    from hydra_ensembles.serve import ray_app

    hydra().save_pretrained(FOLDER / "model")
    return type(ray_app(FOLDER / "model")).__name__


def everything() -> str:
    """Everything that `all` promises."""
    return "; ".join(part() for part in (timm, transformers, open_clip, text, data, report, cli, serve))


PARTS = (none, timm, transformers, open_clip, text, data, onnx, report, cli, serve, ray)

if __name__ == "__main__":
    print({"all": everything, **{part.__name__: part for part in PARTS}}[EXTRA]())
