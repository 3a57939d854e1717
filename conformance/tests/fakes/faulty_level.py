"""A level whose checks do what targets do at their worst; the subject of a task says which."""

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
    return [Task("odd", subject) for subject in SUBJECTS]


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
        return [Check("first", hoards), Check("middle", takes_room), Check("last", hoards)]
    middle = f"{os.getpid()}" if task.subject == "unsure" else "middle"
    act = {"unsure": "exit", "planned-twice": "fine"}.get(task.subject, task.subject)
    return [Check("first", passes), Check(middle, ACTS[act]), Check("last", passes)]


def passes():
    return Outcome("", Comparison(Verdict.PASS))


def fills_memory():
    kept = [torch.ones(2**26) for _ in range(100)]
    return Outcome(str(len(kept)), Comparison(Verdict.PASS))


KEPT = []


def hoards():
    while True:
        KEPT.append(torch.empty(2**26))  # bytes are counted that nothing has touched, too


def takes_room():
    return passes() if torch.empty(2**27).numel() else fails()


def reserves():
    """Reserve addresses as GPU runtimes and arenas do: far more than there is memory, and none that is writable."""
    mmap.mmap(-1, 64 * 2**30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ).close()
    return passes()


def flushes():
    assert torch.set_flush_denormal(True)
    return passes()


def sets_dtype():
    torch.set_default_dtype(torch.float64)
    return flushes()


def prints():
    os.write(1, b"not for the channel\n")
    print("nor this")  # noqa: T201 - that is the point
    sys.stdout.flush()
    return passes()


def raises():
    raise RuntimeError("a check that raises")


def interrupts():
    raise KeyboardInterrupt


def dies_of_a_signal():
    os.kill(os.getpid(), signal.SIGSEGV)


def kills_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def doubles():
    """Fork off a process that raises, and wait for it."""
    number = os.fork()
    if not number:
        raises()
    os.waitpid(number, 0)
    return passes()


def forks(then=passes):
    """Leave a process behind that holds all that is open here; it leaves a mark where nobody ends it."""
    marks = Path(os.environ["ODD_MARKS"])
    if os.fork() == 0:
        with (marks / "held").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_SH)
            time.sleep(30)
            (marks / "lived").touch()
        os._exit(0)
    return then()


def fails():
    return Outcome("", Comparison(Verdict.VALUE))


ALWAYS = {"fails-always": fails, "dies-always": lambda: os._exit(3)}
ACTS = {
    "fine": passes,
    "exit": lambda: os._exit(3),
    "segfault": dies_of_a_signal,
    "kills-itself": kills_itself,
    "hang": lambda: time.sleep(1000),
    "memory": fills_memory,
    "raise": raises,
    "interrupts": interrupts,
    "leaves": sys.exit,
    "flush": flushes,
    "dtype": sets_dtype,
    "print": prints,
    "roomy": takes_room,
    "reserves": reserves,
    "doubles": doubles,
    "helper-left": forks,
    "helper-stuck": lambda: forks(lambda: time.sleep(1000)),
    "helper-orphaned": lambda: forks(lambda: os._exit(3)),
}
