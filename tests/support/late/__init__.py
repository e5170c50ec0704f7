"""late: an accelerator whose kernels run later than their call, on the CPU, for tests without a GPU (see device.h).

`support.late.device` makes it a device of torch in the process that imports it. What it cannot show: the numerics of a
GPU's kernels, how long they take, NCCL's sums and errors, stream priorities, CUDA graphs, and races of the host with
pinned memory (bits show those, the detector does not).
"""

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils import cpp_extension

_HERE = Path(__file__).parent


def can_be_built():
    """Whether there is what it takes to build the device: a compiler and ninja."""
    return bool(shutil.which("g++")) and cpp_extension.is_ninja_available()


def built():
    """The extension's file, which is built once for a version of torch and of its sources: a minute or more."""
    sources = sorted(path for path in _HERE.iterdir() if path.suffix in (".cpp", ".h"))
    version = hashlib.sha1(torch.__version__.encode() + b"".join(map(Path.read_bytes, sources))).hexdigest()[:12]
    found = Path(sys.prefix) / f"late-{version}" / "_late.so"
    if not found.exists():
        found.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=found.parent) as folder:
            cpp_extension.load(
                "_late",
                [str(_HERE / "late.cpp")],
                build_directory=folder,
                extra_cflags=["-O1", "-std=c++20", "-w"],
                is_python_module=False,
            )
            os.replace(Path(folder) / "_late.so", found)
    return found
