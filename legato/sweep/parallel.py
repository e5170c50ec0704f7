"""Where cells run: in this process, on all cores of this machine, or on a Dask or Ray cluster (joblib's backends)."""

from __future__ import annotations

import itertools
import os
import socket
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from legato.core.errors import InputError, LegatoError

__all__ = ["check_backend", "in_parallel"]

T = TypeVar("T")
R = TypeVar("R")
_CONNECT_S = 10
#: Cells a core and round, on backends that hand results over only when a round is done.
_ROUND = 4


def check_backend(name: str | None) -> None:
    """Raise `InputError` unless this is None, `dask://host:port` or `ray`, and installed."""
    if name is None:
        return
    kind, _, address = name.partition("://")
    if kind not in ("dask", "ray") or (kind == "dask") != bool(address) or (kind == "dask" and ":" not in address):
        raise InputError(f"backend {name!r} (expected dask://host:port, or ray)")
    try:
        if kind == "dask":
            import distributed  # noqa: F401
        else:
            import ray.util.joblib  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        package = "'dask[distributed]'" if kind == "dask" else "ray"
        raise InputError(f"backend {name!r} needs {kind}, which is not installed: pip install {package}") from None


def in_parallel(
    function: Callable[[T], R], items: Sequence[T], jobs: int | None = None, backend: str | None = None
) -> Generator[R, None, None]:
    """`function` of every item, as they are finished, in any order.

    On `jobs` cores (None: all there are) of this machine or of the cluster.
    Closing the iterator stops the work. Raises `InputError` where no cluster
    answers, and `LegatoError` when a process that worked is gone.
    """
    if not items:
        return
    import joblib
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    with _joblib_backend(backend) as active:
        cores = min(len(items), jobs or active.effective_n_jobs(-1))
        if backend is None and cores <= 1:
            yield from map(function, items)
            return
        calls = (joblib.delayed(function)(item) for item in items)
        try:
            if active.supports_return_generator:
                pool = joblib.Parallel(
                    n_jobs=cores, return_as="generator_unordered", batch_size=1, pre_dispatch="2*n_jobs"
                )
                yield from _until_closed(pool(calls))
            else:
                with joblib.Parallel(n_jobs=cores, batch_size=1) as pool:
                    while some := list(itertools.islice(calls, cores * _ROUND)):
                        yield from pool(some)
        except TerminatedWorkerError:
            raise LegatoError("a worker process was killed, perhaps for want of memory: try fewer --jobs") from None


def _until_closed(results: Iterable[R]) -> Iterator[R]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that work was left undone is what closing means
        yield from results


@contextmanager
def _joblib_backend(name: str | None) -> Iterator[Any]:
    """Have joblib use the backend, and yield its own object for it."""
    import joblib
    from joblib.parallel import get_active_backend

    check_backend(name)
    if name is None:
        yield get_active_backend()[0]
    elif name == "ray":
        with _ray(), joblib.parallel_config(backend="ray"):
            yield get_active_backend()[0]
    else:
        with _dask_client(name) as client, joblib.parallel_config(backend="dask", client=client):
            yield get_active_backend()[0]


@contextmanager
def _dask_client(name: str) -> Iterator[object]:
    import distributed

    connect: Any = distributed.Client

    try:
        client = connect(name.replace("dask://", "tcp://"), timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise InputError(f"backend {name!r}: no Dask scheduler answers ({type(error).__name__})") from None
    with client:
        if not client.ncores():
            raise InputError(f"backend {name!r}: the Dask cluster has no workers")
        yield client


@contextmanager
def _ray() -> Iterator[None]:
    """Be connected to the Ray cluster that RAY_ADDRESS names, or to one that is started on this machine."""
    import ray
    from ray.util.joblib import register_ray

    register_ray()
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    try:
        if host:  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        where = f"answers at RAY_ADDRESS={address}" if address else "starts"
        raise InputError(f"backend 'ray': no cluster {where} ({type(error).__name__})") from None
    try:
        yield
    finally:
        ray.shutdown()
