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
    typer.Option("--input", metavar="DATA", help=f"One call: {DATA_SYNTAX}. Dims that differ become dynamic."),
]

BatchSize = Annotated[
    int | None,
    typer.Option(help="Split files and shapes into calls of this size, along dim 0.", min=1),
]

Target = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The target: a name that `clika-ref targets` lists, or ort, ov, trt.",
        autocompletion=complete_target,
    ),
]

Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        metavar="NAME",
        help="The target that runs files: a name that `clika-ref targets` lists. May be repeated.",
        autocompletion=complete_target,
    ),
]

SettingsFile = Annotated[
    Path | None,
    typer.Option("--settings", metavar="FILE", help="Settings in YAML. Flags override them."),
]

Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="A field of ClikaCompileOptions, such as smooth_quant=off. May be repeated.",
        autocompletion=complete_option,
    ),
]

Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Path of the artifact.")]

LogsDir = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write a full log to this folder.")]

Seed = Annotated[int, typer.Option(help="Seed of random weights and inputs.")]

AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON to stdout.")]


Static = Annotated[bool, typer.Option("--static", help="Reject inputs of other sizes.")]

TrainMode = Annotated[bool, typer.Option("--train-mode", help="Keep the mode of the model: do not call eval().")]

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show the result; write no file.")]

NoCompare = Annotated[bool, typer.Option("--no-compare", help="Do not compare the file with the model.")]

Calibrate = Annotated[
    list[str] | None,
    typer.Option(metavar="DATA", help=f"Calibration data: {DATA_SYNTAX}. By default, the inputs in the saved module."),
]

Save = Annotated[Path | None, typer.Option(metavar="FILE", help="Save the module to this file, as clika_save does.")]

KeepInputs = Annotated[
    bool, typer.Option("--keep-inputs", help="Save the calibration inputs with the module, for other targets.")
]

Threshold = Annotated[float | None, typer.Option(help="Keep layers with a larger quantization sensitivity in float.")]

WeightsBits = Annotated[
    list[int] | None,
    typer.Option(metavar="BITS", help="Bits of weights. If repeated, each layer uses one of them."),
]

WeightsOnly = Annotated[
    bool | None,
    typer.Option("--weights-only/--weights-and-activations", help="Quantize only weights, or activations, too."),
]

KeepFloat = Annotated[
    list[str] | None,
    typer.Option(metavar="LAYER", help="Keep this layer in float. Wildcards are allowed."),
]

Saved = Annotated[str, typer.Argument(metavar="SAVED", help="A file of clika_save.", show_default=False)]

Fp16 = Annotated[bool, typer.Option("--fp16", help="Compute in FP16 instead of float32.")]

Bf16 = Annotated[bool, typer.Option("--bf16", help="Compute in BF16 instead of float32.")]

KeepOutput = Annotated[
    list[int] | None, typer.Option(metavar="INDEX", help="Export only this output, counted from 0. May be repeated.")
]

AllowUncheckedGuards = Annotated[
    bool,
    typer.Option("--allow-unchecked-guards", help="Write a file that does not check guards."),
]
