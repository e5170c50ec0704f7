"""Max-min fair sharing: all transfers on a link at once; no rate can rise without lowering one that is not higher.

Services that cut through one another are one *flow*: it moves at one rate over all their links, and starts when none of
them waits for anything else. Whenever a flow starts or ends, the rates are computed again by progressive filling: raise
all rates equally; when a link is full, fix the rates of its flows; continue with the others. With priorities, the flows
of the highest one share all bandwidth, the flows of the next one share what is left, and so on. This is for small
cases: each change looks at all active flows. Where links are disturbed (`disturbances.py`), every change of a link's
rate is such a change, so rates are constant in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from legato.simulator.flow.engine.loop import compiled, served
from legato.simulator.flow.engine.services import NO_PROFILES, ServiceProfiles, Services

__all__ = ["fair_rates", "run_fair"]

#: A flow has ended when this share of its bytes is left.
_NOTHING = 1e-12
_NO_WEIGHT = np.empty(0, np.int64)
#: A flow: when it is ready and when it starts; its bytes on links, those that are left, and their rate; its time on no
#: link; and the number of flows' services that it waits for.
_STATE = np.dtype(
    [(name, "f8") for name in ("ready_s", "start_s", "size", "left", "rate", "fixed_s")] + [("held_back", "i8")]
)


class _Flows(NamedTuple):
    """The flow of each service, by how many seconds the service is later than its flow, and its bytes.

    The services of flow f are `by_flow[first[f]:first[f + 1]]`.
    """

    flow_of: NDArray[np.int64]
    lag_s: NDArray[np.float64]
    nbytes: NDArray[np.float64]
    by_flow: NDArray[np.int64]
    first: NDArray[np.int64]


def run_fair(
    services: Services,
    s_per_byte: NDArray[np.float64],
    profiles: ServiceProfiles = NO_PROFILES,
    changes: Sequence[tuple[float, int, float]] = (),
    priority: NDArray[np.int64] | None = None,
    weight: NDArray[np.int64] = _NO_WEIGHT,
) -> int:
    """Run all services that can run, fill in `begin_s` and `end_s`, and return how many ran.

    A byte takes `s_per_byte[link]` seconds on a link. In a disturbed simulation, computation has `profiles`, and links
    have `changes` (`disturbances.py`): (seconds, link, factor), in order of time. The services of a flow have the same
    `priority`, if there is one; higher ones go first. Service i takes `weight[i]` times its flow's rate of its link
    (once if `weight` is empty), as if it were `weight[i]` flows that have to be equally fast; weights exclude
    priorities.
    """
    records, successors, _ = services
    flow_of, lag_s = _flows(records, successors)
    nbytes = np.zeros(len(records))
    wired = records["link"] >= 0
    nbytes[wired] = records["work_s"][wired] / s_per_byte[records["link"][wired]]
    by_flow = np.argsort(flow_of, kind="stable").astype(np.int64)
    first = np.searchsorted(flow_of[by_flow], np.arange(flow_of.max(initial=-1) + 2))
    flows = _Flows(flow_of, lag_s, nbytes, by_flow, first)
    change_s = np.array([change[0] for change in changes])
    link = np.array([change[1] for change in changes], np.int64)
    to = 1 / s_per_byte[link] / np.array([change[2] for change in changes])
    of_flows = np.empty(0, np.int64) if priority is None else priority[by_flow[first[:-1]]]
    return int(_run(records, successors, flows, 1 / s_per_byte, (change_s, link, to), profiles, of_flows, weight))


@compiled
def _root(parent, i):
    """The service at the root of the tree of service i."""
    while parent[i] != i:
        i = parent[i]
    return i


@compiled
def _flows(records, successors):
    """Return (the flow of each service, by how many seconds the service is later than its flow)."""
    total = len(records)
    parent = np.arange(total)
    lag_s = np.zeros(total)
    changed = True
    while changed:  # as many times as the longest path of cut-through services is long
        changed = False
        for i in range(total):
            for e in range(records[i].first, records[i].first + records[i].count):
                if successors[e] & 1:
                    j = successors[e] >> 1
                    if lag_s[j] < lag_s[i] + records[i].delay_s:
                        lag_s[j] = lag_s[i] + records[i].delay_s
                        changed = True
                    a, b = _root(parent, i), _root(parent, j)
                    parent[max(a, b)] = min(a, b)
    flow = np.empty(total, np.int64)
    flows = 0
    for i in range(total):
        if parent[i] == i:
            flow[i] = flows
            flows += 1
        else:
            flow[i] = flow[_root(parent, i)]  # roots are the smallest
    return flow, lag_s


@compiled
def fair_rates(links, first, capacity, weight):
    """The max-min fair rate of each flow, in the unit of `capacity[link]`.

    Flow f uses `links[first[f]:first[f + 1]]`, each listed once, `weight` times its rate there (if it is empty: its
    rate). A flow on no link has an infinite rate.
    """
    flows, num_links = len(first) - 1, len(capacity)
    rate = np.full(flows, np.inf)
    left = capacity.copy()
    users = np.zeros(num_links, np.int64)
    for k in range(len(links)):
        users[links[k]] += 1 if len(weight) == 0 else weight[k]
    undecided = np.sum(first[1:] > first[:-1])
    decided = np.zeros(flows, np.bool_)
    while undecided > 0:
        each = np.where(users > 0, left / np.maximum(users, 1), np.inf)
        share = each.min()
        full = each <= share * (1 + 1e-12)
        for f in range(flows):
            if decided[f] or first[f] == first[f + 1]:
                continue
            stops = False
            for at in range(first[f], first[f + 1]):
                stops = stops or full[links[at]]
            if stops:
                rate[f] = share
                decided[f] = True
                undecided -= 1
                for at in range(first[f], first[f + 1]):
                    used = 1 if len(weight) == 0 else weight[at]
                    left[links[at]] = max(left[links[at]] - used * share, 0.0)
                    users[links[at]] -= used
    return rate


@compiled
def _rates_by_priority(links, first, capacity, priority):
    """The max-min fair rates of the flows of each priority on what those with higher ones leave."""
    rate, left = np.zeros(len(priority)), capacity.copy()
    for level in np.unique(priority)[::-1]:
        mine = np.flatnonzero(priority == level)
        starts = np.zeros(len(mine) + 1, np.int64)
        for k in range(len(mine)):
            starts[k + 1] = starts[k] + first[mine[k] + 1] - first[mine[k]]
        theirs = np.empty(starts[-1], np.int64)
        for k in range(len(mine)):
            theirs[starts[k] : starts[k + 1]] = links[first[mine[k]] : first[mine[k] + 1]]
        rates = fair_rates(theirs, starts, left, np.empty(0, np.int64))
        for k in range(len(mine)):
            rate[mine[k]] = rates[k]
            for at in theirs[starts[k] : starts[k + 1]]:
                left[at] -= rates[k]
        for at in theirs:
            if left[at] <= capacity[at] * _NOTHING:
                left[at] = 0.0
    return rate


@compiled
def _links_of(records, active, by_flow, first):
    """The links of the active flows, each once per flow, as arguments for `fair_rates`, and the services on them."""
    starts = np.zeros(len(active) + 1, np.int64)
    count = 0
    for f in active:
        count += first[f + 1] - first[f]
    links, services = np.empty(count, np.int64), np.empty(count, np.int64)
    at = 0
    for k in range(len(active)):
        for m in range(first[active[k]], first[active[k] + 1]):
            link = records[by_flow[m]].link
            known = link < 0
            for seen in range(starts[k], at):
                known = known or links[seen] == link
            if not known:
                links[at], services[at] = link, by_flow[m]
                at += 1
        starts[k + 1] = at
    return links[:at], starts, services[:at]


@compiled
def _states(records, successors, flows):
    """All flows before the first one starts."""
    states = np.zeros(len(flows.first) - 1, _STATE)
    for i in range(len(records)):
        mine = states[flows.flow_of[i]]
        if records[i].link < 0:
            mine.fixed_s = max(mine.fixed_s, records[i].work_s)
        mine.size = max(mine.size, flows.nbytes[i])
        for e in range(records[i].first, records[i].first + records[i].count):
            if successors[e] & 1 == 0:
                states[flows.flow_of[successors[e] >> 1]].held_back += 1
    for f in range(len(states)):
        states[f].left = states[f].size
    return states


@compiled
def _next_s(states, waiting, active, now):
    """The earliest moment at which a flow starts or ends."""
    until = np.inf
    for f in waiting:
        until = min(until, states[f].ready_s)
    for f in active:
        if states[f].rate > 0:
            until = min(until, now + states[f].left / states[f].rate)
    return until


@compiled
def _moved(states, active, now, until):
    """(flows that go on, flows that end) after moving until then."""
    moving, ended = [0][:0], [0][:0]
    for f in active:
        flow = states[f]
        flow.left -= flow.rate * (until - now)
        if flow.left <= flow.size * _NOTHING or (flow.rate > 0 and now + flow.left / flow.rate == now):
            ended.append(f)
        else:
            moving.append(f)
    return moving, ended


@compiled
def _started(states, waiting, now, moving, ended):
    """Start the waiting flows that are ready: those without bytes end at once. Returns those that go on waiting."""
    later = [0][:0]
    for f in waiting:
        if states[f].ready_s > now:
            later.append(f)
            continue
        states[f].start_s = states[f].ready_s
        if states[f].size > 0:
            moving.append(f)
        else:
            ended.append(f)
    return later


@compiled
def _end(records, successors, flows, states, f, now, profiles, waiting):
    """End flow f, and put those that may start after it to the ones that are `waiting`."""
    first, last, start = flows.first[f], flows.first[f + 1], states[f].start_s
    end = now
    if states[f].size == 0:
        end = start + states[f].fixed_s
        if len(profiles.profile_of) > 0 and last - first == 1:
            end = served(profiles, flows.by_flow[first], start, states[f].fixed_s)
    for i in flows.by_flow[first:last]:
        records[i].begin_s, records[i].end_s = start + flows.lag_s[i], end + flows.lag_s[i]
        for e in range(records[i].first, records[i].first + records[i].count):
            if successors[e] & 1 == 0:
                g = flows.flow_of[successors[e] >> 1]
                states[g].ready_s = max(states[g].ready_s, records[i].end_s + records[i].delay_s)
                states[g].held_back -= 1
                if states[g].held_back == 0:
                    waiting.append(g)


@compiled
def _run(records, successors, flows, capacity, changes, profiles, priority, weight):
    """Run all services; `priority` (by flow), `weight` (by service) and `changes` (seconds, link, capacity) may be
    empty."""
    change_s, change_link, change_to = changes
    states, changed, now, done = _states(records, successors, flows), 0, 0.0, 0
    waiting = [f for f in range(len(states)) if states[f].held_back == 0]  # may start at ready_s
    active = [0][:0]
    while len(waiting) > 0 or len(active) > 0:
        until = _next_s(states, waiting, active, now)
        if changed < len(change_s):
            until = min(until, max(change_s[changed], now))
        moving, ended = _moved(states, active, now, until)
        now = max(now, until)
        while changed < len(change_s) and change_s[changed] <= now:
            capacity[change_link[changed]] = change_to[changed]
            changed += 1
        waiting = _started(states, waiting, now, moving, ended)
        active = moving
        for f in ended:
            _end(records, successors, flows, states, f, now, profiles, waiting)
            done += flows.first[f + 1] - flows.first[f]
        if len(active) > 0:
            chosen = np.array(active)
            links, starts, chosen_services = _links_of(records, chosen, flows.by_flow, flows.first)
            if len(priority) > 0:
                rates = _rates_by_priority(links, starts, capacity, priority[chosen])
            else:
                rates = fair_rates(links, starts, capacity, weight if len(weight) == 0 else weight[chosen_services])
            for k in range(len(chosen)):
                states[chosen[k]].rate = rates[k]
    return done
