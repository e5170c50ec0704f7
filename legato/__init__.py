"""legato: plan, prove, simulate and run the gradient transfers of data-parallel training.

Importing it needs no PyTorch; `legato.distribute`, `legato.parameter_servers`,
`legato.capture` and `legato.calibrate` import it when they are first touched.
"""

from __future__ import annotations

from typing import Any

from legato.core import __version__
from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import CaptureError, FileError, InputError, LegatoError, PlanError, RankError
from legato.core.files import identity, read, write
from legato.core.plan import Message, Plan, Slice, check_plan
from legato.core.timeline import Span, Timeline
from legato.core.workload import Op, Tensor, Workload

_NEEDS_TORCH = ("calibrate", "capture", "distribute", "parameter_servers")

__all__ = [
    "CaptureError",
    "Cluster",
    "FileError",
    "InputError",
    "LegatoError",
    "LinearCost",
    "Message",
    "Op",
    "Plan",
    "PlanError",
    "RankError",
    "Slice",
    "Span",
    "Tensor",
    "Timeline",
    "Workload",
    "__version__",
    "calibrate",
    "capture",
    "check_plan",
    "distribute",
    "identity",
    "parameter_servers",
    "read",
    "write",
]


def __getattr__(name: str) -> Any:
    if name == "distribute":
        from legato.auto import distribute

        return distribute
    if name in _NEEDS_TORCH:
        import legato.pytorch

        return getattr(legato.pytorch, name)
    raise AttributeError(f"module 'legato' has no attribute {name!r}")
