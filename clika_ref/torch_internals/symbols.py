"""Symbolic sizes: PyTorch's sympy functions, the expression of a size, and the configuration of symbols."""

# pyright: reportPrivateUsage=false, reportMissingTypeStubs=false

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx.experimental import _config as symbol_config
from torch.utils._sympy import functions as torch_sympy
from torch.utils._sympy.functions import CeilToInt as CeilToInt
from torch.utils._sympy.functions import FloatTrueDiv as FloatTrueDiv
from torch.utils._sympy.functions import FloorDiv as FloorDiv
from torch.utils._sympy.functions import Min as Min
from torch.utils._sympy.functions import Mod as Mod
from torch.utils._sympy.functions import PythonMod as PythonMod
from torch.utils._sympy.functions import ToFloat as ToFloat
from torch.utils._sympy.functions import TruncToInt as TruncToInt
from torch.utils._sympy.symbol import SymT, symbol_is_type

check: Any = torch._check
"""Declares a relation between sizes during a trace; documented by PyTorch."""


def get_raw_expression(size: torch.SymInt) -> Any:
    """Return the expression of a size before the replacements that the tracer found: a symbol, mostly."""
    return size.node._expr


def is_data_dependent(symbol: sympy.Symbol) -> bool:
    """Return whether a symbol stands for a whole number that depends on the elements of tensors."""
    return symbol_is_type(symbol, SymT.UNBACKED_INT)


__all__ = [
    "CeilToInt",
    "FloatTrueDiv",
    "FloorDiv",
    "Min",
    "Mod",
    "PythonMod",
    "ToFloat",
    "TruncToInt",
    "check",
    "get_raw_expression",
    "is_data_dependent",
    "symbol_config",
    "torch_sympy",
]
