"""Google's queued resources and nodes, as the `Slice`s of cloud.py."""

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from headrace.tpu.cloud import Slice, SliceState

if TYPE_CHECKING:
    from google.cloud.tpu_v2 import Node, QueuedResource, SchedulingConfig

STATES = {
    "CREATING": SliceState.WAITING,
    "ACCEPTED": SliceState.WAITING,
    "WAITING_FOR_RESOURCES": SliceState.WAITING,
    "PROVISIONING": SliceState.WAITING,
    "ACTIVE": SliceState.READY,
    "SUSPENDING": SliceState.LOST,
    "SUSPENDED": SliceState.LOST,
    "FAILED": SliceState.FAILED,
    "DELETING": SliceState.DELETING,
}
# Others become READY by themselves (CREATING, STARTING, REPAIRING, RESTARTING, ...) or one of these
# (STOPPING).
NODE_STATES = {
    "READY": SliceState.READY,
    "PREEMPTED": SliceState.LOST,
    "TERMINATED": SliceState.LOST,
    "STOPPED": SliceState.STOPPED,
    "DELETING": SliceState.DELETING,
}


def to_slice(request: "QueuedResource", all_nodes: "Sequence[Node]") -> Slice:
    """The slice of a queued resource. `all_nodes` are those of its zone, or of all zones."""
    spec = request.tpu.node_spec[0]
    nodes = [node for node in all_nodes if is_same_resource(node.queued_resource, request.name)]
    nodes.sort(key=lambda node: (len(node.name), node.name))  # -2 before -10
    count = spec.multislice_params.node_count or 1
    state, status_text = combine_states(request, nodes, count)
    first = nodes[0] if nodes else spec.node
    return Slice(
        name=request.name.rpartition("/")[2],
        zone=request.name.split("/")[3],
        accelerator=spec.node.accelerator_type,
        terms="spot" if "spot" in request else "reserved" if request.reservation_name else "on-demand",
        state=state,
        status_text=status_text,
        workers=tuple(itertools.chain.from_iterable(map(worker_addresses, nodes))),
        created_at=min(creation_times(nodes), default=0.0),
        node_creation_times=creation_times(nodes),
        labels=dict(first.labels),
        slices=count,
        disks=disk_names(first),
    )


def combine_states(request: "QueuedResource", nodes: "Sequence[Node]", count: int) -> tuple[SliceState, str]:
    """The state of a slice and the cloud's text for it. An active request may have nodes that are not ready,
    or fewer than its `count`."""
    status = request.state.state.name
    state = STATES.get(status, SliceState.WAITING)
    if state is SliceState.READY and len(nodes) < count:
        return SliceState.LOST, f"ACTIVE, but {count - len(nodes)} of {count} nodes are gone"
    if state is SliceState.READY:
        for node in nodes:
            if node.state.name != "READY":
                return NODE_STATES.get(node.state.name, SliceState.WAITING), node.state.name
    if state is SliceState.FAILED and request.state.failed_data.error.message:
        return state, f"FAILED: {request.state.failed_data.error.message}"
    return state, status


def node_to_slice(node: "Node") -> Slice:
    """The slice of a node that belongs to no queued resource."""
    return Slice(
        name=node.name.rpartition("/")[2],
        zone=node.name.split("/")[3],
        accelerator=node.accelerator_type,
        terms=terms_of(node.scheduling_config),
        state=NODE_STATES.get(node.state.name, SliceState.WAITING),
        status_text=node.state.name,
        workers=tuple(worker_addresses(node)),
        created_at=min(creation_times([node]), default=0.0),
        node_creation_times=creation_times([node]),
        labels=dict(node.labels),
        is_standalone=True,
        disks=disk_names(node),
    )


def terms_of(scheduling: "SchedulingConfig") -> str:
    """The terms of a node that belongs to no queued resource."""
    if scheduling.spot or scheduling.preemptible:
        return "spot"
    return "reserved" if scheduling.reserved else "on-demand"


def is_same_resource(first: str, second: str) -> bool:
    """Whether two names mean the same resource. Google names a project by its name or by its number."""
    return bool(first) and first.split("/")[-4:] == second.split("/")[-4:]


def disk_names(node: "Node") -> tuple[str, ...]:
    """The names of the data disks of a node."""
    return tuple(disk.source_disk.rpartition("/")[2] for disk in node.data_disks)


def worker_addresses(node: "Node") -> list[str]:
    """The addresses of the machines of a node, external ones where there are any."""
    return [end.access_config.external_ip or end.ip_address for end in node.network_endpoints]


def creation_times(nodes: "Iterable[Node]") -> frozenset[float]:
    """The times at which the nodes were created, in seconds since 1970."""
    return frozenset(node.create_time.timestamp() for node in nodes if node.create_time)
