"""Runs inside the sandbox: executes one program and reports whether it reached its last line.

sandbox.py passes the text of this file to an interpreter, so it imports nothing of mtbench. Standard input is a file:
a page with a key of KEY_BYTES, then the program. The result goes into that page: the key reversed if the program
reached its end, else the name of the exception. The page is mapped memory, and its file is closed: a program that
closes or writes to all descriptors changes no result. Standard output gets `+` when the program starts. The program
itself gets empty streams.

Arguments: the limits as `CPU=3:4,AS=…` (soft:hard), then the folders of installed packages.
"""

import mmap
import os
import resource
import signal
import sys

KEY_BYTES = 32
PAGE_BYTES = mmap.PAGESIZE


def main() -> None:
    # Bind now what is needed after the program ran: the program may change the modules.
    leave, getpid, own_pid = os._exit, os.getpid, os.getpid()
    with open(0, "rb", closefd=False) as stdin:
        key, source = stdin.read(PAGE_BYTES)[:KEY_BYTES], stdin.read().decode("utf-8", "surrogatepass")
    page = mmap.mmap(0, PAGE_BYTES)
    page[:KEY_BYTES] = bytes(KEY_BYTES)
    os.write(1, b"+")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.closerange(3, 4096)  # with the copy of the file's descriptor that the mapping keeps
    for limit in sys.argv[1].split(","):
        name, _, values = limit.partition("=")
        soft, _, hard = values.partition(":")
        kind = getattr(resource, f"RLIMIT_{name}")
        _, most = resource.getrlimit(kind)
        most = int(hard or soft) if most == resource.RLIM_INFINITY else min(most, int(hard or soft))
        resource.setrlimit(kind, (min(most, int(soft)), most))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process started in the background ignores SIGINT
    sys.path += sys.argv[2:]
    sys.argv[:] = [""]
    try:
        exec(source, {})
    except BaseException as error:
        result = type(error).__name__[:80].encode("ascii", "replace")
    else:
        result = key[::-1]
    if getpid() == own_pid:  # not in a child that the program forked
        page[: len(result)] = result
    leave(0)


if __name__ == "__main__":
    main()
