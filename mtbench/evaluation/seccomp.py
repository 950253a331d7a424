"""The seccomp filter of the sandbox: the system calls that a program may not make, and those that do nothing.

Namespaces already hide files, processes and the network. The filter covers what namespaces do not: socket families
without a namespace (AF_VSOCK reaches the host of a virtual machine), nested namespaces, tracing, keys, memory that
counts towards no limit, and calls that watch, lock or delay the host through a file that the program may only read.
It allows everything else. bubblewrap passes the filter to the kernel. Machines other than the two in MACHINES get no
filter, only the namespaces.

Source: seccomp(2), linux/filter.h, linux/audit.h, and the kernel's tables of system calls.
"""

import errno
import platform
import struct

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # opcodes of classic BPF
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; an argument has 8 bytes, low word first
ALLOW, ERROR, KILL = 0x7FFF0000, 0x00050000, 0x80000000
REFUSE, ABSENT, NO_EFFECT = ERROR | errno.EPERM, ERROR | errno.ENOSYS, ERROR | 0  # NO_EFFECT: the call returns 0
X32 = 0x40000000  # flag of the x32 numbering of system calls on x86-64

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column below, AUDIT_ARCH in linux/audit.h

Numbers = tuple[int | None, int | None]  # of one system call on the machines above; None: this machine has no such call

REFUSED: dict[str, Numbers] = {
    "socket": (41, 198),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "listns": (470, 470),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    # files by another way than their path, and what others do with them
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "cachestat": (451, 451),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "file_setattr": (469, 469),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    # parts of the kernel that a program does not need
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "seccomp": (317, 277),
    "landlock_create_ruleset": (444, 444),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_setup": (206, 0),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "syslog": (103, 116),
    # memory that counts towards no limit
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "setsockopt": (54, 208),  # larger buffers
}

# The scratch folder is in memory and belongs to one program: it needs no disk writes, and its locks protect nothing.
# On the host's files, a lock blocks other processes, and a write to disk or dropped cache delays them.
WITHOUT_EFFECT: dict[str, Numbers] = {
    "flock": (73, 32),
    "sync": (162, 81),
    "syncfs": (306, 267),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "sync_file_range": (277, 84),
    "msync": (26, 227),
    "fadvise64": (221, 223),
}

# clone3 takes its flags in memory, which a filter cannot read. ENOSYS makes libraries fall back to clone.
ABSENT_CALLS: dict[str, Numbers] = {"clone3": (435, 435)}

CLONE, SOCKETPAIR, PRCTL = (56, 220), (53, 199), (157, 167)
FCNTL, SETRLIMIT, PRLIMIT, UTIMENSAT = (72, 25), (160, 164), (302, 261), (280, 88)
NEW_NAMESPACES = 0x7E020080  # clone's CLONE_NEW… flags: time, mount, cgroup, uts, ipc, user, pid, net
PR_SET_SECCOMP, PR_SCHED_CORE = 22, 62
FIRST_LINUX_COMMAND = 1024  # of fcntl: leases, notification about a directory, larger pipes
LINUX_COMMANDS = (1030, 1032)  # the harmless ones: F_DUPFD_CLOEXEC, F_GETPIPE_SZ
LOCK_COMMANDS = (6, 7, 37, 38)  # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW
RLIMIT_CORE = 4
AF_UNIX = 1


def filter_for(machine: str = platform.machine()) -> bytes | None:
    """Return the filter as an array of struct sock_filter; None if MACHINES does not know the machine."""
    if machine not in MACHINES:
        return None
    column, architecture = MACHINES[machine]
    code: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, REFUSE),
    ]
    for calls, action in ((REFUSED, REFUSE), (WITHOUT_EFFECT, NO_EFFECT), (ABSENT_CALLS, ABSENT)):
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, action)]
    for numbers, rule in _rules_on_arguments():
        code += [(EQUAL, 0, len(rule), numbers[column]), *rule]
    code.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _rules_on_arguments() -> list[tuple[tuple[int, int], list[Instruction]]]:
    """Return the instructions for the calls that are allowed with some arguments only; each list ends with a return."""
    refuse, no_effect, allow = (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, NO_EFFECT), (RETURN, 0, 0, ALLOW)
    return [
        (CLONE, [_load(0), (ANY_BIT, 0, 1, NEW_NAMESPACES), refuse, allow]),
        (SOCKETPAIR, [_load(0), (EQUAL, 1, 0, AF_UNIX), refuse, allow]),
        (PRCTL, [_load(0), (EQUAL, 1, 0, PR_SET_SECCOMP), (EQUAL, 0, 1, PR_SCHED_CORE), refuse, allow]),
        (
            FCNTL,
            [
                _load(1),
                *[instruction for lock in LOCK_COMMANDS for instruction in ((EQUAL, 0, 1, lock), no_effect)],
                *[instruction for command in LINUX_COMMANDS for instruction in ((EQUAL, 0, 1, command), allow)],
                (AT_LEAST, 0, 1, FIRST_LINUX_COMMAND),
                refuse,
                allow,
            ],
        ),
        # With the limit 1 and only then, a crash starts none of the host's programs that collect crashes: see core(5).
        (SETRLIMIT, [_load(0), (EQUAL, 0, 1, RLIMIT_CORE), refuse, allow]),
        (PRLIMIT, [_load(1), (EQUAL, 1, 0, RLIMIT_CORE), allow, *_if_null(2, then=allow, otherwise=refuse)]),
        # The times of a device, whose file is the host's, can be set by all who may write to it. Without times, where
        # Path.touch expects an error if there is no file, the call is refused; with times, as in shutil.copy2, it
        # does nothing.
        (UTIMENSAT, _if_null(2, then=refuse, otherwise=no_effect)),
    ]


def _if_null(argument: int, *, then: Instruction, otherwise: Instruction) -> list[Instruction]:
    """Return the instructions that return `then` if this argument is a null pointer."""
    return [_load(argument), (EQUAL, 0, 2, 0), _load(argument, high=True), (EQUAL, 1, 0, 0), otherwise, then]


def _load(argument: int, *, high: bool = False) -> Instruction:
    return (LOAD, 0, 0, ARGUMENTS + 8 * argument + (4 if high else 0))
