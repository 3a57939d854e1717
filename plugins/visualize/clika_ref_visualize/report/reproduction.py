"""Data to reproduce a run: settings, versions of the packages involved, and the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping

import torch

from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry
from clika_ref.lora.adapters import adapters_of
from clika_ref.settings.settings import Settings
from clika_ref.targets.cpu import cpu_name
from clika_ref_visualize.report.contents import Reproduction

REPRODUCTION_CODE = """from clika_ref import Settings, clika_compile

settings = Settings.load_from_path("settings.yaml")
module = clika_compile(model, {}, **settings.compile_arguments())
module.clika_report("report.html")
"""
"""Code that compiles a model with the settings next to it in a file. Same weights and data give the same module."""


def find_irreproducible_steps(graph: Graph, settings: Settings, seconds: Mapping[str, float]) -> str:
    """Return a sentence on the steps of a module that its settings do not include; empty if there are none."""
    steps: list[str] = []
    if "Pruning" in seconds and settings.global_pruning_settings is None:
        steps.append("the module was pruned (sizes before are those after pruning)")
    if adapters_of(graph) and settings.global_lora_settings is None:
        steps.append("adapters were attached")
    if not steps:
        return ""
    return f"The settings below do not include all steps: {' and '.join(steps)}. Repeat these steps, too."


def collect_reproduction(
    settings: Settings, target: str, registry: Registry, seconds: Mapping[str, float]
) -> Reproduction:
    """Return the data to reproduce a run.

    Args:
        settings: all settings.
        target: name of the target; the packages that its plugin requires are listed, too.
        registry: the plugins.
        seconds: seconds of each compilation stage.
    """
    inputs = "tracing_inputs=inputs" if settings.global_quantization_settings is None else "calibration_inputs=batches"
    versions = dict(_list_versions(target, registry))
    return Reproduction(
        settings.to_yaml(), REPRODUCTION_CODE.format(inputs), versions, _collect_machine_facts(), dict(seconds)
    )


def _list_versions(target: str, registry: Registry) -> Iterator[tuple[str, str]]:
    """Yield distributions with versions: ours, PyTorch, the plugins, and the runtime of the target."""
    yield "Python", platform.python_version()
    for name in ("clika-ref", "torch"):
        yield name, importlib.metadata.version(name)
    for plugin in sorted(registry.plugins, key=lambda p: p.distribution):
        yield plugin.distribution, plugin.version
        if any(other.name == target for other in plugin.targets):
            yield from _list_requirements(plugin.distribution)


def _list_requirements(distribution: str) -> Iterator[tuple[str, str]]:
    """Yield the requirements of a distribution, including its runtime, with installed versions."""
    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:  # a plugin that is registered but not installed
        return
    for line in lines:
        match = re.match(r"[\w.-]+", line)
        if match is not None and "extra ==" not in line:
            try:
                yield match[0], importlib.metadata.version(match[0])
            except importlib.metadata.PackageNotFoundError:
                yield match[0], "not installed"


def _collect_machine_facts() -> dict[str, str]:
    return {
        "system": platform.platform(),
        "processor": cpu_name(),
        "processors": str(os.cpu_count()),
        "threads of PyTorch": str(torch.get_num_threads()),
        "byte order": sys.byteorder,
    }
