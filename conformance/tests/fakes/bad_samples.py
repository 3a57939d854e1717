"""Samples that break their rules, put in place of those of an operator in every process of a run."""

import random

import numpy as np
import torch

from clika_ref.core.samples import Descriptions

SOURCES = {
    "random": lambda: random.choice([1.0, 2.0, 3.0, 4.0, 5.0]),
    "torch": lambda: float(torch.rand(())),
    "numpy": lambda: float(np.random.rand()),  # noqa: NPY002 - that is the point
}


def put(suite, argument):
    """Give an operator bad samples; ``argument`` is its name and what is wrong: ``celu raises``."""
    name, _, fault = argument.partition(" ")
    suite.registry.operators[name].sampler = raising if fault == "raises" else drawing_from(SOURCES[fault])
    return suite


def raising(draw, s: Descriptions):
    """Divide by zero."""
    return s.call(draw(s.tensor()), alpha=1 // 0)


def drawing_from(source):
    """Return samples that take a number from a generator of the whole process."""

    def sample(draw, s: Descriptions):
        return s.call(draw(s.tensor(dtype=(torch.float32,))), alpha=source())

    return sample
