"""Tab completion of commands, options, targets and fields of options, without importing PyTorch."""

import os
import subprocess
import sys

import pytest
from clika_ref_cli import completion
from clika_ref_cli.completion import complete_option, complete_target

BEGIN = "import sys; sys.argv = ['clika-ref']; from clika_ref_cli.cli import main; main()"


def complete_line(line):
    """Return the completions that bash gets for the last word of a line, from a new process."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    environment = {**os.environ, "_CLIKA_REF_COMPLETE": "complete_bash", **words}
    done = subprocess.run([sys.executable, "-c", BEGIN], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_completion_commands_options_and_targets():
    """Bash completes commands, options and target names."""
    assert complete_line("clika-ref co") == ["compile", "compare", "conformance"]
    assert "--calibrate" in complete_line("clika-ref quantize --cal")
    assert {"openvino", "onnxruntime", "ort", "ov"} <= {*complete_line("clika-ref compile m --target o")}


def test_completion_files_left_to_shell():
    """Files are completed by the shell."""
    assert complete_line("clika-ref inspect mod") == []


@pytest.fixture
def loaded_plugins(monkeypatch):
    """Install a few fake distributions; return the names of those whose plugins were loaded."""
    loaded = []

    def entry(name, owner):
        return type("Entry", (), {"name": name, "dist": owner and type("Dist", (), {"name": owner})})

    def load(found):
        loaded.append(found.name)
        return ["toaster"]

    def choose(**owners):
        monkeypatch.setattr(completion, "entry_points", lambda group: [entry(n, o) for n, o in owners.items()])
        monkeypatch.setattr(completion, "_load_target_names", load)
        return loaded

    return choose


def test_complete_target_own_targets_not_loaded(loaded_plugins):
    """Our own targets are completed without loading their plugins."""
    loaded = loaded_plugins(
        aten="clika-ref-aten", ort="clika-ref-onnxruntime", trt="clika-ref-tensorrt", visualize="clika-ref-visualize"
    )
    assert complete_target("") == ["onnxruntime", "ort", "tensorrt", "tensorrt-llm", "trt", "trt-llm"]
    assert complete_target("ten") == ["tensorrt", "tensorrt-llm"]
    assert loaded == []


def test_complete_target_other_plugins_loaded(loaded_plugins):
    """Plugins of other distributions are loaded to complete their targets."""
    loaded = loaded_plugins(ort="clika-ref-onnxruntime", other="somebody-else", unknown=None)
    assert complete_target("to") == ["toaster", "toaster"]
    assert loaded == ["other", "unknown"]


def test_complete_target_broken_plugin_offers_no_name(monkeypatch):
    """A broken plugin offers no target."""
    monkeypatch.setattr(completion.importlib, "import_module", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        completion._load_target_names(type("Entry", (), {"name": "broken"}))
    registry = type("Registry", (), {"load_registry": lambda _: 1 / 0})
    monkeypatch.setattr(completion.importlib, "import_module", lambda _: registry)
    assert completion._load_target_names(type("Entry", (), {"name": "broken"})) == []


def test_complete_option_fields_and_values():
    """Option fields are completed, and their values if there is a fixed list."""
    assert complete_option("smo") == ["smooth_quant="]
    assert complete_option("smooth_quant=o") == ["smooth_quant=on", "smooth_quant=off"]
    assert complete_option("check_passes=") == ["check_passes=true", "check_passes=false"]
    assert complete_option("observer=") == []
    assert complete_option("nothing=") == []


@pytest.mark.slow
def test_complete_target_does_not_import_torch():
    """Completing one of our targets does not import torch."""
    code = (
        "import sys; from clika_ref_cli import completion\n"
        "found = [e for e in completion.entry_points(group='clika_ref') if e.dist.name != 'clika-ref-example']\n"
        "completion.entry_points = lambda group: found\n"
        "assert 'onnxruntime' in completion.complete_target('o'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
