"""A level with a check that ends its worker like an error of the suite: with an exit status, without a signal."""

import os

from clika_ref_conformance.cases import Check


def tasks(suite):
    return []


def checks(task, suite):
    return [Check("kill", lambda: os._exit(7))]
