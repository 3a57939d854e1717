"""The log of a compilation: the content of the file, the console output, and the log after a failure."""

import io
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from clika_ref.core.errors import ModelError
from clika_ref.core.passes import PassReport
from clika_ref.reporting.log import CompilationLog, format_stage_line

pytestmark = pytest.mark.usefixtures("_console_output")

LINE = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] ")


def make_terminal() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=True, width=100, soft_wrap=True, color_system="standard"), stream


def wait_for(text: str, stream: io.StringIO) -> None:
    """Wait until a terminal shows a text; 10 s is for a machine that is asleep, a refresh takes 0.25 s."""
    deadline = time.monotonic() + 10
    while text not in stream.getvalue():
        assert time.monotonic() < deadline, f"{text!r} never appeared in {stream.getvalue()!r}"
        time.sleep(0.01)


def read_texts(log: CompilationLog) -> list[str]:
    """Return the lines of a closed log without their times, which each line must have."""
    lines = log.path.read_text(encoding="utf-8").splitlines()
    assert all(LINE.match(line) for line in lines), lines
    return [LINE.sub("", line) for line in lines]


def test_compilation_log_open_creates_folder_and_file_name(tmp_path):
    """The file is named after the time without colons, and its folder is created."""
    with CompilationLog.open(tmp_path / "a" / "b", console=False) as log:
        pass
    assert log.path.parent == tmp_path / "a" / "b"
    assert re.fullmatch(r"clika_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d\.\d{6}\.log", log.path.name)


def test_compilation_log_lines_start_with_system_time(tmp_path, monkeypatch):
    """Every line starts with the system time."""
    monkeypatch.setattr(time, "time", lambda: 86400.0 * 365)
    with CompilationLog.open(str(tmp_path), console=False) as log:
        log.detail("one\ntwo")
    stamp = time.strftime("[%Y-%m-%d %H:%M:%S]", time.localtime(86400 * 365))
    assert log.path.read_text() == f"{stamp} one\n{stamp} two\n"


def test_compilation_log_same_microsecond_gets_other_file(tmp_path, monkeypatch):
    """Two logs of the same microsecond get two files."""
    with CompilationLog.open(tmp_path, console=False) as first:
        pass
    names = iter([first.path.name, first.path.name, "another.log"])

    class Clock:
        @staticmethod
        def now():
            return Clock()

        def astimezone(self):
            return self

        def __format__(self, spec):
            return next(names).removeprefix("clika_").removesuffix(".log")

    monkeypatch.setattr("clika_ref.reporting.log.dt.datetime", Clock)
    with CompilationLog.open(tmp_path, console=False) as second:
        assert second.path.name == "clika_another.log"


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_compilation_log_unwritable_folder_raises(tmp_path, folder):
    """A folder that cannot be written is named in the error, with the remedy."""
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ModelError, match=r"cannot write a log into logs_dir '.*file.*': .+. Give a folder .*=None for no"
    ):
        CompilationLog.open(tmp_path / folder)


def test_compilation_log_without_folder_prints_only(capsys):
    """Without a folder, no file is written and the console output works."""
    with CompilationLog.open(None) as log, log.stage("capture") as stage:
        log.detail("nobody reads this")
        stage.done("1,018 calls")
    assert log.path is None
    err = capsys.readouterr().err
    assert re.fullmatch(r"capture +(< 1|\d+) ms  1,018 calls\n", err), err


def test_compilation_log_messages_to_both_details_to_file(tmp_path, capsys):
    """Messages go to the console and the file; details go to the file only."""
    with CompilationLog.open(tmp_path) as log:
        log.detail("detail")
        log.show("output is float32[b, 3] and [bold]")
        log.warning("odd")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"Created log at: {log.path}\noutput is float32[b, 3] and [bold]\nWarning: odd\n"
    assert read_texts(log) == ["detail", "output is float32[b, 3] and [bold]", "Warning: odd"]


def test_compilation_log_warning_yellow_on_terminal():
    """A warning is yellow on a terminal."""
    console, stream = make_terminal()
    CompilationLog(console=console).warning("odd")
    assert stream.getvalue() == "\x1b[33mWarning: odd\x1b[0m\n"


@pytest.mark.parametrize(("value", "quiet"), [("1", True), ("0", False), ("", False)])
def test_compilation_log_quiet_variable_silences_console(tmp_path, capsys, monkeypatch, value, quiet):
    """`CLIKA_REF_QUIET` silences the console, but not the file."""
    monkeypatch.setenv("CLIKA_REF_QUIET", value)
    with CompilationLog.open(tmp_path) as log:
        log.show("said")
    assert (capsys.readouterr().err == "") is quiet
    assert read_texts(log) == ["said"]


def test_compilation_log_console_false_silences_console(tmp_path, capsys):
    """`console=False` silences the console."""
    with CompilationLog.open(tmp_path, console=False) as log, log.stage("capture"):
        log.warning("odd")
    assert capsys.readouterr() == ("", "")


def test_write_header_lists_versions_and_settings(tmp_path):
    """The header lists versions and settings in the format of clika-ace."""
    with CompilationLog.open(tmp_path, console=False) as log:
        log.write_header(
            {"Deployment Settings": {"target_framework": "ONNX Runtime", "opset": None}, "Run": {"seed": 3}}
        )
    lines = read_texts(log)
    assert re.fullmatch(r"clika-ref Version: \d+\.\d+\.\d+", lines[0])
    assert lines[1] == f"'torch' Version: {torch.__version__}"
    assert lines[2].startswith(f"Python Version: {sys.version.split()[0]} (")
    assert lines[3:] == [
        "",
        "Deployment Settings:",
        "+ target_framework = ONNX Runtime",
        "+ opset = None",
        "",
        "Run:",
        "+ seed = 3",
        "",
    ]


def test_compilation_log_stage_timings_ordered_and_summed(tmp_path, monkeypatch):
    """Stages are timed in their order, and repeated stages are summed."""
    clock = iter([0.0, 1.0, 3.5, 4.0, 10.0, 12.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with CompilationLog.open(tmp_path, console=False) as log:
        with log.stage("export"), log.stage("emit") as inner:
            inner.done("7 nodes")
        with log.stage("emit"):
            pass
    assert log.timings == {"export": 4.0, "emit": 4.5}
    assert list(log.timings) == ["export", "emit"]
    assert read_texts(log) == [
        "Starting export",
        "Starting emit",
        "7 nodes",
        "Done emit in 2.50 s",
        "Done export in 4.00 s",
        "Starting emit",
        "Done emit in 2.00 s",
    ]


def test_compilation_log_warnings_kept_in_order():
    """Warnings are kept in order, also without a file."""
    log = CompilationLog()
    log.warning("the first")
    log.show("no warning")
    log.warning("the second")
    assert log.warnings == ["the first", "the second"]


def test_compilation_log_flushed_at_end_of_stage(tmp_path):
    """The file is flushed at the end of a stage."""
    log = CompilationLog.open(tmp_path, console=False)
    with log.stage("capture"):
        log.detail("detail")
        assert log.path.read_text() == ""  # buffered: lines are cheap
    assert "detail\n" in log.path.read_text()
    log.close()


def test_compilation_log_failure_written_once_and_raised(tmp_path, capsys):
    """A failure is written once, with its traceback, and raised again."""
    message = "the fault"
    with (
        pytest.raises(ZeroDivisionError, match=message),
        CompilationLog.open(tmp_path) as log,
        log.stage("compile"),
        log.stage("capture"),
    ):
        raise ZeroDivisionError(message)
    lines = read_texts(log)
    assert lines.count("Traceback (most recent call last):") == 1
    assert lines.count("ZeroDivisionError: the fault") == 1
    assert [line.split(" after ")[0] for line in lines if " after " in line] == ["Failed capture", "Failed compile"]
    assert list(log.timings) == ["compile", "capture"]
    assert re.search(r"capture +.* m?s  failed\n", capsys.readouterr().err)


def test_compilation_log_second_failure_written_too(tmp_path):
    """A second failure is written even if the first one was caught."""
    with CompilationLog.open(tmp_path, console=False) as log:
        for number in (1, 2):
            with pytest.raises(ValueError, match="fault"), log.stage("trace"):
                raise ValueError(f"fault {number}")
    assert [line for line in read_texts(log) if line.startswith("ValueError")] == [
        "ValueError: fault 1",
        "ValueError: fault 2",
    ]


def test_compilation_log_failure_between_stages_written(tmp_path):
    """A failure outside of a stage is written."""
    with pytest.raises(ValueError, match="between"), CompilationLog.open(tmp_path, console=False) as log:
        raise ValueError("between")
    assert read_texts(log)[-1] == "ValueError: between"


def test_compilation_log_interrupt_restores_terminal(tmp_path):
    """An interrupt restores the cursor and leaves one line."""
    console, stream = make_terminal()
    log = CompilationLog(console=console)
    with pytest.raises(KeyboardInterrupt), log.stage("capture"):
        raise KeyboardInterrupt
    shown = stream.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back
    assert re.search(r"capture +.* m?s  interrupted", shown)


def test_compilation_log_terminal_shows_spinner_and_one_line():
    """A terminal shows a spinner with the latest text, and one line remains."""
    console, stream = make_terminal()
    log = CompilationLog(console=console)
    with log.stage("capture") as stage:
        stage.update("layer 3 of 12")
        wait_for("layer 3 of 12", stream)
        with log.stage("trace"):  # nested: one moving line, for the innermost
            wait_for("trace", stream)
        stage.done("1,018 calls")
    moving, kept = stream.getvalue().split("\x1b[?25h")
    assert re.search(r"[⠋-⠿].*capture +[\d.]+ m?s  layer 3 of 12", moving)
    assert re.search(r"[⠋-⠿].*trace +", moving)
    assert re.search(r"capture +[\d.]+ m?s  1,018 calls", kept)
    assert kept.startswith("\r\x1b[1A\x1b[2K"), "the moving line is not wiped away"
    assert "layer 3" not in kept


def test_compilation_log_print_in_stage_reaches_stdout(capsys):
    """`print` inside a stage reaches a stdout that is no terminal."""
    console, stream = make_terminal()
    with CompilationLog(console=console).stage("capture"):
        print("from forward")  # noqa: T201 - as a user's forward does
    assert capsys.readouterr().out == "from forward\n"
    assert "from forward" not in stream.getvalue()


def test_format_stage_line_aligns_columns():
    """A line aligns stage, time and text."""
    lines = [
        format_stage_line("Capturing", "1,018 calls", 2.41),
        format_stage_line("Comparing", "", 0.01),
        format_stage_line("Removed", "7 nodes"),
    ]
    assert lines == [
        "Capturing      2.4 s  1,018 calls",
        "Comparing      10 ms",
        "Removed               7 nodes",
    ]


def test_compilation_log_removals_per_pass_in_file(tmp_path, capsys):
    """The file has one line for each run of a pass; the console has one line in total."""
    nodes, dropout = "unnecessary node", "Dropout layer"
    reports = [
        PassReport("remove-dead-nodes", 1072, nodes, 0.1, changed=True),
        PassReport("remove-dropout", 37, dropout, 0.1, changed=True),
        PassReport("remove-dead-nodes", 1, nodes, 0.1, changed=True),
        PassReport("remove-dropout", 0, dropout, 0.1, changed=False),
        PassReport("decompose", -4, nodes, 0.1, changed=True),
    ]
    with CompilationLog.open(tmp_path) as log:
        log.report_removals(reports)
        log.report_removals(reports[3:])
    assert read_texts(log) == [
        "Removed 1,072 unnecessary nodes (remove-dead-nodes)",
        "Removed 37 Dropout layers (remove-dropout)",
        "Removed 1 unnecessary node (remove-dead-nodes)",
    ]
    _, *removed = capsys.readouterr().err.splitlines()
    assert removed == ["Removed               1,073 unnecessary nodes, 37 Dropout layers"]


def test_compilation_log_full_disk_ends_log_with_warning(capsys):
    """A log on a full disk ends with a warning, and the compilation continues."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full on this system")
    console = Console(stderr=True, soft_wrap=True)
    log = CompilationLog(full, full.open("w"), console)
    with log, log.stage("capture"):
        log.detail("x" * 100_000)
        log.detail("more")
    log.detail("after the end")
    err = capsys.readouterr().err
    assert "Warning: the log /dev/full ends here: No space left on device. The compilation continues without it" in err
    assert err.count("ends here") == 1


def test_compilation_log_unencodable_name_escaped(tmp_path):
    """A name that cannot be encoded is escaped."""
    with CompilationLog.open(tmp_path, console=False) as log:
        log.detail("layer \ud800")
    assert read_texts(log) == ["layer \\ud800"]


def test_compilation_log_detail_buffered(tmp_path, monkeypatch):
    """A detail is only buffered, and the time is formatted once per second."""
    formatted = []
    strftime = time.strftime
    monkeypatch.setattr(time, "strftime", lambda *args: formatted.append(1) or strftime(*args))
    with CompilationLog.open(tmp_path, console=False) as log:
        started = time.time()
        for index in range(1000):
            log.detail(f"{index}/1000. Parsing node: 'x'")
        assert log.path.stat().st_size == 0
        assert len(formatted) <= time.time() - started + 2  # once a second


def test_compilation_log_live_thread_ends_with_stage():
    """The refresh thread ends with the last stage."""
    console, _ = make_terminal()
    log = CompilationLog(console=console)
    before = set(threading.enumerate())
    with log.stage("capture"):
        (thread,) = set(threading.enumerate()) - before
    thread.join(timeout=10)
    assert not thread.is_alive()


@pytest.mark.slow
def test_compilation_log_real_interrupt_closes_file(tmp_path):
    """An interrupt signal during a stage ends the program with a complete log."""
    code = (
        "import os, signal, sys, time\n"
        "from clika_ref.reporting.log import CompilationLog\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell in the background ignores it
        "with CompilationLog.open(sys.argv[1]) as log, log.stage('capture'):\n"
        "    log.detail('before')\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert "KeyboardInterrupt" in done.stderr
    assert "  interrupted" in done.stderr
    (path,) = tmp_path.iterdir()
    assert "before" in path.read_text()
    assert "Interrupted capture after" in path.read_text()
