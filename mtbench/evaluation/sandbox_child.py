"""Runs inside the sandbox: executes one program and reports whether it reached its last line.

sandbox.py passes the text of this file to an interpreter, so it imports nothing of mtbench. Standard input holds a key
of KEY_BYTES and then the program. Standard output is the result pipe: `+` when the program starts, then the key
reversed if the program reached its end, else the name of the exception. The program itself gets empty streams.

Arguments: the limits as `CPU=3:4,AS=…` (soft:hard), then the folders of installed packages.
"""

import os
import resource
import signal
import sys

KEY_BYTES = 32


def main() -> None:
    # Bind now what is needed after the program ran: the program may change the modules.
    write, leave, getpid, own_pid = os.write, os._exit, os.getpid, os.getpid()
    with open(0, "rb", closefd=False) as stdin:
        key, source = stdin.read(KEY_BYTES), stdin.read().decode("utf-8", "surrogatepass")
    result_pipe = os.dup(1)  # processes that the program starts do not inherit it
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.closerange(result_pipe + 1, 4096)
    for limit in sys.argv[1].split(","):
        name, _, values = limit.partition("=")
        soft, _, hard = values.partition(":")
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (int(soft), int(hard or soft)))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process started in the background ignores SIGINT
    sys.path += sys.argv[2:]
    sys.argv[:] = [""]
    write(result_pipe, b"+")
    try:
        exec(source, {})
    except BaseException as error:
        result = type(error).__name__[:80].encode("ascii", "replace")
    else:
        result = key[::-1]
    if getpid() == own_pid:  # not in a child that the program forked
        write(result_pipe, result)
    leave(0)


if __name__ == "__main__":
    main()
