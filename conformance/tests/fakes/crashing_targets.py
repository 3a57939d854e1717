"""Targets that end or stop their process."""

import fcntl
import os
import signal
import time
from pathlib import Path

from clika_ref_conformance.targets.identity import Identity


class Crashing(Identity):
    """Eager, with a fault of this kind on inputs of more than two elements."""

    def load(self, artifact):
        right = super().load(artifact)

        def run(inputs):
            if inputs[0].numel() > 2:
                self.die()
            return right(inputs)

        return run

    def die(self):
        os.kill(os.getpid(), signal.SIGSEGV)


class Sleepy(Crashing):
    def die(self):
        time.sleep(1000)


class Orphaning(Crashing):
    """Leave a child process with the open files of this one; it writes a marker file if nothing ends it."""

    def die(self):
        if os.fork() == 0:
            time.sleep(20)
            Path(os.environ["MARKS_FOLDER"], "lived").touch()
            os._exit(0)
        super().die()


class Leaving(Crashing):
    def die(self):
        os._exit(0)


class Doubtful(Identity):
    """Never return whether a node is supported."""

    def unsupported_reason(self, node):
        time.sleep(1000)


class Greedy(Crashing):
    """Takes all the memory that it may, and ends as a runtime in C++ does."""

    def die(self):
        taken = []
        try:
            while True:
                taken.append(bytearray(50_000_000))
        except MemoryError:
            os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
            os.abort()


class Stuck(Identity):
    """Never finish compiling, and write the path of the output folder to a file."""

    def compile(self, graph, path, **options):
        with Path(os.environ["MARKS_FOLDER"], "lock").open("w") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_SH)
            print(path, file=lock_file, flush=True)
            time.sleep(200)


class Fatal(Identity):
    """End the process while compiling."""

    def compile(self, graph, path, **options):
        os.kill(os.getpid(), signal.SIGSEGV)
