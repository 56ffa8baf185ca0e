"""The linear maps by which two towers meet in one embedding."""

import torch
from torch import Tensor, nn

from .dual_config import ProjectionConfig
from .encoder.grouped import GroupedLinear
from .errors import ConfigError


class Projections(nn.Module):
    """One linear map per tower; None where a tower's features are the embedding already."""

    def __init__(self, image: GroupedLinear | None = None, text: GroupedLinear | None = None) -> None:
        super().__init__()
        self.image = image
        self.text = text

    @classmethod
    def fresh(cls, image_width: int, text_width: int, outputs: int, bias: bool = False) -> "Projections":
        """New maps for both towers, from their feature widths to an embedding of `outputs` numbers."""
        config = ProjectionConfig(outputs, bias)
        projections = cls(projection_from(config, image_width), projection_from(config, text_width))
        with torch.no_grad():
            for projection in (projections.image, projections.text):
                if projection is not None:
                    projection.weight.normal_(std=projection.weight.shape[2] ** -0.5)
                    if projection.bias is not None:
                        projection.bias.zero_()
        return projections

    @staticmethod
    def stack(members: "list[Projections]") -> "Projections":
        """The maps of several members, one after another."""
        return Projections(
            _join("image", [member.image for member in members]), _join("text", [member.text for member in members])
        )

    def member(self, index: int) -> "Projections":
        """A copy of the maps that one member uses."""
        return Projections(_take(self.image, index), _take(self.text, index))


def projection_from(config: ProjectionConfig | None, inputs: int) -> GroupedLinear | None:
    """An empty map of the given configuration."""
    return None if config is None else GroupedLinear(config.copies, inputs, config.outputs, config.bias)


def projection_config(projection: GroupedLinear | None) -> ProjectionConfig | None:
    """The configuration of a map."""
    if projection is None:
        return None
    copies, outputs, _ = projection.weight.shape
    return ProjectionConfig(outputs, projection.bias is not None, copies)


def linear(weight: Tensor, bias: Tensor | None = None) -> GroupedLinear:
    """A map with copies of the given weights, `[G, out, in]` and `[G, out]`."""
    copies, outputs, inputs = weight.shape
    with torch.device("meta"):
        projection = GroupedLinear(copies, inputs, outputs, bias is not None)
    projection.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))
    if bias is not None:
        projection.bias = nn.Parameter(bias.detach().clone(memory_format=torch.contiguous_format))
    return projection


def compose(inner: GroupedLinear | None, outer: GroupedLinear | None) -> GroupedLinear | None:
    """The one map that does what two do, one after the other; None stands for a map that changes nothing."""
    if inner is None or outer is None:
        return inner if outer is None else outer
    bias = None if outer.bias is None else outer.bias.detach()  # [G, out]
    if inner.bias is not None:
        through = (outer.weight @ inner.bias[..., None])[..., 0].detach()
        bias = through if bias is None else through + bias
    return linear((outer.weight @ inner.weight).detach(), bias)


def _take(projection: GroupedLinear | None, index: int) -> GroupedLinear | None:
    if projection is None:
        return None
    one = slice(0, 1) if projection.weight.shape[0] == 1 else slice(index, index + 1)
    return linear(projection.weight[one], None if projection.bias is None else projection.bias[one])


def _join(tower: str, maps: list[GroupedLinear | None]) -> GroupedLinear | None:
    present = [one for one in maps if one is not None]
    if not present:
        return None
    biases: list[Tensor] = [one.bias for one in present if one.bias is not None]
    shapes = {tuple(one.weight.shape[1:]) for one in present}
    if len(present) != len(maps) or len(biases) not in (0, len(maps)) or len(shapes) > 1:
        raise ConfigError(
            f"the members' {tower} projections differ: {[_text(one) for one in maps]}; "
            "members must be copies of one model, pruned or fine-tuned in different ways"
        )
    return linear(torch.cat([one.weight for one in present]), torch.cat(biases) if biases else None)


def _text(projection: GroupedLinear | None) -> str:
    return "none" if projection is None else projection.extra_repr()
