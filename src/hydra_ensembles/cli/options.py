"""Flags that several commands share. Their default is None, which means: not given, the YAML file may say."""

from typing import Annotated

import typer

_MODEL, _DATA = "Model", "Data"

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="Folder, timm:NAME, hf:ID, or a bare timm name.", show_default=False)
]
OptionalModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Folder, timm:NAME, hf:ID, or a bare timm name.", show_default=False),
]
WeightsOption = Annotated[
    str | None, typer.Option("--weights", help="Weights of a timm model: a .safetensors file.", metavar="FILE")
]
NumClassesOption = Annotated[
    int | None, typer.Option("--num-classes", help="Classes of the timm model; read off the weights if not given.")
]
LabelsOption = Annotated[
    str | None, typer.Option("--labels", help="Text file with the class names, one a line.", metavar="FILE")
]
ModelOptionOption = Annotated[
    list[str] | None,
    typer.Option("--model-option", help="Argument of timm.create_model, as img_size=64.", metavar="NAME=VALUE"),
]
RandomWeightsOption = Annotated[
    bool | None, typer.Option("--random-weights", help="An untrained timm model, to try things out.")
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1; a GPU if there is one.")]

RootOption = Annotated[
    str | None, typer.Option("--root", help="Folder that the data of a suite lie in.", metavar="FOLDER")
]
ColumnOption = Annotated[
    list[str] | None,
    typer.Option("--column", help="Column of a table: image, text, text_pair or label.", metavar="ROLE=NAME"),
]
ByPositionOption = Annotated[
    bool | None, typer.Option("--by-position", help="Match classes by number, whatever their names.")
]
LimitOption = Annotated[int | None, typer.Option("--limit", help="Use at most so many samples of each set.")]
BatchSizeOption = Annotated[int | None, typer.Option("--batch-size", help="Samples a batch; 64 if not given.")]
WorkersOption = Annotated[int | None, typer.Option("--workers", help="Worker processes that read data.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")]
