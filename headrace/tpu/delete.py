"""Delete a slice, and do not return before it is gone: a slice that is forgotten costs money."""

import shlex
from collections.abc import Callable

from headrace.errors import UserError
from headrace.tpu import clock, gcloud, timeouts
from headrace.tpu.cloud import Cloud, Slice, SliceState
from headrace.tpu.console import print_error, print_quietly


def delete_until_gone(
    cloud: Cloud, name: str, log: Callable[[str], None], zone: str = "", expected: Slice | None = None
) -> bool:
    """Delete the slice `name` and wait until the cloud no longer lists it. Return False if it is still there.

    Every error is retried. After `DELETE_TIMEOUT` seconds the command that deletes the slice by hand is
    printed instead. `zone` is where the slice was last seen: only that zone is searched, so that an outage of
    another one does not keep the slice alive. If a slice is found that replaced the `expected` one, the
    expected one is gone, and the new one belongs to whoever requested it.

    Nothing here fails because the output cannot be written, as in `headrace tpu run ... | head`."""
    deadline = clock.monotonic() + timeouts.DELETE_TIMEOUT
    requested_at, last_message = 0.0, ""
    while True:
        message = ""
        try:
            slice_ = cloud.find(name, zone)
            if slice_ is None or (expected is not None and slice_.replaces(expected)):
                print_quietly(log, f"{name} deleted")
                return True
            zone = slice_.zone
            # A slice that has been DELETING for a while is requested to be deleted once more.
            if (
                slice_.state is not SliceState.DELETING
                or clock.monotonic() - requested_at > 6 * timeouts.POLL
            ):
                cloud.delete(slice_)
                message, requested_at = f"deleting {name}", clock.monotonic()
        except Exception as error:  # even a bug: to stop here would leave a slice that costs money
            reason = str(error) if isinstance(error, UserError) else repr(error)
            message = f"deleting {name} failed: {reason}; trying again"
        if message and message != last_message:
            print_quietly(log, message)
            last_message = message
        if clock.monotonic() > deadline:
            command = shlex.join(gcloud.make_delete_args(cloud.scope, name, zone or "ZONE"))
            print_quietly(
                print_error,
                f"headrace: {name} COULD NOT BE DELETED AND COSTS MONEY. Delete it with: {command}",
            )
            return False
        clock.sleep(min(timeouts.POLL, 2.0))
