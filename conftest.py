"""Lets tests import torchvision, which timm and transformers do, where torch was built without CUDA."""

import os

from clika_ref_torchvision.kernels import use_python_kernels

os.environ.setdefault("MKL_CBWR", "AUTO")  # MKL else rounds by where operands lie in memory: equal calls would differ
use_python_kernels()
