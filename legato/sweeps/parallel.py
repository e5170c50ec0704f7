"""Run cells on the cores of this machine, through joblib, or on a Dask cluster."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar

from legato.core.errors import InputError, LegatoError

__all__ = ["check_dask", "in_parallel"]

T = TypeVar("T")
R = TypeVar("R")
_CONNECT_S = 10


def check_dask(address: str | None) -> None:
    """Raise `InputError` if Dask is not installed, or if its scheduler's address is not HOST:PORT."""
    host, _, port = (address or "").removeprefix("tcp://").rpartition(":")
    if address is not None and not (host and "/" not in host and port.isdecimal() and int(port) < 2**16):
        raise InputError(f"dask: {address!r} (expected the scheduler's HOST:PORT)")
    try:
        if address is not None:
            import distributed  # noqa: F401
    except ImportError:
        raise InputError("dask: not installed (pip install 'dask[distributed]')") from None


def in_parallel(
    function: Callable[[T], R], items: Sequence[T], jobs: int | None = None, dask: str | None = None
) -> Generator[R, None, None]:
    """Yield `function(item)` for every item, in the order in which calls finish.

    The calls run on `jobs` cores (None: all) of this machine, or of the Dask cluster whose scheduler has the address
    `dask`. Closing the generator stops the work. Raises `InputError` if no cluster answers, and `LegatoError` if a
    worker process was killed or the cluster was stopped.
    """
    if not items:
        return
    check_dask(dask)
    yield from _on_cores(function, items, jobs) if dask is None else _on_dask(function, items, jobs, dask)


def _on_cores(function: Callable[[T], R], items: Sequence[T], jobs: int | None) -> Generator[R, None, None]:
    import joblib  # slow to import, and only sweeps need it

    cores = min(len(items), jobs or joblib.effective_n_jobs(-1))
    # Ctrl-C reaches all processes of a terminal, but the command itself ends the workers.
    parallel = joblib.Parallel(cores, backend="loky", return_as="generator_unordered", initializer=_ignore_interrupts)
    results = parallel(joblib.delayed(function)(item) for item in items)
    try:
        yield from results
    except BrokenProcessPool:
        raise LegatoError("a worker process was killed, perhaps because memory ran out: try fewer --jobs") from None
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # joblib warns about unfinished work
            results.close()


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _on_dask(
    function: Callable[[T], R], items: Sequence[T], jobs: int | None, address: str
) -> Generator[R, None, None]:
    import distributed

    library: Any = distributed
    try:
        client = library.Client(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise InputError(f"dask: no scheduler answers at {address!r} ({type(error).__name__})") from None
    with client:
        cores = sum(client.ncores().values())
        if not cores:
            raise InputError(f"dask: the cluster at {address!r} has no workers")
        calls = (client.submit(function, item, pure=False) for item in items)
        # Two calls for each core: one waits while the other runs.
        running = library.as_completed(islice(calls, jobs or 2 * cores), loop=client.loop)
        try:
            for call in running:
                yield call.result()
                running.update(islice(calls, 1))
        except (library.KilledWorker, CancelledError, OSError) as error:
            raise LegatoError(
                f"dask: the scheduler or a worker was stopped or killed ({type(error).__name__})"
            ) from None
