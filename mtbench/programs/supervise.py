"""Run a command in a process group of its own, and kill the group when the caller dies, even by SIGKILL.

    supervise.py CALLER FILE COMMAND...

FILE gets the number of the group. A serving engine starts processes of its own, which the death of their parent does
not end, and it is paused by signals to its group. What leaves the group ends after it. This process is in another
group, so that it is never paused. It uses nothing of mtbench, so that it starts in milliseconds. Its output is a log,
which an engine may flood: it is emptied when it is large.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

KILLED_WITH_PARENT, ADOPTS = 1, 36  # PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of prctl(2), Linux only
LARGEST_LOG = 1 << 24  # bytes
LOOK_S = 0.02


def main(caller: int, file: str, command: list[str]) -> int:
    """Return the command's exit code; 127 if it cannot be run."""
    signals = []  # that end the command
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(KILLED_WITH_PARENT, signal.SIGTERM)
        ctypes.CDLL(None).prctl(ADOPTS, 1)  # processes whose parent has ended
    if os.getppid() != caller:  # it died before
        return 1
    try:
        process = subprocess.Popen(command, process_group=0)
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror or error}", file=sys.stderr)
        return 127
    with open(f"{file}.new", "w", encoding="ascii") as handle:
        handle.write(str(process.pid))
    os.replace(f"{file}.new", file)
    while process.poll() is None and not signals and os.getppid() == caller:
        if os.fstat(1).st_size > LARGEST_LOG:
            os.ftruncate(1, 0)  # it is opened to append
        time.sleep(LOOK_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as children:
        while left := children.read().split():
            for child in left:
                os.kill(int(child), signal.SIGKILL)
            os.wait()
            children.seek(0)
    return code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
