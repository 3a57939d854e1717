"""Run one benchmark by name, or without a name import, forward, scaling and export."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import typer

from benchmarks import (
    attention,
    checkpoints,
    decoder,
    digits,
    efficientnet,
    export,
    exporters,
    forward,
    generation,
    imports,
    islands,
    language_model,
    learning_rates,
    loops,
    opinfo,
    pieces,
    placements,
    pruning,
    qat,
    recurrent,
    report,
    scaling,
)
from benchmarks.breadth import run as breadth
from benchmarks.detection import run as detection
from benchmarks.ptq import observers, trained
from benchmarks.ptq import run as ptq
from benchmarks.targets import run as targets

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)

COMMANDS: Mapping[str, Callable[..., None]] = {
    "export": export.run,
    "scaling": scaling.run,
    "import": imports.run,
    "islands": islands.run,
    "language-model": language_model.run,
    "loops": loops.run,
    "opinfo": opinfo.run,
    "pieces": pieces.run,
    "placements": placements.run,
    "forward": forward.run,
    "ptq": ptq.run,
    "trained": trained.run,
    "observers": observers.run,
    "qat": qat.run,
    "learning-rates": learning_rates.run,
    "pruning": pruning.run,
    "detection": detection.run,
    "digits": digits.run,
    "efficientnet": efficientnet.run,
    "checkpoints": checkpoints.run,
    "targets": targets.run,
    "recurrent": recurrent.run,
    "report": report.run,
    "attention": attention.run,
    "generation": generation.run,
    "exporters": exporters.run,
    "decoder": decoder.run,
    "breadth": breadth.run,
}

for _name, _command in COMMANDS.items():
    app.command(_name)(_command)


@app.callback(invoke_without_command=True)
def run_default_benchmarks(context: typer.Context) -> None:
    """Run the default benchmarks if no command is given."""
    if context.invoked_subcommand is None:
        for run in (imports.run, forward.run, scaling.run, export.run):
            run()


if __name__ == "__main__":
    app()
