"""The sixteen `sandbox::*` functions of iii: thin adapters over core, for REST, the command line and an iii engine."""

from atoll.gateway.functions.door import Door, Functions
from atoll.gateway.functions.failure import Failure
from atoll.gateway.functions.table import FUNCTIONS, call

__all__ = ["FUNCTIONS", "Door", "Failure", "Functions", "call"]
