"""Plugins through entry points: rejected ones, all failures reported at once, and a fixed order."""

import re
import sys
from itertools import permutations
from pathlib import Path

import pytest
import torch

from clika_ref.core import registry as registry_module
from clika_ref.core.errors import PluginError
from clika_ref.core.hooks import API_LEVEL
from clika_ref.core.operators import operator
from clika_ref.core.registry import PLUGINS_VARIABLE, Plugin, build_registry, load_registry
from clika_ref.core.visualizers import Visualizer

HEAD = f"""
from clika_ref.core.hooks import hookimpl
from clika_ref.core.operators import operator
import torch
CLIKA_REF_API = {API_LEVEL}
"""

OPERATORS = (
    HEAD
    + """
@operator(torch.ops.aten.{call})
def {name}(x):
    \"\"\"An operator.\"\"\"
    return x

@hookimpl
def clika_ref_operators():
    return [{name}]
"""
)

THINGS = (
    HEAD
    + """
from clika_ref.core.targets import Target

class Thing(Target):
    def __init__(self, name):
        self.name = name

    def unsupported_reason(self, node):
        return None

    def compile(self, graph, path, **options):
        raise NotImplementedError

    def load(self, artifact):
        raise NotImplementedError

@hookimpl
def clika_ref_{kind}():
    return [Thing("{name}")]
"""
)


class NamedVisualizer(Visualizer):
    """A visualizer with nothing but a name."""

    name = ""

    def __init__(self, name):
        self.name = name

    def picture_path(self, path):
        raise NotImplementedError

    def draw(self, facts, path):
        raise NotImplementedError

    def render_svg(self, facts):
        raise NotImplementedError

    def write_report(self, facts, file, step):
        raise NotImplementedError


class Installed:
    """A folder on the path in which distributions appear."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    def __call__(self, name: str, source: str | None, version: str = "1.0") -> None:
        """Install a distribution with one plugin; without source, its module is missing."""
        module = f"installed_{self.folder.name.replace('-', '_')}_{self.count}_{name}"
        self.count += 1
        info = self.folder / f"dist_{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[clika_ref]\n{name} = {module}\n")
        if source is not None:
            (self.folder / f"{module}.py").write_text(source)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Let tests install distributions; those of this environment do not count."""
    found = registry_module.entry_points
    monkeypatch.setattr(
        registry_module,
        "entry_points",
        lambda **options: [e for e in found(**options) if e.dist.name.startswith("dist-")],
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(PLUGINS_VARIABLE, raising=False)
    before = set(sys.modules)
    yield Installed(tmp_path)
    for name in set(sys.modules) - before:
        if name.startswith("installed_"):
            del sys.modules[name]


def assert_load_fails(*parts: str) -> None:
    """Assert that loading fails with a message that matches all these patterns."""
    with pytest.raises(PluginError) as caught:
        load_registry()
    for part in parts:
        assert re.search(part, str(caught.value)), (part, str(caught.value))


def test_load_registry_finds_installed_plugins(install):
    """Installed plugins are found with their operators and targets."""
    install("alpha", OPERATORS.format(call="relu.default", name="relu"), version="2.3")
    install("beta", THINGS.format(kind="targets", name="place"))
    registry = load_registry()
    assert [str(p) for p in registry.plugins] == ["'alpha' (dist-alpha 2.3)", "'beta' (dist-beta 1.0)"]
    assert registry.operator_for(torch.ops.aten.relu.default) is registry.operators["relu"]
    assert registry.operator_for(torch.ops.aten.neg.default) is None
    assert registry.targets["place"].name == "place"


def test_load_registry_without_plugins_empty(install):
    """Without plugins, the registry is empty."""
    registry = load_registry()
    assert (registry.plugins, dict(registry.operators), dict(registry.passes), dict(registry.targets)) == (
        (),
        {},
        {},
        {},
    )


# Plugins that cannot be used


def test_load_registry_missing_module_names_distribution(install):
    """A plugin with a missing module is named with its distribution."""
    install("gone", None)
    assert_load_fails(
        "cannot load 1 of 1 plugins",
        r"'gone' = installed_\w+_gone \(dist-gone 1\.0\): ModuleNotFoundError: No module named",
        r"\nUpdate or uninstall them, or list those to load in \$CLIKA_REF_PLUGINS",
    )


def test_load_registry_missing_own_distribution_names_install(install):
    """A plugin that imports one of our distributions without it is reported with the command to install it."""
    install("needy", "import clika_ref_absent.target\n")
    assert_load_fails(
        r"'needy' = .*: ModuleNotFoundError: No module named 'clika_ref_absent'",
        r"\nRun pip install clika-ref-absent \(in a clone: pip install plugins/absent; .*\)\.\nOr update or uninstall",
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ValueError('no')", "ValueError: no"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("1 +", "SyntaxError: invalid syntax"),
        ("", rf"PluginError: CLIKA_REF_API is not defined, and this clika-ref supports {API_LEVEL}"),
        (
            f"CLIKA_REF_API = {API_LEVEL + 1}",
            rf"CLIKA_REF_API is {API_LEVEL + 1}, and this clika-ref supports {API_LEVEL}",
        ),
        ("CLIKA_REF_API = 'one'", r"CLIKA_REF_API is 'one'"),
        (HEAD + "@hookimpl\ndef clika_ref_operatos():\n    return []", r"PluginValidationError: .*clika_ref_operatos"),
        (HEAD + "@hookimpl\ndef clika_ref_passes(graph):\n    return []", r"PluginValidationError: (?s:.*)graph"),
        (HEAD + "@hookimpl\ndef clika_ref_passes():\n    raise KeyError('x')", "KeyError: 'x'"),
        (
            HEAD + "@hookimpl\ndef clika_ref_operators():\n    return [len]",
            (
                "clika_ref_operators returned <built-in .*>, a builtin_function_or_method. Return operators, made by "
                "@operator."
            ),
        ),
        (
            HEAD + "@hookimpl\ndef clika_ref_passes():\n    return [len.__class__]",
            "clika_ref_passes returned <class '.*'>, which has no `name`. Return instances, not classes.",
        ),
        (
            HEAD + "@hookimpl\ndef clika_ref_targets():\n    return [3]",
            "clika_ref_targets returned 3: it is of the class int, which does not derive from .*core.targets.Target",
        ),
        (
            THINGS.format(kind="targets", name="x").replace('[Thing("x")]', "[Thing(3)]"),
            "clika_ref_targets returned <.*Thing.*>: its name is 3; set the attribute `name` to a string",
        ),
        (
            HEAD + "@hookimpl\ndef clika_ref_visualizers():\n    return ['svg']",
            "clika_ref_visualizers returned 'svg', a str; return instances of Visualizer",
        ),
    ],
)
def test_load_registry_broken_plugin_reports_reason(install, source, reason):
    """A broken plugin is reported with the reason."""
    install("bad", source)
    assert_load_fails(r"'bad' = installed_\w+ \(dist-bad 1\.0\): ", reason)


def test_load_registry_reports_all_failures_at_once(install):
    """All failing plugins are reported at once."""
    install("one", "raise ValueError('first')")
    install("fine", OPERATORS.format(call="relu.default", name="relu"))
    install("two", None)
    assert_load_fails("cannot load 2 of 3 plugins", "'one'.*ValueError: first", "'two'.*No module named")


# Clashes


@pytest.mark.parametrize(("kind", "what"), [("passes", "pass"), ("targets", "target")])
def test_load_registry_duplicate_pass_or_target_raises(install, kind, what):
    """Two passes or targets of one name raise an error that names both plugins."""
    install("a", THINGS.format(kind=kind, name="same"))
    install("b", THINGS.format(kind=kind, name="same"))
    assert_load_fails(
        rf"cannot combine the plugins:\n  {what} 'same' is declared by 'a' \(dist-a 1\.0\) and by 'b' \(dist-b 1\.0\)",
        r"Uninstall one of each, or list the plugins to load in \$CLIKA_REF_PLUGINS",
    )


def test_load_registry_duplicate_operator_or_call_raises(install):
    """Two operators of one name or ATen call raise an error that names both plugins."""
    install("a", OPERATORS.format(call="relu.default", name="same"))
    install("b", OPERATORS.format(call="neg.default", name="same"))
    install("c", OPERATORS.format(call="neg.default", name="other"))
    assert_load_fails(
        r"operator 'same' is declared by 'a' .* and by 'b'",
        r"ATen overload 'aten\.neg\.default' is declared by 'b' .* and by 'c'",
    )


def test_build_registry_duplicate_visualizer_names_both_plugins():
    plugins = [Plugin(name, f"dist-{name}", "1", visualizers=(NamedVisualizer("same"),)) for name in ("a", "b")]
    with pytest.raises(PluginError, match=r"visualizer 'same' is declared by 'a' \(dist-a 1\) and by 'b' \(dist-b 1\)"):
        build_registry(plugins)


def test_build_registry_visualizers_keep_the_order_of_plugins():
    plugins = [Plugin(name, f"dist-{name}", "1", visualizers=(NamedVisualizer(name),)) for name in ("b", "a")]
    assert [*build_registry(plugins).visualizers] == ["b", "a"]


def test_load_registry_duplicate_in_one_plugin_raises(install):
    """One plugin that provides a name twice raises an error."""
    source = THINGS.format(kind="passes", name="same").replace('[Thing("same")]', '[Thing("same"), Thing("same")]')
    install("a", source)
    assert_load_fails(r"pass 'same' is declared by 'a' .* and by 'a'")


# Order and limits


def test_load_registry_independent_of_install_order(install, tmp_path):
    """The registry does not depend on the order of installation."""
    plugins = []
    for name in ("b", "c", "a"):

        @operator()
        def thing(x):
            """Nothing."""

        thing.name = name
        plugins.append(Plugin(name, f"dist-{name}", "1", operators=(thing,)))
    for order in permutations(plugins):
        assert build_registry(order).operators == {p.name: p.operators[0] for p in plugins}
    for name in ("b", "c", "a"):
        install(name, THINGS.format(kind="passes", name=name))
    assert [p.name for p in load_registry().plugins] == ["a", "b", "c"]


def test_load_registry_limited_by_argument_or_environment(install, monkeypatch):
    """An argument or `CLIKA_REF_PLUGINS` limits the plugins; the argument takes precedence."""
    for name in ("a", "b", "broken"):
        install(name, "1 +" if name == "broken" else THINGS.format(kind="passes", name=name))
    assert [p.name for p in load_registry("b, a").plugins] == ["a", "b"]
    monkeypatch.setenv(PLUGINS_VARIABLE, "b")
    assert [p.name for p in load_registry().plugins] == ["b"]
    assert [p.name for p in load_registry("a").plugins] == ["a"], "an argument counts more"
    monkeypatch.setenv(PLUGINS_VARIABLE, "")
    assert load_registry().plugins == ()


def test_load_registry_unknown_name_raises(install):
    """A limit with an unknown plugin raises an error that lists the installed ones."""
    install("a", THINGS.format(kind="passes", name="a"))
    with pytest.raises(
        PluginError,
        match=re.escape(
            "cannot load the plugins in $CLIKA_REF_PLUGINS: ['x', 'y'] are not installed. Installed plugins: ['a']."
        ),
    ):
        load_registry("a,y,x")


def test_load_registry_excluded_plugin_not_imported(install):
    """An excluded plugin is not imported."""
    install("a", THINGS.format(kind="passes", name="a"))
    install("loud", "raise SystemError('imported')")
    load_registry("a")
