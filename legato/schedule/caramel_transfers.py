"""Caramel's network transfer scheduler: pack the messages beside the backward pass, then beside the forward pass.

Idea: a message may go out between the last update of a gradient in it and the
first reading of one. The largest come first, each to the first place where it
fits: (1) within the backward pass, as early as its gradients allow; (2) within
the forward pass, as late as its readers allow; (3) what fits nowhere may reach
over the end of the backward pass or the start of the forward pass, whichever
lengthens the iteration less (the backward pass if neither does).

    computation | backward pass ......... |<- added time ->| forward pass ........ |
    network       | a |  | b || c |         | d  ||    e   |      | f ||   g   |
                  ^ release                                       deadline ^

Paper: Caramel (Hashemi, Jyothi, Campbell, MLSys 2020), section 4.3, "greedy 2D
bin packing"; its bins are stretches of time, and the network is filled by one
message at a time here. Where in its window a message goes is left open there.
Units: seconds.

Seen backwards in time, the forward pass is another backward pass, whose release
times are the tails: one `_Pass` does both. "Forward pass" is all that computes
after the backward pass, optimizer ops included.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Packing", "pack"]


class Packing(NamedTuple):
    """The messages (indices) in the order in which they go out, and what they add to the computation at most."""

    order: list[int]
    added_s: float


def pack(
    head_s: Sequence[float],
    tail_s: Sequence[float],
    send_s: Sequence[float],
    nbytes: Sequence[int],
    backward_s: float,
    forward_s: float,
) -> Packing:
    """Place every message.

    `head_s`: from the start of the backward pass until it may go out; `tail_s`:
    computation from its first reader to the end of the iteration; `send_s`: its
    time on the network; `backward_s`, `forward_s`: the two passes when nothing
    waits. Equally large messages are placed in the order given. Raises
    `ValueError` when the sequences differ in length.
    """
    backward, forward = _Pass(backward_s), _Pass(forward_s)
    messages = list(zip(head_s, tail_s, send_s, nbytes, strict=True))
    unassigned = []
    for m in sorted(range(len(messages)), key=lambda m: -messages[m][3]):
        head, tail, send, _ = messages[m]
        for lane, release in ((backward, head), (forward, tail)):
            start = lane.earliest(release, send)
            if start + send <= lane.length_s:
                lane.place(m, start, send)
                break
        else:
            unassigned.append(m)
    for m in unassigned:
        head, tail, send, _ = messages[m]
        after, before = backward.earliest(head, send), forward.earliest(tail, send)
        if backward.added_s(after + send) <= forward.added_s(before + send):
            backward.place(m, after, send)
        else:
            forward.place(m, before, send)
    return Packing(backward.order() + forward.order()[::-1], backward.beyond_s + forward.beyond_s)


class _Pass:
    """What the network carries beside one pass, and how far that reaches over the pass's end."""

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self.beyond_s = 0.0
        self.busy: list[tuple[float, float]] = []  # in order, with gaps between them
        self.placed: list[tuple[float, float, int]] = []  # start, end, message

    def earliest(self, release_s: float, send_s: float) -> float:
        """Where a message first fits."""
        start = release_s
        at = bisect_left(self.busy, (release_s,))
        if at and self.busy[at - 1][1] > start:
            start = self.busy[at - 1][1]
        for begin, end in self.busy[at:]:
            if start + send_s <= begin:
                break
            start = end
        return start

    def added_s(self, end_s: float) -> float:
        """What a message that ends there adds to the iteration."""
        return max(0.0, end_s - self.length_s - self.beyond_s)

    def place(self, message: int, start_s: float, send_s: float) -> None:
        """Put a message where it fits, and close the gaps that this fills."""
        end = start_s + send_s
        self.beyond_s += self.added_s(end)
        insort(self.placed, (start_s, end, message))
        at = bisect_left(self.busy, (start_s,))
        if at < len(self.busy) and self.busy[at][0] <= end:
            end = max(end, self.busy.pop(at)[1])
        if at and self.busy[at - 1][1] >= start_s:
            start_s = self.busy.pop(at - 1)[0]
            at -= 1
        self.busy.insert(at, (start_s, end))

    def order(self) -> list[int]:
        """The messages in time order."""
        return [message for _, _, message in self.placed]
