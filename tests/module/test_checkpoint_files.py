"""Invalid checkpoints: other formats, truncated, altered, newer, older; and files after an interrupt."""

import contextlib
import copy
import json
import random

import numpy as np
import pytest
import safetensors.torch
import torch
from saved_nets import Tokens, compile_net
from torch import nn

from clika_ref import BaseDeploymentSettings, ClikaModule, ModelError, clika_compile
from clika_ref.core.registry import Plugin, build_registry, load_registry
from clika_ref.module import checkpoint, clika_module
from clika_ref.serialization import container
from clika_ref.serialization.container import pack_file, unpack_file


@pytest.fixture(scope="module")
def module():
    return compile_net(Tokens)


@pytest.fixture(scope="module")
def serialized(module):
    return module.clika_serialize()


def load(serialized):
    return ClikaModule.clika_from_serialized(serialized)


def alter_document(serialized, change):
    """Return a file with a changed document and a valid digest."""
    document, tensors = unpack_file(serialized)
    document = copy.deepcopy(document)
    change(document)
    return b"".join(pack_file(document, tensors))


def write_in_format(form, serialized, monkeypatch):
    """Return a file of another format with the same contents."""
    document, tensors = unpack_file(serialized)
    with monkeypatch.context() as patched:
        patched.setattr(container, "FILE_FORMAT", form)
        return b"".join(pack_file(document, tensors))


def alter_header(serialized, change):
    """Return a file with a changed header and the original digest."""
    length = int.from_bytes(serialized[:8], "little")
    header = json.loads(serialized[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + serialized[8 + length :]


# Paths


def test_clika_save_uses_path_without_adding_suffix(module, tmp_path):
    """The path is used unchanged, with or without a suffix."""
    for name in ("without", "with.suffix", "with.two.suffixes"):
        module.clika_save(tmp_path / name)
        ClikaModule.clika_load(str(tmp_path / name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["with.suffix", "with.two.suffixes", "without"]


def test_clika_save_and_load_folder_raises(module, tmp_path):
    """A folder as the path raises an error."""
    with pytest.raises(ModelError, match=r"cannot write '.*': it is a folder. Add a file name"):
        module.clika_save(tmp_path)
    with pytest.raises(ModelError, match=r"cannot load '.*': it is a folder. Pass the path of a file in it"):
        ClikaModule.clika_load(tmp_path)


def test_clika_save_and_load_missing_path_raises(module, tmp_path):
    """A missing file, a missing folder and a null byte raise an error."""
    with pytest.raises(ModelError, match=r"cannot load '.*missing': No such file or directory"):
        ClikaModule.clika_load(tmp_path / "missing")
    with pytest.raises(ModelError, match=r"cannot write '.*': '.*none' does not exist. Create it, or choose another"):
        module.clika_save(tmp_path / "none/saved")
    with pytest.raises(ModelError, match=r"cannot load '.*': embedded null byte"):
        ClikaModule.clika_load("a\0b")


def test_clika_save_and_load_wrong_argument_types_raise(module):
    """Values that are no path and no bytes raise an error."""
    with pytest.raises(ModelError, match=r"path is 3, a int. Give a path such as 'saved/model'"):
        module.clika_save(3)
    with pytest.raises(ModelError, match=r"path is None, a NoneType. Give a path"):
        ClikaModule.clika_load(None)
    with pytest.raises(ModelError, match=r"serialized is a str. Pass the bytes of clika_serialize"):
        load("text")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_clika_save_interrupt_keeps_old_file(module, tmp_path, monkeypatch, error):
    """An interrupt or a memory error during saving keeps the old file."""
    path = tmp_path / "saved"
    module.clika_save(path)
    before = path.read_bytes()

    def write_half(*_):
        yield b"half of a fi"
        raise error

    monkeypatch.setattr(checkpoint, "pack_file", write_half)
    with pytest.raises(error):
        module.clika_save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
    ClikaModule.clika_load(path)


# Files


def test_clika_load_torch_save_file_rejected(module, tmp_path):
    """A file of `torch.save` is rejected, as pickles may run code."""
    torch.save(module.state_dict(), tmp_path / "state.pt")
    with pytest.raises(ModelError, match=r"it is a zip file from torch.save: a pickle, which can run code and"):
        ClikaModule.clika_load(tmp_path / "state.pt")


def test_clika_load_other_files_report_content(tmp_path):
    """Other files raise an error with their content."""
    with pytest.raises(ModelError, match=r"cannot load 0 bytes: it is not a safetensors file \(0 bytes\)"):
        load(b"")
    with pytest.raises(ModelError, match=r"it is not a safetensors file \(900 bytes\). Give a file from clika_save."):
        load(b"ONNX or else" * 75)
    with pytest.raises(ModelError, match=r"it does not contain a compiled module: KeyError: '__metadata__'"):
        load(safetensors.torch.save({"x": torch.ones(3)}))
    with pytest.raises(ModelError, match=r"it does not contain a compiled module: KeyError: 'clika'"):
        load(safetensors.torch.save({"x": torch.ones(3)}, {"other": "1"}))
    with pytest.raises(ModelError, match=r"it is no saved module: KeyError: "):
        load(bytes(compile_net(Tokens).get_extra_state().numpy()))


def test_clika_load_truncated_file_raises(serialized):
    """A file that is truncated or extended anywhere raises an error."""
    header = int.from_bytes(serialized[:8], "little")
    with pytest.raises(
        ModelError, match=rf"it is truncated: its header has {header:,} bytes, but only 92 are there. Copy it again."
    ):
        load(serialized[:100])
    with pytest.raises(
        ModelError, match=r"it is truncated: its tensors take [\d,]+ bytes, but [\d,]+ are there. Copy it again."
    ):
        load(serialized[:-1])
    with pytest.raises(ModelError, match=r"it has extra bytes at its end: its tensors take [\d,]+ bytes, but"):
        load(serialized + b"0")
    for end in random.Random(0).sample(range(len(serialized)), 50):
        with pytest.raises(ModelError, match=r"truncated|not a safetensors file"):
            load(serialized[:end])


def test_clika_load_any_changed_byte_raises(serialized):
    """A file with any changed byte raises an error."""
    header = 8 + int.from_bytes(serialized[:8], "little")
    draw = random.Random(0)
    for place in [*draw.sample(range(header), 60), *draw.sample(range(header, len(serialized)), 60)]:
        changed = bytearray(serialized)
        changed[place] ^= 1 << draw.randrange(7)
        with pytest.raises(ModelError, match=r"cannot load [\d,]+ bytes: its? "):
            load(bytes(changed))
    changed = bytearray(serialized)
    changed[-1] ^= 1
    with pytest.raises(ModelError, match=r"its digest does not match: it was changed or damaged"):
        load(bytes(changed))


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ('{"format":1e999}', "it does not contain a compiled module: OverflowError"),
        (f'{{"format":{container.FILE_FORMAT},"x":"\ud800"}}', "its digest does not match"),
    ],
)
def test_clika_load_invalid_metadata_raises(serialized, head, reason):
    """Metadata that JSON reads but no module has raises an error."""
    with pytest.raises(ModelError, match=reason):
        load(alter_header(serialized, lambda header: header["__metadata__"].update(clika=head)))


def test_clika_load_infinite_tensor_offsets_raise(serialized):
    """Infinite offsets of a tensor raise an error."""
    endless = {"data_offsets": [0, float("inf")]}
    with pytest.raises(ModelError, match="its header is damaged: OverflowError"):
        load(alter_header(serialized, lambda header: header["clika/document"].update(endless)))


@pytest.mark.parametrize("other", [rb"\"format\":0", rb"\"format\":2", rb"\"fprmat\":%d" % container.FILE_FORMAT])
def test_clika_load_changed_format_number_rejected(serialized, other):
    """A changed format number does not disable the check of the digest."""
    own = rb"\"format\":%d" % container.FILE_FORMAT
    assert serialized.count(own) == 1
    with pytest.raises(ModelError, match="it was saved by a development version; compile again"):
        load(serialized.replace(own, other))


def test_clika_load_newer_format_raises_with_remedy(serialized, monkeypatch):
    """A newer format raises an error that suggests an update."""
    newer = write_in_format(99, serialized, monkeypatch)
    with pytest.raises(
        ModelError,
        match=rf"it has format 99, but this clika-ref reads formats up to {container.FILE_FORMAT}. Update clika-ref.",
    ):
        load(newer)
    with pytest.raises(ModelError, match=r"cannot load _extra_state \(the graph\) of .* bytes: it has format"):
        ClikaModule().load_state_dict({"_extra_state": torch.frombuffer(bytearray(newer), dtype=torch.uint8)})


@pytest.mark.parametrize(
    "state",
    [
        b"bytes",
        None,
        torch.empty(3, dtype=torch.uint8, device="meta"),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(3, dtype=torch.uint8).to_sparse(),
    ],
)
def test_load_state_dict_extra_state_not_bytes_raises(module, state):
    """An `_extra_state` that is no uint8 tensor raises an error."""
    for loading in (ClikaModule(), module):
        with pytest.raises(
            ModelError, match=r"cannot load _extra_state \(the graph\): it is .*. Give the uint8\[bytes\]"
        ):
            loading.load_state_dict({**module.state_dict(), "_extra_state": state})


def test_load_state_dict_non_tensor_named(module):
    """State dict entries that are no tensors are named."""
    one, other, *_ = (name for name in module.state_dict() if name.endswith(".weight"))
    with pytest.raises(ModelError, match=rf"holds '{one}' \(a int\), '{other}' \(a ndarray\) where its graph needs"):
        ClikaModule().load_state_dict({**module.state_dict(), one: 3, other: np.zeros(3)})
    with pytest.raises(ModelError, match=f"lacks '{one}', which its graph needs"):
        ClikaModule().load_state_dict({**module.state_dict(), one: None})


def test_load_state_dict_non_tensor_scale_named(module):
    """A learned scale that is no tensor is named."""
    name = next(name for name in module.state_dict() if name.startswith("clika.log_scales."))
    for loading in (ClikaModule(), module):
        with pytest.raises(RuntimeError, match=f'"{name}", expected torch.Tensor'):
            loading.load_state_dict({**module.state_dict(), name: 3})


@pytest.mark.parametrize("form", range(container.FILE_FORMAT))
def test_clika_load_development_format_rejected(serialized, monkeypatch, form):
    """Each format of a development version is rejected."""
    older = write_in_format(form, serialized, monkeypatch)
    with pytest.raises(ModelError, match=r"cannot load .*: it was saved by a development version; compile again"):
        load(older)


@pytest.mark.slow
def test_clika_load_damaged_documents_raise_model_error(serialized):
    """Randomly damaged documents load or raise a ModelError, and no other error."""

    def damage_document(item, draw):
        """Replace an entry at a random position of a document."""
        while isinstance(item, dict | list) and item:
            keys = list(item) if isinstance(item, dict) else range(len(item))
            key = draw.choice(list(keys))
            if not isinstance(item[key], dict | list) or not item[key] or draw.random() < 0.1:
                item[key] = draw.choice(
                    [None, -1, 2**70, "__import__('os')", [], {}, {"expr": ["exec", 1]}, [[[]]], 0.5]
                )
                return
            item = item[key]

    refused = 0
    for seed in range(300):
        damaged = alter_document(serialized, lambda document, seed=seed: damage_document(document, random.Random(seed)))
        with contextlib.suppress(ModelError):  # the line of a node, or its name, may be any
            load(damaged)
            continue
        refused += 1
    assert 100 < refused < 300


def test_clika_load_steps_of_other_sizes_rejected(serialized):
    """Steps with other sizes than their INT8 weights are rejected before memory is allocated."""

    def enlarge_steps(document):
        held = next(iter(document["quantized_weights"].values()))
        held["steps"].append(["layout", [10**6, 10**6], [1, 1]])

    with pytest.raises(
        ModelError, match=r"the quantized weight .* is damaged: ValueError: a step has the shape \[1000000, 10"
    ):
        load(alter_document(serialized, enlarge_steps))


# What is not there


def test_clika_load_missing_plugin_named(serialized, monkeypatch):
    """A missing plugin is named with its version."""
    whole = load_registry()
    few = build_registry(p for p in whole.plugins if p.name != "aten")
    monkeypatch.setattr(clika_module, "load_registry", lambda: few)
    (aten,) = [p for p in whole.plugins if p.name == "aten"]
    assert isinstance(aten, Plugin)
    match = (
        rf"it needs operators of {aten.distribution} {aten.version}, which are not installed\. "
        r"Run pip install clika-ref-aten \(in a clone: pip install plugins/aten; .*\)\.$"
    )
    with pytest.raises(ModelError, match=match):
        load(serialized)


def test_clika_load_missing_target_still_loads(serialized, module, monkeypatch):
    """A module loads without its target; only functions that need the target fail."""
    whole = load_registry()
    monkeypatch.setattr(
        clika_module, "load_registry", lambda: build_registry(p for p in whole.plugins if not p.targets)
    )
    loaded = load(serialized)
    assert loaded.clika_state.request is None
    assert loaded.clika_state.deployment == module.clika_state.deployment


class OurDeployment(BaseDeploymentSettings):
    target = "onnxruntime"


def test_clika_load_finds_own_deployment_settings():
    """Deployment settings of the user are found by name; unknown and local classes raise an error."""
    x = torch.ones(2, 3)
    own = clika_compile(nn.Linear(3, 2), tracing_inputs=[x], deployment_settings=OurDeployment())
    assert isinstance(load(own.clika_serialize()).clika_state.deployment, OurDeployment)
    unknown = alter_document(own.clika_serialize(), lambda d: d.update(deployment=["absent:Ours", {}]))
    with pytest.raises(
        ModelError, match=r"was compiled for a absent.Ours, but this process has no such class. Import the"
    ):
        load(unknown)
    with pytest.raises(ModelError, match=r"was compiled for a builtins.print, but this process has no such class"):
        load(alter_document(own.clika_serialize(), lambda d: d.update(deployment=["builtins:print", {}])))

    class Local(BaseDeploymentSettings):
        target = "onnxruntime"

    module = clika_compile(nn.Linear(3, 2), tracing_inputs=[x], deployment_settings=Local())
    with pytest.raises(
        ModelError, match=r"cannot save .*: only a class at the top level of a module can be loaded again"
    ):
        module.clika_serialize()


def test_clika_load_unknown_setting_named(serialized):
    """Settings that this version does not have are named."""
    newer = alter_document(serialized, lambda document: document["options"].update(telepathy=True))
    with pytest.raises(ModelError, match=r"saved ClikaCompileOptions: this clika-ref has no field 'telepathy'"):
        load(newer)


def test_clika_load_missing_setting_uses_default(serialized):
    """A file without a newer setting loads with the default."""
    older = alter_document(serialized, lambda document: document["options"].pop("mixed_precision"))
    assert load(older).clika_state.options.mixed_precision == "auto"


def test_clika_load_code_in_names_not_run(tmp_path):
    """Code in names is not executed."""
    name = f"x'); open({str(tmp_path / 'ran')!r}, 'w'); ('"
    model = nn.Module()
    model.add_module(name.replace(".", ""), nn.Linear(3, 2))
    (layer,) = model.children()
    model.forward = layer.forward
    loaded = load(clika_compile(model, tracing_inputs=[torch.ones(2, 3)]).clika_serialize())
    loaded(torch.ones(2, 3))
    assert not (tmp_path / "ran").exists()


# What cannot be saved


def test_clika_serialize_empty_or_extended_module_raises():
    """An empty module, and one with parameters outside of its graph, raise an error."""
    with pytest.raises(ModelError, match="this ClikaModule is empty"):
        ClikaModule().clika_serialize()
    module = compile_net(Tokens)
    module.own = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"cannot save the module: 'own.bias' is not part of its graph. Remove it"):
        module.clika_serialize()


def test_clika_serialize_float_module_contains_graph_only():
    """A float module stores its graph and no quantization."""
    document, tensors = unpack_file(compile_net(settings=None).clika_serialize())
    assert tensors.keys() == {*document["graph"]["constants"]}
    assert document["calibration"] is document["request"] is document["quantization"] is None
    assert json.dumps(document)
