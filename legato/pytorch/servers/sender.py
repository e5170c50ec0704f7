"""Order enforced where it is decided: at the sender, just before the network (TicTac, section 5.1).

Each transfer of an iteration has a number. A counter for each receiver says how
many transfers were handed to the network; a transfer waits until the counter
has come to its number, whenever it was offered. Nothing waits for a transfer to
*arrive*, so they follow one another without a gap, and the receiver holds
nothing back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["Sender"]


class Sender:
    """The transfers to one receiver."""

    def __init__(self, hand_over: Callable[[int], None]) -> None:
        self._hand_over = hand_over
        self._number: dict[int, int] = {}
        self._offered: dict[int, int] = {}
        self.counter = 0

    def begin(self, order: Sequence[int]) -> None:
        """An iteration, whose transfers are to go out in this order."""
        self._number = {transfer: number for number, transfer in enumerate(order)}
        self._offered = {}
        self.counter = 0

    def offer(self, transfer: int) -> None:
        """A transfer can go out, as far as its content is concerned."""
        self._offered[self._number[transfer]] = transfer
        while self.counter in self._offered:
            self._hand_over(self._offered.pop(self.counter))
            self.counter += 1
