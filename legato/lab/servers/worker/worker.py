"""A worker: pushes gradients when the backward pass produces them, and receives parameters for the forward pass.

An iteration of a worker:

    backward            announces the gradients, and pushes each one when its turn in the plan comes
    reading `.grad`     fetches the averages over all workers (for clipping, GradScaler, logging); optional
    optimizer.step()    posts the receives of the new values, sends the servers the settings, and returns
    next forward        the first read of a parameter waits for its value (`legato.pytorch.runtime.waiting.gate`)

[Note: lockstep] A worker begins to push the gradients of an iteration only when it has received all values of the
previous iteration. Therefore, while a server sends a parameter's value, no server changes this parameter, and a worker
is at most one step ahead of another worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from legato.core.errors import RankError
from legato.core.text import count
from legato.lab.servers.protocol import DROP, GRADIENTS, STEP, PendingSend, Transport
from legato.lab.servers.shards import Arena, Shard
from legato.lab.servers.worker.changes import Averages, ParameterCheck
from legato.lab.servers.worker.puller import Puller
from legato.pytorch.runtime.autograd import BackwardScope
from legato.pytorch.runtime.waiting import gate
from legato.pytorch.runtime.waiting.buckets import PENDING, SENT, Slot
from legato.pytorch.runtime.waiting.readers import ModuleCalls, parameter_is_held, settle_before_leaving

__all__ = ["Worker"]


class Worker(Puller):
    """A worker: receives parameters like any `Puller`, and pushes gradients."""

    def __init__(
        self,
        transport: Transport,
        shards: Sequence[Shard],
        pulls: Sequence[int],
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        super().__init__(transport, shards, pulls, parameters)
        self.enabled = True  # False under no_sync()
        self.iteration = 0  # the number of backward passes that have pushed
        self.backward_scope = BackwardScope(lambda: self.enabled, self._backward_ended)
        self._scale = 1.0 / transport.roles.workers
        self._gradients = Arena(shards)
        self._averages = Averages(self)
        self._parameter_check = ParameterCheck(self)
        self._sent: list[PendingSend] = []
        self.in_backward = self._unstepped = False
        self._next = 0
        self._ready: set[str] = set()
        self._hooks = [self._watch(slot) for slot in self.slots.values()]
        self._nodes = [get_gradient_edge(p).node for p in parameters.values()]  # kept alive: use counts are compared
        self._module_calls = ModuleCalls(self.settle, lambda module: getattr(module, "_worker", None) is self)
        settle_before_leaving(self)

    @property
    def status(self) -> str:
        """Describe what the worker is doing, for the error messages of other ranks."""
        if not self.in_backward:
            return f"has begun {count(self.iteration, 'iteration')}"
        return f"is in backward pass {self.iteration}, and waits for the gradient of {self.shards[self._next].label}"

    def close(self) -> None:
        """Bring all parameters up to date, and release them."""
        for hook in self._hooks:
            hook.remove()
        self.leave()

    def begin_forward(self) -> None:
        """Prepare for a forward pass."""
        if self.in_backward:
            raise RankError("the last backward pass did not finish (an exception in it?): restart from a checkpoint")
        self._module_calls.end()
        self.backward_scope.forget()

    def settle(self) -> None:
        """Bring every parameter up to date, in the order of the pulls."""
        super().settle()
        self._module_calls.end()

    # ---- backward: gradients out -------------------------------------------------

    def _watch(self, slot: Slot) -> Any:
        parameter: Any = slot.parameter
        return parameter.register_post_accumulate_grad_hook(lambda _: self._gradient_ready(slot))

    def _gradient_ready(self, slot: Slot) -> None:
        if not self.enabled:
            return
        if not self.in_backward:
            self._begin_backward(slot)
        elif slot.name in self._ready:
            raise RankError(
                f"{slot.name}: a second gradient in one backward pass (checkpointing with use_reentrant=True over a "
                "shared parameter?); use use_reentrant=False, or no_sync() around all but the last backward pass"
            )
        self._ready.add(slot.name)
        self._advance()

    def _begin_backward(self, first: Slot) -> None:
        if self._unstepped:
            raise RankError(
                f"{first.name}: a backward pass began before the gradients of the previous one were used; "
                "call optimizer.step() in between, or run the earlier one under no_sync()"
            )
        self.settle()
        self._parameter_check.check(self.iteration)
        self.backward_scope.notice()
        self.transport.finish(self._sent)
        self._averages.forget()
        self.in_backward = self._unstepped = True
        self.iteration += 1
        self._next = 0
        self._ready.clear()
        self._sent += self.tell_servers(GRADIENTS, self.iteration)

    def _backward_ended(self) -> None:
        if not self.in_backward:
            return
        self._ready.update(self.slots)
        self._advance()
        self.in_backward = False
        for slot in self.slots.values():
            slot.mark_sent()
            gate.install(slot, self.resolve)
        if any(slot.plain_class is not nn.Parameter for slot in self.slots.values()):
            self._averages.fetch(self.iteration)  # reads of such a parameter's gradient cannot be intercepted

    def _advance(self) -> None:
        while self._next < len(self.shards) and self.shards[self._next].name in self._ready:
            self._push(self.shards[self._next])
            self._next += 1

    def _push(self, shard: Shard) -> None:
        with gate.invisible():
            gradient = self.slots[shard.name].parameter.grad
            self._averages.note(shard.name, gradient)
            if gradient is not None and gradient.layout != torch.strided:
                raise RankError(f"{shard.name}: its gradient is {gradient.layout}; only dense gradients can be sent")
            self._send(shard, gradient, self._scale)

    def _send(self, shard: Shard, gradient: Tensor | None, scale: float) -> None:
        elements, trailer = self._gradients.elements[shard.index], self._gradients.trailer[shard.index]
        if gradient is None:
            elements.zero_()
        else:
            part = shard.of(gradient.detach())
            if part.device == elements.device:
                torch.mul(part, scale, out=elements)
            else:
                elements.copy_(part * scale)
        trailer[0], trailer[1] = self.iteration, int(gradient is not None)
        to, what = self.transport.roles.server_rank(shard.server), f"the gradient of {shard.label}"
        self._sent.append(self.transport.send(self._gradients.message[shard.index], to, 1 + shard.index, what))

    # ---- between backward and the next forward ---------------------------------------

    def resolve(self, slot: Slot) -> None:
        """Fetch what a read of this parameter needs: its new value, or the averaged gradients."""
        if slot.stage == SENT:
            self._averages.fetch(self.iteration)
        elif slot.stage == PENDING:
            super().resolve(slot)
            self._parameter_check.note(slot)

    def changed(self) -> list[tuple[int, bool]]:
        """Return (shard index, whether a gradient exists) for each averaged gradient that the script changed.

        Raises `RankError` if the script has changed a parameter, or a gradient that is not averaged yet, because the
        servers cannot follow such a change.
        """
        if self.in_backward or not self._unstepped:
            raise RankError("optimizer.step() without a backward pass before it that pushed gradients to the servers")
        self._parameter_check.check(self.iteration)
        return self._averages.changed()

    def step(self, content: bytes, changed: Sequence[tuple[int, bool]], order: Sequence[int]) -> None:
        """Let the servers update the parameters with the settings in `content`, and send the values in this `order`."""
        self._unstepped = False
        self.expect(order)
        self._sent += self.tell_servers(STEP, self.iteration, content)  # sent after all gradients: no need to wait
        if self.transport.rank == 0:
            self._send_changed(changed)
        self._module_calls.begin()
        with gate.invisible():
            held = [
                s for s in self.slots.values() if s.plain_class is not nn.Parameter or parameter_is_held(s.parameter)
            ]
        for slot in held:  # these could be read past their gates
            self.resolve(slot)

    def _send_changed(self, changed: Sequence[tuple[int, bool]]) -> None:
        with gate.invisible():
            for shard in [self.by_index[index] for index, there in changed if there]:
                self._send(shard, self.slots[shard.name].parameter.grad, 1.0)

    def drop(self) -> None:
        """Tell the servers to discard the pushed gradients: all workers called `zero_grad()` without `step()`."""
        if self.in_backward or not self._unstepped:
            return
        self._unstepped = False
        self.iteration -= 1
        self.transport.finish(self.tell_servers(DROP, self.iteration))
        for server in self.servers:
            self.transport.next_command(
                self.transport.roles.server_rank(server), "that all workers dropped their gradients"
            )
        for slot in self.slots.values():
            gate.remove(slot)
