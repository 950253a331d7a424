"""Runs Python programs that a model wrote, each by itself, where it can do no harm, and says which came to their end.

A program passes if it runs to its last line: an exception, `sys.exit()`, `os._exit()` or a limit is a failure, as for
the metric `code_eval` of Hugging Face's evaluate, of which nothing is fetched or copied. That allows three seconds by
the clock; here it is three of processor time, and ten by the clock, so that a busy machine changes no verdict.

Each program gets a Python of its own inside bubblewrap (github.com/containers/bubblewrap): no network, no files but the
interpreter, its packages and /usr, read-only; an empty scratch folder in memory; namespaces of its own for users,
processes, mounts, IPC, host name and cgroups; no environment; limits on memory, processor time, processes, file size
and open files; mtbench/evaluation/seccomp.py on top. It dies with us. What it prints is thrown away.

Linux does not limit how many processes root has, and an interpreter in root's home folder is out of reach for everybody
else. So as root there are two layers: the outer opens the way to the interpreter and becomes `nobody`; the inner is the
same as for any other user.

What no judge in the same process can prevent, here or in `code_eval`: a program that knows
mtbench/evaluation/sandbox_child.py can find the key in its caller's frame and say what the judge waits for, and one
that returns an object equal to everything passes any test. Neither gets out.
"""

import os
import re
import secrets
import select
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import monotonic

from mtbench.errors import UserError, first_line
from mtbench.evaluation.sandbox_child import KEY_BYTES
from mtbench.evaluation.seccomp import filter_for

NOBODY = "65534"
USR = Path("/usr")
SCRATCH = "/scratch"
PATIENCE_S = 60.0  # for an interpreter to start on a busy machine
CHATTER_BYTES = 200  # more than the judge is ever told
DEVICES = ("null", "zero", "random", "urandom")
LOADER = ("/etc/ld.so.cache", "/etc/alternatives", "/nix/store")  # beside /usr, where libraries may be found
ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # sets in the same order, so that a verdict is the same every time
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
WAY_PAST = "or pass --allow-unsandboxed-code to run generated programs although nothing confines them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use."""

    cpu_s: int = 3  # per process
    wall_s: float = 10.0
    memory_bytes: int = 2**29  # of address space, per process
    processes: int = 8  # and threads; two are there before the program begins
    file_bytes: int = 2**24
    scratch_bytes: int = 2**24
    open_files: int = 64

    def spell(self, *, confined: bool) -> str:
        """As mtbench/evaluation/sandbox_child.py reads them. Unconfined, a user's other processes would count too."""
        processes = f",NPROC={self.processes}" if confined else ""
        memory = f",AS={self.memory_bytes}" if sys.platform == "linux" else ""
        ends = f"CPU={self.cpu_s}:{self.cpu_s + 1},FSIZE={self.file_bytes},NOFILE={self.open_files},CORE=0"
        return ends + memory + processes


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program went. `reason`: "timeout", an exception's name, "killed by SIGSEGV" …; empty if it passed."""

    passed: bool
    reason: str = ""


LIMITS = Limits()


def run_all(programs: Sequence[str], *, unsandboxed: bool = False, limits: Limits = LIMITS) -> list[Outcome]:
    """How each program went, in order; as many run at a time as there are processors, and memory if all take theirs.

    Raises UserError if none can.
    """
    if not unsandboxed and (reason := unavailable()):
        raise UserError(f"{reason}.")
    with ThreadPoolExecutor(_at_a_time(limits)) as pool:
        return list(pool.map(lambda program: _try(program, limits, confined=not unsandboxed), programs))


def _at_a_time(limits: Limits) -> int:
    """Half the machine's memory may be taken by programs of which every process takes all it may."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    greedy = limits.processes * limits.memory_bytes + limits.scratch_bytes
    return max(1, min(os.cpu_count() or 1, memory_bytes // 2 // greedy))


def _try(program: str, limits: Limits, *, confined: bool) -> Outcome:
    """An interpreter that does not start is begun once more, and then fails its own item."""
    for _ in range(2):
        try:
            return _run(program, limits, confined=confined)
        except UserError as error:
            reason = str(error)
    return Outcome(False, reason)


@cache
def unavailable() -> str | None:
    """Why no program can be confined on this machine, and what to do about it; None: it can."""
    if sys.platform != "linux":
        return f"generated code is confined by Linux namespaces, and this is {sys.platform}: use Linux, {WAY_PAST}"
    missing = [tool for tool in ("bwrap", *(["setpriv"] if _is_root() else [])) if not shutil.which(tool)]
    if missing:
        package = "bubblewrap" if "bwrap" in missing else "util-linux"
        return f"generated code needs a sandbox, and there is no {missing[0]}: `apt install {package}`, {WAY_PAST}"
    try:
        outcome = _run("", LIMITS, confined=True)
    except UserError as error:
        return (
            f"generated code needs a sandbox, and {first_line(error)} in one: allow user namespaces "
            "(`sysctl kernel.apparmor_restrict_unprivileged_userns=0` on Ubuntu; a container needs CAP_SYS_ADMIN and "
            f"no seccomp or AppArmor profile against them), {WAY_PAST}"
        )
    return None if outcome.passed else f"an empty program fails in the sandbox ({outcome.reason}): {WAY_PAST}"


# --- One program --------------------------------------------------------------------------------------------------


def _run(program: str, limits: Limits, *, confined: bool) -> Outcome:
    key = secrets.token_hex(KEY_BYTES // 2).encode()
    with ExitStack() as stack:
        asked = stack.enter_context(tempfile.TemporaryFile())
        asked.write(key + program.encode("utf-8", "surrogatepass"))
        asked.seek(0)
        prefix: list[str] = []
        inherited: tuple[int, ...] = ()
        folder = None
        if confined:
            prefix, inherited = _confined(limits, stack.enter_context(_filter()))
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        process = subprocess.Popen(
            [*prefix, *_interpreter(), limits.spell(confined=confined), *_packages()],
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=ENVIRONMENT | {"TMPDIR": folder or SCRATCH},
            pass_fds=inherited,
            start_new_session=True,
        )
        with process:
            try:
                said, in_time = _listen(process, limits.wall_s)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and what else an unconfined program started
                process.wait()
            if not said.startswith(b"+"):
                raise UserError(f"its interpreter did not start ({_complaint(process)})")
    return _judge(said[1:], key[::-1], process.returncode, in_time=in_time)


def _listen(process: subprocess.Popen[bytes], wall_s: float) -> tuple[bytes, bool]:
    """What the judge is told until the process ends; False if it had to be ended."""
    assert process.stdout is not None
    ready = select.poll()
    ready.register(process.stdout, select.POLLIN)
    said, deadline = b"", monotonic() + PATIENCE_S
    while len(said) <= CHATTER_BYTES:
        if not ready.poll(max(0.0, deadline - monotonic()) * 1000):
            return said, False
        heard = os.read(process.stdout.fileno(), CHATTER_BYTES + 1)
        if not heard:
            break
        if not said:
            deadline = monotonic() + wall_s  # the program's time, not that of making its sandbox
        said += heard
    else:
        return said, False
    try:
        process.wait(max(0.0, deadline - monotonic()))
    except subprocess.TimeoutExpired:
        return said, False
    return said, True


def _judge(said: bytes, right: bytes, status: int, *, in_time: bool) -> Outcome:
    if secrets.compare_digest(said, right):
        return Outcome(True)
    if len(said) >= CHATTER_BYTES:
        return Outcome(False, "wrote to its judge")
    if not in_time:
        return Outcome(False, "timeout")
    if re.fullmatch(rb"\w{1,80}", said):
        return Outcome(False, said.decode("ascii"))
    number = -status if status < 0 else status - 128  # bubblewrap ends like a shell: 128 and the signal
    if number not in set(signal.Signals):
        return Outcome(False, "ended before its last line")
    return Outcome(False, "timeout" if number == signal.SIGXCPU else f"killed by {signal.Signals(number).name}")


def _complaint(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    ready = select.poll()
    ready.register(process.stderr, select.POLLIN)
    said = os.read(process.stderr.fileno(), 1000).decode(errors="replace") if ready.poll(0) else ""
    return (said.strip().splitlines() or [f"status {process.returncode}"])[0].rstrip(".")


# --- Its Python ---------------------------------------------------------------------------------------------------


def _interpreter() -> list[str]:
    """This process's, outside any virtual environment; -S leaves startup files unread, which would take longest."""
    executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    return [executable, "-P", "-s", "-S", "-B", "-X", "utf8", "-c", _runner()]


@cache
def _runner() -> str:
    return Path(__file__).with_name("sandbox_child.py").read_text(encoding="utf-8")


def _packages() -> list[str]:
    return sorted({os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")})


def _needed() -> list[Path]:
    """Folders outside /usr that the interpreter reads. Raises UserError if one of them holds much else."""
    folders = {Path(os.path.realpath(path)) for path in (sys.base_prefix, sys.base_exec_prefix, *_packages())}
    for folder in folders:
        if Path(os.path.expanduser("~")).resolve().is_relative_to(folder):
            raise UserError(f"the interpreter's own folder {folder} holds the home folder: use another Python")
    return sorted(folder for folder in folders if not any(folder.is_relative_to(o) for o in folders - {folder} | {USR}))


# --- Its sandbox --------------------------------------------------------------------------------------------------


@cache
def _knows(option: str) -> bool:
    """Of bubblewrap: 0.6, which is still about, lacks some."""
    return option in subprocess.run([_tool("bwrap"), "--help"], capture_output=True, text=True).stdout.split()


def _tool(name: str) -> str:
    """Its path: programs are started without PATH. Raises UserError."""
    path = shutil.which(name)
    if path is None:
        raise UserError(f"there is no {name}")
    return path


@contextmanager
def _filter() -> Iterator[int | None]:
    """mtbench/evaluation/seccomp.py's filter as a file to read."""
    code = filter_for()
    if code is None:
        yield None
        return
    reads, writes = os.pipe()
    os.write(writes, code)
    os.close(writes)
    try:
        yield reads
    finally:
        os.close(reads)


def _confined(limits: Limits, filter_fd: int | None) -> tuple[list[str], tuple[int, ...]]:
    """The command in front of an interpreter's, and the files it must inherit."""
    needed = _needed()
    command = [
        *(_as_nobody(needed) if _is_root() else []),
        *(_tool("bwrap"), "--die-with-parent", "--new-session"),
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        "--unshare-cgroup-try",
        *(["--disable-userns"] if _knows("--disable-userns") else []),
        *("--uid", NOBODY, "--gid", NOBODY, "--hostname", "sandbox"),
        *("--ro-bind", "/usr", "/usr"),
    ]
    for path in sorted(Path("/").glob("lib*")):  # links into /usr nowadays
        command += ["--symlink", os.readlink(path), str(path)] if path.is_symlink() else _read_only(path)
    for file in LOADER:
        command += ["--ro-bind-try", file, file]
    for device in DEVICES:
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for folder in needed:
        command += _read_only(folder)
    # No /proc: nothing that a program should need is there. A scratch folder without a bound would be worse than none.
    if _knows("--size"):
        command += ["--size", str(limits.scratch_bytes), "--tmpfs", SCRATCH]
    else:
        command += ["--dir", SCRATCH]
    command += ["--remount-ro", "/", "--chdir", SCRATCH]
    if filter_fd is None:
        return command, ()
    return [*command, "--seccomp", str(filter_fd)], (filter_fd,)


def _read_only(path: Path) -> list[str]:
    return ["--ro-bind", str(path), str(path)]


def _is_root() -> bool:
    """The machine's, not that of a user namespace, whose processes are counted like anybody's."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]


def _as_nobody(folders: Iterable[Path]) -> list[str]:
    """Everything as it is, but the way to `folders` open to everybody; then no longer root.

    In a namespace of processes that ends with us: root's death would not reach another user's process otherwise.
    """
    command = [_tool("bwrap"), "--die-with-parent", "--unshare-pid", "--dev-bind", "/", "/", "--proc", "/proc"]
    closed = {folder: top for folder in folders if (top := _closed(folder))}
    for top in sorted(set(closed.values())):
        command += ["--tmpfs", str(top)]
    for folder, top in closed.items():
        for parent in reversed(folder.parents):
            if parent != top and parent.is_relative_to(top):
                command += ["--dir", str(parent)]
        command += _read_only(folder)
    command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", _tool("setpriv"), "--inh-caps=-all"]
    return [*command, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]


def _closed(folder: Path) -> Path | None:
    """The topmost folder above this one that only its owner may pass."""
    return next((parent for parent in reversed(folder.parents) if not parent.stat().st_mode & stat.S_IXOTH), None)
