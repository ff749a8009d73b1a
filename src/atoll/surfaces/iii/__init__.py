"""The sixteen `sandbox::*` functions of iii: thin adapters over core, for REST, the command line and an iii engine."""

from atoll.surfaces.iii.door import Door, Functions
from atoll.surfaces.iii.failure import Failure
from atoll.surfaces.iii.table import FUNCTIONS, call

__all__ = ["FUNCTIONS", "Door", "Failure", "Functions", "call"]
