"""Every fenced block of the documents runs unchanged, page by page; exceptions are listed with a reason."""

from collections import Counter
from pathlib import Path

import onnx
import pytest
from fenced_blocks import PAGES, ROOT, RUNNING, SHOWN, WRITTEN, Block, Run, read_blocks, run_page
from warm_process import run_forked

NOT_RUN = {
    ("docs/conformance.md", "clika-ref conformance replay report/cases/NAME.zip"): (
        "NAME stands for a case of the reader's; docs/bring-up-a-target.md replays one"
    ),
}
"""By page and first line: what does not run, and why."""

QUOTED = {"docs/example-plugin.md": "plugins/example/clika_ref_example"}
"""Pages with code that is compared with files of a folder (`test_documents.py`), which have tests of their own."""

ELSEWHERE = {"docs/command-line.md"}
"""Pages with commands that state their exit status; they run in `test_documents.py`."""

INT8_FILES = {"README.md": "quantized.onnx", "docs/training.md": "trained.onnx", "docs/tutorial.md": "digits.onnx"}
"""Pages that promise a quantized file, and its name."""


SLOW_PAGES = {
    "CONTRIBUTING.md",
    "README.md",
    "docs/branches.md",
    "docs/bring-up-a-target.md",
    "docs/checkpoints.md",
    "docs/choosing-a-threshold.md",
    "docs/conformance.md",
    "docs/distributed.md",
    "docs/dynamic-shapes.md",
    "docs/example-plugin.md",
    "docs/from-clika-ace.md",
    "docs/from-nncf.md",
    "docs/from-torch-onnx-export.md",
    "docs/new-plugin.md",
    "docs/partial-graphs.md",
    "docs/pictures.md",
    "docs/report.md",
    "docs/stages.md",
    "docs/targets.md",
    "docs/tasks.md",
    "docs/tutorial.md",
    "docs/write-a-pass.md",
    "docs/write-an-operator.md",
}
"""Pages above 1 s: they run the conformance suite, install packages, or compile several models."""


def is_run(block: Block) -> bool:
    """Whether a block must run."""
    is_quoted = block.page in QUOTED and block.language == "python"
    return not is_quoted and block.page not in ELSEWHERE and (block.page, block.first) not in NOT_RUN


def page_name(page: Path) -> str:
    """Return the path of a page from the root."""
    return page.relative_to(ROOT).as_posix()


@pytest.mark.slow_cases(*SLOW_PAGES)
@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_page_blocks_run_in_order(page, tmp_path, warm_commands):
    """The blocks of a page run in order."""
    blocks = [block for block in read_blocks(page) if is_run(block)]
    if not {block.language for block in blocks} - {"text"}:
        return
    run_forked(run_page, blocks, tmp_path, warm_commands)
    if name := INT8_FILES.get(page_name(page)):
        written = onnx.load(tmp_path / name)
        assert {tensor.data_type for tensor in written.graph.initializer} >= {onnx.TensorProto.INT8}


def test_page_blocks_all_tested_or_listed(capsys):
    """Every block runs, is parsed, is quoted or is listed with a reason."""
    blocks = [block for page in PAGES for block in read_blocks(page)]
    languages = Counter(block.language for block in blocks)
    assert not languages.keys() - {*RUNNING, *WRITTEN, *SHOWN}, "no test knows what to do with one of these languages"
    code = [block for block in blocks if block.language not in SHOWN]
    left_out = [block for block in code if (block.page, block.first) in NOT_RUN]
    assert {(block.page, block.first) for block in left_out} == NOT_RUN.keys(), "remove what is not there any more"
    quoted = [block for block in code if block not in left_out and not is_run(block)]
    with capsys.disabled():
        print(f"\n{len(blocks)} fenced blocks on {len(PAGES)} pages: {dict(languages)}")
        print(f"of {len(code)} of code, {len(quoted)} stand in files that tests run, {len(left_out)} do not run:")
        for block in left_out:
            print(f"  {block.location} {block.first!r}: {NOT_RUN[block.page, block.first]}")


def test_run_wrong_output_fails_with_line(tmp_path):
    """A wrong output fails with the line of its block."""
    run = Run.begin(tmp_path)
    run.take(Block("page.md", 3, "python", "", "print(1 + 1)\n"))
    run.take(Block("page.md", 7, "output", "", "2\n"))
    with pytest.raises(AssertionError, match=r"page\.md:11"):
        run.take(Block("page.md", 11, "output", "", "3\n"))


def test_run_failing_command_fails_page(tmp_path):
    """A failing command fails the page, also if another command follows."""
    run = Run.begin(tmp_path)
    run.take(Block("page.md", 3, "console", "", 'false; echo "exit status $?"\n'))
    assert run.printed == "exit status 1\n"
    with pytest.raises(AssertionError, match=r"(?s)page\.md:7.*failed: false"):
        run.take(Block("page.md", 7, "console", "", "false\ntrue\n"))


def test_run_session_shares_names_with_blocks(tmp_path):
    """A session shares the names of the blocks around it."""
    run = Run.begin(tmp_path)
    run.take(Block("page.md", 3, "python", "", "x = 2\n"))
    run.take(Block("page.md", 7, "python", "", ">>> y = x + 1\n>>> y\n3\n"))
    run.take(Block("page.md", 12, "python", "", "assert y == 3\n"))
    with pytest.raises(AssertionError, match="Expected"):
        run.take(Block("page.md", 15, "python", "", ">>> y\n4\n"))
