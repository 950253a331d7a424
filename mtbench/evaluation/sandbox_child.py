"""What runs inside the sandbox: one program, from its first line to its last, and a word on how it went.

Its text is handed to an interpreter by mtbench/evaluation/sandbox.py, so it imports nothing of mtbench. Standard input
holds a key of KEY_BYTES and then the program; standard output is the way back to the judge: `+` once the program
begins, then the key backwards if it came to its end, else the name of the exception. The program itself gets empty
streams.

Arguments: the limits as `CPU=3:4,AS=…` (soft:hard), then the folders with installed packages.
"""

import os
import resource
import signal
import sys

KEY_BYTES = 32


def main() -> None:
    # What is needed when the program is done is taken beforehand: the program may change the modules it came from.
    write, leave, whoami, me = os.write, os._exit, os.getpid, os.getpid()
    with open(0, "rb", closefd=False) as given:
        key, source = given.read(KEY_BYTES), given.read().decode("utf-8", "surrogatepass")
    judge = os.dup(1)  # not inherited by what the program may start
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    os.closerange(judge + 1, 4096)
    for limit in sys.argv[1].split(","):
        name, _, ends = limit.partition("=")
        soft, _, hard = ends.partition(":")
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (int(soft), int(hard or soft)))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where we were begun in the background
    sys.path += sys.argv[2:]
    sys.argv[:] = [""]
    write(judge, b"+")
    try:
        exec(source, {})
    except BaseException as error:
        said = type(error).__name__[:80].encode("ascii", "replace")
    else:
        said = key[::-1]
    if whoami() == me:  # and not a copy of it that the program made
        write(judge, said)
    leave(0)


if __name__ == "__main__":
    main()
