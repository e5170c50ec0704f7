"""Where cells run: in this process, on all cores of this machine, or on a Dask or Ray cluster (joblib's backends).

[Note: Ctrl-C] Only this process reacts to it. Workers on this machine ignore it from their start, and are killed
when the iterator of results is closed.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any, TypeVar

from legato.core.errors import InputError, LegatoError

__all__ = ["check_backend", "in_parallel"]

T = TypeVar("T")
R = TypeVar("R")
_CONNECT_S = 10
#: Cells per core and round, on backends that return results only when a round is done.
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
    """Yield `function(item)` for every item, in the order in which they finish.

    Runs on `jobs` cores (None: all) of this machine or of the cluster. Closing
    the generator stops the work. Raises `InputError` if no cluster answers, and
    `LegatoError` if a worker process was killed.
    """
    if not items:
        return
    import joblib  # only sweeps need it, and it takes long to import
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    with _one_interrupt(), _joblib_backend(backend) as active:
        cores = min(len(items), jobs or active.effective_n_jobs(-1))
        if backend is None and cores <= 1:
            yield from map(function, items)
            return
        calls = (joblib.delayed(function)(item) for item in items)
        options = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)} if backend is None else {}
        try:
            if active.supports_return_generator:
                pool = joblib.Parallel(
                    n_jobs=cores, return_as="generator_unordered", batch_size=1, pre_dispatch="2*n_jobs", **options
                )
                with ExitStack() as stack:
                    with _interrupts_held_back():
                        results = stack.enter_context(_closing_quietly(pool(calls)))
                    for result in results:  # noqa: UP028 - `yield from` would close them with the warning
                        yield result
            else:
                with joblib.Parallel(n_jobs=cores, batch_size=1, **options) as pool:
                    while some := list(itertools.islice(calls, cores * _ROUND)):
                        yield from pool(some)
        except TerminatedWorkerError:
            raise LegatoError("a worker process was killed, perhaps because memory ran out: try fewer --jobs") from None


@contextmanager
def _closing_quietly(results: Generator[R, None, None]) -> Iterator[Generator[R, None, None]]:
    """Close `results` at the end, without joblib's warning about unfinished work."""
    try:
        yield results
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.close()


@contextmanager
def _one_interrupt() -> Iterator[None]:
    """Let the first Ctrl-C inside the block raise `KeyboardInterrupt`, and ignore further ones until the block ends.

    A second one would interrupt joblib while it ends the worker processes, and the program would then hang at exit.
    A handler other than Python's default one stays in place.
    """

    def interrupt(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Deliver a Ctrl-C inside the block at its end, and never to the threads and processes that are started inside.

    They inherit a signal mask that blocks SIGINT. The terminal sends Ctrl-C to
    the workers too, and one that is still importing would print a traceback.
    """
    resource_tracker.ensure_running()  # when it starts inside the block, CPython 3.11 and 3.12 unblock SIGINT
    held: list[tuple[int, FrameType | None]] = []
    handler = signal.getsignal(signal.SIGINT)
    replaced = threading.current_thread() is threading.main_thread() and callable(handler)
    if replaced:
        signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if replaced:
            signal.signal(signal.SIGINT, handler)
    if held and callable(handler):
        handler(*held[0])


@contextmanager
def _joblib_backend(name: str | None) -> Iterator[Any]:
    """Let joblib use the backend, and yield joblib's object for it."""
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
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        where = f"answers at RAY_ADDRESS={address}" if address else "starts"
        raise InputError(f"backend 'ray': no cluster {where} ({type(error).__name__})") from None
    try:
        yield
    finally:
        ray.shutdown()
