"""Data to reproduce a run: settings, versions of the packages involved, and the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from clika_ref.all_settings import LayerSettings, Settings
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry
from clika_ref.lora.adapters import adapters_of
from clika_ref.processor import name_of_processor
from clika_ref.quantization_settings import LayerQuantizationSettings, QuantizationSettings
from clika_ref.report.contents import Repeat
from clika_ref.settings import BaseDeploymentSettings, ClikaCompileOptions

CODE = """from clika_ref import Settings, clika_compile

settings = Settings.load_from_path("settings.yaml")
module = clika_compile(model, {}, **settings.compile_arguments())
module.clika_report("report.html")
"""
"""Code that compiles a model with the settings next to it in a file. Same weights and data give the same module."""


def settings_of(
    deployment: BaseDeploymentSettings,
    options: ClikaCompileOptions,
    quantization: QuantizationSettings | None,
    layers: Mapping[str, LayerQuantizationSettings],
) -> Settings:
    """Return all settings of a module as one object. Settings of an earlier pruning are not available any more."""
    return Settings(
        deployment_settings=deployment,
        global_quantization_settings=quantization,
        global_lora_settings=options.global_lora_settings,
        layer_settings={name: LayerSettings(layer) for name, layer in layers.items()},
        clika_compile_options=replace(options, global_lora_settings=None),
    )


def not_repeated(graph: Graph, settings: Settings, seconds: Mapping[str, float]) -> str:
    """Return a sentence on changes to a module that its settings do not include; empty if there are none."""
    done: list[str] = []
    if "Pruning" in seconds and settings.global_pruning_settings is None:
        done.append("it was pruned before, so that sizes before are those of what pruning left")
    if adapters_of(graph) and settings.global_lora_settings is None:
        done.append("adapters were attached to it")
    return f"the settings below do not make this module again: {', and '.join(done)}; do the same anew" if done else ""


def repeat_of(settings: Settings, target: str, registry: Registry, seconds: Mapping[str, float]) -> Repeat:
    """Return the data to reproduce a run.

    Args:
        settings: all settings.
        target: name of the target; the packages that its plugin requires are listed, too.
        registry: the plugins.
        seconds: seconds of each compilation stage.
    """
    given = "tracing_inputs=inputs" if settings.global_quantization_settings is None else "calibration_inputs=batches"
    versions = dict(_versions(target, registry))
    return Repeat(settings.to_yaml(), CODE.format(given), versions, _machine(), dict(seconds))


def _versions(target: str, registry: Registry) -> Iterator[tuple[str, str]]:
    """Yield distributions with versions: ours, PyTorch, the plugins, and the runtime of the target."""
    yield "Python", platform.python_version()
    for name in ("clika-ref", "torch"):
        yield name, importlib.metadata.version(name)
    for plugin in sorted(registry.plugins, key=lambda p: p.distribution):
        yield plugin.distribution, plugin.version
        if any(found.name == target for found in plugin.targets):
            yield from _required(plugin.distribution)


def _required(distribution: str) -> Iterator[tuple[str, str]]:
    """Yield the requirements of a distribution, including its runtime, with installed versions."""
    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:  # a plugin that is registered but not installed
        return
    for line in lines:
        found = re.match(r"[\w.-]+", line)
        if found is not None and "extra ==" not in line:
            try:
                yield found[0], importlib.metadata.version(found[0])
            except importlib.metadata.PackageNotFoundError:
                yield found[0], "not installed"


def _machine() -> dict[str, str]:
    return {
        "system": platform.platform(),
        "processor": name_of_processor(),
        "processors": str(os.cpu_count()),
        "threads of PyTorch": str(torch.get_num_threads()),
        "byte order": sys.byteorder,
    }
