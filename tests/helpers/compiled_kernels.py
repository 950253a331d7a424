"""Compiles Triton kernels for a GPU, such as Hopper (sm_90), on a machine without one."""

import json
import subprocess
import sys
from typing import Any

STAND_IN = """
import json, re, subprocess, tempfile
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

class Driver:
    def get_current_device(self): return ARCHITECTURE  # each has kernels of its own
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", ARCHITECTURE, 32)

def compile_only(self, *args, grid, warmup, **options):
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall("(REG|STACK|LOCAL):([0-9]+)", shown)}
    used |= {"shared": kernel.metadata.shared, "threads": kernel.metadata.num_warps * 32}
    print(json.dumps({"name": self.__name__, "wgmma": "wgmma" in kernel.asm["ptx"], **used}))

triton.runtime.driver.set_active(Driver())
run, JITFunction.run = JITFunction.run, compile_only
tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
"""


def compiled(script: str, architecture: int) -> list[dict[str, Any]]:
    """Run a script in a process of its own, in which a launch of a kernel only compiles it.

    Return of each launch: name, registers, spills, shared bytes, threads, matrix unit.
    """
    code = f"ARCHITECTURE = {architecture}\n{STAND_IN}\n{script}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
