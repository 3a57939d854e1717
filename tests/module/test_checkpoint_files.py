"""Files of saved modules that are no such file, cut off, altered, newer or older, and what an interrupt leaves."""

import contextlib
import copy
import json
import random

import numpy as np
import pytest
import safetensors.torch
import torch
from saved_nets import Tokens, compiled
from torch import nn

from clika_ref import BaseDeploymentSettings, ClikaModule, ModelError, clika_compile
from clika_ref.core.registry import Plugin, build_registry, load_registry
from clika_ref.module import checkpoint, clika_module
from clika_ref.serialization import container
from clika_ref.serialization.container import pack_file, unpack_file


@pytest.fixture(scope="module")
def module():
    return compiled(Tokens)


@pytest.fixture(scope="module")
def serialized(module):
    return module.clika_serialize()


def load(serialized):
    return ClikaModule.clika_from_serialized(serialized)


def altered(serialized, change):
    """Return a file whose document is another one, its digest being right."""
    document, tensors = unpack_file(serialized)
    document = copy.deepcopy(document)
    change(document)
    return b"".join(pack_file(document, tensors))


def of_format(form, serialized, monkeypatch):
    """Return a file of another format with the same contents."""
    document, tensors = unpack_file(serialized)
    with monkeypatch.context() as patched:
        patched.setattr(container, "FILE_FORMAT", form)
        return b"".join(pack_file(document, tensors))


def with_header(serialized, change):
    """Return a file whose header is another one, its digest being that of before."""
    length = int.from_bytes(serialized[:8], "little")
    header = json.loads(serialized[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + serialized[8 + length :]


# Paths


def test_the_path_is_taken_as_it_is(module, tmp_path):
    for name in ("without", "with.suffix", "with.two.suffixes"):
        module.clika_save(tmp_path / name)
        ClikaModule.clika_load(str(tmp_path / name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["with.suffix", "with.two.suffixes", "without"]


def test_a_folder_is_refused(module, tmp_path):
    with pytest.raises(ModelError, match=r"cannot write '.*': it is a folder; add a file name"):
        module.clika_save(tmp_path)
    with pytest.raises(ModelError, match=r"cannot load '.*': it is a folder. Pass the path of a file in it"):
        ClikaModule.clika_load(tmp_path)


def test_a_file_that_is_not_there_is_refused(module, tmp_path):
    with pytest.raises(ModelError, match=r"cannot load '.*missing': No such file or directory"):
        ClikaModule.clika_load(tmp_path / "missing")
    with pytest.raises(ModelError, match=r"cannot write '.*': '.*none' does not exist; create it, or choose another"):
        module.clika_save(tmp_path / "none/saved")
    with pytest.raises(ModelError, match=r"cannot load '.*': embedded null byte"):
        ClikaModule.clika_load("a\0b")


def test_what_is_no_path_and_no_bytes_is_refused(module):
    with pytest.raises(ModelError, match=r"path is 3, a int; give a path such as 'saved/model'"):
        module.clika_save(3)
    with pytest.raises(ModelError, match=r"path is None, a NoneType; give a path"):
        ClikaModule.clika_load(None)
    with pytest.raises(ModelError, match=r"serialized is a str. Pass the bytes of clika_serialize"):
        load("text")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_while_saving_leaves_the_old_file_whole(module, tmp_path, monkeypatch, error):
    path = tmp_path / "saved"
    module.clika_save(path)
    before = path.read_bytes()

    def interrupted(*_):
        yield b"half of a fi"
        raise error

    monkeypatch.setattr(checkpoint, "pack_file", interrupted)
    with pytest.raises(error):
        module.clika_save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
    ClikaModule.clika_load(path)


# Files


def test_what_torch_save_writes_is_not_read(module, tmp_path):
    torch.save(module.state_dict(), tmp_path / "state.pt")
    with pytest.raises(ModelError, match=r"it is a zip file from torch.save: a pickle, which can run code and"):
        ClikaModule.clika_load(tmp_path / "state.pt")


def test_other_files_are_refused_with_what_they_are(tmp_path):
    with pytest.raises(ModelError, match=r"cannot load 0 bytes: it is not a safetensors file \(0 bytes\)"):
        load(b"")
    with pytest.raises(ModelError, match=r"it is not a safetensors file \(900 bytes\). Give a file from clika_save."):
        load(b"ONNX or else" * 75)
    with pytest.raises(ModelError, match=r"it does not contain a compiled module: KeyError: '__metadata__'"):
        load(safetensors.torch.save({"x": torch.ones(3)}))
    with pytest.raises(ModelError, match=r"it does not contain a compiled module: KeyError: 'clika'"):
        load(safetensors.torch.save({"x": torch.ones(3)}, {"other": "1"}))
    with pytest.raises(ModelError, match=r"it is no saved module: KeyError: "):
        load(bytes(compiled(Tokens).get_extra_state().numpy()))


def test_a_file_that_is_cut_off_is_refused_wherever_it_ends(serialized):
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


def test_a_file_with_another_byte_is_refused_wherever_it_is(serialized):
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
def test_metadata_that_json_reads_and_no_module_has_is_refused(serialized, head, reason):
    with pytest.raises(ModelError, match=reason):
        load(with_header(serialized, lambda header: header["__metadata__"].update(clika=head)))


def test_places_of_tensors_without_an_end_are_refused(serialized):
    endless = {"data_offsets": [0, float("inf")]}
    with pytest.raises(ModelError, match="its header is damaged: OverflowError"):
        load(with_header(serialized, lambda header: header["clika/document"].update(endless)))


@pytest.mark.parametrize("other", [rb"\"format\":0", rb"\"format\":2", rb"\"fprmat\":%d" % container.FILE_FORMAT])
def test_a_file_whose_format_is_altered_does_not_pass_for_one_without_a_digest(serialized, other):
    own = rb"\"format\":%d" % container.FILE_FORMAT
    assert serialized.count(own) == 1
    with pytest.raises(ModelError, match="it was saved by a development version; compile again"):
        load(serialized.replace(own, other))


def test_a_newer_format_is_refused_with_what_to_do(serialized, monkeypatch):
    newer = of_format(99, serialized, monkeypatch)
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
def test_a_state_dict_whose_graph_is_no_bytes_is_refused(module, state):
    for loading in (ClikaModule(), module):
        with pytest.raises(
            ModelError, match=r"cannot load _extra_state \(the graph\): it is .*. Give the uint8\[bytes\]"
        ):
            loading.load_state_dict({**module.state_dict(), "_extra_state": state})


def test_what_is_no_tensor_in_a_state_dict_is_named(module):
    one, other, *_ = (name for name in module.state_dict() if name.endswith(".weight"))
    with pytest.raises(ModelError, match=rf"holds '{one}' \(a int\), '{other}' \(a ndarray\) where its graph needs"):
        ClikaModule().load_state_dict({**module.state_dict(), one: 3, other: np.zeros(3)})
    with pytest.raises(ModelError, match=f"lacks '{one}', which its graph needs"):
        ClikaModule().load_state_dict({**module.state_dict(), one: None})


def test_what_is_no_tensor_among_learned_scales_is_named(module):
    name = next(name for name in module.state_dict() if name.startswith("clika.log_scales."))
    for loading in (ClikaModule(), module):
        with pytest.raises(RuntimeError, match=f'"{name}", expected torch.Tensor'):
            loading.load_state_dict({**module.state_dict(), name: 3})


@pytest.mark.parametrize("form", range(container.FILE_FORMAT))
def test_load_file_of_development_version_is_rejected(serialized, monkeypatch, form):
    older = of_format(form, serialized, monkeypatch)
    with pytest.raises(ModelError, match=r"cannot load .*: it was saved by a development version; compile again"):
        load(older)


@pytest.mark.slow
def test_documents_that_are_no_such_are_refused_and_never_run(serialized):
    def changed(item, draw):
        """Put something else into a random place of a document."""
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
        damaged = altered(serialized, lambda document, seed=seed: changed(document, random.Random(seed)))
        with contextlib.suppress(ModelError):  # the line of a node, or its name, may be any
            load(damaged)
            continue
        refused += 1
    assert 100 < refused < 300


def test_steps_of_other_sizes_than_their_integers_are_refused_before_they_take_memory(serialized):
    def changed(document):
        held = next(iter(document["integers"].values()))
        held["steps"].append(["moved", [10**6, 10**6], [1, 1]])

    with pytest.raises(
        ModelError, match=r"the quantized weight .* is damaged: ValueError: a step has the shape \[1000000, 10"
    ):
        load(altered(serialized, changed))


# What is not there


def test_plugins_that_are_not_there_are_named(serialized, monkeypatch):
    whole = load_registry()
    few = build_registry(p for p in whole.plugins if p.name != "aten")
    monkeypatch.setattr(clika_module, "load_registry", lambda: few)
    (aten,) = [p for p in whole.plugins if p.name == "aten"]
    assert isinstance(aten, Plugin)
    match = (
        rf"it needs operators of {aten.distribution} {aten.version}, which is not among the plugins here; install it"
    )
    with pytest.raises(ModelError, match=match):
        load(serialized)


def test_a_target_that_is_not_there_is_missed_by_what_needs_it_only(serialized, module, monkeypatch):
    whole = load_registry()
    monkeypatch.setattr(
        clika_module, "load_registry", lambda: build_registry(p for p in whole.plugins if not p.targets)
    )
    loaded = load(serialized)
    assert loaded.clika_state.request is None
    assert loaded.clika_state.deployment == module.clika_state.deployment


class OurDeployment(BaseDeploymentSettings):
    target = "onnxruntime"


def test_deployment_settings_of_ones_own_are_found_by_their_names():
    x = torch.ones(2, 3)
    own = clika_compile(nn.Linear(3, 2), tracing_inputs=[x], deployment_settings=OurDeployment())
    assert isinstance(load(own.clika_serialize()).clika_state.deployment, OurDeployment)
    unknown = altered(own.clika_serialize(), lambda d: d.update(deployment=["absent:Ours", {}]))
    with pytest.raises(
        ModelError, match=r"was compiled for a absent.Ours, but this process has no such class. Import the"
    ):
        load(unknown)
    with pytest.raises(ModelError, match=r"was compiled for a builtins.print, but this process has no such class"):
        load(altered(own.clika_serialize(), lambda d: d.update(deployment=["builtins:print", {}])))

    class Local(BaseDeploymentSettings):
        target = "onnxruntime"

    module = clika_compile(nn.Linear(3, 2), tracing_inputs=[x], deployment_settings=Local())
    with pytest.raises(ModelError, match=r"a Local, cannot be saved: only a class that a module defines at its top"):
        module.clika_serialize()


def test_settings_that_this_version_does_not_know_are_named(serialized):
    newer = altered(serialized, lambda document: document["options"].update(telepathy=True))
    with pytest.raises(
        ModelError, match=r"saved ClikaCompileOptions has 'telepathy', which this clika-ref does not know"
    ):
        load(newer)


def test_a_file_written_before_a_setting_was_there_is_read(serialized):
    older = altered(serialized, lambda document: document["options"].pop("sparing"))
    assert load(older).clika_state.options.sparing == "auto"


def test_a_name_that_is_code_stays_a_name(tmp_path):
    name = f"x'); open({str(tmp_path / 'ran')!r}, 'w'); ('"
    model = nn.Module()
    model.add_module(name.replace(".", ""), nn.Linear(3, 2))
    (layer,) = model.children()
    model.forward = layer.forward
    loaded = load(clika_compile(model, tracing_inputs=[torch.ones(2, 3)]).clika_serialize())
    loaded(torch.ones(2, 3))
    assert not (tmp_path / "ran").exists()


# What cannot be saved


def test_an_empty_module_and_strange_parameters_are_refused():
    with pytest.raises(ModelError, match="this ClikaModule is empty"):
        ClikaModule().clika_serialize()
    module = compiled(Tokens)
    module.own = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"cannot save the module: 'own.bias' is not part of its graph. Remove it"):
        module.clika_serialize()


def test_a_module_that_was_compiled_in_float_holds_no_more_than_its_graph():
    document, tensors = unpack_file(compiled(settings=None).clika_serialize())
    assert tensors.keys() == {*document["graph"]["constants"]}
    assert document["calibration"] is document["wanted"] is document["quantization"] is None
    assert json.dumps(document)
