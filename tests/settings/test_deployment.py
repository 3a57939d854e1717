"""Deployment settings by name: those of plugins, derived classes, and required arguments."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
from clika_ref_cli.command_settings import deployment_settings_for
from clika_ref_cli.exit_status import MisuseError

import clika_ref
from clika_ref import BaseDeploymentSettings, DeploymentSettings_TensorRT_ONNX
from clika_ref.core.errors import ModelError, TargetError
from clika_ref.settings.compile_options import deployment_settings_named


@pytest.fixture
def deployment_classes():
    """Classes of settings by name, which no other test finds; some are asked for before any exist."""
    made_up = [deployment_settings_named(name) for name in ("derived", "interpreter")]

    class OfAVendor(BaseDeploymentSettings):
        pass

    class Derived(OfAVendor):
        target: ClassVar[str] = "derived"

    class FurtherTensorRt(DeploymentSettings_TensorRT_ONNX):
        pass

    @dataclass(frozen=True)
    class Chip(OfAVendor):
        target: ClassVar[str] = "interpreter"  # which the example plugin provides
        cores: int
        clock: float = 1.0

    made = {kind.__name__: kind for kind in (OfAVendor, Derived, FurtherTensorRt, Chip)}
    yield made
    assert [settings.target for settings in made_up] == ["derived", "interpreter"]
    for kind in made.values():
        kind.target = ""  # something may hold the class, and it would be found


def test_deployment_settings_named_finds_derived_classes(deployment_classes):
    """Settings classes are found through intermediate base classes, base classes first."""
    assert type(deployment_settings_named("derived")) is deployment_classes["Derived"]
    assert type(deployment_settings_named("trt")) is DeploymentSettings_TensorRT_ONNX
    assert str(deployment_settings_named("toaster")) == "toaster"


@pytest.mark.usefixtures("deployment_classes")
@pytest.mark.parametrize(
    ("call", "kind"), [(deployment_settings_named, TargetError), (deployment_settings_for, MisuseError)]
)
def test_deployment_settings_required_field_raises(call, kind):
    """A field without a default raises an error with its class and the remedy."""
    message = r"cannot use the target interpreter by name: .*Chip needs cores\. Give deployment_s"
    with pytest.raises(kind, match=message):
        call("interpreter")


def test_settings_load_from_path_sets_required_field(deployment_classes, tmp_path):
    """A settings file sets the fields without a default."""
    path = tmp_path / "settings.yaml"
    path.write_text("deployment_settings:\n  target_framework: interpreter\n  clock: 2.0\n  cores: 8\n")
    assert clika_ref.Settings.load_from_path(path).deployment_settings == deployment_classes["Chip"](8, 2.0)
    path.write_text("deployment_settings:\n  target_framework: interpreter\n  clock: 2.0\n")
    with pytest.raises(ModelError, match=r"deployment_settings lacks cores, which have no default in .*Chip"):
        clika_ref.Settings.load_from_path(path)
