"""Shared arguments and options of the commands, with their help and completion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clika_ref_cli.completion import complete_option, complete_target

MODEL_SYNTAX = "package.module:factory (a module, its class, or a callable), a file of clika_save"

DATA_SYNTAX = (
    "a shape (1x3x224x224, int64:1x128, ids=int64:1x128,mask=1x128), x.npy, calls.npz, calls.safetensors, or "
    "package.module:function, which yields batches"
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help=f"{MODEL_SYNTAX}.", show_default=False)]

ModelOrOnnx = Annotated[
    str, typer.Argument(metavar="MODEL", help=f"{MODEL_SYNTAX}, or an ONNX file.", show_default=False)
]

Inputs = Annotated[
    list[str] | None,
    typer.Option("--input", metavar="DATA", help=f"One call: {DATA_SYNTAX}. A side that differs becomes dynamic."),
]

BatchSize = Annotated[
    int | None,
    typer.Option(help="Cut what files and shapes hold into calls of so many, along their first sides.", min=1),
]

Target = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Where the model is to run: a name that `clika-ref targets` lists, or ort, ov, trt.",
        autocompletion=complete_target,
    ),
]

Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        metavar="NAME",
        help="Where files are run: a name that `clika-ref targets` lists; may be given again.",
        autocompletion=complete_target,
    ),
]

SettingsFile = Annotated[
    Path | None,
    typer.Option("--settings", metavar="FILE", help="Settings in YAML; a flag wins over what stands there."),
]

Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="A field of ClikaCompileOptions, such as smoothing=off; may be given again.",
        autocompletion=complete_option,
    ),
]

Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="The artifact to write.")]

LogsDir = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keep a full log in this folder.")]

Seed = Annotated[int, typer.Option(help="Of random weights and inputs.")]

AsJson = Annotated[bool, typer.Option("--json", help="Write JSON, and nothing else, on stdout.")]


Static = Annotated[bool, typer.Option("--static", help="Refuse inputs of different sizes.")]

TrainMode = Annotated[bool, typer.Option("--train-mode", help="Leave the model's mode: no eval().")]

DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; write nothing.")]

NoCompare = Annotated[bool, typer.Option("--no-compare", help="Skip running the file against the model.")]

Calibrate = Annotated[
    list[str] | None,
    typer.Option(metavar="DATA", help=f"Representative data: {DATA_SYNTAX}. Without, what was saved with the module."),
]

Save = Annotated[Path | None, typer.Option(metavar="FILE", help="Save the module itself, as clika_save does.")]

KeepInputs = Annotated[
    bool, typer.Option("--keep-inputs", help="Save calibration inputs with it, by which other targets are served.")
]

Threshold = Annotated[
    float | None, typer.Option(help="Leave float what alone changes the outputs by a larger share of their square.")
]

WeightsBits = Annotated[
    list[int] | None, typer.Option(metavar="BITS", help="Of weights; of several, each layer takes one.")
]

WeightsOnly = Annotated[
    bool | None,
    typer.Option("--weights-only/--weights-and-values", help="Leave values between layers float, or not."),
]

KeepFloat = Annotated[
    list[str] | None, typer.Option(metavar="LAYER", help="Leave it float, or all that a wildcard stands for.")
]

Saved = Annotated[str, typer.Argument(metavar="SAVED", help="A file of clika_save.", show_default=False)]

Fp16 = Annotated[bool, typer.Option("--fp16", help="Compute in float16 what is float.")]

Bf16 = Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16 what is float.")]

KeepOutput = Annotated[
    list[int] | None, typer.Option(metavar="PLACE", help="Write only this output, from 0; may be given again.")
]
