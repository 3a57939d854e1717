"""The examples run and print the results that they promise."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch
from test_code_rules import count_code_lines
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Return an example by its name, with less timing."""
    monkeypatch.setenv("CLIKA_REF_PLUGINS", "aten,cleanup,onnxruntime,openvino,visualize")
    monkeypatch.syspath_prepend(EXAMPLES)  # where an example that is run finds its neighbours
    for path in EXAMPLES.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    importlib.import_module("digits").TIMED_RUNS = 1
    return importlib.import_module


def read_readme_demo():
    """Return the README's output of the first example."""
    text = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```text\n(  450 test images.*?)^```", text, re.DOTALL | re.MULTILINE)
    return shown


def remove_measures(text):
    """Return the lines of a text without times, sizes, accuracies and decibels, which depend on the machine."""
    measure = r"(?:\d+ min )?(?:[\d.,]+|<) *(?:1 ms|ms|s|%|MB|KB|KiB|dB|epoch/s)(?!\w)|[\d.]+x|\d/\d|─+"
    return [" ".join(re.sub(measure, " # ", line).split()) for line in text.splitlines() if line.strip()]


@pytest.mark.slow
def test_demo_int8_keeps_accuracy_in_a_third_of_the_bytes(example, tmp_path, capsys):
    """In both runtimes: accuracy within 0.5 point of float, 99 % of decisions the same, at most 0.35x of the bytes."""
    example("digits").main(tmp_path / "build" / "digits.onnx")
    out, err = capsys.readouterr()
    for runtime in ("ONNX Runtime", "OpenVINO"):
        files = {
            kind: tmp_path / "build" / f"digits-{runtime.replace(' ', '').lower()}-{kind.lower()}.onnx"
            for kind in ("float", "INT8")
        }
        row = r"{}, {} +([\d.]+) % +([\d.]+) % +([\d,]+) KB .*x\) .* ms +(inf|-?[\d.]+) dB"
        rows = {kind: re.search(row.format(runtime, kind), out) for kind in files}
        assert all(rows.values()), out
        accuracies = {kind: float(found[1]) for kind, found in rows.items()}
        sizes = {kind: path.stat().st_size for kind, path in files.items()}
        assert accuracies["float"] > 98, out  # guessing gives 10; the README shows 99.78
        assert abs(accuracies["INT8"] - accuracies["float"]) <= 0.5, out
        assert float(rows["float"][2]) == 100, out
        assert float(rows["INT8"][2]) >= 99, out
        assert float(rows["float"][4]) == float("inf"), out
        assert float(rows["INT8"][4]) > 30, out  # the README shows 42 and more
        assert {kind: f"{size / 1000:,.0f}" for kind, size in sizes.items()} == {k: rows[k][3] for k in rows}
        assert sizes["float"] > 1_700_000  # 442,000 weights of 4 bytes
        assert sizes["INT8"] <= 0.35 * sizes["float"]
    floats = re.search(r"^  Layers in float: (\d+|none)$", out, re.MULTILINE)
    assert floats, out
    named = re.findall(r"^    (\S+): .", out, re.MULTILINE)
    assert len(named) == min(int(floats[1].replace("none", "0")), 3), out
    assert all(re.fullmatch(r"(stem|blocks\.\d\.layers|head)\.[a-z_0-9]+", name) for name in named), named
    assert re.search(r"Capturing +[\d.]+", err + out)
    assert [line for line in remove_measures(read_readme_demo()) if line not in remove_measures(out + err)] == []
    report = re.search(r"The report on every layer: (.+)", out)
    assert report, out
    assert Path(report[1]).is_file()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*without its .* dropout")
def test_qat_example_artifact_keeps_accuracy(example, tmp_path, capsys):
    """The QAT example exports an INT8 artifact with an accuracy above 90 %."""
    path = tmp_path / "build" / "trained.onnx"
    example("digits").EPOCHS, example("qat").EPOCHS = 3, 1
    example("qat").main(path)
    out = capsys.readouterr().out
    found = [float(x) for x in re.findall(r"(?:in float|quantized|quantized, after QAT) +([\d.]+) %", out)]
    assert len(found) == 3, out
    assert min(found) > 90, out
    assert "QuantizeLinear" in {node.op_type for node in onnx.load(path).graph.node}
    assert path.stat().st_size < 600_000  # 442,000 weights of one byte, with scales and biases


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*without its .* dropout")
def test_prune_then_quantize_example_shrinks_twice(example, tmp_path, capsys):
    """Pruning and quantization each reduce the size."""
    path = tmp_path / "build" / "pruned.onnx"
    example("prune_then_quantize").main(path)
    out = capsys.readouterr().out
    rows = re.findall(r"(in float|pruned|and trained|and quantized) +([\d.]+) % +([\d,]+) KiB", out)
    sizes = {stage: int(size.replace(",", "")) for stage, _, size in rows}
    assert sizes.keys() == {"in float", "pruned", "and trained", "and quantized"}, out
    assert sizes["pruned"] < 0.4 * sizes["in float"]
    assert sizes["and quantized"] < 0.5 * sizes["pruned"]
    assert float(rows[-1][1]) > 85, out


@pytest.mark.slow
def test_lora_example_learns_two_tasks_on_int4_weights(example, tmp_path, capsys):
    """Adapters on INT4 weights learn two tasks."""
    lora = example("lora")
    lora.EPOCHS, lora.ADAPTER_EPOCHS = 4, 15
    lora.main(tmp_path / "build")
    out = capsys.readouterr().out
    for task in lora.TASKS:
        told = re.search(rf"{task} +([\d.]+) % +([\d.]+) % +(\d+) KiB", out)
        ran = re.search(rf"{task}\.onnx +(\d+) KiB +([\d.]+) %", out)
        assert told, out
        assert ran, out
        assert float(told[1]) < 60, out
        assert float(told[2]) > 85, out
        assert abs(float(ran[2]) - float(told[2])) < 1, "a few images of 450 may lie between two classes"
        assert int(told[3]) < 0.25 * int(ran[1]), "the adapter is a small part of the file in four bits"
    kept = [(tmp_path / "build" / f"{task}.safetensors").read_bytes() for task in lora.TASKS]
    assert kept[0] != kept[1]


@pytest.mark.slow
def test_ddp_example_ranks_end_with_equal_model(tmp_path):
    """The example starts torchrun with two processes, and both end with the same model."""
    place, environment = tmp_path / "build" / "two.onnx", {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "ddp_quantize.py"), str(place)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,  # issue 6
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    ranks = sorted(re.findall(r"rank ([01]): (\d+) batches read, weights and scales ([0-9a-f]{16})", done.stdout))
    assert [rank for rank, *_ in ranks] == ["0", "1"], done.stdout
    assert ranks[0][2] == ranks[1][2]
    found = {name: float(share) for name, share in re.findall(r"(float|quantized|QAT) +([\d.]+) %", done.stdout)}
    assert min(found.values()) > 90, done.stdout  # guessing gives 10
    assert found["QAT"] >= found["quantized"] - 1
    assert place.stat().st_size > 5_000  # 24,000 weights of one byte, and less


@pytest.mark.slow
def test_language_model_example_writes_code_with_four_bits(example, tmp_path, capsys, monkeypatch):
    """A decoder is trained on a part of the sources; in 4 bits it takes a fifth of the bytes, and continues a text."""
    generating = example("train_and_generate")
    training, held_out = generating.read_sources()
    assert not set(training) & set(held_out)
    monkeypatch.setattr(generating, "read_sources", lambda: (training[:40], held_out[:2]))
    generating.SIZE = generating.ModelSize(vocabulary=512, width=64, layers=2, steps=60)
    generating.main(tmp_path / "build" / "decoder.onnx")
    out = capsys.readouterr().out
    rows = re.findall(r"^ *(float|4 bits) +([\d.]+) +([\d,]+) KB", out, re.MULTILINE)
    bits = {name: float(found) for name, found, _ in rows}
    sizes = {name: int(size.replace(",", "")) for name, _, size in rows}
    assert bits["float"] < 8, "untrained, each byte takes about 6 bits, and more where it is certain of another one"
    assert abs(bits["4 bits"] - bits["float"]) < 0.2
    assert sizes["4 bits"] < 0.3 * sizes["float"]
    assert out.partition("the file in 4 bits writes:")[2].strip().startswith("def __init__(self, name):")


def test_insert_a_pass_example_replaces_node_in_forty_lines(example, capsys):
    """A custom pass runs between two stages, in at most 40 lines."""
    torch.manual_seed(0)
    inserting = example("insert_a_pass")
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Flatten(), nn.Linear(144, 2)).eval()
    with torch.no_grad():
        inserting.main(model, [torch.randn(4, 3, 8, 8) for _ in range(3)])
    before, behind = capsys.readouterr().out.splitlines()
    assert before.startswith("as it is: 0 of ")
    assert behind.startswith("with Hardswish: 1 of ")
    own, whole = (float(x) for x in re.findall(r"(-?[\d.]+) dB", behind))
    assert own > whole, "integers are nearer to the float graph that they were made of, which is no longer the model"
    source = (EXAMPLES / "insert_a_pass.py").read_text(encoding="utf-8")
    assert count_code_lines(source) <= 40
