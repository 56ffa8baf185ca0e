"""From the name of an open_clip model and a list of labels to a zero-shot classifier that knows when to abstain.

    python examples/zero_shot.py                     # offline: a small CLIP with random weights, embedded images
    python examples/zero_shot.py --model ViT-B-32 --pretrained laion2b_s34b_b79k --images held-out --others odd \\
        --template "A photo of a {label}."

`held-out` has a folder of images for each class, for temperature and thresholds, `odd` images unlike them. Nothing is
pruned without `--prune`. Predictions of random weights mean nothing: the offline run shows the steps.
"""

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch

import hydra_ensembles as he
from hydra_ensembles import data
from hydra_ensembles.demo.run import load_sample
from hydra_ensembles.heads.ranking import circuit_members

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from libraries that open_clip imports
    import open_clip


def small_clip() -> Any:
    """A CLIP of open_clip with random weights, small enough for any machine."""
    warnings.filterwarnings("ignore", message="the temperature")  # no temperature fits random predictions
    torch.manual_seed(0)
    image = {"layers": 3, "width": 64, "head_width": 16, "patch_size": 16, "image_size": 64}
    text = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 4, "layers": 2}
    return open_clip.CLIP(embed_dim=64, vision_cfg=image, text_cfg=text).eval()


# start: calibrate
def calibrated(dual: he.DualEncoder, labels: list[str], template: str, images: Any) -> he.Ensemble:
    """A zero-shot classifier that knows when not to answer, from held-out labelled pictures."""
    ensemble = he.zero_shot(dual, labels, template)
    return he.calibrate(ensemble, data.batches(images, ensemble.metadata.preprocessing, batch_size=32))


# end: calibrate


# start: build
def build(dual: he.DualEncoder, labels: list[str], template: str, images: Any, others: Any, prune: int) -> he.Ensemble:
    """Three circuits over both towers, fused into one zero-shot classifier with a temperature and a threshold."""
    sets = (*data.split(images, 0.5, seed=0), others)
    ranking, validation, odd = (data.batches(one, dual.image.metadata.preprocessing, batch_size=32) for one in sets)
    settings: dict[str, Any] = {"class_names": labels, "templates": template}
    settings["budget"] = prune + 2  # heads more than needed, should two scores choose the same
    rankings = {
        score: he.extract_circuit(dual, ranking, odd, score=score, **settings) for score in ("avg", "acc", "ood")
    }
    members = [he.prune(dual, heads) for heads in circuit_members(rankings, prune, members=3)]
    return he.calibrate(he.zero_shot(he.fuse(members), labels, template), validation)


# end: build


# start: answer
def answer(ensemble: he.Ensemble, picture: Any) -> str:
    """The label of a picture, or that it abstains."""
    p = ensemble.predict(picture)
    sure = p.accept is None or bool(p.accept[0])
    return f"{p.names()[0] if sure else 'abstain':22} confidence {p.confidence[0]:.2f}  epistemic {p.epistemic[0]:.4f}"


# end: answer


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name of an open_clip model; default: a small random one")
    parser.add_argument("--pretrained", help="which weights of that model")
    parser.add_argument("--images", type=Path, help="held-out pictures, one folder per class; default: embedded ones")
    parser.add_argument("--others", type=Path, help="pictures unlike them")
    parser.add_argument("--labels", nargs="+", help="class names for the text tower; default: those of the folders")
    parser.add_argument("--template", default="A photo of a {label}.")
    parser.add_argument("--prune", type=int, default=0, help="heads that each of three members loses; 0: one model")
    parser.add_argument("--output", type=Path, default=Path("hydra-zero-shot"), help="folder for the saved model")
    options = parser.parse_args()
    sample = load_sample()
    images = data.subset(sample["circuit_id"], 48, seed=0) if options.images is None else data.load(options.images)
    others = data.subset(sample["circuit_ood"], 32, seed=0)
    if options.others is not None:
        others = data.load(options.others, labels="optional")
    labels = options.labels or list(images.class_names)

    # start: convert
    if options.model is None:
        model, tokenizer = small_clip(), open_clip.SimpleTokenizer()
    else:
        model = open_clip.create_model(options.model, pretrained=options.pretrained).eval()
        tokenizer = open_clip.get_tokenizer(options.model)
    dual = he.convert(model, processor=tokenizer)  # both towers, their projections, the preprocessing of both inputs
    # end: convert
    preprocess: Any = dual.image.metadata.preprocessing
    pictures = preprocess([images[row][0] for row in range(4)])
    with torch.no_grad():
        texts = tokenizer([options.template.replace("{label}", label) for label in labels])
        theirs = model.get_logits(pictures, texts)[0]
        ours = he.zero_shot(dual, labels, options.template)(pictures)[0]
    print(f"zero-shot logits differ from open_clip's by at most {(ours - theirs).abs().max():.1e}")

    given = (dual, labels, options.template, images)
    hydra = build(*given, others, options.prune) if options.prune else calibrated(*given)
    hydra.save_pretrained(options.output)
    # start: load
    hydra = he.Ensemble.from_pretrained(options.output)  # needs neither open_clip nor its tokenizer
    # end: load
    for row in range(3):
        print(f"{images.class_names[images.labels[row]]:22} -> {answer(hydra, images[row][0])}")
    print(f"{'something else':22} -> {answer(hydra, others[0][0])}")
    print(f"saved to {options.output}: {hydra}")


if __name__ == "__main__":
    main()
