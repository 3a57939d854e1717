"""Models in pieces, saved in one file, and exported to a folder with an artifact for each piece."""

import json

import pytest
import torch
from torch import nn

from clika_ref import (
    ClikaModule,
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_OpenVINO_ONNX,
    ModelError,
    PartialArtifact,
    PartialClikaModule,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.serialization.container import unpack_file
from clika_ref.serialization.vocabulary import ModuleKey, PartialKey, PartialTensorPrefix

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Dynamo, which hides it from users


class Branching(nn.Module):
    """Takes a branch by the elements of its input, and counts its calls."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.positive = nn.Linear(8, width)
        self.negative = nn.Linear(8, width)
        self.register_buffer("unused", torch.arange(3))

    def forward(self, x):
        return self.positive(x) + 1 if x.sum() > 0 else self.negative(x).relu()


class ChangedBranching(Branching):
    """The same weights with other code."""

    def forward(self, x):
        return self.positive(x) - 1 if x.sum() > 0 else self.negative(x).relu()


INPUTS = torch.rand(5, 8), -torch.rand(1, 8)


def make_model():
    torch.manual_seed(0)
    return Branching().eval()


@pytest.fixture(scope="module")
def module():
    return clika_compile(
        make_model(),
        tracing_inputs=[torch.ones(2, 8), -torch.ones(3, 8)],
        calibration_inputs=[sign * torch.rand(16, 8) for sign in (1, -1, 1, -1)],
        quantization_settings=QuantizationSettings(quantization_sensitivity_threshold=0.1),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        fullgraph=False,
    )


@pytest.fixture(scope="module")
def folder(module, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "model"
    module.clika_export(path)
    return path


@pytest.fixture
def copied_folder(folder, tmp_path):
    copied = tmp_path / "model"
    copied.mkdir()
    for file in folder.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    return copied


@pytest.mark.slow
def test_saved_pieces_loaded_into_the_class(module, tmp_path):
    module.clika_save(tmp_path / "saved")
    model = Branching()
    loaded = PartialClikaModule.clika_load(tmp_path / "saved", model)
    assert torch.equal(loaded.unused, torch.arange(3))
    assert not any(parameter.eq(0).all() for parameter in model.parameters())
    for x in INPUTS:
        assert torch.equal(loaded(x), module(x))
    assert str(loaded.clika_breaks) == str(module.clika_breaks)


class TiedHead(nn.Module):
    """An embedding and a head with one weight, in pieces around a condition."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + torch.relu(self.layer(x))
        if torch.isnan(x).any():
            raise ValueError
        return self.head(x)


@pytest.mark.slow
def test_saved_weight_that_pieces_share_stays_exact(tmp_path):
    """A weight that one piece quantizes and another one reads in float is the same after loading."""
    torch.manual_seed(1)
    module = clika_compile(
        TiedHead().eval(),
        tracing_inputs=[torch.randint(0, 10, (2, 5)), torch.randint(0, 10, (3, 7))],
        calibration_inputs=[torch.randint(0, 10, (4, 6)) for _ in range(4)],
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        fullgraph=False,
    )
    module.clika_save(tmp_path / "saved")
    loaded = PartialClikaModule.clika_load(tmp_path / "saved", TiedHead().eval())
    ids = torch.randint(0, 10, (2, 4))
    assert torch.equal(loaded(ids), module(ids))


def test_saved_names_pinned(module, folder, tmp_path):
    module.clika_save(tmp_path / "saved")
    document, tensors = unpack_file((tmp_path / "saved").read_bytes())
    manifest = json.loads((folder / "manifest.json").read_text())
    pinned = {name.value for name in [*PartialKey, *ModuleKey]}
    assert {*document, *manifest, *document["pieces"][0], *manifest["pieces"][0]} <= pinned
    assert {"/".join(name.split("/")[:2]) + "/" for name in tensors} == {name.value for name in PartialTensorPrefix}


def test_saved_float_weights_restored(module, tmp_path):
    module.clika_save(tmp_path / "saved", keep_float_weights=True)
    loaded = PartialClikaModule.clika_load(tmp_path / "saved", Branching())
    for name, tensor in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_loading_needs_the_class_and_its_code(module, tmp_path):
    module.clika_save(tmp_path / "saved")
    with pytest.raises(ModelError, match=r"Linear has no weight 'positive\.weight'"):
        PartialClikaModule.clika_load(tmp_path / "saved", nn.Linear(8, 8))
    with pytest.raises(ModelError, match=r"is a dict\. Pass an instance of the class that was compiled"):
        PartialClikaModule.clika_load(tmp_path / "saved", {})
    changed = PartialClikaModule.clika_load(tmp_path / "saved", ChangedBranching())
    with pytest.raises(ModelError, match=r"forward resumed at test_partial_files\.py:\d+ does not compute what was"):
        changed(INPUTS[0])


def test_saved_file_damaged_or_of_one_graph_rejected(module, tmp_path):
    module.clika_save(tmp_path / "saved")
    with pytest.raises(ModelError, match=r"in pieces.*PartialClikaModule\.clika_load"):
        ClikaModule.clika_load(tmp_path / "saved")
    contents = bytearray((tmp_path / "saved").read_bytes())
    contents[-9] ^= 1
    (tmp_path / "damaged").write_bytes(contents)
    with pytest.raises(ModelError, match="changed or damaged"):
        PartialClikaModule.clika_load(tmp_path / "damaged", Branching())
    with pytest.raises(ModelError, match="No such file"):
        PartialClikaModule.clika_load(tmp_path / "missing", Branching())
    clika_compile(nn.Linear(8, 8), tracing_inputs=[torch.ones(1, 8)]).clika_save(tmp_path / "whole")
    with pytest.raises(ModelError, match="holds one graph"):
        PartialClikaModule.clika_load(tmp_path / "whole", Branching())


def test_exported_pieces_run_in_the_runtime(module, folder):
    runner = PartialArtifact.load(folder).bind(make_model())
    for x in INPUTS:
        torch.testing.assert_close(runner(x), module(x).detach(), atol=0.05, rtol=0)
        assert not runner(x).requires_grad
    assert str(runner.clika_breaks) == str(module.clika_breaks)


def test_exported_files_and_digests_listed(folder):
    parts = json.loads((folder / "manifest.json").read_text())["pieces"]
    listed = {name for part in parts for name in part["digests"]}
    assert listed == {file.name for file in folder.iterdir()} - {"manifest.json"}
    assert any(part["file"].endswith("_positive.onnx") for part in parts)


def test_exported_piece_missing_or_changed_rejected(copied_folder):
    (file,) = copied_folder.glob("*_positive.onnx")
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(ModelError, match=rf"the piece {file.name} was changed"):
        PartialArtifact.load(copied_folder)
    file.unlink()
    with pytest.raises(ModelError, match=rf"the piece {file.name} is missing"):
        PartialArtifact.load(copied_folder)
    (copied_folder / "manifest.json").write_text("{")
    with pytest.raises(ModelError, match=r"manifest\.json is damaged"):
        PartialArtifact.load(copied_folder)
    (copied_folder / "manifest.json").unlink()
    with pytest.raises(ModelError, match="Pass a folder that clika_export wrote"):
        PartialArtifact.load(copied_folder)


def test_exported_pieces_need_the_code_that_was_compiled(folder):
    runner = PartialArtifact.load(folder).bind(ChangedBranching())
    with pytest.raises(ModelError, match="does not compute what was compiled"):
        runner(INPUTS[0])


def test_export_path_rejected(module, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"it is a file\. Pass the path of a folder"):
        module.clika_export(tmp_path / "file")
    with pytest.raises(ModelError, match=r"does not exist\. Create it"):
        module.clika_export(tmp_path / "missing" / "model")


@pytest.mark.slow
def test_exported_again_for_another_target(module, copied_folder):
    artifact = module.clika_export(copied_folder, DeploymentSettings_OpenVINO_ONNX())
    assert artifact.manifest["target"] == "openvino"
    torch.testing.assert_close(artifact.bind(make_model())(INPUTS[0]), module(INPUTS[0]).detach(), atol=0.05, rtol=0)


class BranchingOnLength(nn.Module):
    """A piece with a branch on a size, and another branch on elements."""

    def forward(self, x):
        x = x * 2 if x.shape[0] > 4 else x * 3
        return x + 1 if x.sum() > 0 else x - 1


def test_exported_piece_with_branch_on_size_checked_by_runner(tmp_path):
    """The runner checks the guards of each piece, so that an export accepts branches on sizes."""
    model = BranchingOnLength().eval()
    module = clika_compile(model, tracing_inputs=[torch.rand(6, 4), torch.rand(8, 4)], fullgraph=False)
    runner = module.clika_export(tmp_path / "model").bind(model)
    x = torch.rand(5, 4)
    torch.testing.assert_close(runner(x), model(x))
    with pytest.raises(ModelError, match="no saved piece matches it"):
        runner(torch.rand(3, 4))
