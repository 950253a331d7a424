"""Run a command that the kernel kills when its caller dies, even by SIGKILL: `launch.py CALLER COMMAND...`.

`processes.started` begins every process by it. A function for the new process (`preexec_fn`) would do the same, but
Python then forks with hooks, in which an interrupt of the caller is lost. It uses nothing of mtbench, so that it starts
in milliseconds.
"""

import ctypes
import os
import signal
import sys

KILLED_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2), Linux only


def main(caller: int, command: list[str]) -> None:
    """Become the command. Ends with 127 if it cannot be run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(KILLED_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != caller:  # it died before
        sys.exit(1)
    try:
        os.execv(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror or error}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
