"""Hostile programs for the tests of the sandbox (evaluation/hostile.txt), by what they attack.

A program runs to its last line, so that it would pass, only if its attack succeeds; otherwise it raises an exception.

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

PROGRAMS = {
    **programs("hostile.txt", CALL=CALL, LOCKED=LOCKED, SAY=SAY),
    "forges: a null byte": "\0",
    "forges: half a surrogate pair": "x = '\ud800'",
    "forges: a long program": "x = 1\n" * 2 * 10**4 + "assert False",
}
KINDS = {name.partition(":")[0] for name in PROGRAMS}

# One program for each kind of attack; `make slow` runs all PROGRAMS.
REPRESENTATIVE = {
    "reads: passwd": "a system file",
    "reads: a file by its path": "a file of the user",
    "reads: a file by a symbolic link": "a file of the user through a link",
    "reads: the environment": "the environment",
    "reads: init's root": "files of another process",
    "reads: kernel memory": "a device",
    "reads: another process's memory": "memory of another process",
    "reads: which files the host opens, by inotify": "what the host does",
    "writes: system folder": "a read-only folder",
    "writes: a file by its path": "a file of the user",
    "writes: kernel settings": "settings of the kernel",
    "writes: the terminal": "the terminal",
    "writes: times of a device": "a device's file",
    "writes: a lock on the host's file": "a lock",
    "connects: loopback": "a network socket",
    "connects: unix, by path": "a Unix socket in the file system",
    "connects: unix, by name": "an abstract Unix socket",
    "connects: vsock": "a socket family without a namespace",
    "connects: the x32 number of a system call": "a system call by another number",
    "connects: io_uring": "system calls from a queue",
    "connects: inherited files": "open files of the parent",
    "escapes: setuid": "another user",
    "escapes: capabilities": "capabilities",
    "escapes: a user namespace": "a nested namespace",
    "escapes: a namespace by clone3": "a nested namespace with flags in memory",
    "escapes: mount": "the mounts",
    "escapes: chroot": "the root folder",
    "escapes: tracing its parent": "tracing",
    "escapes: loading BPF code into the kernel": "code in the kernel",
    "escapes: limits": "its own limits",
    "signals: the test's process": "a process outside",
    "exhausts: an endless loop": "processor time",
    "exhausts: sleep": "wall time",
    "exhausts: memory": "memory",
    "exhausts: forks, counted": "processes",
    "exhausts: empty files": "the kernel's memory for files",
    "exhausts: one large file": "disk space",
    "exhausts: output to every file": "endless output",
    "exhausts: a broken pointer": "a crash of the interpreter",
    "outlives: a daemon": "a process that outlives the program",
    "forges: os._exit": "an exit with status 0",
    "forges: sys.exit": "an exit by an exception",
    "forges: the caller's frames": "the key of the runner",
    "forges: an exception without a readable name": "the runner's error handling",
}
