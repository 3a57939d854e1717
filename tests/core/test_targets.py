"""`Target`: the methods that an author must implement, and the defaults of all others."""

from pathlib import Path

import pytest
import torch

from clika_ref.core.arithmetic import Arithmetic
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import TargetError
from clika_ref.core.targets import Target, invalid_target_reason

ARTIFACT = Artifact(Path("model.bin"), "plain", (), ())


class Plain(Target):
    name = "plain"

    def unsupported_reason(self, node):
        return None

    def compile(self, graph, path, **options):
        return ARTIFACT

    def load(self, artifact):
        return lambda inputs: [*inputs]


class Complete(Plain):
    emulated_by = "another runtime"

    def check(self, path):
        return []

    def profile(self, artifact, inputs):
        return {"relu": 1e-6}

    def open_file(self, path, folder):
        raise TargetError("damaged")


@pytest.mark.parametrize("method", ["unsupported_reason", "compile", "load"])
def test_target_without_required_method_cannot_be_created(method):
    members = {name: getattr(Plain, name) for name in ("name", "unsupported_reason", "compile", "load")}
    del members[method]
    with pytest.raises(TypeError, match=f"Can't instantiate abstract class Part .*{method}"):
        type("Part", (Target,), members)()


def test_optional_attributes_have_defaults():
    target = Plain()
    assert target.scheme is None
    assert target.arithmetic == ()
    assert (target.emulated_by, target.runtime, target.suffixes, target.deviations) == ("", "", (), None)


def test_optional_methods_have_defaults():
    target = Plain()
    assert target.unavailable_reason() is None
    assert target.passes() == target.check(ARTIFACT.path) == ()
    assert target.explain(ARTIFACT) == target.profile(ARTIFACT, []) == {}
    assert target.configure(object()) is target.with_rounded_inputs(32) is target
    assert target.describe_runtime() == "plain"


def test_open_file_without_own_format_is_rejected():
    with pytest.raises(TargetError, match=r"open model.bin for plain: .* no file format of its own. Give an ONNX file"):
        Plain().open_file(ARTIFACT.path, Path())


def test_overridden_methods_are_reported():
    plain, complete = Plain(), Complete()
    assert not any((plain.has_file_rules(), plain.has_node_times(), plain.has_own_format()))
    assert complete.has_file_rules()
    assert complete.has_node_times()
    assert complete.has_own_format()
    assert complete.describe_runtime() == "plain, emulated by another runtime"


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("name", 3, "its name is 3; set the attribute `name` to a string"),
        ("scheme", "int8", "its scheme is 'int8'; set it to a clika_ref.core.quantization_scheme.QuantizationScheme"),
        ("arithmetic", [8], "its arithmetic is [8]; set it to a sequence of clika_ref.core.arithmetic.Arithmetic"),
        ("arithmetic", "tf32", "its arithmetic is 'tf32'; set it to a sequence"),
    ],
)
def test_invalid_declaration_is_named_with_its_value(attribute, value, reason):
    target = Plain()
    setattr(target, attribute, value)
    assert invalid_target_reason(target).startswith(reason)


def test_target_without_name_is_invalid():
    nameless = type("Nameless", (Plain,), {"name": None})()
    assert invalid_target_reason(nameless) == "its name is None; set the attribute `name` to a string"
    assert invalid_target_reason(Plain) == (
        "it is of the class ABCMeta, which does not derive from clika_ref.core.targets.Target"
    )


def test_valid_target_has_no_reason():
    target = Plain()
    target.arithmetic = [Arithmetic(torch.float32)]
    assert invalid_target_reason(target) is None
