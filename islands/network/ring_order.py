"""In which order a ring visits the islands.

A ring's neighbours exchange a chunk in every phase, and between two islands each chunk crosses the
links of their route. So the best order is the one whose busiest link is crossed the fewest times;
among those, the one with the fewest crossings in all, then the least delay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import permutations
from math import fsum
from typing import TypeAlias

#: ``routes[source][target]``: numbers of the links from one island to another.
Routes: TypeAlias = Sequence[Sequence[tuple[int, ...]]]
#: Most crossings of one link, crossings in all, delay in seconds, the order itself.
_Cost: TypeAlias = tuple[int, int, float, tuple[int, ...]]

#: Up to so many islands every order is looked at: 5,040 of them, in tens of milliseconds.
MOST_EXACT = 8
#: Crossings that the heuristic counts before it takes the best order so far: about a second.
_MOST_COUNTED = 2_000_000


def island_order(routes: Routes, delay_s: Sequence[float]) -> tuple[int, ...]:
    """The order of all islands, beginning with the first, that crosses links the least.

    Minimises (the largest number of times that any link is crossed, crossings in all, total delay,
    the order itself) over cyclic orders: exactly for up to ``MOST_EXACT`` islands, else by nearest
    neighbour and 2-opt from there and from the islands' own order, which is then never beaten by
    the islands' own order. ``delay_s`` is of each link.
    """
    if len(routes) < 3:
        return tuple(range(len(routes)))
    tours = _Tours(routes, delay_s)
    return tours.exact() if len(routes) <= MOST_EXACT else tours.heuristic()


class _Tours:
    """Cyclic orders of the islands and what they cost."""

    def __init__(self, routes: Routes, delay_s: Sequence[float]) -> None:
        self._routes, self._islands = routes, range(len(routes))
        self._delay_s = [[fsum(delay_s[link] for link in way) for way in row] for row in routes]
        out = [[j for j in self._islands if j != i] for i in self._islands]
        #: What leaving each island costs at least.
        self._shortest = [min(len(routes[i][j]) for j in out[i]) for i in self._islands]
        self._quickest_s = [min(self._delay_s[i][j] for j in out[i]) for i in self._islands]
        self._counted = 0

    def cost(self, order: Sequence[int]) -> _Cost:
        """Counted over the closed ring; fsum so that equal delays are equal in any order."""
        edges = list(_edges(order))
        times = Counter(link for a, b in edges for link in self._routes[a][b])
        total = times.total()
        self._counted += total
        return max(times.values()), total, fsum(self._delay_s[a][b] for a, b in edges), tuple(order)

    def exact(self) -> tuple[int, ...]:
        """Depth first through all orders, in order, leaving a branch that cannot be the best."""
        times = Counter[int]()
        best = self.cost(self._islands)

        def extend(
            order: list[int], most: int, total: int, delay_s: float, left: list[int]
        ) -> None:
            """``left`` are the islands to come; what was crossed so far is in the other ones."""
            nonlocal best
            if not left:
                best = min(best, self.cost(order))
                return
            here = order[-1]
            for target in left:
                route = self._routes[here][target]
                times.update(route)
                now = max([most, *(times[link] for link in route)])
                so_far = total + len(route)
                spent_s = delay_s + self._delay_s[here][target]
                at_least = (
                    now,
                    so_far + sum(self._shortest[island] for island in left),
                    # Less a little, so that rounding never cuts off a better order.
                    (spent_s + sum(self._quickest_s[i] for i in left)) * (1 - 1e-12),
                )
                if at_least < best[:3]:
                    extend([*order, target], now, so_far, spent_s, [i for i in left if i != target])
                times.subtract(route)

        extend([0], 0, 0, 0.0, list(self._islands)[1:])
        return best[3]

    def heuristic(self) -> tuple[int, ...]:
        """The better of the islands' own order and the nearest neighbours', each improved."""
        at_least = self._lower_bound()
        best = self.cost(self._islands)
        for start in (list(self._islands), self._nearest_neighbours()):
            best = min(best, self._improved(start, at_least))
            if best[:3] <= at_least:
                break
        return best[3]

    def _nearest_neighbours(self) -> list[int]:
        order, left = [0], set(self._islands) - {0}
        while left:
            here = order[-1]
            order.append(
                min(left, key=lambda i: (len(self._routes[here][i]), self._delay_s[here][i], i))
            )
            left.remove(order[-1])
        return order

    def _improved(self, start: list[int], at_least: tuple[int, int, float]) -> _Cost:
        """2-opt: reverse a part of the ring as long as that makes it better."""
        best = self.cost(start)
        limit = self._counted + _MOST_COUNTED
        improved = True
        while improved and best[:3] > at_least and self._counted < limit:
            improved = False
            for first, last in _parts(len(start)):
                if best[:3] <= at_least or self._counted >= limit:
                    break
                order = list(best[3])
                order[first:last] = reversed(order[first:last])
                cost = self.cost(order)
                if cost[:3] < best[:3]:
                    best, improved = cost, True
        return best

    def _lower_bound(self) -> tuple[int, int, float]:
        """What no order can beat: every island left over its shortest and its quickest route."""
        pairs = permutations(self._islands, 2)
        # A link that is on every route (a backbone) is crossed once per island.
        on_all = set.intersection(*(set(self._routes[i][j]) for i, j in pairs))
        most = len(self._islands) if on_all else 1
        return most, sum(self._shortest), fsum(self._quickest_s)


def _edges(order: Sequence[int]) -> Iterable[tuple[int, int]]:
    """From each island to the next, and from the last to the first."""
    return zip(order, [*order[1:], order[0]], strict=True)


def _parts(islands: int) -> Iterable[tuple[int, int]]:
    """Slices of two islands or more; the first island stays where it is."""
    return (
        (first, last) for first in range(1, islands - 1) for last in range(first + 2, islands + 1)
    )
