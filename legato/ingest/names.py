"""Kinds and sizes of collectives from the names that NCCL, gloo, PyTorch and Chakra write."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

__all__ = [
    "GRADIENT_KINDS",
    "GROUPED",
    "collective_kind",
    "element_bytes",
    "is_integer",
    "is_transfer",
    "looks_like_a_transfer",
    "ranks_in_words",
    "tensor_bytes",
    "tensor_elements",
]

#: The collectives that carry gradients if the backward pass issues them.
GRADIENT_KINDS = ("all_reduce", "reduce_scatter")
#: Sends and receives that NCCL carries out together, and whatever else it does.
GROUPED = "send_recv"

_KINDS = {
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "sendrecv": GROUPED,
    "broadcast": "broadcast",
    "barrier": "barrier",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
    "coalesced": GROUPED,
}

#: Kernels that move data between devices, and their kind where their names do not say it: libraries of collectives
#: (NCCL, RCCL, oneCCL, MSCCL, NVSHMEM, rocSHMEM), torch's symmetric memory, and those of experts' and of serving's own.
_TRANSFERS = (
    (re.compile(r"deep_?ep\b|deep_ep::|pplx|mori::|\bep_(?:dispatch|combine)", re.IGNORECASE), "all_to_all"),
    (re.compile(r"cross_device_reduce|quick_?reduce|allreduce_prototype|allreduce_fusion|lamport", re.IGNORECASE),
     "all_reduce"),
    (re.compile(r"nccl|rccl|oneccl|msccl|nvshmem|rocshmem|(?:^|\W)multimem_|(?:one|two)_?shot_", re.IGNORECASE), None),
)  # fmt: skip
_LIKE_TRANSFERS = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|send_?recv|broadcast_?ring|p2p|PtoP|peer_?to_?peer|symm_?mem",
    re.IGNORECASE,
)

_ELEMENT_BYTES = {
    "double": 8, "long": 8, "long int": 8, "int64": 8, "float64": 8, "complexfloat": 8,
    "float": 4, "int": 4, "float32": 4, "int32": 4,
    "half": 2, "bfloat16": 2, "short": 2, "short int": 2, "float16": 2, "int16": 2,
    "byte": 1, "char": 1, "unsigned char": 1, "signed char": 1, "bool": 1, "int8": 1, "uint8": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


def collective_kind(name: str) -> str | None:
    """`all_reduce` from `ncclDevKernel_AllReduce_Sum_f32`, `nccl:all_reduce`, `allreduce_coalesced`; or None."""
    if kind := next((kind for pattern, kind in _TRANSFERS if kind and pattern.search(name)), None):
        return kind
    plain = re.sub(r"[^a-z]", "", name.lower())
    return next((kind for word, kind in _KINDS.items() if word in plain), None)


@lru_cache(2**16)
def is_transfer(kernel: str) -> bool:
    """Whether a kernel of this name is known to move data between devices: no copy or fill is, whatever its name."""
    return not kernel.startswith("Mem") and any(pattern.search(kernel) for pattern, _ in _TRANSFERS)


def looks_like_a_transfer(kernel: str) -> bool:
    """Whether a kernel that is not known to be one has a name like a transfer's."""
    return not is_transfer(kernel) and _LIKE_TRANSFERS.search(kernel) is not None


def element_bytes(name: str | None) -> int | None:
    """Bytes of one element of a type called `Float`, `c10::Half`, `long int`, ...; None if unknown."""
    return None if name is None else _ELEMENT_BYTES.get(name.lower().removeprefix("c10::"))


def is_integer(name: Any) -> bool:
    """Whether a type called `long int`, `Int`, `uint8`, ... has whole numbers, which no gradient consists of."""
    plain = name.lower().removeprefix("c10::") if isinstance(name, str) else ""
    return plain in _ELEMENT_BYTES and re.search("float|double|half|complex", plain) is None


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 0`, `ranks 0, 3, 5`, `ranks 0-7`, `ranks 0, 8, ..., 56`; `all ranks` if there are none."""
    if not ranks:
        return "all ranks"
    steps = {b - a for a, b in itertools.pairwise(ranks)}
    if len(ranks) < 4 or len(steps) > 1:
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return f"ranks {ranks[0]}-{ranks[-1]}" if steps == {1} else f"ranks {ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"


def tensor_bytes(dims: Any, types: Any) -> int | None:
    """Bytes of the first tensor of the profiler's `Input Dims` and `Input type`; None if they describe none.

    For a list of tensors, `Input Dims` has a list of lists of dimensions.
    """
    if not (isinstance(dims, list) and isinstance(types, list) and dims and types):
        return None
    size = element_bytes(types[0]) if isinstance(types[0], str) else None
    total = (size or 0) * (tensor_elements(dims[0]) or 0)
    return total if 0 < total < 2**62 else None


def tensor_elements(shape: Any) -> int | None:
    """Elements of a tensor of this shape, or of all tensors of a list of shapes; None if it is neither."""
    if not isinstance(shape, list):
        return None
    shapes = shape if shape and all(isinstance(s, list) for s in shape) else [shape]
    if not all(isinstance(n, int) and 0 <= n < 2**48 for s in shapes for n in s) or any(len(s) > 64 for s in shapes):
        return None
    return sum(math.prod(s) for s in shapes)
