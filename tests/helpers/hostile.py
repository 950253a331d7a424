"""Hostile programs for the tests of the sandbox (evaluation/hostile.txt), by what they attack.

A program runs to its last line, so that it would pass, only if its attack succeeds; otherwise it raises an exception.
One program for each kind of attack has a star before its name.

The test defines these names before each program: HOME and HOME_NAMES, the user's home folder and its content; PROJECT,
this project's folder; SECRET, a file with a secret; VARIABLE, an environment variable of the test; PORT, a server of
the test on the loopback device; UNIX and ABSTRACT, its servers on Unix sockets, by path and by abstract name; PID, the
test's process; MARKER, the command line of every process that tries to outlive its program. A
line `%CALL` in a program stands for the text of that name.
"""

from confinement import programs

CALL = """
import ctypes, os
def call(number, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(ctypes.c_long(number), *(a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def number(x86, arm):
    return arm if os.uname().machine == "aarch64" else x86
"""

LOCKED = """
import fcntl, os, struct
first, second = open(os.__file__), open(os.__file__)
def lock(kind):
    return struct.pack('hhqqi', kind, 0, 0, 0, 0)
def blocks(command):
    return struct.unpack('hhqqi', fcntl.fcntl(second, command, lock(fcntl.F_WRLCK)))[0] != fcntl.F_UNLCK
"""

SAY = """
for fd in range(64):
    for word in words:
        try:
            os.write(fd, word)
        except OSError:
            pass
os._exit(0)
"""

STORED = programs("hostile.txt", CALL=CALL, LOCKED=LOCKED, SAY=SAY)
REPRESENTATIVE = [name.removeprefix("* ") for name in STORED if name.startswith("* ")]  # `make slow` runs all PROGRAMS
PROGRAMS = {
    **{name.removeprefix("* "): program for name, program in STORED.items()},
    "forges: a null byte": "\0",
    "forges: half a surrogate pair": "x = '\ud800'",
    "forges: a long program": "x = 1\n" * 2 * 10**4 + "assert False",
}
KINDS = {name.partition(":")[0] for name in PROGRAMS}
