"""Invalid samples that replace those of an operator in every process of a run."""

import random

import numpy as np
import torch

from clika_ref.core.samples import Descriptions

SOURCES = {
    "random": lambda: random.choice([1.0, 2.0, 3.0, 4.0, 5.0]),
    "torch": lambda: float(torch.rand(())),
    "numpy": lambda: float(np.random.rand()),  # noqa: NPY002 - that is the point
}


def put_bad_sampler(suite, argument):
    """Give an operator bad samples; ``argument`` is its name and the fault: ``celu raises``."""
    name, _, fault = argument.partition(" ")
    suite.registry.operators[name].sampler = raise_error if fault == "raises" else make_unseeded_sampler(SOURCES[fault])
    return suite


def raise_error(draw, s: Descriptions):
    """Divide by zero."""
    return s.call(draw(s.tensor()), alpha=1 // 0)


def make_unseeded_sampler(source):
    """Return samples that take a number from a generator of the whole process."""

    def sample(draw, s: Descriptions):
        return s.call(draw(s.tensor(dtype=(torch.float32,))), alpha=source())

    return sample
