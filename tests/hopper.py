"""Compiles Triton kernels for a Hopper GPU (sm_90) on a machine without one."""

import subprocess
import sys

STAND_IN = """
import re, subprocess, tempfile
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

class Hopper:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

def compile_only(self, *args, grid, warmup, **options):
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = [word for word in ("wgmma", "griddepcontrol.wait") if word in kernel.asm["ptx"]]
    print(self.__name__, *re.findall("(?:REG|STACK|LOCAL):[0-9]+", usage), *found)

triton.runtime.driver.set_active(Hopper())
run, JITFunction.run = JITFunction.run, compile_only
tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
"""


def compiled(script: str) -> list[str]:
    """Return what `script` prints and, for each launch of a kernel in it, name, registers, spills and, where it uses
    them, `wgmma` (the matrix unit) and `griddepcontrol.wait` (programmatic dependent launch).

    It runs in a process of its own, in which a launch only compiles.
    """
    done = subprocess.run([sys.executable, "-c", STAND_IN + script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
