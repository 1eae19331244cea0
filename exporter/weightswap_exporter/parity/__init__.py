"""Parity of exported graphs with the eager model, and the first point where they diverge."""

from .checks import check_outputs, record_outputs
from .compare import compare
from .divergence import first_divergence
from .executions import Run
from .report import CaseParity, Divergence, EngineParity, ModuleError, OutputParity, ParityReport
from .verification import Verification, verify

__all__ = [
    "CaseParity",
    "Divergence",
    "EngineParity",
    "ModuleError",
    "OutputParity",
    "ParityReport",
    "Run",
    "Verification",
    "check_outputs",
    "compare",
    "first_divergence",
    "record_outputs",
    "verify",
]
