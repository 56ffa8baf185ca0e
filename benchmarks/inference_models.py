"""The models that `inference.py` measures: a user's own model, and the ensembles that can be made from it.

All weights are random: time does not depend on them. Members differ wherever fine-tuning would make them differ, so
that nothing is shared by accident. Only public names of the library are used (except to count arithmetic, and for what
baselines leave after training), so that the same script can run another checkout.
"""

import copy
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any, cast

import timm
import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional as F

import hydra_ensembles as he

LABELS = {
    "single": "the user's own model",
    "ours": "our single (M = 1)",
    "pruned": "pruned, a third of the heads",
    "mc-dropout": "MC Dropout, M passes",
    "lora": "LoRA-Ensemble, merged",
    "lora-last": "LoRA-Ensemble, the last quarter of the layers",
    "batch-ensemble": "BatchEnsemble, all layers",
    "batch-ensemble-last": "BatchEnsemble, the last quarter of the layers",
    "batch-ensemble-inputs": "BatchEnsemble, scales of inputs, folded into norms",
    "mimo": "MIMO, kernels summed",
    "packed": "Packed-Ensemble, alpha 2",
    "oba": "OBA, zeros stored",
    "laplace": "last-layer Laplace, 20 classifiers",
    "classifiers": "Deep Ensemble of classifiers",
    "swag": "SWAG or Snapshot members, stacked",
    "deep-last": "Deep Ensemble, the last quarter of the layers",
    "deep-in-turn": "Deep Ensemble, in turn",
    "deep-vmap": "Deep Ensemble, torch.func",
    "deep-stacked": "Deep Ensemble, stacked (ours)",
    **{
        f"hydra-k{trunk}": f"Pruned members, {f'trunk of {trunk}' if trunk else 'no trunk'}"
        for trunk in (0, 4, 6, 8, 10)
    },
    "hydra-uneven": "Pruned members, uneven heads",
    "hydra-joint": "Pruned members, circuits of both towers",
}
ZERO_SHOT = ("single", "ours", "deep-in-turn", "hydra-joint")
NAMES = tuple(name for name in LABELS if name != "hydra-joint")
OF_IMAGES = ("mimo",)
MEMBERS = {"single": 1, "ours": 1, "pruned": 1, "oba": 1, "laplace": 20}  # of contenders with a fixed number of members
APART = {  # parameter groups that a baseline's members do not share; each has its own classifier
    "lora": ("attention",),
    "batch-ensemble": ("attention", "mlp"),
    "batch-ensemble-inputs": ("norms",),
    "deep": ("attention", "mlp", "norms"),
}
LAST = "-last"  # suffix of names: members differ only in the last quarter of the layers
_RANKED = "data to rank heads; fine-tuning optional"
METHODS = {  # contenders of docs/tables_methods.md: their names there, and what they need
    "single": ("Single", "–"),
    "hydra-k0": ("Pruned members, 8 of 12 heads, no trunk", _RANKED),
    "hydra-k8": ("Pruned members, 8 of 12 heads above a trunk of 8 layers", _RANKED),
    "deep-in-turn": ("Deep Ensemble, models in turn", "three fine-tunings"),
    "deep-stacked": ("Deep Ensemble, `deep_ensemble`", "three fine-tunings"),
    "deep-last": ("Deep Ensemble of the last 3 blocks", "three fine-tunings of a quarter"),
    "classifiers": ("Deep Ensemble of classifiers", "three trainings of a linear layer"),
    "lora": (
        "LoRA-Ensemble, `lora_ensemble`",
        "one fine-tuning together, or three apart; 0.3 M parameters train for each member",
    ),
    "lora-last": ("LoRA-Ensemble of the last 3 blocks", "the same, shorter"),
    "batch-ensemble": ("BatchEnsemble, `batch_ensemble`", "one fine-tuning"),
    "batch-ensemble-last": ("BatchEnsemble of the last 3 blocks", "one fine-tuning"),
    "batch-ensemble-inputs": ('BatchEnsemble, `scales="inputs"`', "one fine-tuning; a pre-norm model"),
    "mimo": ("MIMO, `mimo`", "long training on batches `batch_repeat` times as large; images"),
    "packed": ("Packed-Ensemble, `packed_ensemble`", "training from scratch: pretrained weights do not fit"),
    "oba": ("OBA, `oba`", "a pass with second derivatives per step, then fine-tuning; zeros are stored like others"),
    "laplace": ("last-layer Laplace, `laplace`", "one pass over the training data"),
    "swag": ("SWAG, `swag`; Snapshot", "a trained model, and to train on for a while; or one training in three cycles"),
    "mc-dropout": ("MC Dropout, `mc_dropout`", "nothing; better trained with dropout"),
}
NOISE = 0.02  # imitates fine-tuning, coarse enough to survive bfloat16
DROPOUT = 0.1
PRUNED_SHARE = 10  # one head in so many is pruned from a zero-shot classifier: 24 of the 144 + 96 of ViT-B/32
TEMPLATE = "A photo of a {label}."

Inputs = dict[str, Tensor]
Call = Callable[..., Tensor]


# --- shapes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """One architecture in one size."""

    build: Callable[[], nn.Module]  # with random weights, dropout off
    tokens: int  # of an input
    pixels: int = 0  # side of the images; 0 for texts
    classes: int = 0  # class names of a dual encoder; 0 for a classifier
    words: int = 0  # vocabulary size of a text model

    def inputs(self, batch: int, generator: torch.Generator) -> Inputs:
        """A batch; texts have mixed lengths with padding, one of them has full length."""
        if self.pixels:
            return {"pixel_values": torch.randn(batch, 3, self.pixels, self.pixels, generator=generator)}
        ids = torch.randint(1000 % self.words, self.words, (batch, self.tokens), generator=generator)
        lengths = torch.randint(self.tokens // 8, self.tokens + 1, (batch, 1), generator=generator)
        lengths[0] = self.tokens
        mask = (torch.arange(self.tokens)[None] < lengths).long()
        return {"input_ids": ids * mask, "attention_mask": mask}

    def logits(self, model: Any, *inputs: Tensor) -> Tensor:
        """Call the model."""
        if self.pixels:
            return cast(Tensor, model(*inputs))
        return cast(Tensor, model(input_ids=inputs[0], attention_mask=inputs[1]).logits)


def _bert(**settings: Any) -> nn.Module:
    config = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **settings)
    return cast(nn.Module, transformers.BertForSequenceClassification(config))


def _clip(image: dict[str, Any], text: dict[str, Any], width: int) -> nn.Module:
    config = transformers.CLIPConfig(vision_config=image, text_config=text, projection_dim=width)
    return cast(nn.Module, transformers.CLIPModel(config))


def _tower(layers: int, width: int, heads: int, mlp: int, **more: int) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": mlp}
    return {"hidden_act": "gelu", **sizes, **more}


def names_of(shape: Shape) -> tuple[str, ...]:
    """The contenders of a shape."""
    if shape.classes:
        return ZERO_SHOT
    return tuple(name for name in NAMES if shape.pixels or name not in OF_IMAGES)


_TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 12, "num_heads": 6, "num_classes": 5}
_TINY_BERT = {"hidden_size": 24, "num_attention_heads": 6, "intermediate_size": 32, "vocab_size": 50}
_TINY_WORDS = {"vocab_size": 40, "bos_token_id": 38, "eos_token_id": 39, "max_position_embeddings": 12}
_CLIP = partial(_clip, _tower(12, 768, 12, 3072, patch_size=32), _tower(12, 512, 8, 2048), 512)
_TINY_CLIP = partial(_clip, _tower(4, 24, 6, 32, image_size=16, patch_size=8), _tower(4, 16, 4, 32, **_TINY_WORDS), 20)
SHAPES = {
    "vit-b16": Shape(partial(timm.create_model, "vit_base_patch16_224"), 197, 224),
    "vit-s16": Shape(partial(timm.create_model, "vit_small_patch16_224"), 197, 224),
    "dinov2-s": Shape(partial(timm.create_model, "vit_small_patch14_dinov2", img_size=112, num_classes=10), 65, 112),
    "bert-base": Shape(_bert, 128, words=30522),
    "clip-b32": Shape(_CLIP, 50, 224, classes=1000),
    "clip-b32-100": Shape(_CLIP, 50, 224, classes=100),
    "tiny": Shape(partial(timm.create_model, "vit_base_patch16_224", **_TINY), 5, 16),
    "tiny-bert": Shape(partial(_bert, **_TINY_BERT), 8, words=50),
    "tiny-clip": Shape(_TINY_CLIP, 5, 16, classes=5),
}


# --- contenders ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """A model ready to be measured."""

    run: Call  # takes the tensors of a batch one by one
    modules: Sequence[nn.Module]  # hold its weights
    parameters: int  # stored
    multiply_adds: Callable[[], int]  # actually computed for one input
    plan: str = ""  # how members run, for an ensemble of ours
    expected: Tensor | None = None  # outputs of an ensemble of ours before it was optimized
    random: bool = False  # whether its outputs differ each time

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, shared ones counted once."""
        tensors = [t for module in self.modules for t in [*module.parameters(), *module.buffers()]]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class Workshop:
    """Makes the contenders of one shape, in one dtype, on one device; caches what can be reused."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str, seed: int) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = torch.device(device)
        self.seed = seed
        self._ensembles: dict[tuple[str, int], he.Ensemble] = {}

    @cached_property
    def model(self) -> nn.Module:
        """The user's model, in float32."""
        torch.manual_seed(self.seed)
        return self._noisy(self.shape.build(), "model").eval().to(self.device)

    @cached_property
    def base(self) -> he.Ensemble:
        """The user's model as an ensemble of ours, in float32."""
        return cast(he.Ensemble, he.convert(self.model))

    def single_multiply_adds(self) -> int:
        """Multiply-adds per input of the user's model, which computes every token of every layer."""
        return arithmetic(self.base, self.shape.tokens, shortcut=False)

    def make(self, name: str, members: int, inputs: Inputs) -> Contender:
        """A contender, with the fastest plan for these inputs."""
        if name == "single":
            return self._foreign([self._deployed(self.model)])
        if name in ("deep-in-turn", "deep-vmap"):
            copies = [self._noisy(copy.deepcopy(self.model), "model", member) for member in range(members)]
            return self._foreign([self._deployed(model) for model in copies], stacked=name == "deep-vmap")
        if name == "mc-dropout":
            return self._mc_dropout(members)
        ensemble = self.ensemble(name, members)
        runner = ensemble.optimize()
        plan = runner.choice_for(inputs).plan
        module = runner.module(plan)
        with torch.no_grad():
            expected = ensemble(*inputs.values())
        count = sum(p.numel() for p in ensemble.parameters())
        return Contender(module, [module], count, lambda: self._madds(ensemble), plan, expected)

    def counts(self, name: str, members: int) -> tuple[int, int]:
        """Parameters that a contender stores, and multiply-adds actually computed per input."""
        if name in ("single", "deep-in-turn", "deep-vmap"):
            return members * sum(p.numel() for p in self.model.parameters()), members * self.single_multiply_adds()
        if name == "mc-dropout":
            return sum(p.numel() for p in self.base.parameters()), members * self._madds(self.base)
        ensemble = self._fused(name, members)
        return sum(p.numel() for p in ensemble.parameters()), self._madds(ensemble)

    def ensemble(self, name: str, members: int) -> he.Ensemble:
        """An ensemble of ours, made once."""
        if (name, members) not in self._ensembles:
            self._ensembles[name, members] = self._fused(name, members).to(self.dtype)
        return self._ensembles[name, members]

    def _madds(self, ensemble: he.Ensemble) -> int:
        return arithmetic(ensemble, self.shape.tokens)

    # --- models of other libraries -------------------------------------------------------------------------------

    def _deployed(self, model: nn.Module) -> nn.Module:
        """The form in which a user runs a model of this shape."""
        return model

    def _foreign(self, models: list[nn.Module], stacked: bool = False) -> Contender:
        """Models of other libraries: alone, one after another, or stacked as in PyTorch's tutorial on ensembles."""
        models = [copy.deepcopy(model).to(self.dtype).eval() for model in models]
        count = sum(p.numel() for model in models for p in model.parameters())
        members = len(models)
        modules = models
        logits = self.shape.logits

        def in_turn(*inputs: Tensor) -> Tensor:
            answers = [logits(model, *inputs) for model in models]
            return torch.stack(answers) if members > 1 else answers[0]

        run: Call = in_turn
        if stacked:
            parameters, buffers = stack_module_state(models)
            skeleton = copy.deepcopy(models[0]).to("meta")
            weights = nn.Module()
            for index, tensor in enumerate([*parameters.values(), *buffers.values()]):
                weights.register_buffer(f"stacked{index}", tensor)

            def forward(parameters: Any, buffers: Any, inputs: Any) -> Tensor:
                def call(*args: Any, **kwargs: Any) -> Any:
                    return functional_call(skeleton, (parameters, buffers), args, kwargs)

                return logits(call, *inputs)

            def run(*inputs: Any) -> Any:
                return torch.vmap(forward, (0, 0, None))(parameters, buffers, inputs)

            modules = [weights]
        return Contender(run, modules, count, lambda: members * self.single_multiply_adds())

    # --- ensembles of ours ---------------------------------------------------------------------------------------

    def _fused(self, name: str, members: int) -> he.Ensemble:
        if name in ("ours", "oba"):  # zeros are stored and multiplied like other numbers
            return self.base.member(0)
        if name == "pruned":
            return he.prune(self.base, self._heads("even", 0, 0))
        if name in ("deep-stacked", "swag"):
            return he.Ensemble.stack([self._tuned(self.base.member(0), 0, member) for member in range(members)])
        if not name.startswith("hydra-"):
            return self._baseline(name, members)
        trunk = int(name.removeprefix("hydra-k")) if name != "hydra-uneven" else 0
        kind = "uneven" if name == "hydra-uneven" else "even"
        pruned = [he.prune(self.base, self._heads(kind, trunk, member)) for member in range(members)]
        return he.fuse([self._tuned(model, trunk, member) for member, model in enumerate(pruned)])

    def _baseline(self, name: str, members: int) -> he.Ensemble:
        """The result of training a baseline: members share what it does not train separately."""
        from hydra_ensembles import baselines
        from hydra_ensembles.baselines.building_blocks import fresh, joined
        from hydra_ensembles.model.config import Sharing

        if name == "packed":
            model = fresh(baselines.Packed(members).narrow(self.base.config), self.seed, self.base.metadata)
            return model.to(self.device)
        layers = self.base.num_layers
        apart = APART.get(name.removesuffix(LAST), ())
        trunk = layers - layers // 4 if name.endswith(LAST) else 0
        sharing = Sharing(**{group: group not in apart for group in ("stem", "attention", "mlp", "norms")})
        return cast(he.Ensemble, self._noisy(joined([self.base] * members, sharing, trunk), "baseline"))

    def _mc_dropout(self, passes: int) -> Contender:
        model = he.mc_dropout(self.base.member(0).to(self.dtype), DROPOUT, passes).model  # dropout stays on

        def run(*inputs: Tensor) -> Tensor:
            repeated = [tensor.repeat(passes, *(1,) * (tensor.dim() - 1)) for tensor in inputs]
            return model(*repeated)[0].unflatten(0, (passes, -1))

        count = sum(p.numel() for p in model.parameters())
        return Contender(run, [model], count, lambda: passes * self._madds(self.base), random=True)

    def _tuned(self, ensemble: he.Ensemble, trunk: int, member: int) -> he.Ensemble:
        """Imitates fine-tuning with the stem and the first layers frozen: everything else is a member's own."""

        def frozen(name: str) -> bool:
            layer = re.match(r"encoder\.layers\.(\d+)\.", name)
            return name.startswith("stem.") or (layer is not None and int(layer[1]) < trunk)

        return cast(he.Ensemble, self._noisy(ensemble, "member", member, frozen))

    def _noisy(self, model: Any, kind: str, index: int = 0, frozen: Callable[[str], bool] = lambda name: False) -> Any:
        device = next(model.parameters()).device
        generator = self._generator(kind, index, device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if not frozen(name):
                    parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator, device=device))
        return model

    def _heads(self, kind: str, trunk: int, member: int) -> list[tuple[int, int]]:
        """A third of the heads: of every layer above the trunk, or (uneven) anywhere, like a circuit's."""
        generator = self._generator(kind, member)
        layers = self.base.num_layers
        heads = self.base.num_heads
        if kind == "uneven":
            drawn = torch.randperm(layers * heads, generator=generator)[: layers * heads // 3].tolist()
            return [divmod(index, heads) for index in drawn]
        draws = [torch.randperm(heads, generator=generator)[: heads // 3].tolist() for _ in range(layers)]
        return [(layer, head) for layer, drawn in enumerate(draws) if layer >= trunk for head in drawn]

    def _generator(self, kind: str, index: int, device: torch.device | str = "cpu") -> torch.Generator:
        return torch.Generator(device).manual_seed(zlib.crc32(f"{self.seed}/{kind}/{index}".encode()))


def arithmetic(ensemble: he.Ensemble, tokens: int, shortcut: bool = True) -> int:
    """Multiply-adds per input; with `shortcut`, the last block computes only the tokens that the readout reads."""
    from hydra_ensembles.model.cost import multiply_adds

    config, encoder = ensemble.config, ensemble.config.encoder
    total = multiply_adds(config, tokens)
    positions = ensemble.readout.tokens_read()
    if positions is None or not shortcut:
        return total
    left_out = tokens - len(range(*positions.indices(tokens)))
    inside = [config.copies(group, layer) for group in ("attention", "mlp", "norms") for layer in range(encoder.layers)]
    branches = max(config.copies("stem"), *inside)
    heads = sum(len(config.heads[member][encoder.layers - 1]) for member in range(branches))
    total -= heads * left_out * encoder.head_dim * (2 * encoder.width + 2 * tokens)
    return total - branches * left_out * encoder.width * encoder.mlp_width * (3 if encoder.gated else 2)


# --- zero-shot classifiers -------------------------------------------------------------------------------------------


class ZeroShotWorkshop(Workshop):
    """Makes the contenders of a dual encoder: CLIP as its user runs it, and ensembles of its circuits.

    Class embeddings are computed once, before anything is timed.
    """

    @cached_property
    def names(self) -> list[str]:
        """The class names."""
        return [f"class{number}" for number in range(self.shape.classes)]

    @cached_property
    def tokenizer(self) -> he.TextPreprocessing:
        """A tokenizer with the words of the prompts."""
        config = cast(Any, self.model).config.text_config
        return word_tokenizer(self.prompts, config.max_position_embeddings, config.bos_token_id, config.eos_token_id)

    @property
    def prompts(self) -> list[str]:
        """The inputs of text towers."""
        return [TEMPLATE.replace("{label}", name) for name in self.names]

    @cached_property
    def dual(self) -> he.DualEncoder:
        """The user's model as a dual encoder of ours, in float32."""
        return cast(he.DualEncoder, he.convert(self.model, processor=self.tokenizer))

    @cached_property
    def base(self) -> he.Ensemble:
        """Its zero-shot classifier."""
        return he.zero_shot(self.dual, self.names, TEMPLATE, keep_text=False)

    def _madds(self, ensemble: he.Ensemble) -> int:
        """In the layer where untrained members first differ, the heads that they have in common run once."""
        config = ensemble.config
        tokens = self.shape.tokens
        madds = super()._madds(ensemble)
        if config.members == 1 or config.trunk >= config.encoder.layers - 1:  # the last block skips most tokens
            return madds
        kept = [layers[config.trunk] for layers in config.heads]
        spared = sum(len(heads) for heads in kept) - len({head for heads in kept for head in heads})
        width, head_dim = config.encoder.width, config.encoder.head_dim
        return madds - spared * (3 * tokens * width * head_dim + 2 * tokens * tokens * head_dim)

    def _deployed(self, model: nn.Module) -> nn.Module:
        """Image side and class embeddings."""
        return UsersClip(model, self.tokenizer(self.prompts)["input_ids"].to(self.device))

    def _fused(self, name: str, members: int) -> he.Ensemble:
        """Members with different heads and otherwise equal weights, because nothing is trained."""
        if name == "ours":
            return self.base.member(0)
        heads: list[he.Head] = []
        for side, tower in (("image", self.dual.image), ("text", self.dual.text)):
            indices = product(range(tower.num_layers), range(tower.num_heads))
            heads += [he.Head(layer, head, cast(Any, side)) for layer, head in indices]
        pruned = []
        for member in range(members):  # a tenth of both towers, unevenly distributed, like a circuit over both
            drawn = torch.randperm(len(heads), generator=self._generator("joint", member))[: len(heads) // PRUNED_SHARE]
            pruned.append(he.prune(self.dual, [heads[index] for index in drawn.tolist()]))
        return he.zero_shot(he.fuse(pruned), self.names, TEMPLATE, keep_text=False)


class UsersClip(nn.Module):
    """A `CLIPModel` of transformers as a classifier: image features, and their cosines with embedded prompts."""

    def __init__(self, clip: Any, ids: Tensor) -> None:  # [C, T]
        super().__init__()
        self.vision_model, self.visual_projection = clip.vision_model, clip.visual_projection
        self.logit_scale = clip.logit_scale
        with torch.no_grad():
            features = [clip.text_projection(clip.text_model(input_ids=part).pooler_output) for part in ids.split(256)]
        self.classes = nn.Parameter(F.normalize(torch.cat(features), dim=-1), requires_grad=False)  # [C, e]

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits `[B, C]`."""
        features = self.visual_projection(self.vision_model(pixel_values=pixels).pooler_output)
        return self.logit_scale.exp() * F.normalize(features, dim=-1) @ self.classes.T


def word_tokenizer(prompts: Sequence[str], tokens: int, start: int, end: int) -> he.TextPreprocessing:
    """A tokenizer for given prompts: every word or mark is a token, between a start and an end token, padded."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = sorted({word for prompt in prompts for word in prompt.replace(".", " . ").split()})
    ids = {"[UNK]": 1, "[START]": start, "[END]": end, **{word: 2 + i for i, word in enumerate(words)}}
    tokenizer = Tokenizer(models.WordLevel(ids, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[START]", start), ("[END]", end)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[START] $A [END]", special_tokens=special)
    return he.TextPreprocessing(
        max_length=tokens, pad_id=0, pad_to_max=True, attention_mask=False, tokenizer=tokenizer.to_str()
    )
