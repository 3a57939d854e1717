"""Implementation of ``clika-ref check``: find violations of a target's rules in a file or an exported model."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from clika_ref.compiled.lowering import target_for
from clika_ref.core.artifacts import Violation
from clika_ref.core.registry import load_registry
from clika_ref_cli.arguments import ModelKind, find_model_kind, load_compiled
from clika_ref_cli.command_settings import deployment_settings_for
from clika_ref_cli.data import read_calls
from clika_ref_cli.exit_status import MisuseError
from clika_ref_cli.output import show_spinner


def find_violations(text: str, target: str, inputs: Sequence[str]) -> Sequence[Violation]:
    """Return the violations of a target's rules in a file; for a module, in the file that an export would write.

    Args:
        text: the argument that names the file or the module.
        target: the target with the rules.
        inputs: tracing inputs for a model that must be compiled.

    Raises:
        MisuseError: there is no such file or target, or the target has no rules.
        ModelError: the model cannot be compiled or loaded.
        TargetError: the target cannot read the file, or does not support nodes of the model.
    """
    registry, settings = load_registry(), deployment_settings_for(target)
    checked = target_for(settings, registry)
    if not checked.has_file_rules():
        names = sorted(name for name, other in registry.targets.items() if other.has_file_rules())
        raise MisuseError(
            f"cannot check files for {target}: it has no rules. Targets with rules: {', '.join(names) or 'none'}."
        )
    if find_model_kind(text, inputs) is ModelKind.ONNX:
        with show_spinner("Checking"):
            return checked.check(Path(text))
    module = load_compiled(text, [*read_calls(inputs)])
    with tempfile.TemporaryDirectory() as folder:
        return checked.check(module.clika_export(Path(folder) / "model.onnx", deployment_settings=settings).path)
