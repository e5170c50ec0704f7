"""The kinds and sizes of collectives, from the names that NCCL, gloo, PyTorch and Chakra write."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from legato.core.errors import InputError

__all__ = [
    "COMMUNICATION",
    "GRADIENT_KINDS",
    "GROUPED",
    "Transfers",
    "collective_kind",
    "element_bytes",
    "is_integer",
    "ranks_in_words",
    "tensor_bytes",
    "tensor_elements",
]

#: The collectives that carry gradients if the backward pass issues them.
GRADIENT_KINDS = ("all_reduce", "reduce_scatter")
#: The operator whose arguments describe a collective.
COMMUNICATION = "record_param_comms"
_COLLECTIVES = r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
#: The kind of a kernel with several sends and receives, which NCCL runs together.
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

#: Patterns for kernels that move data between devices, and for operators that launch such kernels, with the kind if the
#: name does not tell it. The kernels belong to libraries of collectives (NCCL, RCCL, oneCCL, MSCCL, HCCL, NVSHMEM,
#: rocSHMEM), to torch, or to libraries for experts and serving.
_TRANSFERS = tuple(
    (re.compile(pattern, re.IGNORECASE), kind)
    for pattern, kind in (
        (r"(?:deep|hybrid)_?ep\b|(?:deep|hybrid)_ep::|pplx|mori::|\bep_(?:dispatch|combine)", "all_to_all"),
        (r"cross_device_reduce|quick_?reduce|allreduce_prototype|allreduce_fusion|lamport", "all_reduce"),
        (r"nccl|rccl|oneccl|msccl|hccl|nvshmem|rocshmem|userbuffers|(?:^|\W)multimem_", None),
        (r"(?:one|two)_?shot(?:_|\w*reduce)", None),
        (r"(?:^|[^\w:])(?:_?c10d\w*::(?!check_?for_?nan|\w*wait|monitored_barrier)|symm_mem::|_dtensor::)", None),
        (rf"^(?:{COMMUNICATION}|(?!aten|torch|autograd|fsdp)\w+::\w*(?:{_COLLECTIVES})\w*)$", None),
    )
)
#: Copies, and kernels that compute although a collective launches them.
_COMPUTES = re.compile(r"Mem(?!cpy PtoP)|.*checkForNaN", re.IGNORECASE)
_LIKE_TRANSFERS = re.compile(rf"{_COLLECTIVES}|send_?recv|broadcast_?ring|p2p|peer_?to_?peer|symm_?mem|PtoP", re.I)

_ELEMENT_BYTES = {
    "double": 8, "long": 8, "long int": 8, "int64": 8, "float64": 8, "complexfloat": 8,
    "float": 4, "int": 4, "float32": 4, "int32": 4,
    "half": 2, "bfloat16": 2, "short": 2, "short int": 2, "float16": 2, "int16": 2,
    "byte": 1, "char": 1, "unsigned char": 1, "signed char": 1, "bool": 1, "int8": 1, "uint8": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


def collective_kind(name: str) -> str | None:
    """Return the kind of a collective by name, or None: `all_reduce` for `nccl:all_reduce`, `allreduce_coalesced`."""
    if kind := next((kind for pattern, kind in _TRANSFERS if kind and pattern.search(name)), None):
        return kind
    plain = re.sub(r"[^a-z]", "", name.lower())
    return next((kind for word, kind in _KINDS.items() if word in plain), None)


class Transfers:
    """The names of kernels and operators that move data between devices: legato's table, and the user's additions.

    `added` are texts `PATTERN=COLLECTIVE`. Kernels, operators and marks whose names match the regular expression belong
    to this collective, such as `all-reduce`. Raises `InputError` if a text in `added` does not have this form.
    """

    def __init__(self, added: Iterable[str] = ()) -> None:
        self.added = tuple(map(_added, added))
        self.known = lru_cache(2**16)(self._known)

    def _known(self, name: str) -> bool:
        """Return whether a kernel of this name moves data, or an operator of this name launches such kernels."""
        found = any(pattern.search(name) for pattern, _ in _TRANSFERS)
        return (found and _COMPUTES.match(name) is None) or self.is_added(name)

    def is_added(self, name: str) -> bool:
        """Return whether the user has declared this name as a transfer."""
        return any(pattern.search(name) for pattern, _ in self.added)

    def can_be(self, kernel: str) -> bool:
        """Return whether a kernel launched by a collective's operator or mark can be a transfer, not a computation."""
        return _COMPUTES.match(kernel) is None

    def suspects(self, kernel: str) -> bool:
        """Return whether a kernel is not known to move data, but has a name similar to kernels that do."""
        return not self.known(kernel) and _LIKE_TRANSFERS.search(kernel) is not None

    def kind(self, names: Sequence[str]) -> str:
        """Return the kind of a collective from the names of its kernel, marks and operators.

        If a name matches a pattern of the user, the pattern's kind is returned. Otherwise, the last name with a known
        kind is used; the kind is `send_recv` only if no name has another kind.
        """
        if told := next((kind for pattern, kind in self.added if any(map(pattern.search, names))), None):
            return told
        found = "unknown"
        for kind in filter(None, map(collective_kind, names)):
            if kind != GROUPED or found == "unknown":
                found = kind
        return found


def _added(text: str) -> tuple[re.Pattern[str], str]:
    pattern, _, kind = text.rpartition("=")
    plain = kind.replace("-", "_")
    if not pattern or plain not in _KINDS.values():
        kinds = ", ".join(dict.fromkeys(kind.replace("_", "-") for kind in _KINDS.values()))
        raise InputError(f"--transfer: {text!r} (expected PATTERN=COLLECTIVE, which is one of {kinds})")
    try:
        return re.compile(pattern), plain
    except re.error as error:
        raise InputError(f"--transfer: {pattern!r}: {error} (expected a regular expression)") from None


def element_bytes(name: str | None) -> int | None:
    """Return the bytes of an element of a type called `Float`, `c10::Half`, `long int`, ..., or None if unknown."""
    return None if name is None else _ELEMENT_BYTES.get(name.lower().removeprefix("c10::"))


def is_integer(name: Any) -> bool:
    """Return whether a type called `long int`, `Int`, `uint8`, ... is an integer type, which no gradient has."""
    plain = name.lower().removeprefix("c10::") if isinstance(name, str) else ""
    return plain in _ELEMENT_BYTES and re.search("float|double|half|complex", plain) is None


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return words such as `ranks 0, 3, 5`, `ranks 0-7` or `ranks 0, 8, ..., 56`; `all ranks` for no ranks."""
    if not ranks:
        return "all ranks"
    steps = {b - a for a, b in itertools.pairwise(ranks)}
    if len(ranks) < 4 or len(steps) > 1:
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return f"ranks {ranks[0]}-{ranks[-1]}" if steps == {1} else f"ranks {ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"


def tensor_bytes(dims: Any, types: Any) -> int | None:
    """Return the bytes of the first tensor in the profiler's `Input Dims` and `Input type`, or None without one.

    For a list of tensors, `Input Dims` has a list of lists of dimensions.
    """
    if not (isinstance(dims, list) and isinstance(types, list) and dims and types):
        return None
    size = element_bytes(types[0]) if isinstance(types[0], str) else None
    total = (size or 0) * (tensor_elements(dims[0]) or 0)
    return total if 0 < total < 2**62 else None


def tensor_elements(shape: Any) -> int | None:
    """Return the number of elements of a shape, or of all shapes in a list; None if the value is neither."""
    if not isinstance(shape, list):
        return None
    shapes = shape if shape and all(isinstance(s, list) for s in shape) else [shape]
    if not all(isinstance(n, int) and 0 <= n < 2**48 for s in shapes for n in s) or any(len(s) > 64 for s in shapes):
        return None
    return sum(math.prod(s) for s in shapes)
