"""Processes of this Python that are forked from the one of the tests, where everything is imported already.

Importing torch and transformers takes five seconds of a processor. A forked process can be signalled, killed and waited
for as any other, and its own are forked, too. What acts on imports does not work: options of Python, PYTHONPATH, and
variables that a module reads when it is imported. What tests have patched stays patched.
"""

import atexit
import faulthandler
import gc
import multiprocessing
import os
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

SCRIPT = b"#!/bin/sh\nexec "  # how a made-up build begins


@contextmanager
def forking() -> Iterator[None]:
    """Meanwhile every process of this Python that `subprocess` or `multiprocessing` starts is forked."""
    fork = multiprocessing.get_context("fork")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Popen)
        patch.setattr(multiprocessing, "get_context", lambda method=None: fork)
        yield


class Popen(subprocess.Popen[Any]):
    """A process; if it is one of this Python, forked."""

    def __init__(self, args: Any, *rest: Any, **options: Any) -> None:
        if not isinstance(args, str) and str(args[0]) == sys.executable:
            env = options.get("env")
            options["preexec_fn"] = partial(_become, list(map(str, args)), None if env is None else dict(env))
        super().__init__(args, *rest, **options)


def _become(command: Sequence[str], env: Mapping[str, str] | None = None) -> NoReturn:
    """Be a new process of Python that runs a command, up to its end."""
    code: Any = 1
    try:
        leave_parent()
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        code = _ended(command)
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:  # also of a thread that is interrupted
        traceback.print_exc()
    finally:
        os._exit(code)


def leave_parent(kept: int = 0) -> None:
    """Give up what belongs to the parent: open files but for the standard ones and `kept`, handlers, ends."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in [int(name) for name in os.listdir("/proc/self/fd")]:
        if file not in (0, 1, 2, kept, nothing) and os.path.exists(f"/proc/self/fd/{file}"):
            os.dup2(nothing, file)  # its number stays taken: objects of the parent would close a new file
    for stream, (name, mode) in enumerate([("stdin", "r"), ("stdout", "w"), ("stderr", "w")]):
        opened = open(stream, mode, 1, closefd=False)  # noqa: SIM115
        setattr(sys, name, opened)
        setattr(sys, f"__{name}__", opened)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.disable()
    atexit._clear()
    gc.enable()
    torch.set_num_threads(1)  # makes torch's pool anew; two threads that do so at once collide


def _ended(command: Sequence[str]) -> int:
    """Run the program of a command, as Python does; return its exit code."""
    os.execv = _exec  # type: ignore[assignment]
    words = list(command[1:])
    while words[0] in ("-I", "-S", "-E"):
        words.pop(0)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    try:
        if words[0] == "-c":
            sys.argv, sys.path[:0] = ["-c", *words[2:]], [""]
            exec(compile(words[1], "<string>", "exec"), main.__dict__)
        elif words[0] == "-m":
            sys.argv, sys.path[:0] = words[1:], [os.getcwd()]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[:0] = words, [str(Path(words[0]).resolve().parent)]
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _exec(path: str, command: Sequence[str]) -> None:
    """Take the place of `os.execv`, by which mtbench/programs/launch.py becomes its command.

    That may be a made-up build (tests/helpers/fake_build.py): a script that only starts this Python.
    """
    with open(path, "rb") as file:
        begins = file.read(4096)
    if begins.startswith(SCRIPT):
        *words, _ = shlex.split(begins.decode())[2:]
        command = [*words, *command[1:]]
    if command[0] == sys.executable:
        _become(command)
    os.execve(path, list(command), os.environ)
