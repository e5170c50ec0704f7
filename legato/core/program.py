"""A program: the computation and communication of each worker of a job, in order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from legato.core.errors import InputError, TooLargeError

__all__ = ["Action", "Communication", "Compute", "Lane", "Operation", "Program", "Start", "Times", "Wait", "clock"]

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]

#: The most actions of all lanes, and the most workers of all distinct groups. The check of a larger program would take
#: seconds.
_MOST_ACTIONS, _MOST_MEMBERS = 2**22, 2**26
_MOST_TIMES = 2**20


class Compute(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, tag_field="do", tag="compute"):
    """Computation that takes `seconds`."""

    seconds: float
    label: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise InputError(f"seconds of {self.label!r}: {self.seconds} (expected a finite number, at least 0)")


class Start(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, tag_field="do", tag="start"):
    """The start of a communication, given by its number in the program. The worker does not wait."""

    communication: int


class Wait(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, tag_field="do", tag="wait"):
    """A wait of the worker for the end of a communication, which is given by its number in the program.

    A blocking communication is a `Start`, followed by a `Wait`.
    """

    communication: int


Action: TypeAlias = Compute | Start | Wait


class Times(NamedTuple):
    """The times of all actions and communications, as `clock` computes them.

    `actions` has, for each lane, the times at which its actions end. The other fields have one time for each
    communication: `started` is when the last lane starts the communication, and `begins` and `ends` are when it begins
    and ends.
    """

    actions: list[list[float]]
    started: list[float]
    begins: dict[int, float]
    ends: dict[int, float]

    @property
    def lanes(self) -> list[float]:
        """Return the time at which the last action of each lane ends."""
        return [own[-1] if own else 0.0 for own in self.actions]


def clock(
    lanes: Sequence[Sequence[Action]],
    lines: Sequence[Hashable],
    seconds: Sequence[float],
    after: Mapping[int, int] | None = None,
) -> Times:
    """Run lanes and return their times.

    Communication n takes `seconds[n]`. Communication n begins once the previous communication with the same `lines[n]`
    has ended. If `after[n]` exists, communication n also waits for the end of communication `after[n]`.

    A lane runs until it waits for a communication that other lanes have not started yet. The last lane that starts this
    communication wakes the waiting lane, so no loop has to search for lanes that can run. If lanes wait for each other
    in a circle, they stop, and the result has no times for their remaining actions.
    """
    missing = Counter(action.communication for lane in lanes for action in lane if type(action) is Start)
    actions: list[list[float]] = [[] for _ in lanes]
    started, begins, ends = [0.0] * len(seconds), dict[int, float](), dict[int, float]()
    free: dict[Hashable, float] = {}
    after = after or {}
    waiting: dict[int, list[int]] = {}
    awake = list(range(len(lanes)))
    while awake:
        lane = awake.pop()
        mine, own = lanes[lane], actions[lane]
        now = own[-1] if own else 0.0
        for position in range(len(own), len(mine)):
            action = mine[position]  # `isinstance` is slow if the answer is no
            if type(action) is Compute:
                now += action.seconds
            elif type(action) is Start:
                number = action.communication
                missing[number] -= 1
                if now > started[number]:
                    started[number] = now
                if not missing[number]:
                    line, before = lines[number], ends.get(after.get(number, -1), 0.0)
                    begins[number] = begin = max(started[number], free.get(line, 0.0), before)
                    ends[number] = free[line] = begin + seconds[number]
                    awake += waiting.pop(number, ())
            elif isinstance(action, Wait):
                if action.communication not in ends:
                    waiting.setdefault(action.communication, []).append(lane)
                    break
                now = max(now, ends[action.communication])
            own.append(now)
    return Times(actions, started, begins, ends)


class Communication(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A communication in one or several groups of workers. Each group lists its workers in the order of its ring.

    `nbytes` is the size of the message in a broadcast or send, of the result in an all-gather, and of each worker's
    input in all other operations (the worker's own part included). `kind` is the purpose of the communication, such as
    `tensor` or `data`. A broadcast comes from the first worker of a group; a send goes from the first worker to the
    second. One `Communication` can stand for several equal communications that run one after another; `times` is their
    number. `traced_s` is the traced duration, from the moment when all workers had started the communication. `after`
    is the number of another communication that must end before this communication begins.
    """

    kind: str
    operation: Operation
    groups: tuple[tuple[int, ...], ...]
    nbytes: float
    times: int = 1
    traced_s: float | None = None
    after: int | None = None

    def __post_init__(self) -> None:
        where = f"{self.kind} {self.operation}"
        if not 1 <= self.times <= _MOST_TIMES:
            raise InputError(f"times of {where}: {self.times} (expected 1 to {_MOST_TIMES:,})")
        for field, amount in (("nbytes", self.nbytes), ("traced_s", self.traced_s or 0.0)):
            if not (math.isfinite(amount) and amount >= 0):
                raise InputError(f"{field} of {where}: {amount} (expected a finite number, at least 0)")
        sizes = {len(group) for group in self.groups}
        if len(sizes) != 1 or min(sizes) < 2 or (self.operation == "send" and sizes != {2}):
            least = "2 workers" if self.operation == "send" else "at least 2 workers, as many in each"
            raise InputError(f"groups of {where}: {sorted(sizes)} workers (expected {least})")
        members = [worker for group in self.groups for worker in group]
        if len(set(members)) < len(members):
            raise InputError(f"groups of {where}: a worker twice (expected each once)")


class Lane(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group of workers that do the same, with their actions in order."""

    workers: tuple[int, ...]
    actions: tuple[Action, ...]


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format", tag="legato.program/1"):
    """The work of a job's workers on any network, derived from a `Job` or from the traces of its ranks.

    Workers that do the same share a lane. Each worker 0, 1, ... is in exactly one lane.

    If a communication has several groups, the first workers of all groups are in one lane, the second workers in one
    lane, and so on. Every member of a group starts a communication once, except that only the sender starts a send. A
    communication begins when all workers that start it have done so. Sends with the same groups run in the order of
    their starts. Other communications with the same groups also run in the order of their starts, which is the same on
    all lanes. If a communication runs `after` another, the same lanes start both communications, the earlier one first.

    `traced_s` is the traced time of the step, from the first worker's begin to the last worker's end, or None.

    Raises `InputError` if one of these rules is broken or lanes wait for each other in a circle, and `TooLargeError`
    beyond four million actions.
    """

    name: str
    lanes: tuple[Lane, ...]
    communications: tuple[Communication, ...] = ()
    traced_s: float | None = None

    def __post_init__(self) -> None:
        if sum(len(lane.actions) for lane in self.lanes) > _MOST_ACTIONS:
            raise TooLargeError(f"actions of all lanes: more than {_MOST_ACTIONS:,}")
        groups = {id(one.groups): one.groups for one in self.communications}.values()
        if sum(len(one) * len(one[0]) for one in groups) > _MOST_MEMBERS:
            raise TooLargeError(f"workers of all groups: more than {_MOST_MEMBERS:,}")
        workers = sorted(worker for lane in self.lanes for worker in lane.workers)
        if not workers or workers != list(range(len(workers))):
            raise InputError(f"lanes: {len(workers)} workers (expected 0, 1, ... each on one lane)")
        if any(not lane.workers for lane in self.lanes):
            raise InputError("lanes: one without workers (expected at least one)")
        order_of = self.orders()
        self._check_starts(self._starters(order_of), order_of)
        self._check_circles()

    @property
    def workers(self) -> int:
        return sum(len(lane.workers) for lane in self.lanes)

    def describe(self, number: int) -> str:
        """Return a communication in words, for error messages."""
        one = self.communications[number]
        return f"communication {number} ({one.kind} {one.operation})"

    def orders(self) -> list[int]:
        """Return a number for each communication; communications with the same number run in the order of starts."""
        known: dict[tuple[int, bool], int] = {}  # many communications have the same groups
        numbers: dict[tuple[object, bool], int] = {}
        result = []
        for one in self.communications:
            key = (id(one.groups), one.operation == "send")
            if key not in known:
                known[key] = numbers.setdefault((one.groups, key[1]), len(numbers))
            result.append(known[key])
        return result

    def afters(self) -> dict[int, int]:
        """Return, for each communication that runs after another, the number of the earlier one."""
        return {number: one.after for number, one in enumerate(self.communications) if one.after is not None}

    def _starters(self, order_of: Sequence[int]) -> list[set[int]]:
        """Return the lanes that have to start each communication."""
        lane_of = {worker: k for k, lane in enumerate(self.lanes) for worker in lane.workers}
        known: dict[int, set[int]] = {}
        for number, order in enumerate(order_of):
            if order not in known:
                known[order] = self._starters_of(number, lane_of)
        return [known[order] for order in order_of]

    def _starters_of(self, number: int, lane_of: dict[int, int]) -> set[int]:
        one = self.communications[number]
        if unknown := [worker for group in one.groups for worker in group if worker not in lane_of]:
            raise InputError(f"{self.describe(number)}: worker {unknown[0]} (expected 0 to {len(lane_of) - 1})")
        places = [{lane_of[worker] for worker in place} for place in zip(*one.groups, strict=True)]
        if any(len(place) > 1 for place in places):
            raise InputError(f"{self.describe(number)}: groups on several lanes at one place (expected groups alike)")
        every = set().union(*places)
        if one.operation == "send" and len(every) == 1:
            raise InputError(f"{self.describe(number)}: from a lane to itself (expected to another one)")
        members = len(one.groups) * len(one.groups[0])
        if sum(len(self.lanes[lane].workers) for lane in every) != members:
            raise InputError(f"{self.describe(number)}: only some workers of a lane (expected all of them)")
        return places[0] if one.operation == "send" else every

    def _check_starts(self, starters: list[set[int]], order_of: Sequence[int]) -> None:
        """Check that each lane starts each of its communications once, and that all lanes of a group use one order."""
        orders: dict[int, dict[int, list[int]]] = {}
        for k, lane in enumerate(self.lanes):
            started: set[int] = set()
            for number in self._numbers(lane):
                if k not in starters[number]:
                    raise InputError(f"{self.describe(number)}: started by lane {k}, which has no part in its start")
                if number in started:
                    raise InputError(f"{self.describe(number)}: started twice by lane {k}")
                after = self.communications[number].after
                if after is not None and not (after in started and starters[after] == starters[number]):
                    raise InputError(
                        f"{self.describe(number)}: after {after} (expected one that its lanes start before)"
                    )
                started.add(number)
                orders.setdefault(order_of[number], {}).setdefault(k, []).append(number)
            never = (number for number, own in enumerate(starters) if k in own and number not in started)
            if (number := next(never, None)) is not None:
                raise InputError(f"{self.describe(number)}: never started by lane {k} (expected once)")
        self._check_order(orders.values())

    def _check_order(self, orders: Iterable[dict[int, list[int]]]) -> None:
        for by_lane in orders:
            first, *others = by_lane.values()
            for other in others:
                if first != other:
                    number = next(a for a, b in zip(first, other, strict=True) if a != b)
                    raise InputError(f"{self.describe(number)}: started in another order on another lane of its groups")

    def _numbers(self, lane: Lane) -> Iterator[int]:
        """Yield the communications that a lane starts, in order; check that the program has every one that it names."""
        for action in lane.actions:
            if isinstance(action, Compute):
                continue
            if not 0 <= action.communication < len(self.communications):
                raise InputError(f"communication: {action.communication} (expected below {len(self.communications)})")
            if isinstance(action, Start):
                yield action.communication

    def _check_circles(self) -> None:
        found = clock([lane.actions for lane in self.lanes], self.orders(), [0.0] * len(self.communications))
        for k, (lane, done) in enumerate(zip(self.lanes, found.actions, strict=True)):
            for action in lane.actions[len(done) : len(done) + 1]:
                number = -1 if isinstance(action, Compute) else action.communication
                raise InputError(f"lane {k}: waits for {self.describe(number)} in a circle (expected none)")
