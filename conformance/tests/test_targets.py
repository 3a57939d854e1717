"""Selection of a target: an installed one, eager, or one in a module of its own; and messages for unknown names."""

from dataclasses import replace

import pytest
import torch
from clika_ref_conformance.execution.case_checks import run_case
from clika_ref_conformance.targets.identity import Identity
from clika_ref_conformance.targets.loading import find_module_folder, load_target
from clika_ref_conformance.verdicts import Verdict
from small_cases import REGISTRY, make_case, make_suite

from clika_ref.core.errors import TargetError
from clika_ref.core.targets import Target


def test_find_module_folder_returns_folder_of_outer_package(tmp_path, monkeypatch):
    """The folder of a target contains its outermost package."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "outer_of_targets/inner").mkdir(parents=True)
    for name in ("outer_of_targets/inner/__init__", "outer_of_targets/inner/some", "lone_target"):
        (tmp_path / f"{name}.py").touch()
    for place in ("outer_of_targets.inner", "outer_of_targets.inner.some", "lone_target"):
        assert find_module_folder(f"{place}:TARGET") == str(tmp_path)
    for text in ("onnxruntime", "torch.nn.functional:relu", "sys:path"):
        assert find_module_folder(text) == ""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of targets, in the folder in which the suite is run."""
    (tmp_path / "some_targets.py").write_text(
        "from clika_ref.core.targets import Target\n"
        "from clika_ref_conformance.targets.identity import Identity as Base\n"
        "TARGET = Base('mine')\n"
        "class Made(Base): pass\n"
        "def make(): return Base('made')\n"
        "def leaves(): raise SystemExit(0)\n"
        "def fails(): raise OSError('no device')\n"
        "class Missing(Base):\n"
        "    def unavailable_reason(self): return 'install it'\n"
        "class Vague(Base):\n"
        "    arithmetic = 'float16'\n"
        "Schemeless = type('Schemeless', (Base,), {'scheme': 'int8'})\n"
        "def fail(self): raise OSError('no driver')\n"
        "Raising = type('Raising', (Base,), {'unavailable_reason': fail})\n"
        "Passless = type('Passless', (Base,), {'passes': fail})\n"
        "Nameless = type('Nameless', (Base,), {'scheme': property(fail), '__init__': lambda self: None})\n"
        "Undeclared = type('Undeclared', (Base,), {'deviations': property(fail)})\n"
        "Unprintable = type('Unprintable', (), {'__repr__': fail, 'compile': fail})\n"
        "RaisingRepr = type('RaisingRepr', (Base,), {'__repr__': fail})\n"
        "class Half(Target):\n"
        "    name = 'half'\n"
        "    def compile(self): pass\n"
        "class Foreign:\n"
        "    name = 'foreign'\n"
        "Untitled = type('Untitled', (Base,), {'name': 3, '__init__': lambda self: None})\n"
    )
    (tmp_path / "needs_more.py").write_text("import no_such_library")
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "leaving.py").write_text("raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("onnxruntime", "onnxruntime"),
        ("ort", "onnxruntime"),
        ("identity", "identity"),
        ("some_targets:TARGET", "mine"),
        ("some_targets:Made", "identity"),
        ("some_targets:make", "made"),
        ("some_targets:RaisingRepr", "identity"),
        ("clika_ref_onnxruntime.target:UNOPTIMIZED", "onnxruntime-unoptimized"),
    ],
)
def test_load_target_finds_installed_or_module_target(module, text, name):
    """An installed target, an alias or an object of a module is loaded."""
    found = load_target(text, REGISTRY)
    assert found.name == name
    assert isinstance(found, Target)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("onnxruntim", r"there is no target 'onnxruntim'\. Did you mean onnxruntime\? Installed: identity, "),
        ("nobody", r"there is no target 'nobody'\. Installed: .* as package\.module:TARGET"),
        (
            "no_such_module:TARGET",
            r"cannot import no_such_module: there is no module 'no_such_module'\. Run this",
        ),
        ("needs_more:TARGET", r"cannot import needs_more: it imports 'no_such_library', which is not installed"),
        ("leaving:TARGET", r"cannot import leaving: it raised SystemExit: 0"),
        ("some_targets:leaves", r"some_targets:leaves\(\), without arguments, raised SystemExit: 0"),
        ("broken:TARGET", r"cannot import broken: it raised ZeroDivisionError: division by zero"),
        ("some_targets:TARGETT", r"cannot load some_targets:TARGETT: .* has no 'TARGETT'\. Did you mean TARGET"),
        ("some_targets:fails", r"some_targets:fails\(\), without arguments, raised OSError: no device"),
        ("some_targets:Half", r"TypeError: Can't instantiate abstract class Half .* load, unsupported_reason"),
        (
            "some_targets:Foreign",
            r"it is of the class Foreign, which does not derive from clika_ref.core.targets.Target",
        ),
        ("some_targets:Untitled", r"its name is 3; set the attribute `name` to a string"),
        ("some_targets:Vague", r"its arithmetic is 'float16'; set it to a sequence of clika_ref.core.arithmetic"),
        ("some_targets:Schemeless", r"its scheme is 'int8'; set it to a .*QuantizationScheme, or None$"),
        ("some_targets:Missing", r"cannot use the target identity: install it"),
        (
            "some_targets:Raising",
            r"some_targets:Raising: its unavailable_reason\(\) raised OSError: no driver\. Raise no error",
        ),
        ("some_targets:Passless", r"some_targets:Passless: its passes\(\) raised OSError: no driver\. Raise no error"),
        ("some_targets:Nameless", r"some_targets:Nameless: its scheme raised OSError: no driver\. Raise no error"),
        ("some_targets:Undeclared", r"its deviations raised OSError: .* unavailable_reason\(\) report"),
        (
            "some_targets:Unprintable",
            r"cannot use the target some_targets:Unprintable: it is of the class Unprintable, which does not derive",
        ),
    ],
)
def test_load_target_other_object_raises(module, text, message):
    """An object that is no target raises TargetError."""
    with pytest.raises(TargetError, match=message):
        load_target(text, REGISTRY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_identity_round_trip_equals_eager(tmp_path, dtype):
    """The identity target equals eager through a file."""
    x = torch.tensor([[1, 0, 3], [0, 2, 0]]).to(dtype)
    case = make_case(("detach", {}), ("unsqueeze", {"dim": 0}), x=x)
    suite = make_suite(tmp_path)
    assert isinstance(suite.target, Identity)
    assert run_case(case, suite).verdict is Verdict.PASS
    artifact = Identity().compile(case.graph, tmp_path / "artifact")
    assert artifact.input_names == ("x",)
    alone = type(artifact)(artifact.path, artifact.target, artifact.input_names, artifact.output_names)
    (result,) = Identity().load(alone)((x,))
    assert torch.equal(result, x[None])
    assert result.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_identity_damaged_file_raises_target_error(tmp_path, kept):
    """A damaged file raises a TargetError."""
    artifact = Identity().compile(make_case(("relu", {})).graph, tmp_path / "model")
    content = artifact.path.read_bytes()
    artifact.path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(
        TargetError, match=r"cannot load .*model: it is damaged \(SafetensorError: .*\)\. Compile it again"
    ):
        Identity().load(artifact)


def test_identity_header_without_graph_raises(tmp_path):
    """A header that contains no graph raises a TargetError."""
    artifact = Identity().compile(make_case(("relu", {})).graph, tmp_path / "model")
    artifact.path.write_bytes(artifact.path.read_bytes().replace(b"nodes", b"modes"))
    with pytest.raises(TargetError, match=r"cannot load .*model: it is damaged"):
        Identity().load(artifact)


def test_load_target_of_a_missing_plugin_names_package():
    registry = replace(REGISTRY, targets={})
    message = (
        r"there is no target 'ov'\. Run pip install clika-ref-openvino \(in a clone: pip install plugins/openvino; "
    )
    with pytest.raises(TargetError, match=message):
        load_target("ov", registry)
