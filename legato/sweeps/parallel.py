"""Run cells through joblib on the cores of this machine, or on a Dask or Ray cluster."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from legato.core.errors import InputError, LegatoError

__all__ = ["check_backend", "in_parallel"]

T = TypeVar("T")
R = TypeVar("R")
_CONNECT_S = 10
#: Cells per core in each round, for backends that return results only at the end of a round.
_ROUND = 4


def check_backend(name: str | None) -> None:
    """Raise `InputError` unless `name` is None or the name (`dask://host:port`, `ray`) of an installed backend."""
    if name is None:
        return
    kind, _, address = name.partition("://")
    if kind not in ("dask", "ray") or (kind == "dask") != bool(address) or (kind == "dask" and ":" not in address):
        raise InputError(f"backend {name!r} (expected dask://host:port, or ray)")
    try:
        if kind == "dask":
            import distributed  # noqa: F401
        else:
            import ray.util.joblib  # noqa: F401
    except ImportError:
        package = "'dask[distributed]'" if kind == "dask" else "ray"
        raise InputError(f"backend {name!r} needs {kind}, which is not installed: pip install {package}") from None


def in_parallel(
    function: Callable[[T], R], items: Sequence[T], jobs: int | None = None, backend: str | None = None
) -> Generator[R, None, None]:
    """Yield `function(item)` for every item, in the order in which calls finish.

    The calls run on `jobs` cores (None: all) of this machine or of the cluster, or on the backend that the caller has
    chosen in joblib. Closing the generator stops the work. Raises `InputError` if no cluster answers, and `LegatoError`
    if a worker process was killed.
    """
    if not items:
        return
    import joblib  # slow to import, and only sweeps need it
    from joblib.parallel import get_active_backend

    with _on(backend):
        active, _ = get_active_backend()
        cores = min(len(items), jobs or joblib.effective_n_jobs(-1))
        calls = (joblib.delayed(function)(item) for item in items)
        try:
            if active.supports_return_generator:
                # Ctrl-C reaches all processes of a terminal, but the command itself ends the workers.
                own: dict[str, Any] = {"initializer": _ignore_interrupts} if _is_loky(active) else {}
                yield from _as_they_finish(joblib.Parallel(cores, return_as="generator_unordered", **own)(calls))
            else:
                with joblib.Parallel(cores) as pool:
                    while some := list(itertools.islice(calls, cores * _ROUND)):
                        yield from pool(some)
        except BrokenProcessPool:
            raise LegatoError("a worker process was killed, perhaps because memory ran out: try fewer --jobs") from None


def _is_loky(active: object) -> bool:
    from joblib.parallel import BACKENDS

    return isinstance(active, BACKENDS["loky"])


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _as_they_finish(results: Generator[R, None, None]) -> Iterator[R]:
    """Yield the results, and close their generator without joblib's warning about unfinished work."""
    try:
        yield from results
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.close()


@contextmanager
def _on(name: str | None) -> Iterator[None]:
    """Make joblib use the named backend in this context."""
    import joblib

    check_backend(name)
    if name is None:
        yield
    elif name == "ray":
        with _ray(), joblib.parallel_config(backend="ray"):
            yield
    else:
        with _dask_client(name) as client, joblib.parallel_config(backend="dask", client=client):
            yield


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
    """Connect to the Ray cluster at RAY_ADDRESS, or start one on this machine."""
    import ray
    from ray.util.joblib import register_ray

    register_ray()
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    try:
        if host:  # Ray itself would try for minutes
            if int(port) > 65535:  # the resolver would use it modulo 65536, and something else may listen on that port
                raise ValueError(port)
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        where = f"answers at RAY_ADDRESS={address}" if address else "starts"
        raise InputError(f"backend 'ray': no cluster {where} ({type(error).__name__})") from None
    try:
        yield
    finally:
        ray.shutdown()
