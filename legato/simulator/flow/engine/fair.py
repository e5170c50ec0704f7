"""Max-min fair sharing: transfers share a link, and no rate can rise unless an equal or lower rate falls.

Services that release one another *cut through* (`services.py`) form one *flow*, with one rate on all its links. A flow
starts when none of its services waits for anything outside the flow. Whenever a flow starts or ends, the rates are
computed again by progressive filling: raise all rates equally; when a link is full, fix the rates of its flows;
continue with the remaining flows. With priorities, the flows of the highest priority share all bandwidth, the flows of
the next priority share the rest, and so on. This engine is for small cases, since each change looks at all active
flows. If links are disturbed (`disturbances.py`), the rates are also computed again whenever the speed of a link
changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from legato.simulator.flow.engine.loop import compiled, served
from legato.simulator.flow.engine.services import NO_PROFILES, ServiceProfiles, Services

__all__ = ["fair_rates", "run_fair"]

#: A flow has ended when only this fraction of its bytes is left.
_NOTHING = 1e-12
_NO_WEIGHT = np.empty(0, np.int64)
#: The state of a flow: the time when it is ready, its start, its bytes on links, the bytes left, its rate, its time on
#: no link, and the number of services for which its services wait.
_STATE = np.dtype(
    [(name, "f8") for name in ("ready_s", "start_s", "size", "left", "rate", "fixed_s")] + [("held_back", "i8")]
)


class _Flows(NamedTuple):
    """All flows. Service i runs `lag_s[i]` seconds later than its flow `flow_of[i]`; flow f has `nbytes[f]` bytes.

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

    A byte takes `s_per_byte[link]` seconds on a link. In a disturbed simulation, `profiles` says how computation slows
    down (`disturbances.py`), and `changes` lists the changes of links as (seconds, link, factor), in order of time. If
    there are priorities, the services of a flow have the same `priority`, and higher priorities go first. If `weight`
    is empty, each service uses the rate of its flow on its link. Otherwise, service i uses `weight[i]` times this rate,
    as `weight[i]` equally fast flows would. Weights cannot be combined with priorities.
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
    """Return the root of the tree that contains service i."""
    while parent[i] != i:
        i = parent[i]
    return i


@compiled
def _flows(records, successors):
    """Return (flow, delay after the flow in seconds) of each service."""
    total = len(records)
    parent = np.arange(total)
    lag_s = np.zeros(total)
    changed = True
    while changed:  # repeats as often as the longest path of cut-through services has edges
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
            flow[i] = flow[_root(parent, i)]  # the root of a flow has the smallest id
    return flow, lag_s


@compiled
def fair_rates(links, first, capacity, weight):
    """Return the max-min fair rate of each flow, in the unit of `capacity[link]`.

    Flow f uses the links `links[first[f]:first[f + 1]]`, each listed once. On each link, a flow uses `weight` times its
    rate, or just its rate if `weight` is empty. A flow on no link has an infinite rate.
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
    """Return max-min fair rates: each priority shares the bandwidth that higher priorities leave."""
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
    """Return the arguments `links` and `first` of `fair_rates` for active flows, and a service on each of the links."""
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
    """Return the states of all flows before the first flow starts."""
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
    """Return the earliest moment at which a flow starts or ends."""
    until = np.inf
    for f in waiting:
        until = min(until, states[f].ready_s)
    for f in active:
        if states[f].rate > 0:
            until = min(until, now + states[f].left / states[f].rate)
    return until


@compiled
def _moved(states, active, now, until):
    """Let all active flows send bytes from `now` to `until`, and return (flows that go on, flows that end)."""
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
    """Start the waiting flows that are ready, and return the flows that still wait. Flows without bytes end at once."""
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
    """End flow f, and add the flows that may start after it to `waiting`."""
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
    """Run all services, and return how many ran.

    `priority` (by flow), `weight` (by service) and `changes` (seconds, link, capacity) may be empty.
    """
    change_s, change_link, change_to = changes
    states, changed, now, done = _states(records, successors, flows), 0, 0.0, 0
    waiting = [f for f in range(len(states)) if states[f].held_back == 0]  # these flows may start at ready_s
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
