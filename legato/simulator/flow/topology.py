"""The network as a fabric sees it: hosts, their links and racks, and three ways to send between hosts.

These are `send` (one to one), `multicast` (one to many; each link carries the
bytes once) and `aggregate` (many to one; the switch adds up). All take arrays: a
fabric describes a step of all messages and all workers at once. Hosts are
numbers: `worker(w)` and `server(s)`.

[Note: symmetry]
If all workers compute alike and the fabric looks the same from every worker (a
ring rotated by one is the same ring), all workers behave alike. Then only the
first `size` workers are simulated, and `worker(w)` is w modulo `size`: a transfer
to the neighbour becomes a transfer to the worker itself, as if it came from the
neighbour on the other side. Links break ties by message, not by worker, so the
order on every link, and with it all times, are those of the full simulation.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from legato.simulator.flow.graph import NO_LINK, NO_TAG, Graph, Ids
from legato.simulator.flow.network import Network

__all__ = ["Branches", "Hosts", "Topology"]

Hosts = NDArray[np.int64]


class Branches(NamedTuple):
    """A round of a tree: who sends to whom. Receiver k receives what sender `come_from[k]` sends.

    `level` is that of the receivers, or None where they are the parents.
    """

    senders: Hosts
    receivers: Hosts
    come_from: Hosts
    level: int | None


class Topology:
    """The links of `size` workers and `servers` servers, and the graph that transfers are added to.

    `workers` is the number of workers there are; `ranks` are those simulated.
    The first axis of everything that is sent counts the fragments, of which
    fragment i is tagged `tag[i]` (all of them, if there is one tag only).
    """

    def __init__(self, graph: Graph, network: Network, size: int, servers: int, local_bandwidth_bps: float) -> None:
        self.graph, self.network = graph, network
        self.workers, self.size, self.servers = network.workers, size, servers
        self.ranks: Hosts = np.arange(size)
        self.tag = np.array([NO_TAG])
        self._local_s_per_byte = 8 / local_bandwidth_bps
        self._hosts = size + servers
        self._host_s_per_byte = network.host_s_per_byte(size, servers)
        racks = network.racks
        self._rack = np.concatenate([network.rack_of_workers()[:size], np.arange(servers) % racks])
        self._rack_s_per_byte = network.s_per_byte * network.oversubscription * racks / network.workers

    @property
    def stand_ins(self) -> Hosts:
        """The number of the worker that each rank stands for, among others."""
        return self.ranks

    @property
    def members(self) -> Hosts:
        """The number of workers that each rank stands for."""
        return np.full(self.size, self.workers // self.size)

    @property
    def num_events(self) -> int:
        """The number of services that are simulated."""
        return self.graph.num_services

    def tagged(self, tag: NDArray[np.int64]) -> Topology:
        """The same topology on the same graph, for fragments with these tags."""
        other = copy.copy(self)
        other.tag = tag
        return other

    def _tags(self, shape: tuple[int, ...]) -> NDArray[np.int64]:
        return np.broadcast_to(self.tag.reshape(-1, *[1] * (len(shape) - 1)), shape)

    # Links: out of and into each host, out of and into each rack, and the local ones.

    @property
    def num_links(self) -> int:
        return 4 * self._hosts + 2 * self.network.racks

    def out_link(self, host: ArrayLike) -> Hosts:
        return 2 * np.asarray(host)

    def in_link(self, host: ArrayLike) -> Hosts:
        return 2 * np.asarray(host) + 1

    def _up_link(self, rack: Hosts) -> Hosts:
        return 4 * self._hosts + 2 * rack

    def _down_link(self, rack: Hosts) -> Hosts:
        return 4 * self._hosts + 2 * rack + 1

    def links_of(self, kind: str, number: int) -> list[int]:
        """The two links of a worker ("link"), of a server, or of a rack ("uplink")."""
        if kind == "uplink":
            rack = np.asarray(number)
            return [int(self._up_link(rack)), int(self._down_link(rack))]
        host = self.server(number) if kind == "server" else self.worker(number)
        return [int(self.out_link(host)), int(self.in_link(host))]

    def s_per_byte(self) -> NDArray[np.float64]:
        """Seconds that a byte takes on each link."""
        return np.concatenate(
            [
                np.repeat(self._host_s_per_byte, 2),
                np.full(2 * self._hosts, self._local_s_per_byte),
                np.full(2 * self.network.racks, self._rack_s_per_byte),
            ]
        )

    def worker(self, rank: ArrayLike) -> Hosts:
        """The host of a worker; `rank` may be any whole number, which is taken modulo the number of workers."""
        return np.asarray(rank) % self.workers % self.size

    def server(self, index: ArrayLike) -> Hosts:
        """The host of a server."""
        return self.size + np.asarray(index)

    def send(
        self,
        source: ArrayLike,
        target: ArrayLike,
        nbytes: ArrayLike,
        after: Iterable[Ids],
        *,
        key: ArrayLike,
        adds: bool = False,
        local: bool = False,
    ) -> Ids:
        """Send from hosts to hosts once all of `after` have ended; return services that end when the last byte arrives.

        All arrays are broadcast. Of the transfers that are ready on a link at the
        same time, the one with the smallest `key` goes first. With `adds`, the
        target adds the bytes to its own, and the services end when it has done
        so. With `local`, the links inside the host are used, not the network.
        """
        after = list(after)
        source, target, nbytes, key, *_ = np.broadcast_arrays(source, target, nbytes, key, *after)
        self.graph.check_room(2 * nbytes.size)
        out, inbound = self._transfers(source, target, nbytes, key, adds, local)
        for before in after:
            self.graph.edge(before, out)
        return inbound

    def pass_around(
        self,
        target: Hosts,
        come_from: Hosts,
        nbytes: NDArray[np.float64],
        begin: Ids,
        steps: int,
        *,
        key: ArrayLike,
        source: Hosts | None = None,
        adds: bool = False,
        local: bool = False,
    ) -> Ids:
        """Send in rounds, in each of which every rank forwards the bytes that it received in the round before.

        Rank r starts when `begin[:, r]` has ended, sends `nbytes[:, None]` bytes to
        host `target[r]` and receives from rank `come_from[r]`. With `adds`, it adds
        its own bytes to those it received, so it forwards nothing before
        `begin[:, r]` has ended. `source` is the host whose link each rank sends
        on, if that is not its own. Returns [fragment, step, rank]: services that
        end when the rank has received the bytes of the step.
        """
        shape = (len(begin), steps, self.size)
        self.graph.check_room(2 * math.prod(shape))
        hosts = self.ranks if source is None else source
        sources, targets, sizes, keys = np.broadcast_arrays(
            hosts, target, nbytes[:, None, None], np.asarray(key)[:, None, None], np.empty(shape)
        )[:4]
        out, inbound = self._transfers(sources, targets, sizes, keys, adds, local)
        arrived = inbound[:, :, come_from]
        if steps:
            self.graph.edge(begin, out[:, 0])
            self.graph.edge(arrived[:, :-1], out[:, 1:])
            if adds and self.size > 1:  # with one rank, its own chunk comes later anyway
                self.graph.edge(begin[:, None], out[:, 1:])
        return arrived

    def all_to_all(
        self, nbytes: NDArray[np.float64], begin: Ids, *, key: ArrayLike, adds: bool = False, multicast: bool = False
    ) -> Ids:
        """Send `nbytes` from every rank to every other; return services that end when a rank has received them all.

        Rank r starts when `begin[:, r]` has ended, with the neighbour on the right,
        then the one after it, and so on: no worker receives two at once. With
        `multicast`, it sends once for all. The services do not end before `begin`.
        """
        ranks, steps = self.ranks[:, None], np.arange(1, self.workers)
        targets, key = self.worker(ranks + steps), np.asarray(key)[:, None]
        if not len(steps):
            return begin
        if multicast:
            sent = self.multicast(self.ranks, targets, nbytes[:, None], [begin], key=key)
        else:
            sizes = nbytes[:, None, None]
            sent = self.send(ranks, targets, sizes, [begin[..., None]], key=key[..., None], adds=adds)
        mine = sent[:, self.worker(ranks - steps), steps - 1]
        return self.graph.join(np.concatenate([mine, begin[..., None]], axis=-1))

    def branches(self, level: int, *, up: bool) -> Branches:
        """A round of a binomial tree: the workers at a level send to their parents (`up`), or receive from them.

        A worker is at the level of the lowest bit of its number, and its parent's number does not have that bit.
        """
        children = np.arange(1 << level, self.workers, 2 << level)
        parents, each = children - (1 << level), np.arange(len(children))
        return Branches(children, parents, each, None) if up else Branches(parents, children, each, level)

    def relay(
        self, branches: Branches, nbytes: NDArray[np.float64], after: Ids, *, key: ArrayLike, adds: bool = False
    ) -> Ids:
        """Send `nbytes[fragment]` in a round of a tree, from sender k once `after[:, k]` has ended.

        Returns [fragment, receiver]: services that end as those of `send`.
        """
        senders, receivers, come_from, _ = branches
        sizes, key, after = nbytes[:, None], np.asarray(key)[:, None], after[:, come_from]
        return self.send(senders[come_from], receivers, sizes, [after], key=key, adds=adds)

    def _transfers(
        self, source: Hosts, target: Hosts, nbytes: ArrayLike, key: ArrayLike, adds: bool, local: bool
    ) -> tuple[Ids, Ids]:
        """Add the services of transfers, on outgoing and incoming links; all arrays have the same shape."""
        network, nbytes = self.network, np.asarray(nbytes)
        hosts = np.stack([source, target], axis=-1)
        s_per_byte = self._local_s_per_byte if local else self._host_s_per_byte[hosts]
        shift = 2 * self._hosts if local else 0
        latency = 0.0 if local else network.latency_s
        reduce_s = network.reduce_s_per_byte * nbytes if adds else np.zeros(nbytes.shape)
        # Outgoing and incoming services alternate: the engine runs them one after the other.
        both = self.graph.add(
            (*nbytes.shape, 2),
            link=2 * hosts + [shift, shift + 1],
            work_s=nbytes[..., None] * s_per_byte,
            delay_s=np.stack([np.full(nbytes.shape, latency), reduce_s], axis=-1),
            key=np.asarray(key)[..., None],
            tag=self._tags((*nbytes.shape, 2)),
        )
        out, inbound = both[..., 0], both[..., 1]
        self.graph.edge(self._between_racks(out, source, target, nbytes, key), inbound, cut_through=network.cut_through)
        return out, inbound

    def _receive(self, target: Hosts, nbytes: NDArray[np.float64], key: ArrayLike) -> Ids:
        work_s = nbytes * self._host_s_per_byte[target]
        return self.graph.add(
            target.shape, link=self.in_link(target), work_s=work_s, key=key, tag=self._tags(target.shape)
        )

    def _between_racks(self, out: Ids, source: ArrayLike, target: ArrayLike, nbytes: ArrayLike, key: ArrayLike) -> Ids:
        """Return the last service before the target's link: `out`, or that on the downlink of the target's rack."""
        if self.network.racks == 1:
            return out
        here, there = self._rack[np.asarray(source)], self._rack[np.asarray(target)]
        far = here != there
        work_s, far_key = np.asarray(nbytes)[far] * self._rack_s_per_byte, np.asarray(key)[far]
        tag = self._tags(far.shape)[far]
        up = self.graph.add(work_s.shape, link=self._up_link(here[far]), work_s=work_s, key=far_key, tag=tag)
        down = self.graph.add(work_s.shape, link=self._down_link(there[far]), work_s=work_s, key=far_key, tag=tag)
        self.graph.edge(out[far], up, cut_through=self.network.cut_through)
        self.graph.edge(up, down, cut_through=self.network.cut_through)
        last = out.copy()
        last[far] = down
        return last

    def multicast(
        self, source: ArrayLike, targets: ArrayLike, nbytes: ArrayLike, after: Iterable[Ids], *, key: ArrayLike
    ) -> Ids:
        """Send from a host to all along the last axis of `targets`; return what ends when each has all bytes."""
        after = list(after)
        source, nbytes, key, *_ = np.broadcast_arrays(source, nbytes, key, *after)
        graph, network = self.graph, self.network
        work_s = nbytes * self._host_s_per_byte[source]
        tag = self._tags(nbytes.shape)
        out = graph.add(
            nbytes.shape, link=self.out_link(source), work_s=work_s, delay_s=network.latency_s, key=key, tag=tag
        )
        for before in after:
            graph.edge(before, out)
        targets = np.broadcast_to(targets, (*nbytes.shape, np.shape(targets)[-1]))
        inbound = self._receive(targets, nbytes[..., None], key[..., None])
        if network.racks == 1:
            graph.edge(out[..., None], inbound, cut_through=network.cut_through)
            return inbound
        # Each message goes up once, and down once into every other rack.
        rack_work = nbytes * self._rack_s_per_byte
        here = self._rack[source]
        up = graph.add(nbytes.shape, link=self._up_link(here), work_s=rack_work, key=key, tag=tag)
        racks = np.arange(network.racks)
        elsewhere = racks != here[..., None]
        down_link = np.where(elsewhere, self._down_link(racks), NO_LINK)
        down_work = np.where(elsewhere, rack_work[..., None], 0.0)
        down = graph.add(down_link.shape, link=down_link, work_s=down_work, key=key[..., None], tag=tag[..., None])
        graph.edge(out, up, cut_through=network.cut_through)
        graph.edge(up[..., None], down, cut_through=network.cut_through)
        there = self._rack[targets]
        last = np.where(there == here[..., None], out[..., None], np.take_along_axis(down, there, -1))
        graph.edge(last, inbound, cut_through=network.cut_through)
        return inbound

    def aggregate(
        self, sources: ArrayLike, target: ArrayLike, nbytes: ArrayLike, after: Ids, *, key: ArrayLike, cut_through: bool
    ) -> Ids:
        """Send from the hosts along the last axis of `sources` to one host; switches add up the bytes on the way.

        Source i waits for `after[..., i]`. The switch waits for the whole message
        of the last source, or, with `cut_through`, only for its first byte.
        """
        target, nbytes, key = np.broadcast_arrays(target, nbytes, key)
        graph, network = self.graph, self.network
        sources = np.broadcast_to(sources, after.shape)
        work_s = nbytes[..., None] * self._host_s_per_byte[sources]
        out = graph.add(
            after.shape,
            link=self.out_link(sources),
            work_s=work_s,
            delay_s=network.latency_s,
            key=key[..., None],
            tag=self._tags(after.shape),
        )
        graph.edge(after, out)
        inbound = self._receive(target, nbytes, key)
        if network.racks == 1:
            graph.edge(out, inbound[..., None], cut_through=cut_through)
            return inbound
        # Each rack adds up its messages and sends one up; the switch above adds those up.
        rack_work = nbytes * self._rack_s_per_byte
        here, there = self._rack[sources], self._rack[target]
        tag = self._tags(nbytes.shape)
        down = graph.add(nbytes.shape, link=self._down_link(there), work_s=rack_work, key=key, tag=tag)
        for rack in range(network.racks):
            members = np.flatnonzero(here.reshape(-1, here.shape[-1])[0] == rack)
            far = there != rack
            up_link = np.full_like(there[far], self._up_link(np.asarray(rack)))
            up = graph.add(up_link.shape, link=up_link, work_s=rack_work[far], key=key[far], tag=tag[far])
            graph.edge(out[..., members][far], up[..., None], cut_through=cut_through)
            graph.edge(up, down[far], cut_through=cut_through)
            graph.edge(out[..., members][~far], inbound[~far][..., None], cut_through=cut_through)
        graph.edge(down, inbound, cut_through=cut_through)
        return inbound
