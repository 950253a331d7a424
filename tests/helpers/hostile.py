"""Hostile programs for the tests of the sandbox, by what they attack.

A program runs to its last line, so that it would pass, only if its attack succeeds; otherwise it raises an exception.

The test defines these names before each program: HOME and HOME_NAMES, the user's home folder and its content; PROJECT,
this project's folder; SECRET, a file with a secret; VARIABLE, an environment variable of the test; PORT, a server of
the test on the loopback device; UNIX and ABSTRACT, its servers on Unix sockets, by path and by abstract name; PID, the
test's process; MARKER, the command line of every process that tries to outlive its program.
"""

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

READS = {
    "passwd": "open('/etc/passwd').read()",
    "home folder": "import os\nassert set(os.listdir(HOME)) & set(HOME_NAMES)",
    "the project": "import os\nassert os.path.exists(os.path.join(PROJECT, 'pyproject.toml'))",
    "a file by its path": "open(SECRET).read()",
    "a file by a symbolic link": "import os\nos.symlink(SECRET, 'link')\nopen('link').read()",
    "a file by a hard link": "import os\nos.link(SECRET, 'link')\nopen('link').read()",
    "a file by searching": (
        "import os\n"
        "tops = ('/home', '/mnt', '/opt', '/run', '/srv', '/tmp', '/var')\n"
        "assert any(os.path.basename(SECRET) in files for top in tops for _, _, files in os.walk(top))"
    ),
    "the environment": "import os\nassert VARIABLE in os.environ or 'HOME' in os.environ or 'PATH' in os.environ",
    "init's environment": "open('/proc/1/environ', 'rb').read()",
    "init's root": "import os\nos.listdir('/proc/1/root/')",
    "the test's process": "open(f'/proc/{PID}/cmdline').read()",
    "its own memory": "open('/proc/self/mem', 'rb').seek(0)",
    "its open files": "import os\nos.listdir('/proc/self/fd')",
    "the mounts": "open('/proc/self/mountinfo').read()",
    "kernel memory": "open('/dev/mem', 'rb').read(1)",
    "kernel symbols": "open('/proc/kallsyms').read()",
    "kernel messages": CALL + "call(number(103, 116), 10, 0, 0)",
    "disks": "import glob\nassert glob.glob('/dev/[svn]d*') or glob.glob('/dev/nvme*')",
    "devices in sysfs": "import os\nos.listdir('/sys/class')",
    "processes of the host": "import os\nos.kill(PID, 0)",
    "the host's name": "import os\nassert os.uname().nodename != 'sandbox'",
    "the user's name": "import getpass\ngetpass.getuser()",
    "a file by its handle": (
        CALL + "place = ctypes.create_string_buffer(b'\\x80\\0\\0\\0' + bytes(140))\n"
        "call(number(303, 264), -100, b'/usr', ctypes.addressof(place), ctypes.addressof(place) + 136, 0)"
    ),
    "another process's memory": CALL + "call(number(310, 270), os.getppid(), 0, 0, 0, 0, 0)",
    "another process's files": CALL + "call(438, call(434, 1, 0), 0, 0)",
    "standard input": "import os\nassert os.read(0, 1)",
    "which files the host opens, by inotify": CALL + "call(number(294, 26), 0)",
    "which files the host opens, by the first inotify": CALL + "call(number(253, 26), 0)",
    "which files the host opens, by fanotify": CALL + "call(number(300, 262), 0x200, 0)",
    "what the host does in a folder": "import fcntl, os\nfcntl.fcntl(os.open('/usr/bin', 0), 1026, 0x80000001)",
    "which files the host reads, by the page cache": (
        CALL
        + "fd = os.open(os.__file__, os.O_RDONLY)\nspan = (ctypes.c_uint64 * 2)()\nfound = (ctypes.c_uint64 * 5)()\n"
        "call(451, fd, ctypes.addressof(span), ctypes.addressof(found), 0)"
    ),
    "mounts of the host": (
        CALL + "ids = (ctypes.c_uint64 * 99)()\nquery = (ctypes.c_uint64 * 3)(24, 2**64 - 1, 0)\n"
        "call(458, ctypes.addressof(query), ctypes.addressof(ids), 99, 0)"
    ),
    "a mount of the host": (
        CALL + "place = ctypes.create_string_buffer(4096)\nquery = (ctypes.c_uint64 * 3)(24, 1, 2)\n"
        "call(457, ctypes.addressof(query), ctypes.addressof(place), 4096, 0)"
    ),
    "what two processes share": CALL + "call(number(312, 272), os.getpid(), os.getppid(), 2, 0, 0)",
    "quotas": CALL + "call(number(179, 60), 0x800001 << 8, 0, 0, 0)",
}

WRITES = {
    "system folder": "open('/usr/mtbench_hostile', 'w')",
    "device folder": "open('/dev/mtbench_hostile', 'w')",
    "shared memory folder": "open('/dev/shm/mtbench_hostile', 'w')",
    "interpreter": "import os\nopen(os.__file__, 'a')",
    "rights of the interpreter": "import os, sys\nos.chmod(os.path.realpath(sys.executable), 0o777)",
    "home folder": "import os\nos.makedirs(HOME, exist_ok=True)\nopen(os.path.join(HOME, 'mtbench_hostile'), 'w')",
    "a file by its path": "open(SECRET, 'w').write('changed')",
    "a file by a link": "import os\nos.symlink(SECRET, 'link')\nopen('link', 'r+').write('changed')",
    "a file by removing it": "import os\nos.remove(SECRET)",
    "a whole system": "import shutil\nshutil.rmtree('/usr')\nassert not shutil.os.path.exists('/usr/lib')",
    "the scratch folder": "import os\nhere = os.getcwd()\nos.chdir('/')\nos.rmdir(here)",
    "kernel settings": "open('/proc/sys/kernel/hostname', 'w').write('hostile')",
    "the OOM killer's score": "open('/proc/self/oom_score_adj', 'w').write('-1000')",
    "control groups": "import os\nos.mkdir('/sys/fs/cgroup/hostile')",
    "kernel messages": "open('/dev/kmsg', 'w').write('hostile')",
    "the terminal": "open('/dev/tty', 'w').write('hostile')",
    "the terminal's input": (
        "import fcntl, os, termios\n"
        "terminal = next((fd for fd in range(64) if os.isatty(fd)), None)\n"
        "assert terminal is not None\n"
        "fcntl.ioctl(terminal, termios.TIOCSTI, b'x')"
    ),
    "a device of its own": "import os\nos.mknod('disk', 0o60600, os.makedev(254, 0))\nopen('disk', 'rb')",
    "the host's name": "import socket\nsocket.sethostname('hostile')",
    "the clock": "import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)",
    "times of a device": "import os\nos.utime('/dev/null')",
    "times of a device, by its descriptor": "import os\nos.utime(os.open('/dev/null', os.O_RDWR))",
    "times of a device, given": "import os\nos.utime('/dev/zero', (1, 1))\nassert os.stat('/dev/zero').st_mtime == 1",
    "times of a device, now": (
        CALL + "import time\nnow = (ctypes.c_int64 * 4)(0, 2**30 - 1, 0, 2**30 - 1)\n"
        "call(number(280, 88), -100, b'/dev/null', ctypes.addressof(now), 0)\n"
        "assert time.time() - os.stat('/dev/null').st_mtime < 5"
    ),
    "times of a device, by older calls": (
        CALL + "for older, arguments in ((132, ()), (235, ()), (261, (-100,))):\n"
        "    try:\n        call(older, *arguments, b'/dev/null', 0)\n        break\n"
        "    except OSError:\n        pass\nelse:\n    raise OSError"
    ),
    "attributes of a file": "import os\nos.setxattr(os.__file__, 'user.hostile', b'x')",
    "a lock on the host's file": LOCKED + "fcntl.flock(first, fcntl.LOCK_EX)\n"
    "try:\n    fcntl.flock(second, fcntl.LOCK_SH | fcntl.LOCK_NB)\n"
    "except BlockingIOError:\n    pass\nelse:\n    raise OSError",
    "a record lock on the host's file": LOCKED + "fcntl.lockf(first, fcntl.LOCK_SH)\n"
    "if not os.fork():\n    os._exit(blocks(fcntl.F_GETLK))\nassert os.wait()[1]",
    "an open file's lock on the host's file": LOCKED + "fcntl.fcntl(first, 37, lock(fcntl.F_RDLCK))\nassert blocks(36)",
    "a lease on the host's file": LOCKED + "fcntl.fcntl(first, fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "a lease on its own file": "import fcntl\nx = open('x', 'w')\nfcntl.fcntl(x, fcntl.F_SETLEASE, fcntl.F_WRLCK)",
}

CONNECTS = {
    "loopback": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)",
    "datagram": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    "raw": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "packet": "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "netlink": "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "unix, by path": "import socket\nsocket.socket(socket.AF_UNIX).connect(UNIX)",
    "unix, by name": "import socket\nsocket.socket(socket.AF_UNIX).connect(ABSTRACT)",
    "vsock": "import socket\nsocket.socket(40, socket.SOCK_STREAM).bind((2**32 - 1, 2**32 - 1))",
    "kernel's crypto": "import socket\nsocket.socket(38, socket.SOCK_SEQPACKET)",
    "any family": (
        "import socket\n"
        "opened = 0\n"
        "for family in range(64):\n"
        "    for kind in range(1, 11):\n"
        "        try:\n"
        "            socket.socket(family, kind)\n"
        "            opened += 1\n"
        "        except OSError:\n"
        "            pass\n"
        "assert opened"
    ),
    "a server of its own": "import socket\nsocket.create_server(('127.0.0.1', 0))",
    "a pair of sockets of another family": "import socket\nsocket.socketpair(30, socket.SOCK_STREAM)",
    "another program": (
        "import subprocess\nsubprocess.run(['/usr/bin/bash', '-c', f'echo > /dev/tcp/127.0.0.1/{PORT}'], check=True)"
    ),
    "the bare system call": CALL + "call(number(41, 198), 2, 1, 0)",
    "the 32-bit number of a system call": (
        "import ctypes, mmap\n"  # socket(AF_INET, SOCK_STREAM, 0) as 32-bit programs call it
        "page = mmap.mmap(-1, 4096, prot=7)\n"
        "page.write(bytes.fromhex('53b867010000bb02000000b90100000031d2cd805bc3'))\n"
        "start = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
        "assert ctypes.CFUNCTYPE(ctypes.c_int)(start)() >= 0"
    ),
    "the x32 number of a system call": CALL + "call(0x40000000 + 41, 2, 1, 0)",
    "io_uring": CALL + "place = ctypes.create_string_buffer(256)\ncall(425, 4, ctypes.addressof(place))",
    "inherited files": (
        "import os, stat\n"
        "found = 0\n"
        "for fd in range(1024):\n"
        "    try:\n"
        "        found += not stat.S_ISCHR(mode := os.fstat(fd).st_mode) and not stat.S_ISFIFO(mode)\n"
        "    except OSError:\n"
        "        pass\n"
        "assert found"
    ),
}

ESCAPES = {
    "setuid": "import os\nos.setuid(0)",
    "setresuid to another": "import os\nos.setresuid(1, 1, 1)",
    "setgid": "import os\nos.setgid(0)",
    "setgroups": "import os\nos.setgroups([0])",
    "being root": "import os\nassert 0 in (os.getuid(), os.geteuid(), os.getgid(), *os.getgroups())",
    "privileges through a started program": "import ctypes\nassert ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) != 1",
    "a setuid file of its own": (
        "import os, shutil, subprocess, sys\n"
        "shutil.copy('/usr/bin/env', 'x')\nos.chown('x', 0, 0)\nos.chmod('x', 0o4755)"
    ),
    "capabilities": CALL + "assert any(ctypes.CDLL(None).prctl(47, 1, n, 0, 0) == 1 for n in range(41))",
    "taking capabilities": (
        CALL + "head = (ctypes.c_uint32 * 2)(0x20080522, 0)\ndata = (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)\n"
        "call(number(126, 91), ctypes.addressof(head), ctypes.addressof(data))"
    ),
    "a user namespace": CALL + "call(number(272, 97), 0x10000000)",
    "a mount namespace": CALL + "call(number(272, 97), 0x00020000)",
    "a network namespace": CALL + "call(number(272, 97), 0x40000000)",
    "a namespace by clone": CALL + "if call(number(56, 220), 0x10000000 | 17, 0, 0, 0, 0) == 0: os._exit(0)",
    "a namespace by clone3": (
        CALL + "place = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17)\n"
        "if call(435, ctypes.addressof(place), 88) == 0: os._exit(0)"
    ),
    "another process's namespace": CALL + "call(number(308, 268), os.open('/proc/1/ns/net', os.O_RDONLY), 0)",
    "another process's namespace by its pidfd": CALL + "call(number(308, 268), call(434, 1, 0), 0x40000000)",
    "mount": CALL + "call(number(165, 40), b'none', b'/usr', b'tmpfs', 0, 0)",
    "remount": CALL + "call(number(165, 40), b'none', b'/usr', b'none', 4096 | 32, 0)",
    "unmount": CALL + "call(number(166, 39), b'/usr', 2)",
    "mount by file descriptor": CALL + "call(430, b'proc', 0)",
    "chroot": "import os\nos.chroot('/usr')",
    "pivot_root": CALL + "call(number(155, 41), b'/usr', b'/usr')",
    "leaving a chroot": "import os\nos.mkdir('in')\nos.chroot('in')\nos.chdir('../../../..')\nopen(SECRET)",
    "tracing its parent": CALL + "call(number(101, 117), 16, os.getppid(), 0, 0)",
    "tracing init": CALL + "call(number(101, 117), 0x4206, 1, 0, 0)",
    "tracing its child": (
        CALL + "child = os.fork()\nif not child:\n    import time; time.sleep(1); os._exit(0)\n"
        "call(number(101, 117), 16, child, 0, 0)"
    ),
    "loading BPF code into the kernel": CALL + "call(number(321, 280), 5, 0, 0)",
    "kernel modules": CALL + "call(number(175, 105), 0, 0, b'')",
    "performance counters": CALL
    + "call(number(298, 241), ctypes.addressof(ctypes.create_string_buffer(128)), 0, -1, -1, 0)",
    "userfaultfd": CALL + "call(number(323, 282), 0)",
    "keys": CALL + "call(number(250, 219), 0, -4, 1)",
    "a fixed memory layout": CALL + "call(number(135, 92), 0x0040000)",
    "a table of segments": CALL + "call(number(154, 9999), 0, 0, 0)",
    "a filter of its own": CALL + "call(number(317, 277), 2, 0, 0)",
    "a strict filter of its own": CALL + "call(number(157, 167), 22, 2, 0, 0, 0)",
    "a rule set of its own": CALL + "place = (ctypes.c_uint64 * 1)(1)\ncall(444, ctypes.addressof(place), 8, 0)",
    "a processor core of its own": CALL + "call(number(157, 167), 62, 1, 0, 0, 0)",
    "core files": "import resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
    "core files, by the other call": (
        "import resource\nassert resource.prlimit(0, resource.RLIMIT_CORE) != (0, 0)\n"
        "resource.prlimit(0, resource.RLIMIT_CORE, (0, 0))"
    ),
    "core files, from an address with a low word of 0": (
        CALL + "import mmap\nmap = ctypes.CDLL(None).mmap\nmap.restype = ctypes.c_void_p\n"
        "map.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]\n"
        "assert map(2**33, 4096, 3, 0x32, -1, 0) == 2**33\ncall(number(302, 261), 0, 4, 2**33, 0)"
    ),
    "reboot": CALL + "call(number(169, 142), 0xFEE1DEAD, 672274793, 0x1234567, 0)",
    "limits": (
        "import resource\n"
        "raised = 0\n"
        "for name in ('AS', 'CPU', 'NPROC', 'FSIZE', 'NOFILE', 'CORE'):\n"
        "    try:\n"
        "        resource.setrlimit(getattr(resource, 'RLIMIT_' + name), (-1, -1))\n"
        "        raised += 1\n"
        "    except ValueError:\n"
        "        pass\n"
        "assert raised"
    ),
    "priority": "import os\nos.setpriority(os.PRIO_PROCESS, 0, -20)",
    "real-time priority": "import os\nos.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))",
}

SIGNALS = {
    "the test's process": "import os\nos.kill(PID, 9)",
    "the parent": "import os\nassert os.getppid() != 1\nos.kill(os.getppid(), 9)",
    "init": "import os, time\nos.kill(1, 9)\nos.kill(1, 15)\ntime.sleep(0.3)\nos.kill(1, 0)\nraise RuntimeError",
    "every process": "import os\nos.kill(-1, 9)\nos.kill(-1, 19)\nraise RuntimeError",
    "its group": "import os\nos.killpg(0, 9)",
    "itself": "import os\nos.kill(os.getpid(), 9)",
    "itself, to stop": "import os\nos.kill(os.getpid(), 19)",
    "abort": "import os\nos.abort()",
}

EXHAUSTS = {
    "an endless loop": "while True: pass",
    "an endless loop that ignores signals": (
        "import signal\nfor n in set(signal.Signals) - {9, 19}:\n    signal.signal(n, signal.SIG_IGN)\nwhile True: pass"
    ),
    "sleep": "import time\ntime.sleep(1000)",
    "output to every file": (
        "import os\nwhile True:\n    for fd in range(64):\n        try:\n            os.write(fd, b'x' * 2**16)\n"
        "        except OSError:\n            pass"
    ),
    "memory": "x = bytearray(2**33)",
    "memory of processes": "import os\nfor _ in range(4): os.fork()\nx = []\nwhile True: x.append(b'x' * 2**24)",
    "an anonymous memory file": CALL + "call(number(319, 279), b'x', 0)",
    "shared memory": CALL + "call(number(29, 194), 0, 2**26, 0o1600)",
    "messages": CALL + "call(number(68, 186), 0, 0o1600)",
    "semaphores": CALL + "call(number(64, 190), 0, 250, 0o1600)",
    "forks with retries": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "forks, counted": "import os, time\nfor _ in range(64):\n    if not os.fork():\n        time.sleep(9)",
    "threads": "import threading, time\nfor _ in range(64): threading.Thread(target=time.sleep, args=(9,)).start()",
    "open files": "x = [open('/dev/null') for _ in range(100)]",
    "one large file": "with open('x', 'wb') as f:\n    for _ in range(256): f.write(bytes(2**20))",
    "many files": "for n in range(256):\n    with open(f'x{n}', 'wb') as f: f.write(bytes(2**20))",
    "recursion in C": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "a broken pointer": "import ctypes\nctypes.string_at(0)",
    "a deep expression": "eval('(' * 10**5 + ')' * 10**5)",
    "locked memory": CALL + "x = bytearray(2**28)\ncall(number(151, 230), 3)",
    "a locked page": CALL
    + "x = ctypes.create_string_buffer(2**16)\ncall(number(149, 228), ctypes.addressof(x), 2**16)",
    "memory that is resident in no process": (
        "import mmap, os, time\n"
        "for _ in range(24):\n"
        "    x = mmap.mmap(-1, 2**27)\n"
        "    x.write(bytes(2**27))\n"
        "    x.madvise(mmap.MADV_DONTNEED)\n"
        "    if not os.fork():\n        time.sleep(60)\n"
        "    x.close()\n"
        "time.sleep(60)"
    ),
    "asynchronous input and output": (
        CALL + "place = ctypes.c_uint64()\ncall(number(206, 0), 1000, ctypes.addressof(place))"
    ),
    "sockets": (
        "import os, socket, time\nfor _ in range(3): os.fork()\n"
        "x = [socket.socketpair() for _ in range(28)]\ntime.sleep(60)"
    ),
    "a larger socket": ("import socket\nsocket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**22)"),
    "a larger pipe": "import fcntl, os\nfcntl.fcntl(os.pipe()[1], 1031, 2**20)",
    "processors": "import os\nfor _ in range(4): os.fork()\nwhile True: pass",
    "names that do not exist": (
        "import os\nfor _ in range(4): os.fork()\nn = 0\n"
        "while True:\n    n += 1\n    os.path.exists(f'/usr/{os.getpid()}{n:0200}')"
    ),
    "empty files": "n = 0\nwhile True:\n    open(str(n), 'w').close()\n    n += 1",
    "links": "import os\nopen('x', 'w').close()\nn = 0\nwhile True:\n    os.link('x', str(n))\n    n += 1",
    "folders in folders": "import os\nwhile True:\n    os.mkdir('x')\n    os.chdir('x')",
    "attributes of its own file": "import os\nopen('x', 'w').close()\nos.setxattr('x', 'user.x', bytes(2**15))",
    "timers": CALL + "place = ctypes.c_int()\nwhile True: call(number(222, 107), 1, 0, ctypes.addressof(place))",
    "signals": (
        CALL + "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [40])\n"
        "x = (ctypes.c_int32 * 32)(40, 0, -1)\n"
        "while True: call(number(129, 138), os.getpid(), 40, ctypes.addressof(x))"
    ),
    "the result's page, larger": (
        CALL + "import sys\npage = sys._getframe(1).f_locals['page']\n"
        "place = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
        "larger = ctypes.CDLL(None).mremap\nlarger.restype = ctypes.c_void_p\n"
        "larger.argtypes = [ctypes.c_void_p] + [ctypes.c_size_t] * 2 + [ctypes.c_int]\n"
        "ctypes.memset(larger(place, 4096, 2**24, 1), 1, 2**24)"
    ),
}

OUTLIVES = {
    "a daemon": (
        "import os, time\n"
        "if not os.fork():\n"
        "    os.setsid()\n"
        "    if not os.fork():\n"
        "        os.execv('/usr/bin/sleep', [MARKER, '60'])\n"
        "    os._exit(0)\n"
        "time.sleep(0.2)\n"
        "os._exit(0)"
    ),
    "a child that ignores signals": (
        "import os, signal, time\n"
        "if not os.fork():\n"
        "    for n in set(signal.Signals) - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
        "    os.execv('/usr/bin/sleep', [MARKER, '60'])\n"
        "time.sleep(0.2)\n"
        "os._exit(0)"
    ),
    "a program in the background": (
        "import subprocess\n"
        "subprocess.Popen([MARKER, '60'], executable='/usr/bin/sleep', start_new_session=True)\n"
        "raise RuntimeError"
    ),
    "an endless chain of forks": "import os\nwhile True:\n    if os.fork(): os._exit(0)",
    "a program that replaces itself": "import os\nos.execv('/usr/bin/sleep', [MARKER, '60'])",
}

SAY = """
for fd in range(64):
    for word in words:
        try:
            os.write(fd, word)
        except OSError:
            pass
os._exit(0)
"""

FORGES = {
    "os._exit": "import os\nos._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "another program": "import os\nos.execv('/usr/bin/true', ['true'])",
    "an exit handler": "import atexit, os\natexit.register(os._exit, 0)\nassert False",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "an interrupt": "import _thread, time\n_thread.interrupt_main()\ntime.sleep(1)",
    "a thread that exits": "import os, _thread\n_thread.start_new_thread(os._exit, (0,))\nwhile True: pass",
    "success of a forked child": "import os\nif os.fork(): os._exit(0)",
    "replaced assertions": "import builtins\nbuiltins.AssertionError = type('X', (BaseException,), {})\nassert False",
    "replaced builtins": (
        "import builtins\n"
        "for name in ('exec', 'type', 'len', 'open', 'getattr', 'print', '__import__'):\n"
        "    setattr(builtins, name, lambda *a, **k: None)\n"
        "assert False"
    ),
    "replaced os functions": "import os\nos._exit = lambda code: None\nos.write = lambda *a: 1\nassert False",
    "a trace": "import os, sys\nsys.settrace(lambda *a: os._exit(0))\ndef f(): pass\nf()",
    "the caller's frames": (
        "import os, sys\nwords, frame = [b'+', b'passed', b'True'], sys._getframe()\n"
        "while frame:\n"
        "    words += [v for v in [*frame.f_locals.values(), *frame.f_globals.values()] if isinstance(v, bytes)]\n"
        "    frame = frame.f_back\n" + SAY
    ),
    "the runner's objects": (
        "import gc, os\n"
        "found = [value for thing in gc.get_objects() for value in gc.get_referents(thing)]\n"
        "words = [value for value in found if type(value) is bytes and len(value) < 99]\n" + SAY
    ),
    "every file closed": "import os\nos.closerange(0, 1024)\nassert False",
    "the result's page": (
        "import gc, mmap, os\n"
        "pages = [thing for thing in gc.get_objects() if isinstance(thing, mmap.mmap)]\n"
        "pages += [v for v in __import__('sys')._getframe(1).f_locals.values() if isinstance(v, mmap.mmap)]\n"
        "for page in pages: page[:] = b'+' * len(page)\nos._exit(0)"
    ),
    "the result's page closed": ("import sys\nsys._getframe(1).f_locals['page'].close()\nassert False"),
    "a larger result": (
        "import sys\npage = sys._getframe(1).f_locals['page']\npage.resize(2**24)\npage[:] = b'x' * len(page)"
    ),
    "the runner's module": "import sys\nsys.modules['__main__'].main()\nassert False",
    "the caller's key": "import sys\nsys._getframe(1).f_locals['key'] = b''\nassert False",
    "an exception of a long name": "raise type('x' * 10**6, (Exception,), {})('x' * 10**7)",
    "an exception without a readable name": (
        "class Meta(type):\n    __name__ = property(lambda self: 1 / 0)\n"
        "class Error(Exception, metaclass=Meta): pass\nraise Error"
    ),
    "an exception that exits": (
        "import os\n"
        "class Meta(type):\n    __name__ = property(lambda self: os._exit(0))\n"
        "class Error(Exception, metaclass=Meta): pass\nraise Error"
    ),
    "an exception that hangs": (
        "class Error(Exception):\n    def __str__(self):\n        while True: pass\n    __repr__ = __str__\nraise Error"
    ),
    "a destructor": "import os\nclass X:\n    def __del__(self): os._exit(0)\nx = X()\ndel x",
    "syntax": "def f(:",
    "a null byte": "\0",
    "half a surrogate pair": "x = '\ud800'",
    "a long program": "x = 1\n" * 2 * 10**4 + "assert False",
}

KINDS = {
    "reads": READS,
    "writes": WRITES,
    "connects": CONNECTS,
    "escapes": ESCAPES,
    "signals": SIGNALS,
    "exhausts": EXHAUSTS,
    "outlives": OUTLIVES,
    "forges": FORGES,
}
PROGRAMS = {f"{kind}: {name}": program for kind, programs in KINDS.items() for name, program in programs.items()}

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
