"""All seeded mutants, collected from every module of this package with a catalogue."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path

from clika_ref_conformance.mutants.seeding import Catalogue, Mutant


@cache
def load_mutants() -> dict[str, Mutant]:
    """Return the mutants by name."""
    here = __name__.rpartition(".")[0]
    names = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    modules = [importlib.import_module(f"{here}.{name}") for name in names]
    found = {id(item): item for module in modules for item in vars(module).values() if isinstance(item, Catalogue)}
    return {mutant.name: mutant for catalogue in found.values() for mutant in catalogue.mutants}
