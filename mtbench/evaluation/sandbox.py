"""Run Python programs that a model wrote, each in its own sandbox, and report which of them ran to their last line.

A program passes if it runs to its last line. An exception, `sys.exit()`, `os._exit()` or an exceeded limit is a
failure, as for the metric `code_eval` of Hugging Face's evaluate, of which nothing is downloaded or copied. `code_eval`
allows three seconds of wall time. This sandbox allows three seconds of processor time and ten of wall time, so that a
busy machine does not change a result.

SECURITY.md says what a program can do and what it cannot. bubblewrap (github.com/containers/bubblewrap) gives each one
its own namespaces and folders and an empty environment; the kernel's limits hold for each process; sandbox_watch.py
bounds what its processes use together; seccomp.py filters their system calls. The output is discarded.

Linux does not limit the number of processes of root, and other users cannot read an interpreter in root's home folder.
So root gets two layers: the outer one makes the interpreter readable and switches to the user `nobody`; the inner one
is the same as for any other user.
"""

import os
import re
import resource
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
from mtbench.evaluation.sandbox_child import KEY_BYTES, PAGE_BYTES
from mtbench.evaluation.sandbox_watch import INTERVAL_S, Totals, Watch, Watched
from mtbench.evaluation.seccomp import filter_for
from mtbench.programs.machine_share import usable_memory_bytes, usable_processors

NOBODY_ID = "65534"  # user and group
USR = Path("/usr")
SCRATCH = "/scratch"
START_TIMEOUT_S = 60.0  # for the interpreter to start, on a busy machine
TOTALS = Totals()
PROCESSES_BEFORE = 2  # in a sandbox before its program starts another one: bubblewrap's and its own
DEVICES = ("null", "zero", "random", "urandom")
LOADER = ("/etc/ld.so.cache", "/etc/alternatives", "/nix/store")  # where libraries may be, besides /usr
ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # a fixed order of sets: the same program always gets the same result
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",  # address space for memory, and not for an arena of each thread
}
WITHOUT_SANDBOX = "or pass --allow-unsandboxed-code to run generated programs without a sandbox (unsafe)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The resources that one program may use."""

    cpu_s: int = 3  # per process
    wall_s: float = 10.0
    memory_bytes: int = 2**31  # of address space, per process
    processes: int = 32  # and threads, that the program may start
    file_bytes: int = 2**24
    scratch_bytes: int = 2**24
    open_files: int = 64
    together: Totals = TOTALS  # in all its processes

    def as_argument(self, *, confined: bool) -> str:
        """Return the limits in the format of sandbox_child.py.

        An unconfined program has no limit on processes, because the user's other processes would count too.
        """
        limits = [f"CPU={self.cpu_s}:{self.cpu_s + 1}", f"FSIZE={self.file_bytes}", f"NOFILE={self.open_files}"]
        if sys.platform == "linux":
            limits += [f"AS={self.memory_bytes}", "MEMLOCK=0", "SIGPENDING=256", "RTPRIO=0", "NICE=0"]
        limits.append(f"NPROC={self.processes + PROCESSES_BEFORE}" if confined else "CORE=0")
        return ",".join(limits)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one program. `reason`: "timeout", an exception's name, "killed by SIGSEGV", …; "" if it passed."""

    passed: bool
    reason: str = ""


LIMITS = Limits()


def run_all(programs: Sequence[str], *, unsandboxed: bool = False, limits: Limits = LIMITS) -> list[Outcome]:
    """Run all programs and return their outcomes in order.

    As many run at once as there are processors, and as fit into memory if each holds what it may. Raise UserError if
    this machine cannot run a sandbox.
    """
    if not unsandboxed and (reason := unavailable()):
        raise UserError(f"{reason}.")
    with ExitStack() as stack:
        watch = None if unsandboxed else stack.enter_context(Watch(limits.together, SCRATCH))
        pool = stack.enter_context(ThreadPoolExecutor(max_concurrent(limits)))
        return list(pool.map(lambda program: _run_with_retry(program, limits, watch), programs))


def max_concurrent(limits: Limits) -> int:
    """Return how many programs may run at once: one per processor, and together in half of the memory."""
    most_bytes = limits.together.resident_bytes + limits.scratch_bytes  # of one program
    return max(1, min(usable_processors(), usable_memory_bytes() // 2 // most_bytes))


def _run_with_retry(program: str, limits: Limits, watch: Watch | None) -> Outcome:
    """Run a program; if its interpreter does not start, try once more, and then fail this program only."""
    for _ in range(2):
        try:
            return _run(program, limits, watch)
        except UserError as error:
            reason = str(error)
    return Outcome(False, reason)


@cache
def unavailable() -> str | None:
    """Return why this machine cannot run a sandbox and what to do about it; None if it can."""
    if sys.platform != "linux":
        return f"the sandbox for generated code needs Linux, and this is {sys.platform}: use Linux, {WITHOUT_SANDBOX}"
    tools = ["bwrap", "setpriv"] if _is_root() else ["bwrap"]
    missing = [tool for tool in tools if not shutil.which(tool)]
    if missing:
        package = "bubblewrap" if "bwrap" in missing else "util-linux"
        return f"the sandbox for generated code needs {missing[0]}: `apt install {package}`, {WITHOUT_SANDBOX}"
    try:
        with Watch(LIMITS.together, SCRATCH) as watch:
            outcome = _run("", LIMITS, watch)
    except UserError as error:
        return (
            f"the sandbox for generated code does not work ({first_line(error)}): allow user namespaces "
            "(`sysctl kernel.apparmor_restrict_unprivileged_userns=0` on Ubuntu; a container needs CAP_SYS_ADMIN and "
            f"no seccomp or AppArmor profile against them), {WITHOUT_SANDBOX}"
        )
    if not outcome.passed:
        return f"an empty program fails in the sandbox ({outcome.reason}): {WITHOUT_SANDBOX}"
    return None


# --- One program --------------------------------------------------------------------------------------------------


def _run(program: str, limits: Limits, watch: Watch | None) -> Outcome:
    """Run a program to its end or to a limit, in a sandbox if there is a `watch`.

    Raise UserError if its interpreter does not start.
    """
    key = secrets.token_hex(KEY_BYTES // 2).encode()
    with ExitStack() as stack:
        source = key.ljust(PAGE_BYTES, b"\0") + program.encode("utf-8", "surrogatepass")
        stdin, stderr = (stack.enter_context(_file_with(content)) for content in (source, b""))
        prefix: list[str] = []
        inherited: list[int] = []
        folder = None
        if watch:
            prefix = _sandbox_command(limits)
            if code := filter_for():
                inherited.append(stack.enter_context(_file_with(code)))
                prefix += ["--seccomp", str(inherited[0])]
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        process = subprocess.Popen(
            [*prefix, *_interpreter_command(), limits.as_argument(confined=bool(watch)), *_package_folders()],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=folder,
            env=ENVIRONMENT | {"TMPDIR": folder or SCRATCH},
            pass_fds=inherited,
            start_new_session=True,
        )
        with process:
            try:
                watched = stack.enter_context(watch.over(process.pid)) if watch else Watched(process.pid)
                started, stopped = _wait(process, limits.wall_s, watched)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also other processes that an unconfined program started
                process.wait()
        if not started:
            output = os.pread(stderr, 1000, 0).decode(errors="replace").strip() or f"status {process.returncode}"
            raise UserError(f"its interpreter did not start ({output.splitlines()[0].rstrip('.')})")
        result = os.pread(stdin, PAGE_BYTES, 0).rstrip(b"\0")
    return _classify(result, key[::-1], process.returncode, stopped)


@contextmanager
def _file_with(content: bytes) -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file.fileno()


def _wait(process: subprocess.Popen[bytes], wall_s: float, watched: Watched) -> tuple[bool, str]:
    """Return whether the program started, and why it must be stopped: "" if it ended by itself in time."""
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    started = False
    deadline = monotonic() + START_TIMEOUT_S
    while (left_s := deadline - monotonic()) > 0:
        if poll.poll(min(left_s, INTERVAL_S) * 1000):
            if not os.read(process.stdout.fileno(), 1):
                break
            started = True
            deadline = monotonic() + wall_s  # the program's time starts here, without the start of its sandbox
        elif watched.exceeded:
            return started, f"too much: {watched.exceeded}"
    try:
        process.wait(max(0.0, deadline - monotonic()))
    except subprocess.TimeoutExpired:
        return started, "timeout"
    return started, ""


def _classify(result: bytes, success: bytes, status: int, stopped: str) -> Outcome:
    """Return the outcome for a result, an exit status and the reason why the program was stopped, "" if it was not.

    `success` is the result that passes.
    """
    if secrets.compare_digest(result, success):
        return Outcome(True)
    if stopped:
        return Outcome(False, stopped)
    if re.fullmatch(rb"\w{1,80}", result):
        return Outcome(False, result.decode("ascii"))
    number = -status if status < 0 else status - 128  # like a shell, bubblewrap exits with 128 + the signal
    if number not in set(signal.Signals):
        return Outcome(False, "ended before its last line")
    if number == signal.SIGXCPU:
        return Outcome(False, "timeout")
    return Outcome(False, f"killed by {signal.Signals(number).name}")


# --- The interpreter ----------------------------------------------------------------------------------------------


def _interpreter_command() -> list[str]:
    """Return the command of this process's interpreter without its virtual environment.

    -S skips the startup files of installed packages, which would take most of the start.
    """
    executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    return [executable, "-P", "-s", "-S", "-B", "-X", "utf8", "-c", _child_source()]


@cache
def _child_source() -> str:
    return Path(__file__).with_name("sandbox_child.py").read_text(encoding="utf-8")


def _package_folders() -> list[str]:
    return sorted({os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")})


def _interpreter_folders() -> list[Path]:
    """Return the folders outside /usr that the interpreter reads. Raise UserError if one holds the home folder."""
    paths = (sys.base_prefix, sys.base_exec_prefix, *_package_folders())
    folders = {Path(os.path.realpath(path)) for path in paths}
    home = Path(os.path.expanduser("~")).resolve()
    for folder in folders:
        if home.is_relative_to(folder):
            raise UserError(f"the interpreter's own folder {folder} holds the home folder: use another Python")
    mounted = folders | {USR}
    return sorted(f for f in folders if not any(f.is_relative_to(other) for other in mounted - {f}))


# --- The sandbox --------------------------------------------------------------------------------------------------


@cache
def _bwrap_supports(option: str) -> bool:
    """Return whether the installed bubblewrap has an option; version 0.6, still in use, lacks some."""
    return option in subprocess.run([_tool_path("bwrap"), "--help"], capture_output=True, text=True).stdout.split()


def _tool_path(name: str) -> str:
    """Return the absolute path of a tool, as programs start without PATH. Raise UserError if it is not installed."""
    path = shutil.which(name)
    if path is None:
        raise UserError(f"{name} is not installed")
    return path


@cache
def _inherited_settings() -> list[str]:
    """Return a command that starts another one with settings which all its processes inherit.

    If memory runs out, the kernel ends them before all others. If they crash, no core file is written, and none of the
    host's programs that collect crashes starts: that is what the limit 1 means, see core(5).
    """
    command: list[str] = []
    if (prlimit := shutil.which("prlimit")) and resource.getrlimit(resource.RLIMIT_CORE)[1] != 0:
        command += [prlimit, "--core=1:1"]
    if choom := shutil.which("choom"):
        command += [choom, "--adjust", "1000", "--"]
    return command


def _sandbox_command(limits: Limits) -> list[str]:
    interpreter_folders = _interpreter_folders()
    command = [
        *_inherited_settings(),
        *(_switch_to_nobody(interpreter_folders) if _is_root() else []),
        *(_tool_path("bwrap"), "--die-with-parent", "--new-session"),
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        "--unshare-cgroup-try",
        *(["--disable-userns"] if _bwrap_supports("--disable-userns") else []),
        *("--uid", NOBODY_ID, "--gid", NOBODY_ID, "--hostname", "sandbox"),
        *("--ro-bind", "/usr", "/usr"),
    ]
    for path in sorted(Path("/").glob("lib*")):  # on most systems links into /usr
        command += ["--symlink", os.readlink(path), str(path)] if path.is_symlink() else _bind_read_only(path)
    for file in LOADER:
        command += ["--ro-bind-try", file, file]
    for device in DEVICES:
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for folder in interpreter_folders:
        command += _bind_read_only(folder)
    # No /proc: a program should not need it. Without a size limit, a scratch folder in memory is worse than none.
    if _bwrap_supports("--size"):
        command += ["--size", str(limits.scratch_bytes), "--tmpfs", SCRATCH]
    else:
        command += ["--dir", SCRATCH]
    return [*command, "--remount-ro", "/", "--chdir", SCRATCH]


def _bind_read_only(path: Path) -> list[str]:
    return ["--ro-bind", str(path), str(path)]


def _is_root() -> bool:
    """Return whether this is the machine's root; the root of a user namespace has limits like any other user."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]


def _switch_to_nobody(folders: Iterable[Path]) -> list[str]:
    """Return a command that makes `folders` readable to everybody and then switches from root to the user `nobody`.

    It uses a process namespace that ends with its parent: a process of another user would survive root's death.
    """
    command = [_tool_path("bwrap"), "--die-with-parent", "--unshare-pid", "--dev-bind", "/", "/", "--proc", "/proc"]
    closed_above = {folder: _topmost_closed_parent(folder) for folder in folders}
    closed = {folder: top for folder, top in closed_above.items() if top is not None}
    for top in sorted(set(closed.values())):
        command += ["--tmpfs", str(top)]
    for folder, top in closed.items():
        for parent in reversed(folder.parents):
            if parent != top and parent.is_relative_to(top):
                command += ["--dir", str(parent)]
        command += _bind_read_only(folder)
    command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", _tool_path("setpriv"), "--inh-caps=-all"]
    return [*command, f"--reuid={NOBODY_ID}", f"--regid={NOBODY_ID}", "--clear-groups", "--"]


def _topmost_closed_parent(folder: Path) -> Path | None:
    """Return the topmost folder above this one that other users may not enter; None if they may enter all."""
    for parent in reversed(folder.parents):
        if not parent.stat().st_mode & stat.S_IXOTH:
            return parent
    return None
