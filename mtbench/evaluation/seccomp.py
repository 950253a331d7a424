"""The seccomp filter of the sandbox: the system calls that a program may not make.

Namespaces already hide files, processes and the network. The filter refuses what namespaces do not cover: socket
families without a namespace (AF_VSOCK reaches the host of a virtual machine), nested namespaces, tracing, keys, and
memory that counts towards no limit. It allows everything else. bubblewrap passes the filter to the kernel.
Source: seccomp(2), linux/filter.h, linux/audit.h, and the kernel's tables of system calls. Machines other than the two
in MACHINES get no filter, only the namespaces.
"""

import errno
import platform
import struct

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # opcodes of classic BPF
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
X32 = 0x40000000  # flag of the x32 numbering of system calls on x86-64
NEW_NAMESPACES = 0x7E020080  # clone's CLONE_NEW… flags: time, mount, cgroup, uts, ipc, user, pid, net

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column below, AUDIT_ARCH in linux/audit.h

CLONE, CLONE3 = (56, 220), (435, 435)
REFUSED: dict[str, tuple[int, int]] = {
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "personality": (135, 92),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}


def filter_for(machine: str = platform.machine()) -> bytes | None:
    """Return the filter as an array of struct sock_filter; None if MACHINES does not know the machine."""
    if machine not in MACHINES:
        return None
    column, architecture = MACHINES[machine]
    refuse = REFUSE | errno.EPERM
    code: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, refuse),
        # clone3 takes its flags in memory, which a filter cannot read. ENOSYS makes libraries fall back to clone.
        (EQUAL, 0, 1, CLONE3[column]),
        (RETURN, 0, 0, REFUSE | errno.ENOSYS),
    ]
    for numbers in REFUSED.values():
        code += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, refuse)]
    code += [
        (EQUAL, 0, 3, CLONE[column]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (ANY_BIT, 0, 1, NEW_NAMESPACES),
        (RETURN, 0, 0, refuse),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
