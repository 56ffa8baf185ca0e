"""Zero-shot classifiers that `inference.py` measures: CLIP as its user runs it, and ensembles of its circuits.

Class embeddings are made once, before anything is timed. Two contenders make them anew for every batch instead: they
show what text towers would cost if they took part in inference.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from contenders import Contender, Workshop, alone, multiply_adds_done
from model_shapes import ClipShape, Inputs
from torch import Tensor, nn
from torch.nn import functional as F

import hydra_ensembles as he
from hydra_ensembles._utils import derive_seed
from hydra_ensembles.model.config import EnsembleConfig
from hydra_ensembles.model.cost import multiply_adds
from hydra_ensembles.optimize import Plan

ZERO_SHOT_NAMES = ("single", "ours", "hydra-joint", "deep-in-turn", "single-texts", "hydra-texts")
PRUNED_SHARE = 10  # one head in so many: 24 of the 144 + 96 of ViT-B/32
TEMPLATE = "A photo of a {label}."
FIRST_WORD = 2  # ids below are padding and unknown words


class ZeroShotWorkshop(Workshop):
    """Makes the contenders of a dual encoder."""

    def __init__(self, shape: ClipShape, dtype: torch.dtype, device: str, seed: int) -> None:
        super().__init__(shape, dtype, device, seed)
        self.clip_shape = shape
        self.names = [f"class{number}" for number in range(shape.classes)]
        self._duals: dict[int, he.DualEncoder] = {}  # by number of members

    @cached_property
    def dual(self) -> he.DualEncoder:
        """The user's model as a dual encoder of ours, in float32."""
        return cast(he.DualEncoder, he.convert(self.model, processor=self.tokenizer))

    @cached_property
    def base(self) -> he.Ensemble:
        """Its zero-shot classifier."""
        return he.zero_shot(self.dual, self.names, TEMPLATE, keep_text=False)

    @cached_property
    def tokenizer(self) -> he.TextPreprocessing:
        """A tokenizer that knows the words of the prompts."""
        config = cast(Any, self.model).config.text_config
        return word_tokenizer(self.prompts, self.clip_shape.text_tokens, config.bos_token_id, config.eos_token_id)

    @property
    def prompts(self) -> list[str]:
        """What text towers read."""
        return [TEMPLATE.replace("{label}", name) for name in self.names]

    @cached_property
    def ids(self) -> Tensor:
        """The prompts as token ids, `[C, T]`."""
        return self.tokenizer(self.prompts)["input_ids"].to(self.device)

    def make(self, name: str, members: int, inputs: Inputs, plan: Plan | None = None) -> Contender:
        """A contender, with the plan that suits these inputs unless one is given."""
        batch = len(next(iter(inputs.values())))
        if name == "single-texts":
            made = self._foreign(name, 1, [UsersClip(self.model, self.ids, every_batch=True)], alone)
            return replace(made, multiply_adds=made.multiply_adds + self._of_texts(self.dual, batch))
        if name == "hydra-texts":
            return self._texts_in_every_batch(members, inputs, plan)
        made = super().make(name, members, inputs, plan)
        if name != "hydra-joint":
            return made
        saved = done_once(self._kept(name, members).config, self.shape.tokens)
        return replace(made, multiply_adds=made.multiply_adds - saved)

    def answer(self, name: str, members: int, inputs: Inputs) -> Tensor | None:
        """What the model itself answers, before it was rewritten for speed; None for models not of ours."""
        if name != "hydra-texts":
            return super().answer(name, members, inputs)
        with torch.no_grad():
            return cast(Tensor, self._fused(members)(*inputs.values(), self.ids))

    def deployed(self, model: nn.Module) -> nn.Module:
        """Image side and class embeddings."""
        return UsersClip(model, self.ids, every_batch=False)

    def _ensemble(self, name: str, members: int) -> he.Ensemble:
        if name == "ours":
            return self.base.member(0)
        if name != "hydra-joint":
            raise ValueError(f"there is no zero-shot contender {name!r}; there are {', '.join(ZERO_SHOT_NAMES)}")
        return he.zero_shot(self._circuits(members), self.names, TEMPLATE, keep_text=False)

    def _circuits(self, members: int) -> he.DualEncoder:
        """Members of different heads and otherwise equal weights, since nothing is trained; fused."""
        return he.fuse([he.prune(self.dual, self._jointly(member)) for member in range(members)])

    def _jointly(self, member: int) -> list[he.Head]:
        """A tenth of the heads of both towers, drawn by the seed: as uneven as a circuit over both takes them."""
        towers = {"image": self.dual.image, "text": self.dual.text}
        heads = [
            he.Head(layer, head, name)
            for name, tower in towers.items()
            for layer in range(tower.num_layers)
            for head in range(tower.num_heads)
        ]
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "joint", member))
        drawn = torch.randperm(len(heads), generator=generator)[: len(heads) // PRUNED_SHARE]
        return [heads[index] for index in drawn.tolist()]

    def _fused(self, members: int) -> he.DualEncoder:
        if members not in self._duals:
            self._duals[members] = self._circuits(members).to(self.dtype)
        return self._duals[members]

    def _texts_in_every_batch(self, members: int, inputs: Inputs, plan: Plan | None) -> Contender:
        """Both towers of all members, each run as fast as it can be."""
        dual = self._fused(members)
        plans = None if plan is None else [plan]
        image, text = dual.image.optimize(plans=plans), dual.text.optimize(plans=plans)
        chosen = plan or image.choice_for(inputs).plan
        towers = image.module(chosen), text.module(plan or text.choice_for(self.ids).plan)
        module = TextsInEveryBatch(*towers, dual, self.ids)
        without = self._kept("hydra-joint", members)
        done = multiply_adds_done(without.config, self.shape.tokens, without.readout.tokens_read())
        done -= done_once(without.config, self.shape.tokens)
        return Contender(
            name="hydra-texts",
            run=module,
            modules=(module,),
            parameters=sum(p.numel() for p in dual.parameters()),
            multiply_adds=done + self._of_texts(dual, len(next(iter(inputs.values())))),
            plan=chosen,
        )

    def _of_texts(self, dual: he.DualEncoder, batch: int) -> int:
        """Multiply-adds that the text towers do for all classes, shared out among the images of a batch."""
        assert dual.projections.text is not None
        width = dual.text.config.encoder.width
        each = multiply_adds(dual.text.config, self.clip_shape.text_tokens)
        each += dual.text.num_members * width * dual.embedding_width
        return len(self.names) * each // batch


class UsersClip(nn.Module):
    """A `CLIPModel` of transformers that classifies: image features, and their cosines with class embeddings.

    Args:
        clip: The model; its parts are used as they are.
        ids: Prompts `[C, T]`.
        every_batch: Compute the class embeddings in every call, instead of once here.
    """

    def __init__(self, clip: Any, ids: Tensor, every_batch: bool) -> None:
        super().__init__()
        self.vision_model, self.visual_projection = clip.vision_model, clip.visual_projection
        self.logit_scale = clip.logit_scale
        self.every_batch = every_batch
        if every_batch:
            self.text_model, self.text_projection = clip.text_model, clip.text_projection
            self.register_buffer("ids", ids)
        else:
            with torch.no_grad():
                classes = torch.cat([self._classes(clip, some) for some in ids.split(256)])
            self.classes = nn.Parameter(classes, requires_grad=False)  # [C, e]

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits `[B, C]`."""
        features = self.visual_projection(self.vision_model(pixel_values=pixels).pooler_output)
        classes = self._classes(self, cast(Tensor, self.ids)) if self.every_batch else self.classes
        return self.logit_scale.exp() * F.normalize(features, dim=-1) @ classes.T

    @staticmethod
    def _classes(parts: Any, ids: Tensor) -> Tensor:
        return F.normalize(parts.text_projection(parts.text_model(input_ids=ids).pooler_output), dim=-1)


class TextsInEveryBatch(nn.Module):
    """A dual encoder of ours whose class embeddings are not kept: both towers run in every call."""

    def __init__(self, image: nn.Module, text: nn.Module, dual: he.DualEncoder, ids: Tensor) -> None:
        super().__init__()
        self.image, self.text, self.projections = image, text, dual.projections
        self.logit_scale = dual.logit_scale
        self.register_buffer("ids", ids)

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits `[M, B, C]`."""
        image, text = (
            one if one is not None else nn.Identity() for one in (self.projections.image, self.projections.text)
        )
        images = F.normalize(image(self.image(pixels)), dim=-1)  # [M, B, e]
        classes = F.normalize(text(self.text(self.ids)), dim=-1)  # [M, C, e]
        return images @ classes.transpose(1, 2) * self.logit_scale.exp()[:, None, None]


def done_once(config: EnsembleConfig, tokens: int) -> int:
    """Multiply-adds saved where untrained members first differ: heads they share see one input, and run once there."""
    if config.trunk >= config.encoder.layers - 1:  # the last block leaves most tokens out
        return 0
    kept = [layers[config.trunk] for layers in config.heads]
    spared = sum(len(heads) for heads in kept) - len({head for heads in kept for head in heads})
    width, head_dim = config.encoder.width, config.encoder.head_dim
    return spared * (3 * tokens * width * head_dim + 2 * tokens * tokens * head_dim)


def word_tokenizer(prompts: Sequence[str], tokens: int, start: int, end: int) -> he.TextPreprocessing:
    """A tokenizer for given prompts: a word or mark is a token, between a start and an end token, padded."""
    words = sorted({word for prompt in prompts for word in prompt.replace(".", " . ").split()})
    ids = {"[UNK]": 1, "[START]": start, "[END]": end, **{word: FIRST_WORD + i for i, word in enumerate(words)}}
    special = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in ("[START]", "[END]")}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "decoder": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "[START]", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "[END]", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": special,
        },
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": "[UNK]"},
    }
    return he.TextPreprocessing(
        max_length=tokens, pad_id=0, pad_to_max=True, attention_mask=False, tokenizer=json.dumps(content)
    )
