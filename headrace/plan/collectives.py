"""Seconds that collectives take over the links between chips, and which links they occupy."""

import itertools
import re
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

from headrace.plan import device_rates
from headrace.plan.device_rates import DeviceRates
from headrace.plan.hlo import Computation, Instruction

# A resource that transfers occupy: "hbm", "host", "network", or (axis, direction) of the torus.
Lane = Hashable


@dataclass(frozen=True)
class _LinkPath:
    """The links that connect the members of a group."""

    axes: tuple[tuple[int, int, float], ...]  # axis of the torus, members along it, bytes/s into each
    slices: int  # in which the group has members
    members_per_slice: int


def transfer_time(
    rates: DeviceRates, computation: Computation, i: Instruction
) -> tuple[str, float, list[Lane]]:
    """Return the kind of a collective, its seconds, and the lanes it occupies.

    On a torus all links of all axes of a group work at the same time, and each device receives everything but
    its own part: bytes x (n - 1) / n over all incoming links. An all-reduce is a reduce-scatter and an
    all-gather."""
    local_bytes = sum(array.bytes for name in i.operands for array in computation.instructions[name].shape)
    kind = i.opcode.removesuffix("-start")
    if kind == "send":
        kind = frontend_attribute(i, "_xla_megascale_transfer_type").lower().replace("_", "-") or "send"
        received = _received_bytes(kind, local_bytes, len({place[0] for place in rates.places}))
        return f"{kind} between slices", device_rates.MESSAGE_SECONDS + received / rates.network, ["network"]
    if kind == "collective-permute":
        max_messages, hops, lanes = _route_messages(rates, i.source_target_pairs)
        bandwidth = rates.network if "network" in lanes else rates.link * device_rates.LINK_SHARE
        latency = device_rates.MESSAGE_SECONDS + device_rates.HOP_SECONDS * hops
        return kind, latency + max_messages * local_bytes / bandwidth, list(lanes)
    return _group_transfer_time(rates, kind, i, local_bytes)


def frontend_attribute(i: Instruction, key: str) -> str:
    """Return an attribute that the frontend attached to an instruction; empty if there is none."""
    match = re.search(rf'{key}="([^"]*)"', i.attributes.get("frontend_attributes", ""))
    return match[1] if match else ""


def _group_transfer_time(
    rates: DeviceRates, kind: str, i: Instruction, local_bytes: int
) -> tuple[str, float, list[Lane]]:
    group = (i.replica_groups or (tuple(range(len(rates.places))),))[0]
    path = _find_link_path(rates, group)
    bandwidth = sum(rate for _, _, rate in path.axes) or rates.bandwidth  # between the cores of a chip
    latency = device_rates.MESSAGE_SECONDS
    latency += device_rates.HOP_SECONDS * sum(count // 2 for _, count, _ in path.axes)
    total_bytes = local_bytes * path.members_per_slice if kind == "all-gather" else local_bytes
    seconds = _received_bytes(kind, total_bytes, path.members_per_slice) / bandwidth
    if kind == "all-to-all":  # half of all bytes cross the middle of each axis, one axis after the other
        seconds = max((local_bytes * count / (4 * rate) for _, count, rate in path.axes), default=0.0)
    lanes: list[Lane] = [(axis, sign) for axis, _, _ in path.axes for sign in (1, -1)]
    if path.slices > 1:
        between_slices = _received_bytes(kind, total_bytes / path.members_per_slice, path.slices)
        seconds += between_slices / rates.network
        lanes.append("network")
    return kind, latency + seconds, lanes


def _received_bytes(kind: str, total_bytes: float, members: int) -> float:
    """Return the bytes that each member of a group receives."""
    return total_bytes * (members - 1) / members * (2 if kind == "all-reduce" else 1)


def _find_link_path(rates: DeviceRates, group: tuple[int, ...]) -> _LinkPath:
    """Find the links that connect the devices of a group, and this group's share of their bandwidth."""
    places = [rates.places[member] for member in group]
    in_slice = [place for place in places if place[0] == places[0][0]]
    # Devices of a chip that are in different groups share its links.
    on_chip = sum(place[0] == places[0][0] and place[2:] == places[0][2:] for place in rates.places)
    share = len({place[1] for place in in_slice}) / on_chip
    axes = []
    for axis, (side, wraps) in enumerate(zip(rates.shape, rates.wraps, strict=True)):
        positions = sorted({place[2 + axis] for place in in_slice})
        if len(positions) > 1:
            # Members that are not neighbors share the links between them with other groups. The ends of a
            # line have one incoming link, members of a ring two.
            gap = max(b - a for a, b in itertools.pairwise(positions))
            is_ring = wraps and len(positions) * gap == side and len(positions) > 2
            bandwidth = rates.link * device_rates.LINK_SHARE * (2 if is_ring else 1) * share / gap
            axes.append((axis, len(positions), bandwidth))
    return _LinkPath(tuple(axes), len({place[0] for place in places}), len(in_slice))


@lru_cache(maxsize=1024)
def _route_messages(
    rates: DeviceRates, pairs: tuple[tuple[int, int], ...]
) -> tuple[int, int, tuple[Lane, ...]]:
    """Return the most messages on a link, the most hops of a message, and all lanes, for (source, target)
    pairs.

    Messages follow one axis after the other, on rings in the shorter direction."""
    messages: dict[tuple[Hashable, ...], int] = defaultdict(int)  # by link
    max_hops = 0
    for source, target in pairs:
        position, goal = list(rates.places[source]), rates.places[target]
        if position[0] != goal[0]:
            messages["network", position[0], tuple(position)] += 1
            continue
        hops = 0
        for axis, (side, wraps) in enumerate(zip(rates.shape, rates.wraps, strict=True)):
            distance = goal[2 + axis] - position[2 + axis]
            if wraps and abs(distance) > side - abs(distance):
                distance -= side if distance > 0 else -side
            sign = 1 if distance > 0 else -1
            for _ in range(abs(distance)):
                messages[axis, sign, position[0], *position[2:]] += 1
                position[2 + axis] = (position[2 + axis] + sign) % side
            hops += abs(distance)
        max_hops = max(max_hops, hops)
    lanes = {"network" if link[0] == "network" else link[:2] for link in messages}
    return max(messages.values(), default=0), max_hops, tuple(sorted(lanes, key=str))
