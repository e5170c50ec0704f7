"""The network as a fabric sees it: hosts, their links, and three ways to send between hosts.

`send` sends from one host to one host. `multicast` sends from one host to many, and each link carries the bytes once.
`aggregate` sends from many hosts to one; switches add up the bytes, so each link carries only sums. The arguments are
arrays, since a fabric describes a step of all messages and all workers at once. Hosts are numbers: `worker(w)` and
`server(s)`.

[Note: routes] All three ways to send follow routes. A route is a list of links from one host to another: out of the
sender's card, between switches (`switches.py`), and into the receiver's card. If sender and receiver are workers on one
host, the route goes through the host's inner switch. The routes of a multicast form a tree, since all its routes go up
to the spines on the same path, and only one way leads down to each host. The routes of an aggregation also form a tree.
In a tree, a link carries a message once (as one service), even if several routes use the link.

[Note: symmetry] If all workers compute alike and the fabric looks the same from every worker (a ring rotated by one is
the same ring), all workers behave alike. If they do, only the first `size` workers are simulated, and worker w is
represented by host `worker(w)`, the number w modulo `size`. If only one worker is simulated, its transfer to a
neighbour becomes a transfer to itself, which stands for the transfer from its other neighbour. If several transfers are
ready, a link chooses by their message, not by their worker. So the order of transfers on every link, and all times, are
the same as in the full simulation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from legato.simulator.flow.engine.graph import Graph
from legato.simulator.flow.engine.services import NO_LINK, Ids
from legato.simulator.flow.network.network import Network
from legato.simulator.flow.network.switches import HostShape

__all__ = ["Hosts", "Routes", "Topology"]

Hosts = NDArray[np.int64]
_ONE_WORKER = HostShape()


class Routes(NamedTuple):
    """Arrays of routes' first links, links between ([..., hop]) and last links. NO_LINK fills short routes."""

    first: Hosts
    between: Hosts
    last: Hosts


class Topology:
    """The links of `size` workers and `servers` servers, and the graph to which transfers are added.

    `workers` is the number of all workers; `ranks` are the simulated workers. In all arrays of transfers, the first
    index is the number of the fragment.
    """

    def __init__(self, graph: Graph, network: Network, size: int, servers: int, shape: HostShape = _ONE_WORKER) -> None:
        self.graph, self.network, self.shape = graph, network, shape
        self.workers, self.size, self.servers = network.workers, size, servers
        self.ranks: Hosts = np.arange(size)
        self.switches = network.switches
        self._star = self.switches.one and shape.gpus == 1  # there is one switch, and each link belongs to one host
        self._hosts, self._first_server = size + servers, size
        own = size + np.arange(servers)
        self._card = np.concatenate([self.ranks // shape.gpus_per_card * shape.gpus_per_card, own])
        self._chassis = np.concatenate([self.ranks // shape.gpus, own])
        leaf_of_worker, leaf_of_server = self.switches.leaf_of_worker, self.switches.leaf_of_server
        self._leaf = np.concatenate([leaf_of_worker(self._card[:size]), leaf_of_server(np.arange(servers))])
        self._s_per_byte = np.concatenate(
            [
                np.repeat(network.host_s_per_byte(size, servers), 2),
                np.full(2 * self._hosts, 8 / network.local_bandwidth_bps),
                self.switches.s_per_byte(network.s_per_byte),
            ]
        )

    @property
    def numbers(self) -> Hosts:
        """Return the number of each rank's worker in the network."""
        return self.ranks

    @property
    def members(self) -> Hosts:
        """Return the number of workers that each rank represents."""
        return np.full(self.size, self.workers // self.size)

    # Links go out of and into each card and each worker inside its host, and between switches.

    @property
    def num_links(self) -> int:
        return len(self._s_per_byte)

    def out_link(self, host: ArrayLike) -> Hosts:
        card: Hosts = self._card[np.asarray(host)]
        return 2 * card

    def in_link(self, host: ArrayLike) -> Hosts:
        return self.out_link(host) + 1

    def _local_out_link(self, host: Hosts) -> Hosts:
        return 2 * (self._hosts + host)

    def _local_in_link(self, host: Hosts) -> Hosts:
        return 2 * (self._hosts + host) + 1

    def local_links(self, worker: ArrayLike) -> Hosts:
        """Return the links of workers inside their hosts, as [..., 2]: out and in."""
        worker = np.asarray(worker)
        return np.stack([self._local_out_link(worker), self._local_in_link(worker)], axis=-1)

    def route(self, source: ArrayLike, target: ArrayLike) -> Hosts:
        """Return the links of the routes in order, as [..., hop]. Short routes are filled with NO_LINK."""
        source, target = np.broadcast_arrays(source, target)
        first, between, last = self._routes(source, target, (source, target))
        between = np.broadcast_to(between, (*source.shape, between.shape[-1]))
        return np.concatenate([first[..., None], between, last[..., None]], axis=-1)

    def links_of(self, kind: str, number: int) -> list[int]:
        """Return the links, in both directions, of a worker (`kind` "link"), a server, a leaf ("uplink") or a spine.

        The links of a leaf are its links to spines. Links are numbered as if all workers of the network were simulated.
        """
        if kind in ("uplink", "spine"):
            above = self.switches.links_of_leaf(number) if kind == "uplink" else self.switches.links_of_spine(number)
            found: list[int] = (4 * self._hosts + above).tolist()
            return found
        host = self.network.workers + number if kind == "server" else number
        return [int(self.out_link(host)), int(self.in_link(host))]

    def s_per_byte(self) -> NDArray[np.float64]:
        """Return the seconds that a byte takes on each link."""
        return self._s_per_byte

    def worker(self, rank: ArrayLike) -> Hosts:
        """Return the host of a worker. `rank` may be any whole number; it is taken modulo the number of workers."""
        return np.asarray(rank) % self.workers % self.size

    def server(self, index: ArrayLike) -> Hosts:
        """Return the host of a server."""
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
    ) -> Ids:
        """Send from hosts to hosts, and return services that end when the last byte arrives.

        Transfers start when all services in `after` have ended. All arrays are broadcast to one shape. If several
        transfers are ready on a link at the same time, the transfer with the smallest `key` goes first. With `adds`,
        the target adds the bytes to its own bytes, and the services end after the addition.
        """
        after = list(after)
        source, target, nbytes, key, *_ = np.broadcast_arrays(source, target, nbytes, key, *after)
        self.graph.check_room(2 * nbytes.size)
        out, inbound = self._transfers(self._routes(source, target, (source, target)), nbytes, key, adds)
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
        adds: bool = False,
        local: bool | None = None,
    ) -> Ids:
        """Send in rounds: in each round, every rank forwards the bytes that it received in the round before.

        Rank r starts when `begin[:, r]` has ended, sends `nbytes[:, None]` bytes to host `target[r]` and receives from
        rank `come_from[r]`. With `adds`, the rank adds its own bytes to the received bytes before it forwards them, so
        each of the rank's steps waits for `begin[:, r]`. `local` says whether all transfers stay inside hosts. If
        `local` is None, the numbers of the hosts decide, and all workers must be simulated. Returns services [fragment,
        step, rank] that end when the rank has received the bytes of the step.
        """
        shape = (len(begin), steps, self.size)
        self.graph.check_room(2 * math.prod(shape))
        sizes, keys = nbytes[:, None, None], np.asarray(key)[:, None, None]
        routes = self._routes(self.ranks, target, (self.ranks, target), local)
        out, inbound = self._transfers(routes, np.broadcast_to(sizes, shape), keys, adds)
        arrived = inbound[:, :, come_from]
        if steps:
            self.graph.edge(begin, out[:, 0])
            self.graph.edge(arrived[:, :-1], out[:, 1:])
            if adds and self.size > 1:  # with only one simulated rank, its own chunk comes later anyway
                self.graph.edge(begin[:, None], out[:, 1:])
        return arrived

    def all_to_all(
        self,
        nbytes: NDArray[np.float64],
        begin: Ids,
        shifts: Sequence[int],
        *,
        key: ArrayLike,
        adds: bool = False,
        multicast: bool = False,
    ) -> Ids:
        """Send `nbytes` from every rank to others, and return services that end when a rank has received all bytes.

        Rank r starts when `begin[:, r]` has ended. Rank r sends first to rank r + `shifts[0]`, then to rank r +
        `shifts[1]`, and so on. Since all ranks use the same shifts, no worker receives from two ranks at once. With
        `multicast`, each rank sends its bytes once, and all others receive them. With `adds`, each rank adds up the
        received bytes at the end. No service ends before `begin[:, r]` has ended.
        """
        ranks, steps = self.ranks[:, None], np.asarray(shifts)
        targets, key = self.worker(ranks + steps), np.asarray(key)[:, None]
        if not len(steps):
            return begin
        if multicast:
            sent = self.multicast(self.ranks, targets, nbytes[:, None], [begin], key=key)
        else:
            sizes = nbytes[:, None, None]
            sent = self.send(ranks, targets, sizes, [begin[..., None]], key=key[..., None])
        mine = sent[:, self.worker(ranks - steps), np.arange(len(steps))]
        received = self.graph.join(np.concatenate([mine, begin[..., None]], axis=-1))
        if not (adds and self.network.reduce_s_per_byte):
            return received
        summed = self.graph.add(received.shape, work_s=self.network.reduce_s_per_byte * nbytes[:, None] * len(steps))
        self.graph.edge(received, summed)
        return summed

    def _routes(
        self, source: Hosts, target: Hosts, flow: tuple[ArrayLike, ArrayLike], local: bool | None = None
    ) -> Routes:
        """Return the routes from hosts to hosts ([Note: routes]). `flow` determines the path."""
        if self._star:
            return Routes(self.out_link(source), np.empty((1, 0), np.int64), self.in_link(target))
        source, target = np.broadcast_arrays(source, target)
        if local is None:
            inside = (self._chassis[source] == self._chassis[target]) & (self.shape.gpus > 1)
        else:
            inside = np.full(source.shape, local)
        first, last = self.out_link(source), self.in_link(target)
        here, there = self._leaf[source], self._leaf[target]
        if self.switches.connected:
            above = self.switches.path(here, there, self.switches.choice(*flow))
            between = np.where(above == NO_LINK, NO_LINK, above + 4 * self._hosts)
        else:
            # To send to another leaf, a worker goes through the GPU of its host on that leaf. It receives from servers
            # on another leaf in the same way.
            crosses, sends = here != there, source < self._first_server
            relay = np.where(sends, self._on_leaf(source, there), self._on_leaf(target, here))
            into = np.where(sends, self._local_in_link(relay), self.in_link(relay))
            outof = np.where(sends, self.out_link(relay), self._local_out_link(relay))
            first = np.where(crosses & sends, self._local_out_link(source), first)
            last = np.where(crosses & ~sends, self._local_in_link(target), last)
            between = np.where(crosses[..., None], np.stack([into, outof], axis=-1), NO_LINK)
        if inside.any():
            first = np.where(inside, self._local_out_link(source), first)
            last = np.where(inside, self._local_in_link(target), last)
            between = np.where(inside[..., None], NO_LINK, between)
        return Routes(first, between, last)

    def _on_leaf(self, worker: Hosts, leaf: Hosts) -> Hosts:
        """Return the worker on the same host whose card is on this leaf (of rails). For servers, return any host."""
        gpus, gpus_per_card = self.shape
        found: Hosts = worker // gpus * gpus + leaf * gpus_per_card + worker % gpus_per_card
        return np.minimum(found, self._hosts - 1)

    def _services(self, link: Hosts, nbytes: ArrayLike, key: ArrayLike, *, adds: ArrayLike = False) -> Ids:
        """Return services that carry bytes over links. On a link out of a card, latency and sending time are added."""
        leaves_host = (link < 2 * self._hosts) & (link % 2 == 0)
        reduce_s = np.where(adds, self.network.reduce_s_per_byte * np.asarray(nbytes), 0.0)
        return self.graph.add(
            np.shape(link),
            link=link,
            work_s=np.asarray(nbytes) * self._s_per_byte[link] + np.where(leaves_host, self.network.sending_s, 0.0),
            delay_s=np.where(leaves_host, self.network.on_the_way_s, reduce_s),
            key=key,
        )

    def _transfers(self, routes: Routes, nbytes: NDArray[np.float64], key: ArrayLike, adds: bool) -> tuple[Ids, Ids]:
        """Add the services of transfers, and return the first and last ones. `nbytes` has the transfers' shape."""
        shape, key = nbytes.shape, np.asarray(key)
        ends = np.broadcast_to(np.stack([routes.first, routes.last], axis=-1), (*shape, 2))
        # Outgoing and incoming services alternate, because the engine runs them one after the other.
        both = self._services(ends, nbytes[..., None], key[..., None], adds=[False, adds])
        out, inbound = both[..., 0], both[..., 1]
        last = out
        for hop in range(routes.between.shape[-1]):
            link = np.broadcast_to(routes.between[..., hop], shape)
            there = link != NO_LINK
            carried = self._services(link[there], nbytes[there], np.broadcast_to(key, shape)[there])
            self.graph.edge(last[there], carried, cut_through=self.network.cut_through)
            last = last.copy()
            last[there] = carried
        self.graph.edge(last, inbound, cut_through=self.network.cut_through)
        return out, inbound

    def _tree(
        self, routes: Routes, nbytes: NDArray[np.float64], key: NDArray[np.int64], *, cut_through: bool
    ) -> tuple[Ids, Ids]:
        """Add the services of trees, one for each link that a message crosses, and return the first and last services.

        `nbytes` and `key` have one value for each message, and `routes` [message, ..., route] the routes of the
        messages.
        """
        if self._star:
            first, last = (self._services(link, nbytes[..., None], key[..., None]) for link in routes[::2])
            self.graph.edge(first, last, cut_through=cut_through)
            return first, last
        shape = routes.first.shape
        links = np.concatenate([routes.first[None], routes.last[None], np.moveaxis(routes.between, -1, 0)])
        crossed = links != NO_LINK
        message = np.broadcast_to(np.arange(nbytes.size).reshape(*nbytes.shape, 1), shape)
        named = (message * self.num_links + links)[crossed]
        found, at, which = np.unique(named, return_index=True, return_inverse=True)
        in_order = np.argsort(at)  # services on first links come first, as in transfers
        message, link = np.divmod(found[in_order], self.num_links)
        added = self._services(link, nbytes.reshape(-1)[message], key.reshape(-1)[message])
        by_name = np.empty_like(added)
        by_name[in_order] = added
        ids = np.full(links.shape, -1, np.int32)
        ids[crossed] = by_name[which]
        first, last, *between = ids
        before = first
        pairs = []
        for after in (*between, last):
            there = after >= 0
            pairs.append((before[there], after[there]))
            before = np.where(there, after, before)
        befores, afters = (np.concatenate(side) for side in zip(*pairs, strict=True))
        self._edges_once(befores, afters, cut_through=cut_through)
        return first, last

    def _edges_once(self, before: Ids, after: Ids, *, cut_through: bool = False) -> None:
        """Let `after` wait for `before`; a pair of services that occurs several times gets only one edge."""
        if self._star:  # no two routes share a link, so each pair of services occurs once
            self.graph.edge(before, after, cut_through=cut_through)
            return
        befores, afters = np.broadcast_arrays(before, after)
        pairs = np.unique(befores.astype(np.int64) << 32 | afters)
        self.graph.edge((pairs >> 32).astype(np.int32), pairs.astype(np.int32), cut_through=cut_through)

    def multicast(
        self, source: ArrayLike, targets: ArrayLike, nbytes: ArrayLike, after: Iterable[Ids], *, key: ArrayLike
    ) -> Ids:
        """Send from a host to all hosts along the last axis of `targets`, and return services that end on arrival.

        Workers that share a network card receive the bytes at the same time.
        """
        after = list(after)
        source, nbytes, key, *_ = np.broadcast_arrays(source, nbytes, key, *after)
        targets = np.broadcast_to(targets, (*nbytes.shape, np.shape(targets)[-1]))
        self.graph.check_room(targets.size)
        root = source[..., None]
        first, last = self._tree(
            self._routes(root, targets, (root, root)), nbytes, key, cut_through=self.network.cut_through
        )
        for before in after:
            self._edges_once(before[..., None], first)
        return last

    def aggregate(
        self, sources: ArrayLike, target: ArrayLike, nbytes: ArrayLike, after: Ids, *, key: ArrayLike, cut_through: bool
    ) -> Ids:
        """Send from the hosts along the last axis of `sources` to one host. Switches add up the bytes on the way.

        Source i waits for `after[..., i]`. A switch waits until all its sources have sent the whole message (with
        `cut_through`: the first byte). Workers that share a card add up their bytes before they send.
        """
        target, nbytes, key = np.broadcast_arrays(target, nbytes, key)
        self.graph.check_room(after.size)
        root = target[..., None]
        routes = self._routes(np.broadcast_to(sources, after.shape), root, (root, root))
        first, last = self._tree(routes, nbytes, key, cut_through=cut_through)
        self._edges_once(after, first)
        return last[..., 0]

    def add_up(self, workers: Hosts, nbytes: NDArray[np.float64], after: Ids, *, key: NDArray[np.int64]) -> Ids:
        """Let switches add up the messages of workers on several hosts, and return services that end on arrival.

        Switches send the sum back to all these workers, as it arrives. Message [fragment, m] comes from the workers
        `workers[m]`, one on each host, which do not share cards. Worker i waits for `after[..., i]`. Each link carries
        a message once in each direction. The returned services end when each worker has the sum.
        """
        self.graph.check_room(2 * after.size)
        tree, hosts = np.arange(len(workers)), self.numbers[workers]
        climbed = self.switches.climb(self._leaf[hosts], self.switches.choice(tree, tree))
        up = [*np.moveaxis(np.where(climbed == NO_LINK, NO_LINK, climbed + 4 * self._hosts), -1, 0)]
        down = [np.where(link == NO_LINK, NO_LINK, link + 1) for link in reversed(up)]
        first, *others, last = (
            self._merged(link, nbytes, key) for link in (self.out_link(hosts), *up, *down, self.in_link(hosts))
        )
        top = np.broadcast_to(self.graph.add(nbytes.shape)[..., None], first.shape)
        before = first
        for now in (*others[: len(up)], top, *others[len(up) :], last):
            there = now >= 0
            pairs = np.unique(before[there].astype(np.int64) << 32 | now[there])
            self.graph.edge((pairs >> 32).astype(np.int32), pairs.astype(np.int32), cut_through=True)
            before = np.where(there, now, before)
        self.graph.edge(after, first)
        return last

    def _merged(self, link: Hosts, nbytes: NDArray[np.float64], key: NDArray[np.int64]) -> Ids:
        """Return services [fragment, m, host]; hosts whose message [fragment, m] uses the same link share a service.

        For NO_LINK, the service is -1.
        """
        shape = (*nbytes.shape, link.shape[-1])
        links, there = np.broadcast_to(link, shape), np.broadcast_to(link >= 0, shape)
        message = np.broadcast_to(np.arange(nbytes.size).reshape(*nbytes.shape, 1), shape)
        ids = np.full(shape, -1, np.int32)
        found, which = np.unique((message * self.num_links + links)[there], return_inverse=True)
        message, link = np.divmod(found, self.num_links)
        ids[there] = self._services(link, nbytes.reshape(-1)[message], key.reshape(-1)[message])[which]
        return ids
