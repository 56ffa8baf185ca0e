"""A Hydra Ensemble from a vision transformer of timm.

    python examples/timm_vit.py                                      # offline: the embedded ViT and images
    python examples/timm_vit.py --model vit_small_patch16_224 --weights mine.safetensors --images mine/ --others odd/

`--images` has a folder for each class, as the model counts them; `--others` holds pictures unlike the training data.
Without `--others` heads are chosen by Taylor scores, with it by circuits. Whatever the model, the part that makes the
ensemble is the same; see `make_ensemble`.
"""

import argparse
from pathlib import Path
from typing import Any

import timm

import hydra_ensembles as he
from hydra_ensembles import data
from hydra_ensembles.demo.embedded import load_backbone, load_sample


# start: ensemble
def make_ensemble(model: Any, processor: Any, images: Any, others: Any, prune: int, output: Path) -> he.Ensemble:
    """From a live timm model and held-out labelled images to a fused, calibrated ensemble."""
    base = he.convert(model, labels=images.class_names, processor=processor)  # None takes timm's preprocessing
    batches: dict[str, Any] = {"id": data.batches(images, base.metadata.preprocessing, batch_size=16)}
    if others is None:
        config = he.HydraConfig(members=3, prune=prune, strategy="taylor", taylor_scope="global", calibration_batches=4)
    else:
        config = he.HydraConfig(members=3, prune=prune, strategy="circuit")
        batches["ood"] = data.batches(others, base.metadata.preprocessing, batch_size=16)
    hydra = he.build(base, config, **batches, output=output / "run")
    hydra.save_pretrained(output / "model")
    return hydra


# end: ensemble


NAMES = {  # ours: timm's
    "encoder.layers": "blocks",
    "attention.qkv_bias": "attn.qkv.bias",
    "attention.qkv": "attn.qkv.weight",
    "attention.out_bias": "attn.proj.bias",
    "attention.out": "attn.proj.weight",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
    "stem.patch_bias": "patch_embed.proj.bias",
    "stem.patch": "patch_embed.proj.weight",
    "stem.class_token": "cls_token",
    "stem.position": "pos_embed",
    "readout.norm": "norm",
    "readout.classifier": "head",
}


def embedded_vit() -> Any:
    """The trained model of the package, put back into timm: it stands for your model, without a download."""
    stored = load_backbone()
    sizes = {"img_size": 64, "patch_size": 8, "embed_dim": stored.config.encoder.width, "depth": stored.num_layers}
    heads, classes = stored.num_heads, stored.num_classes
    model = timm.create_model("vit_tiny_patch16_224", num_heads=heads, num_classes=classes, **sizes)
    wanted, found = model.state_dict(), {}
    for name, tensor in stored.state_dict().items():
        if name.endswith(("attention.qkv", "attention.qkv_bias")):
            tensor = tensor.transpose(0, 1)  # [heads, 3, ...] -> [3, heads, ...]
        elif name.endswith("attention.out"):
            tensor = tensor.flatten(0, 1).T  # [heads, d_k, d] -> [d, heads * d_k]
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        found[name] = tensor.reshape(wanted[name].shape)
    model.load_state_dict(found)
    return model.eval()


def verdicts(prediction: he.Prediction) -> list[str]:
    """What to do with each answer; without a calibrated threshold all are accepted."""
    taken = [True] * len(prediction) if prediction.accept is None else prediction.accept.tolist()
    return ["accept" if one else "abstain" for one in taken]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name of a timm ViT; default: the one in the package")
    parser.add_argument("--weights", help="your checkpoint of it; default: timm's pretrained weights")
    parser.add_argument("--images", type=Path, help="held-out images, a folder for each class; default: embedded ones")
    parser.add_argument("--others", type=Path, help="images unlike the training data")
    parser.add_argument("--prune", type=int, default=12, help="heads each member loses")
    parser.add_argument("--output", type=Path, default=Path("hydra-vit"), help="folder for run and model")
    options = parser.parse_args()
    sample = load_sample().sets
    images = sample["calibration"] if options.images is None else data.load(options.images)
    others = None if options.others is None else data.load(options.others, labels="optional")
    if options.model is None:
        model, processor = embedded_vit(), load_backbone().metadata.preprocessing
    else:
        processor = None
        settings = {"checkpoint_path": options.weights} if options.weights else {"pretrained": True}
        model = timm.create_model(options.model, num_classes=len(images.class_names), **settings)
    hydra = make_ensemble(model, processor, images, others, options.prune, options.output)
    print(hydra.describe())

    p = hydra.predict([images[index][0] for index in range(5)])
    for row, name in enumerate(p.names()):
        said = f"{name:20} confidence {p.confidence[row]:.2f}  epistemic {p.epistemic[row]:.4f}"
        print(f"{said}  {verdicts(p)[row]:8} (is: {images.class_names[images.labels[row]]})")
    odd = verdicts(hydra.predict([sample["FashionMNIST"][index][0] for index in range(32)]))
    print(f"of 32 pictures of clothes, which no class is for, it abstains from {odd.count('abstain')}")
    print(f"saved to {options.output / 'model'}")


if __name__ == "__main__":
    main()
