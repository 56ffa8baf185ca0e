"""A timm vision transformer that knows when to abstain: alone, fused from several fine-tunings, or pruned.

    python examples/timm_vit.py                                      # offline: the embedded ViT and images
    python examples/timm_vit.py --model vit_small_patch16_224 --weights mine.safetensors --images mine/
    python examples/timm_vit.py --model vit_small_patch16_224 --weights a.safetensors b.safetensors --images mine/
    python examples/timm_vit.py --prune 2                            # pruned members, trained further

`--images` has a folder for each class, in the model's class order. `--prune` chooses heads by circuits with `--others`,
images unlike the training data, and by Taylor scores without.
"""

import argparse
from pathlib import Path
from typing import Any

import timm

import hydra_ensembles as he
from hydra_ensembles import data
from hydra_ensembles.demo.run import load_backbone, load_sample


# start: ensemble
def make_ensemble(models: list[Any], processor: Any, images: Any) -> he.Ensemble:
    """From a live timm model, or several fine-tunings of one, and held-out labelled images to a calibrated model."""
    members = [he.convert(one, labels=images.class_names, processor=processor) for one in models]  # None takes timm's
    hydra = members[0] if len(members) == 1 else he.fuse(members, mlp="separate", average=0.8)  # 10 of 12 layers
    return he.calibrate(hydra, data.batches(images, hydra.metadata.preprocessing, batch_size=16))


# end: ensemble
# start: prune
def prune_and_train(base: he.Ensemble, sets: dict[str, Any], prune: int, output: Path) -> he.Ensemble:
    """Copies of one model, each without `prune` heads, then fine-tuned; `sets` are id, train and optionally ood."""
    batches = {name: data.batches(one, base.metadata.preprocessing, batch_size=16) for name, one in sets.items()}
    recipe = he.Recipe(learning_rate=3e-5, epochs=3, train_groups=("attention", "mlp", "norms", "readout"))
    ranked: Any = {"strategy": "circuit"} if "ood" in sets else {"strategy": "taylor", "taylor_scope": "global"}
    config = he.HydraConfig(prune=prune, shared_layers=0, calibration_batches=2, recipe=recipe, **ranked)
    return he.build(base, config, **batches, output=output)


# end: prune


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
    """The package's trained model as a timm model, used instead of yours, without a download."""
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


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name of a timm ViT; default: the one in the package")
    parser.add_argument("--weights", nargs="*", default=[], help="your checkpoints of it; default: timm's weights")
    parser.add_argument("--images", type=Path, help="held-out images, a folder for each class; default: embedded ones")
    parser.add_argument("--others", type=Path, help="images unlike the training data")
    parser.add_argument("--train", type=Path, help="training images, for pruned members; default: some embedded ones")
    parser.add_argument("--prune", type=int, default=0, help="heads each member loses; default: nothing is pruned")
    parser.add_argument("--output", type=Path, default=Path("hydra-vit"), help="folder for run and model")
    options = parser.parse_args()
    sample = load_sample()
    images = sample["calibration"] if options.images is None else data.load(options.images)
    models, processor = [embedded_vit()], load_backbone().metadata.preprocessing
    if options.model is not None:
        settings: list[dict[str, Any]] = [{"checkpoint_path": one} for one in options.weights] or [{"pretrained": True}]
        models = [timm.create_model(options.model, num_classes=len(images.class_names), **one) for one in settings]
        processor = None
    hydra = make_ensemble(models, processor, images)
    if options.prune:
        embedded = options.model is None and options.train is None
        train = sample["train"].select(range(0, 280, 2)) if embedded else data.load(options.train)
        sets = {"id": images, "train": train}
        if options.others is not None:
            sets["ood"] = data.load(options.others, labels="optional")
        hydra = prune_and_train(hydra, sets, options.prune, options.output / "run")
    hydra.save_pretrained(options.output / "model")
    print(hydra.describe())
    p = hydra.predict([images[index][0] for index in range(5)])
    for row, name in enumerate(p.names()):
        said = f"{name:20} confidence {p.confidence[row]:.2f}  epistemic {p.epistemic[row]:.4f}"
        print(f"{said}  {'abstain' if p.reason[row] else 'accept':8} (is: {images.class_names[images.labels[row]]})")
    odd = hydra.predict([sample["FashionMNIST"][index][0] for index in range(32)]).reason
    print(f"of 32 pictures of clothes, which no class is for, it abstains from {sum(map(bool, odd))}")
    print(f"saved to {options.output / 'model'}")


if __name__ == "__main__":
    main()
