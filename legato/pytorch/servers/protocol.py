"""What travels between workers and servers, and what becomes of it when somebody is gone.

[Note: the wire] Between any two ranks gloo has one TCP connection, and what is
handed over for it first goes first, once the receiver has said where to put it.
So receivers post all buffers of an iteration at once, before they are asked
for, and the order of transfers is decided at the sender and nowhere else.

    tag 0       commands, 24 bytes: (command, iteration, length of what follows), then that many bytes of JSON
    tag 1 + i   shard i: its gradient from a worker, its value from a server

[Note: nobody waits for ever] Every wait ends after `patience_s`. Waiting for
what a rank should send, gloo also reports at once when that rank's connection
closes. Either way `Watchdog` asks all ranks what they are doing, so that the error
names who is gone, and what was missing from whom.
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

GRADIENTS = 1  # a worker's gradients of an iteration follow
STEP = 2  # optimizer.step() was called; `StepRequest` goes with it
STATE = 3  # the optimizer's state, please
PULL = 4  # an agent wants all parameters
BYE = 5  # this rank needs nothing any more
REPLY = 6  # of a server, to STATE, PULL or DROP
AVERAGES = 7  # the averaged gradients of this iteration, please
DROP = 8  # the gradients of this iteration will not be used

_ANY_TIME = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class Roles:
    """Which rank is what: workers first, then servers, then inference agents."""

    workers: int
    servers: int
    agents: int

    @property
    def size(self) -> int:
        return self.workers + self.servers + self.agents

    def server_rank(self, server: int) -> int:
        return self.workers + server

    def role(self, rank: int) -> str:
        """`worker 0` or the like."""
        if rank < self.workers:
            return f"worker {rank}"
        rank -= self.workers
        return f"server {rank}" if rank < self.servers else f"agent {rank - self.servers}"


class PendingSend(NamedTuple):
    """Something that was handed to the network, for a rank."""

    work: Any
    to: int
    what: str


class Command(msgspec.Struct, frozen=True):
    """What came with tag 0."""

    kind: int
    iteration: int
    content: bytes = b""


class StepRequest(msgspec.Struct, frozen=True):
    """How to step: the settings of all groups, and which gradients the user changed after they were averaged.

    Of each of these, its shard and whether there still is a gradient; if so, worker 0 sends it after this.
    """

    groups: list[dict[str, Any]]
    changed: list[tuple[int, bool]] = []


class Transport:
    """This rank's end of all connections."""

    def __init__(self, group: Any, roles: Roles, patience_s: float, watch: Watchdog) -> None:
        self.group, self.roles, self.watch = group, roles, watch
        self.rank = group.rank()
        self._patience = timedelta(seconds=patience_s)

    def named(self, rank: int) -> str:
        """`rank 3 (server 1)`"""
        return f"rank {rank} ({self.roles.role(rank)})"

    def send(self, message: torch.Tensor, to: int, tag: int, what: str) -> PendingSend:
        """Hand a message to the network; it must not change until it is out (`finish`)."""
        try:
            return PendingSend(dist.isend(message, group=self.group, group_dst=to, tag=tag), to, what)
        except RuntimeError as error:
            raise self.watch.failure(f"{what} to {self.named(to)}", error) from error

    def receive(self, message: torch.Tensor, source: int, tag: int, what: str) -> Any:
        """Say where a message is to be put; it is there when the work that is returned is done."""
        try:
            return dist.irecv(message, group=self.group, group_src=source, tag=tag)
        except RuntimeError as error:
            raise self.watch.failure(f"{what} from {self.named(source)}", error) from error

    def wait(self, work: Any, peer: int, what: str, *, ever: bool = False) -> None:
        """Until it is done. Raises `RankError` when the peer is gone, or after the patience (not if `ever`)."""
        try:
            work.wait(_ANY_TIME if ever else self._patience)
        except RuntimeError as error:
            raise self.watch.failure(f"{what}, {self.named(peer)}", error) from error

    def begin_command(
        self, to: int, kind: int, iteration: int, content: bytes = b"", *, before: str = ""
    ) -> list[PendingSend]:
        """Hand a command to the network; `before` says what is to follow. It goes out behind all that went before."""
        what = f"the word that goes before {before}" if before else "a command"
        parts = [torch.tensor([kind, iteration, len(content)], dtype=torch.int64)]
        if content:
            parts.append(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        return [self.send(part, to, 0, what) for part in parts]

    def command(self, to: int, kind: int, iteration: int, content: bytes = b"", *, before: str = "") -> None:
        """Send a command, and wait until it is out; `before` says what is to follow."""
        self.finish(self.begin_command(to, kind, iteration, content, before=before))

    def finish(self, sent: list[PendingSend]) -> None:
        """Wait until all of these are out, and forget them."""
        for work, to, what in sent:
            self.wait(work, to, what)
        sent.clear()

    def next_command(self, source: int, what: str, *, ever: bool = False) -> Command:
        """Wait for a rank's next command; `what` says what is missing if it does not come."""
        head = torch.zeros(3, dtype=torch.int64)
        self.wait(self.receive(head, source, 0, what), source, what, ever=ever)
        kind, iteration, length = head.tolist()
        if not length:
            return Command(kind, iteration)
        body = torch.empty(length, dtype=torch.uint8)
        self.wait(self.receive(body, source, 0, what), source, what)
        return Command(kind, iteration, body.numpy().tobytes())


def join(store: Any, rank: int, size: int, patience_s: float, problem: str) -> None:
    """Wait until all ranks have come this far, each with a problem or an empty string.

    Raises `RankError` that names the ranks that did not come, or the first one with a problem.
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
        if said := store.get(f"joined/{r}").decode(errors="replace"):
            raise RankError(f"rank {r}: {said}")
