"""The log of a compilation: what the file holds, what the console shows, and what failures leave."""

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

LINE = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] ")


@pytest.fixture(autouse=True)
def audible(monkeypatch):
    """Tests see the console whatever the environment of the tests says."""
    monkeypatch.delenv("CLIKA_REF_QUIET", raising=False)


def terminal() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=True, width=100, soft_wrap=True, color_system="standard"), stream


def wait_for(text: str, stream: io.StringIO) -> None:
    """Wait until a terminal shows a text; 10 s is for a machine that is asleep, a refresh takes 0.25 s."""
    deadline = time.monotonic() + 10
    while text not in stream.getvalue():
        assert time.monotonic() < deadline, f"{text!r} never appeared in {stream.getvalue()!r}"
        time.sleep(0.01)


def texts(log: CompilationLog) -> list[str]:
    """The lines of a closed log, without their times, which each line must have."""
    lines = log.path.read_text(encoding="utf-8").splitlines()
    assert all(LINE.match(line) for line in lines), lines
    return [LINE.sub("", line) for line in lines]


def test_the_file_is_named_after_the_time_without_colons_and_its_folder_is_made(tmp_path):
    with CompilationLog.open(tmp_path / "a" / "b", console=False) as log:
        pass
    assert log.path.parent == tmp_path / "a" / "b"
    assert re.fullmatch(r"clika_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d\.\d{6}\.log", log.path.name)


def test_every_line_bears_the_time_of_the_system_clock(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 86400.0 * 365)
    with CompilationLog.open(str(tmp_path), console=False) as log:
        log.detail("one\ntwo")
    stamp = time.strftime("[%Y-%m-%d %H:%M:%S]", time.localtime(86400 * 365))
    assert log.path.read_text() == f"{stamp} one\n{stamp} two\n"


def test_two_logs_of_one_microsecond_are_two_files(tmp_path, monkeypatch):
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
def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(tmp_path, folder):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ModelError, match=r"cannot write a log into logs_dir '.*file.*': .+; give a folder .*=None for no"
    ):
        CompilationLog.open(tmp_path / folder)


def test_without_a_folder_there_is_no_file_and_everything_else_works(capsys):
    with CompilationLog.open(None) as log, log.stage("capture") as stage:
        log.detail("nobody reads this")
        stage.done("1,018 calls")
    assert log.path is None
    err = capsys.readouterr().err
    assert re.fullmatch(r"capture +(< 1|\d+) ms  1,018 calls\n", err), err


def test_what_is_said_goes_to_both_what_is_detail_to_the_file_only(tmp_path, capsys):
    with CompilationLog.open(tmp_path) as log:
        log.detail("detail")
        log.say("said of float32[b, 3] and [bold]")
        log.warning("odd")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"Created log at: {log.path}\nsaid of float32[b, 3] and [bold]\nWarning: odd\n"
    assert texts(log) == ["detail", "said of float32[b, 3] and [bold]", "Warning: odd"]


def test_a_warning_is_yellow_on_a_terminal():
    console, stream = terminal()
    CompilationLog(console=console).warning("odd")
    assert stream.getvalue() == "\x1b[33mWarning: odd\x1b[0m\n"


@pytest.mark.parametrize(("value", "quiet"), [("1", True), ("0", False), ("", False)])
def test_the_environment_silences_the_console_but_not_the_file(tmp_path, capsys, monkeypatch, value, quiet):
    monkeypatch.setenv("CLIKA_REF_QUIET", value)
    with CompilationLog.open(tmp_path) as log:
        log.say("said")
    assert (capsys.readouterr().err == "") is quiet
    assert texts(log) == ["said"]


def test_console_false_silences_it_too(tmp_path, capsys):
    with CompilationLog.open(tmp_path, console=False) as log, log.stage("capture"):
        log.warning("odd")
    assert capsys.readouterr() == ("", "")


def test_the_header_has_the_versions_and_the_settings_in_the_form_of_the_record(tmp_path):
    with CompilationLog.open(tmp_path, console=False) as log:
        log.write_header(
            {"Deployment Settings": {"target_framework": "ONNX Runtime", "opset": None}, "Run": {"seed": 3}}
        )
    lines = texts(log)
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


def test_stages_are_timed_in_the_order_in_which_they_began_and_summed(tmp_path, monkeypatch):
    clock = iter([0.0, 1.0, 3.5, 4.0, 10.0, 12.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with CompilationLog.open(tmp_path, console=False) as log:
        with log.stage("export"), log.stage("emit") as inner:
            inner.done("7 nodes")
        with log.stage("emit"):
            pass
    assert log.timings == {"export": 4.0, "emit": 4.5}
    assert list(log.timings) == ["export", "emit"]
    assert texts(log) == [
        "Starting export",
        "Starting emit",
        "7 nodes",
        "Done emit in 2.50 s",
        "Done export in 4.00 s",
        "Starting emit",
        "Done emit in 2.00 s",
    ]


def test_warnings_are_kept_in_order_with_a_file_or_without():
    log = CompilationLog()
    log.warning("the first")
    log.say("no warning")
    log.warning("the second")
    assert log.warnings == ["the first", "the second"]


def test_the_file_is_on_disk_when_a_stage_ends(tmp_path):
    log = CompilationLog.open(tmp_path, console=False)
    with log.stage("capture"):
        log.detail("detail")
        assert log.path.read_text() == ""  # buffered: lines are cheap
    assert "detail\n" in log.path.read_text()
    log.close()


def test_a_failure_is_written_once_with_its_traceback_and_passes_on(tmp_path, capsys):
    message = "the fault"
    with (
        pytest.raises(ZeroDivisionError, match=message),
        CompilationLog.open(tmp_path) as log,
        log.stage("compile"),
        log.stage("capture"),
    ):
        raise ZeroDivisionError(message)
    lines = texts(log)
    assert lines.count("Traceback (most recent call last):") == 1
    assert lines.count("ZeroDivisionError: the fault") == 1
    assert [line.split(" after ")[0] for line in lines if " after " in line] == ["Failed capture", "Failed compile"]
    assert list(log.timings) == ["compile", "capture"]
    assert re.search(r"capture +.* m?s  failed\n", capsys.readouterr().err)


def test_a_second_failure_is_written_even_if_the_first_was_survived(tmp_path):
    with CompilationLog.open(tmp_path, console=False) as log:
        for number in (1, 2):
            with pytest.raises(ValueError, match="fault"), log.stage("trace"):
                raise ValueError(f"fault {number}")
    assert [line for line in texts(log) if line.startswith("ValueError")] == [
        "ValueError: fault 1",
        "ValueError: fault 2",
    ]


def test_a_failure_between_stages_is_written_as_well(tmp_path):
    with pytest.raises(ValueError, match="between"), CompilationLog.open(tmp_path, console=False) as log:
        raise ValueError("between")
    assert texts(log)[-1] == "ValueError: between"


def test_an_interrupt_leaves_a_clean_terminal_and_a_line(tmp_path):
    console, stream = terminal()
    log = CompilationLog(console=console)
    with pytest.raises(KeyboardInterrupt), log.stage("capture"):
        raise KeyboardInterrupt
    shown = stream.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back
    assert re.search(r"capture +.* m?s  interrupted", shown)


def test_a_terminal_shows_a_spinner_with_the_latest_text_and_keeps_one_line():
    console, stream = terminal()
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


def test_print_inside_a_stage_reaches_a_stdout_that_is_no_terminal(capsys):
    console, stream = terminal()
    with CompilationLog(console=console).stage("capture"):
        print("from forward")  # noqa: T201 - as a user's forward does
    assert capsys.readouterr().out == "from forward\n"
    assert "from forward" not in stream.getvalue()


def test_a_line_aligns_stage_time_and_text():
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


def test_removals_are_one_line_for_each_run_in_the_file_and_one_in_all_on_the_console(tmp_path, capsys):
    nodes, dropout = "unnecessary nodes", "Dropout layers"
    reports = [
        PassReport("remove-dead-nodes", 1072, nodes, 0.1, changed=True),
        PassReport("remove-dropout", 37, dropout, 0.1, changed=True),
        PassReport("remove-dead-nodes", 1, nodes, 0.1, changed=True),
        PassReport("remove-dropout", 0, dropout, 0.1, changed=False),
        PassReport("decompose", -4, nodes, 0.1, changed=True),
    ]
    with CompilationLog.open(tmp_path) as log:
        log.removed(reports)
        log.removed(reports[3:])
    assert texts(log) == [
        "Removed 1072 unnecessary nodes (remove-dead-nodes)",
        "Removed 37 Dropout layers (remove-dropout)",
        "Removed 1 unnecessary nodes (remove-dead-nodes)",
    ]
    _, *removed = capsys.readouterr().err.splitlines()
    assert removed == ["Removed               1,073 unnecessary nodes, 37 Dropout layers"]


def test_a_log_that_runs_full_ends_with_a_warning_and_the_work_goes_on(capsys):
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
    assert "Warning: the log /dev/full ends here (No space left on device); the compilation goes on without it" in err
    assert err.count("ends here") == 1


def test_a_name_that_no_encoding_knows_does_not_end_the_compilation(tmp_path):
    with CompilationLog.open(tmp_path, console=False) as log:
        log.detail("layer \ud800")
    assert texts(log) == ["layer \\ud800"]


def test_a_detail_costs_one_write_into_a_buffer(tmp_path, monkeypatch):
    formatted = []
    strftime = time.strftime
    monkeypatch.setattr(time, "strftime", lambda *args: formatted.append(1) or strftime(*args))
    with CompilationLog.open(tmp_path, console=False) as log:
        started = time.time()
        for index in range(1000):
            log.detail(f"{index}/1000. Parsing node: 'x'")
        assert log.path.stat().st_size == 0
        assert len(formatted) <= time.time() - started + 2  # once a second


def test_the_live_thread_ends_with_the_last_stage():
    console, _ = terminal()
    log = CompilationLog(console=console)
    before = set(threading.enumerate())
    with log.stage("capture"):
        (thread,) = set(threading.enumerate()) - before
    thread.join(timeout=10)
    assert not thread.is_alive()


@pytest.mark.slow
def test_a_real_interrupt_during_a_stage_ends_the_program_with_the_log_closed(tmp_path):
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
