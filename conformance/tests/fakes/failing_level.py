"""A level whose check ends its worker as a fault of the suite does: with an exit status, not by a signal."""

import os

from clika_ref_conformance.cases import Check


def tasks(suite):
    return []


def checks(task, suite):
    return [Check("kill", lambda: os._exit(7))]
