"""Python's logging: each message has the logger of its module, and nothing is printed twice."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import clika_ref
from clika_ref import clika_compile
from clika_ref.reporting.log import CompilationLog

X = [torch.zeros(1, 4), torch.zeros(2, 4)]


@pytest.fixture
def records(caplog, monkeypatch):
    """Compile a small model; return the log records of all levels."""
    monkeypatch.setenv("CLIKA_REF_QUIET", "1")
    with caplog.at_level(logging.DEBUG, logger="clika_ref"):
        clika_compile(nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval(), tracing_inputs=X)
    return [record for record in caplog.records if record.name.startswith("clika_ref")]


def test_logging_records_named_after_calling_module(records):
    """Each log record has the name of the module that logs it."""
    assert records
    for record in records:
        package = Path(clika_ref.__file__).parents[1]
        path = Path(record.pathname).relative_to(package).with_suffix("")
        assert record.name == ".".join(path.parts)
        assert record.name != "clika_ref.reporting.log"
    assert len({record.name for record in records}) > 1


def test_logging_stages_at_info_details_at_debug(records):
    """Stages are logged at INFO, details at DEBUG."""
    told = [record.getMessage().split()[0] for record in records if record.levelno == logging.INFO]
    assert [word for word in told if word in ("Capturing", "Cleaning", "Wrapping")] == [
        "Capturing",
        "Cleaning",
        "Wrapping",
    ]
    assert any(record.levelno == logging.DEBUG for record in records)


def test_logging_warning_has_level_and_caller(caplog, monkeypatch):
    """A warning of the log is a WARNING record with the caller's file."""
    monkeypatch.setenv("CLIKA_REF_QUIET", "1")
    with CompilationLog.open(None) as log, caplog.at_level(logging.DEBUG, logger=__name__):
        log.warning("100% of them")
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [(__name__, "WARNING", "100% of them")]
    assert Path(caplog.records[0].pathname) == Path(__file__)


@pytest.mark.slow
def test_logging_without_handler_printed_once():
    """A message without a handler is printed once."""
    code = (
        "from clika_ref.reporting.log import CompilationLog\n"
        "__name__ = 'clika_ref.pipeline'  # the module of the message\n"
        "CompilationLog.open(None).warning('odd weights')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout + done.stderr).count("odd weights") == 1


def test_compilation_log_file_contains_each_line_once(tmp_path):
    """The file contains each line once."""
    with CompilationLog.open(tmp_path, console=False) as log:
        log.show("said")
        log.warning("warned")
        log.detail("detailed")
        with log.stage("Working") as stage:
            stage.done("worked")
    text = log.path.read_text(encoding="utf-8")
    assert [text.count(word) for word in ("said", "warned", "detailed", "worked", "Done Working")] == [1] * 5
