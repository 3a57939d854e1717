"""A level with checks that crash, hang or print; the subject of a task selects the behavior."""

import fcntl
import mmap
import os
import signal
import sys
import time
from pathlib import Path

import torch
from clika_ref_conformance.cases import Check, Outcome, Task
from clika_ref_conformance.verdicts import Comparison, Verdict

SUBJECTS = (
    "fine",
    "exit",
    "segfault",
    "kills-itself",
    "hang",
    "memory",
    "raise",
    "interrupts",
    "leaves",
    "flush",
    "dtype",
    "print",
    "plan-raises",
    "plan-dies",
    "plan-interrupts",
    "planned-twice",
    "unsure",
    "hoards",
    "roomy",
    "reserves",
    "doubles",
    "helper-left",
    "helper-stuck",
    "helper-orphaned",
    "fails-always",
    "dies-always",
)


def tasks(suite):
    return [Task("faulty", subject) for subject in SUBJECTS]


def checks(task, suite):
    if task.subject == "plan-raises":
        raise ValueError("the sampler is broken")
    if task.subject == "plan-interrupts":
        raise KeyboardInterrupt
    if task.subject == "plan-dies":
        os._exit(7)
    mark = suite.folder.parent / "killed"
    if task.subject == "planned-twice" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if task.subject in ALWAYS:
        return [Check(f"check-{i}", ALWAYS[task.subject]) for i in range(4)]
    if task.subject == "hoards":
        return [
            Check("first", allocate_until_out_of_memory),
            Check("middle", allocate_tensor),
            Check("last", allocate_until_out_of_memory),
        ]
    middle = f"{os.getpid()}" if task.subject == "unsure" else "middle"
    act = {"unsure": "exit", "planned-twice": "fine"}.get(task.subject, task.subject)
    return [Check("first", return_pass), Check(middle, ACTS[act]), Check("last", return_pass)]


def return_pass():
    return Outcome("", Comparison(Verdict.PASS))


def fill_memory():
    kept = [torch.ones(2**26) for _ in range(100)]
    return Outcome(str(len(kept)), Comparison(Verdict.PASS))


KEPT = []


def allocate_until_out_of_memory():
    while True:
        KEPT.append(torch.empty(2**26))  # bytes are counted that nothing has touched, too


def allocate_tensor():
    return return_pass() if torch.empty(2**27).numel() else return_fail()


def reserve_addresses():
    """Reserve addresses as GPU runtimes and arenas do: far more than there is memory, and none that is writable."""
    mmap.mmap(-1, 64 * 2**30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ).close()
    return return_pass()


def set_flush_denormal():
    assert torch.set_flush_denormal(True)
    return return_pass()


def set_default_dtype():
    torch.set_default_dtype(torch.float64)
    return set_flush_denormal()


def print_to_stdout():
    os.write(1, b"not for the channel\n")
    print("nor this")  # noqa: T201 - that is the point
    sys.stdout.flush()
    return return_pass()


def raise_error():
    raise RuntimeError("a check that raises")


def raise_keyboard_interrupt():
    raise KeyboardInterrupt


def die_of_segfault():
    os.kill(os.getpid(), signal.SIGSEGV)


def kill_own_process():
    os.kill(os.getpid(), signal.SIGKILL)


def fork_raising_child():
    """Fork off a process that raises, and wait for it."""
    number = os.fork()
    if not number:
        raise_error()
    os.waitpid(number, 0)
    return return_pass()


def leave_child_process(then=return_pass):
    """Leave a child process with all open files; it writes a marker file if nothing ends it."""
    marks = Path(os.environ["MARKS_FOLDER"])
    if os.fork() == 0:
        with (marks / "lock").open("w") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_SH)
            time.sleep(30)
            (marks / "lived").touch()
        os._exit(0)
    return then()


def return_fail():
    return Outcome("", Comparison(Verdict.VALUE))


ALWAYS = {"fails-always": return_fail, "dies-always": lambda: os._exit(3)}
ACTS = {
    "fine": return_pass,
    "exit": lambda: os._exit(3),
    "segfault": die_of_segfault,
    "kills-itself": kill_own_process,
    "hang": lambda: time.sleep(1000),
    "memory": fill_memory,
    "raise": raise_error,
    "interrupts": raise_keyboard_interrupt,
    "leaves": sys.exit,
    "flush": set_flush_denormal,
    "dtype": set_default_dtype,
    "print": print_to_stdout,
    "roomy": allocate_tensor,
    "reserves": reserve_addresses,
    "doubles": fork_raising_child,
    "helper-left": leave_child_process,
    "helper-stuck": lambda: leave_child_process(lambda: time.sleep(1000)),
    "helper-orphaned": lambda: leave_child_process(lambda: os._exit(3)),
}
