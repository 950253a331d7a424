"""How many workers this machine or a cluster has: checked before anything is planned."""

import os
import socket

import torch

from mtbench.errors import UserError, first_line
from mtbench.hardware.machine import VISIBLE
from mtbench.models.auto import resolve_device
from mtbench.programs.machine_share import usable_processors

CONNECT_TIMEOUT_S = 5.0  # for a cluster


def refuse(workers: int | None, ray: str | None, device: str) -> None:
    """Raise UserError if this machine or cluster lacks the workers or the device, if that is known before.

    Each worker needs a GPU; on a CPU it needs a core that this process may use.
    """
    if ray is not None:
        check_reachable(ray)
        return
    gpus = visible_gpus(device)
    if workers is not None:
        most, units = (len(gpus), "GPUs of this machine") if gpus else (usable_processors(), "cores of this process")
        refuse_count(workers, most, units)


def visible_gpus(device: str) -> list[str]:
    """Return the GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them; none for a CPU. Raises UserError."""
    if resolve_device(device) == "cpu":
        return []
    names = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    if names and names[0].startswith("MIG-"):  # CUDA shows a process one part only
        return names
    most = torch.cuda.device_count()
    return names[:most] or [str(number) for number in range(most)]


def refuse_count(workers: int, most: int, units: str) -> None:
    """Raise UserError for a number of workers that is not allowed."""
    if not 1 <= workers <= most:
        raise UserError(f"--workers {workers} is not allowed; it is from 1 to {most}, the {units}.")


def check_reachable(address: str) -> None:
    """Raise UserError if no cluster listens at the address; Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if not address:
            raise ValueError("no address")
        if host:
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise no_cluster(address, error) from None


def no_cluster(address: str, error: BaseException) -> UserError:
    """Return the error of a cluster that does not answer."""
    return UserError(f"--ray {address!r}: no cluster ({first_line(error)}); `ray start --head` starts one.")
