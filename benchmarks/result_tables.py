"""Tables and sentences of the documents from single files under `results/` whose scripts make no tables."""

import re

from hydra_ensembles.convert.convert import ARCHITECTURES, DUAL_ARCHITECTURES
from hydra_ensembles.demo import Gains
from hydra_ensembles.report import to_markdown
from hydra_ensembles.schema import from_plain
from studies.results import ROOT, load, markdown


def fusion_table() -> str:
    """A table for the documents: every way to fuse the same three members."""
    result = load("fusion_dinov2_cifar10.json")
    lines = []
    for row in result["rows"]:
        ways = [row.get(key, "") for key in ("mlp", "norms", "readout")]
        quality = [f"{100 * row['accuracy']:.1f}", f"{row['nll']:.4f}", f"{100 * row['ece']:.2f}"]
        lines.append((row["method"], *ways, *quality, f"{100 * row['auroc']:.2f}", f"{row['parameters'] / 1e6:.2f} M"))
    header = ("method", "MLP", "norms", "readout", "accuracy", "NLL", "ECE", "AUROC", "parameters")
    about = (
        f"{result['hardware']}, torch {result['torch']}, seed {result['seed']}; {result['holdout_id']} ID and "
        f"{result['holdout_ood']} OOD images held out, {result['prune']} of 72 heads pruned. From "
        "`results/fusion_dinov2_cifar10.json`."
    )
    return markdown(header, lines, about, "llll")


def demo_table() -> str:
    """The quickstart's table: one run of the demo."""
    gains = from_plain(Gains, load("demo.json")["gains"], "gains")
    return "\n".join([to_markdown(gains.table).rstrip(), "From `results/demo.json`."])


def demo_line() -> str:
    """The README's sentence: what the demo's ensemble declines, compared with the model that it is made from."""
    result = load("demo.json")["gains"]
    ours, single = (result["methods"][name] for name in ("Pruned branches", "Single"))
    keys = {"mistakes.both": "of its own mistakes", "near.both": "of near OOD images", "far.both": "of far ones"}
    means = {key: [method["numbers"][key]["mean"] for method in (ours, single)] for key in keys}
    shares = ", ".join(f"{100 * means[key][0]:.0f} % {words}" for key, words in keys.items())
    alone = ", ".join(f"{100 * means[key][1]:.0f} %" for key in keys)
    level = all({"Pruned branches", "Single"} <= set(result["best"][key]) for key in keys)
    return (
        f"The ensemble declines {shares}; the model alone {alone}, at {100 * single['price'] / ours['price']:.0f} % of "
        f"the work{': no significant difference' if level else ''}. Both promise to accept "
        f"{100 * result['share']:.0f} % of familiar images. From `results/demo.json`."
    )


def attack_table() -> str:
    """The outcomes of every attack case, and their totals."""
    parts = load("attack.json")["parts"]
    columns = ["cases", "refused", "same", "other", "raw", "crash", "slow", "apart"]
    rows = [[row["what"], *(row[column] for column in columns)] for part in parts.values() for row in part["rows"]]
    total = ["**all**", *(sum(row[index + 1] for row in rows) for index in range(len(columns)))]
    lines = [[name, *(f"{number:,}" for number in numbers)] for name, *numbers in (*rows, total)]
    notes = []
    for name, part in parts.items():
        cases = sum(row["cases"] for row in part["rows"])
        share = part["share"]
        trial = "" if share == 1 else f", {share:.0%} of a whole run"
        notes.append(f"`{name}` {cases:,} cases in {part['minutes']:g} minutes (seed {part['seed']}{trial})")
    if len({part["source"] for part in parts.values()}) > 1:
        notes.append("not all on the same state of the library, see `source` there")
    last = list(parts.values())[-1]
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    about = f"Parts: {'; '.join(notes)}. {last['hardware']}; {versions}. From `results/attack.json`."
    return markdown(["what", *columns], lines, about)


def conversion_line() -> str:
    """The cost of comparing outputs at the end of a conversion."""
    run = load("conversion.json")
    return (
        f"The comparison takes {run['comparison_seconds']:.2f} s of computing for ViT-B/16 at 224 pixels (float32, "
        f"{run['hardware']}; the whole conversion {run['convert_seconds']:.2f} s). From `results/conversion.json`."
    )


def takes_table() -> str:
    """The README's table: models that convert without a declaration, with the versions that the tests use."""
    named = [(one.name, f" ({one.models})" if one.models else "") for one in ARCHITECTURES]
    named += [(one.name, " dual encoder") for one in DUAL_ARCHITECTURES]
    models: dict[str, dict[str, None]] = {}  # by library, by the names that users know
    for full_name, remark in named:
        library, _, name = full_name.partition(" ")
        models.setdefault(library, {})[re.sub(r"( with)? (classifier|encoder)$", "", name) + remark] = None
    models["sentence-transformers"] = {"the text encoders of transformers, pooled by mean, first or last token": None}
    models["torch"] = {"plain classifiers around `nn.TransformerEncoder` or `nn.MultiheadAttention`": None}
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    rows = [
        [library, pinned[{"open_clip": "open_clip_torch"}.get(library, library)], ", ".join(names)]
        for library, names in models.items()
    ]
    return markdown(["library", "tested with", "models"], rows, align="lll")


def tables() -> dict[str, str]:
    """Every table by its name in the documents."""
    return {
        "fusion": fusion_table(),
        "demo": demo_table(),
        "demo_gain": demo_line(),
        "attack": attack_table(),
        "conversion": conversion_line(),
        "takes": takes_table(),
    }
