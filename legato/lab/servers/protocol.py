"""The protocol between workers, servers and agents: commands, transfers of shards, and timeouts.

[Note: transfer order] Gloo has one TCP connection between any two ranks. Gloo sends messages in the order in which they
are launched, and sends a message only after the receiver has posted the receive. Receivers post the receives of an
iteration at once, before the sends are launched, so the sender alone decides the order of transfers.

    tag 0       a command, 24 bytes: (kind, iteration, length of the content), then the content (JSON)
    tag 1 + i   shard i: its gradient from a worker, its value from a server

[Note: timeouts] Every wait ends after `patience_s`. When a rank waits for a message and the sender's connection closes,
gloo reports this at once. After a timeout or a closed connection, `Watchdog` asks all ranks what they are doing, so the
error names the rank that failed and the message that is missing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from legato.core.errors import RankError
from legato.core.text import count
from legato.pytorch.network.watchdog import Watchdog

__all__ = [
    "AVERAGES",
    "BYE",
    "DROP",
    "GRADIENTS",
    "PULL",
    "REPLY",
    "STATE",
    "STEP",
    "Command",
    "PendingSend",
    "Roles",
    "StepRequest",
    "Transport",
    "join",
]  # fmt: skip

GRADIENTS = 1  # from a worker: its gradients of this iteration follow
STEP = 2  # from a worker: optimizer.step() was called; the content is a `StepRequest`
STATE = 3  # from a worker: a request for the optimizer's state
PULL = 4  # from an agent: a request for all parameters
BYE = 5  # from a worker or agent: this rank is done
REPLY = 6  # from a server: the answer to STATE, PULL or DROP
AVERAGES = 7  # from a worker: a request for the averaged gradients of this iteration
DROP = 8  # from a worker: the gradients of this iteration will not be used

_ANY_TIME = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class Roles:
    """The role of each rank: workers come first, then servers, then inference agents."""

    workers: int
    servers: int
    agents: int

    def __str__(self) -> str:
        return f"{count(self.workers, 'worker')}, {count(self.servers, 'server')}, {count(self.agents, 'agent')}"

    @property
    def size(self) -> int:
        return self.workers + self.servers + self.agents

    def server_rank(self, server: int) -> int:
        return self.workers + server

    def role(self, rank: int) -> str:
        """Return the role and its number, such as `worker 0`."""
        if rank < self.workers:
            return f"worker {rank}"
        rank -= self.workers
        return f"server {rank}" if rank < self.servers else f"agent {rank - self.servers}"


class PendingSend(NamedTuple):
    """A send that was launched, and its destination."""

    work: Any
    to: int
    what: str


class Command(msgspec.Struct, frozen=True):
    """A received command."""

    kind: int
    iteration: int
    content: bytes = b""


class StepRequest(msgspec.Struct, frozen=True):
    """A request to step: the hyper-parameters of all groups, and the gradients that the script changed after averaging.

    `changed` has, for each shard of a changed gradient, its index and whether the gradient still exists. After the
    request, worker 0 sends the changed gradients that exist.
    """

    groups: list[dict[str, Any]]
    changed: list[tuple[int, bool]] = []


class Transport:
    """Sends and receives messages and commands between this rank and all others."""

    def __init__(self, group: Any, roles: Roles, patience_s: float, watchdog: Watchdog) -> None:
        self.group, self.roles, self.watchdog = group, roles, watchdog
        self.rank = group.rank()
        self._patience = timedelta(seconds=patience_s)

    def named(self, rank: int) -> str:
        """Return the rank and its role, such as `rank 3 (server 1)`."""
        return f"rank {rank} ({self.roles.role(rank)})"

    def send(self, message: torch.Tensor, to: int, tag: int, what: str) -> PendingSend:
        """Launch the send of a message. The message must not change until `finish` has returned."""
        try:
            return PendingSend(dist.isend(message, group=self.group, group_dst=to, tag=tag), to, what)
        except RuntimeError as error:
            raise self.watchdog.failure(f"{what} to {self.named(to)}", error) from error

    def receive(self, message: torch.Tensor, source: int, tag: int, what: str) -> Any:
        """Post the receive of a message. The message has arrived when the returned work is done."""
        try:
            return dist.irecv(message, group=self.group, group_src=source, tag=tag)
        except RuntimeError as error:
            raise self.watchdog.failure(f"{what} from {self.named(source)}", error) from error

    def wait(self, work: Any, peer: int, what: str, *, ever: bool = False) -> None:
        """Wait for a send or receive. Raises `RankError` if the peer is gone, or at the timeout (none with `ever`)."""
        try:
            work.wait(_ANY_TIME if ever else self._patience)
        except RuntimeError as error:
            raise self.watchdog.failure(f"{what}, {self.named(peer)}", error) from error

    def begin_command(
        self, to: int, kind: int, iteration: int, content: bytes = b"", *, before: str = ""
    ) -> list[PendingSend]:
        """Launch the send of a command after earlier sends; `before` names the transfer that follows the command."""
        what = f"the command that precedes {before}" if before else "a command"
        parts = [torch.tensor([kind, iteration, len(content)], dtype=torch.int64)]
        if content:
            parts.append(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        return [self.send(part, to, 0, what) for part in parts]

    def command(self, to: int, kind: int, iteration: int, content: bytes = b"", *, before: str = "") -> None:
        """Send a command, and wait until it is sent; `before` names the transfer that follows the command."""
        self.finish(self.begin_command(to, kind, iteration, content, before=before))

    def finish(self, sent: list[PendingSend]) -> None:
        """Wait until all of these sends are done, and clear the list."""
        for work, to, what in sent:
            self.wait(work, to, what)
        sent.clear()

    def next_command(self, source: int, what: str, *, ever: bool = False) -> Command:
        """Wait for the next command of a rank. If none arrives, the error says that `what` is missing."""
        head = torch.zeros(3, dtype=torch.int64)
        self.wait(self.receive(head, source, 0, what), source, what, ever=ever)
        kind, iteration, length = head.tolist()
        if not length:
            return Command(kind, iteration)
        body = torch.empty(length, dtype=torch.uint8)
        self.wait(self.receive(body, source, 0, what), source, what)
        return Command(kind, iteration, body.numpy().tobytes())


def join(store: Any, rank: int, size: int, patience_s: float, problem: str) -> None:
    """Wait until all ranks have called this; each rank states its `problem`, or an empty string if it has none.

    Raises `RankError`, which names the ranks that did not join, or the first rank that stated a problem.
    """
    store.set(f"joined/{rank}", problem)
    deadline = time.monotonic() + patience_s
    missing = list(range(size))
    while missing:
        missing = [r for r in missing if not store.check([f"joined/{r}"])]
        if missing and time.monotonic() > deadline:
            who = ", ".join(f"rank {r}" for r in missing)
            raise RankError(f"{who} did not join within {patience_s:g} s")
        time.sleep(0.01)
    for r in range(size):
        if found := store.get(f"joined/{r}").decode(errors="replace"):
            raise RankError(f"rank {r}: {found}")
