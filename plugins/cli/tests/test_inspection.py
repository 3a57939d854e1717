"""Facts about installed plugins and operators."""

import inspect

import pytest
import torch
from clika_ref_cli import plugin_facts
from clika_ref_cli.plugin_facts import (
    count_items,
    find_operator,
    find_source_location,
    list_operator_facts,
    load_installed_plugins,
)

from clika_ref.core.errors import ModelError, PluginError
from clika_ref.core.operators import operator
from clika_ref.core.registry import Plugin, build_registry
from clika_ref.core.traits import compute_trait


@operator(torch.ops.aten.linear.default, quant=compute_trait(bias=2))
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Map ``x[..., i]`` to ``y[..., o]``.

    Twice over.
    """
    return torch.nn.functional.linear(x, weight, bias)


@linear.onnx
def lower(op, x, weight, bias):
    return op.Gemm(x, weight, bias)


@operator(torch.ops.aten.rand_like.default, random=True)
def rand_like(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


PLUGIN = Plugin("mine", "my-distribution", "1.2", operators=(linear, rand_like))


@pytest.fixture
def registry():
    return build_registry([PLUGIN])


@pytest.mark.parametrize(
    "text",
    ["linear", "aten.linear.default", "aten.linear", "aten::linear", "torch.ops.aten.linear.default"],
)
def test_find_operator_by_name_or_aten_call(registry, text):
    """An operator is found by its name and by its ATen calls."""
    assert find_operator(registry, text) is linear


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "liner",
            r"cannot find the operator 'liner': no installed plugin declares it\. Did you mean linear\? Run `clika-ref",
        ),
        ("aten.linear.out", r"Did you mean aten\.linear\.default"),
        ("rand", r"Did you mean rand_like"),
        ("zzz", r"cannot find the operator 'zzz': no installed plugin declares it\. Run `clika-ref plugins --names`\."),
    ],
)
def test_find_operator_unknown_suggests_near_names(registry, text, message):
    """An unknown operator raises an error with similar names."""
    with pytest.raises(ModelError, match=message):
        find_operator(registry, text)


def test_operator_facts_lists_all_facts(registry):
    """All facts about an operator are listed."""
    line = inspect.getsourcelines(lower)[1]
    facts = dict(list_operator_facts(registry, linear))
    assert facts["schema"] == (
        "linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor"
    )
    assert facts["meaning"] == "Map ``x[..., i]`` to ``y[..., o]``.\n\nTwice over."
    assert facts["ATen calls"] == "aten.linear.default"
    assert facts["quantization"] == "compute (weight 1, axis 0, bias 2)"
    assert facts["rounding error"] == "compose"
    assert facts["deterministic"] == "yes"
    assert facts["ONNX lowering"].endswith(f"test_inspection.py:{line}")
    assert facts["samples"] == "none"
    assert facts["plugin"] == "'mine' (my-distribution 1.2)"
    other = dict(list_operator_facts(registry, rand_like))
    assert other["meaning"] == "not documented"
    assert other["deterministic"] == "no"
    assert other["quantization"] == "keep-float"


def test_find_source_location_relative_to_working_directory(tmp_path, monkeypatch):
    """A file below the working directory is shown by its relative path."""
    code = compile("def f(): pass", str(tmp_path / "folder" / "file.py"), "exec")
    (function,) = [torch.nn.Module.__init__.__class__(code.co_consts[0], {})]
    monkeypatch.chdir(tmp_path)
    assert find_source_location(function) in {"folder/file.py:1", "folder\\file.py:1"}
    assert find_source_location(torch.relu) == "builtins.builtin_function_or_method"


def test_count_items_omits_zero_counts():
    """Counts of zero are omitted."""
    assert count_items(PLUGIN) == "2 operators"
    assert count_items(Plugin("a", "b", "1", operators=(linear,), passes=(1, 2), targets=(3,), visualizers=(4,))) == (
        "1 operator, 2 passes, 1 target, 1 visualizer"
    )
    assert count_items(Plugin("a", "b", "1")) == "nothing"


class Entry:
    def __init__(self, name):
        self.name = name


@pytest.fixture
def environment(monkeypatch):
    """Replace the installed plugins by a good one, a broken one, and one with the same claims as the good one."""
    monkeypatch.delenv("CLIKA_REF_PLUGINS", raising=False)

    def install(*names):
        monkeypatch.setattr(plugin_facts, "entry_points", lambda group: [Entry(name) for name in names])

    def load(limit):
        if limit == "broken":
            message = (
                "cannot load 1 of 1 plugins:\n  'broken' = b.plugin (b 0.1): ImportError: no c\nUpdate or uninstall"
            )
            raise PluginError(message)
        return build_registry([Plugin(limit, f"dist-{limit}", "1.2", operators=(linear,))])

    monkeypatch.setattr(plugin_facts, "load_registry", load)
    return install


def test_load_installed_plugins_broken_keeps_others(environment):
    """A broken plugin is listed as a failure next to the others."""
    environment("broken", "good")
    installed = load_installed_plugins()
    assert [p.name for p in installed.plugins] == ["good"]
    assert installed.failures == ("'broken' = b.plugin (b 0.1): ImportError: no c",)
    assert installed.as_json() == {
        "plugins": [
            {
                "name": "good",
                "distribution": "dist-good",
                "version": "1.2",
                "operators": ["linear"],
                "passes": [],
                "targets": [],
                "visualizers": [],
            }
        ],
        "failures": ["'broken' = b.plugin (b 0.1): ImportError: no c"],
        "excluded": [],
    }


def test_load_installed_plugins_clash_listed_as_failure(environment):
    """Clashing plugins are listed, and the clash is a failure."""
    environment("good", "twin")
    installed = load_installed_plugins()
    assert [p.name for p in installed.plugins] == ["good", "twin"]
    (failure,) = installed.failures
    assert "operator 'linear' is declared by 'good' (dist-good 1.2) and by 'twin' (dist-twin 1.2)" in failure


def test_load_installed_plugins_excluded_plugin_listed(environment, monkeypatch):
    """Excluded plugins are listed, and an unknown name is a failure."""
    environment("broken", "good")
    monkeypatch.setenv("CLIKA_REF_PLUGINS", "good, absent")
    installed = load_installed_plugins()
    assert installed.failures == ("$CLIKA_REF_PLUGINS names 'absent', which is not installed",)
    assert installed.excluded == ("broken",)
