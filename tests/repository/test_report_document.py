"""The code of docs/report.md runs unchanged, and the page names the parts of a report."""

import re
from pathlib import Path

import reported_nets

import clika_ref

DOCUMENT = Path(__file__).parents[2] / "docs/report.md"


def test_the_code_of_the_document_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {name: getattr(clika_ref, name) for name in clika_ref.__all__}
    names |= {"model": reported_nets.Small().eval(), "batches": [reported_nets.X, reported_nets.X[:2]]}
    code = "".join(re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))
    exec(compile(code, str(DOCUMENT), "exec"), names)  # noqa: S102 - it is ours
    assert [row["target"] for row in reported_nets.read_contents(tmp_path / "targets.html")["targets"]] == [
        "openvino",
        "onnxruntime",
        "tensorrt, emulated by ONNX Runtime",
    ]
    assert names["slowest"]["seconds"] > 0


def test_the_parts_of_the_document_are_those_of_the_page():
    page = (Path(__file__).parents[2] / "plugins/visualize/clika_ref_visualize/report/assets/report.html").read_text(
        encoding="utf-8"
    )
    told = re.findall(r"^\| ([A-Z][\w ]+) \| ", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert told == re.findall(r'data-title="([\w ]+)"', page)
