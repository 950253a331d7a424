"""Compiles Triton kernels for a GPU, such as Hopper (sm_90), on a machine without one."""

import json
import subprocess
import sys
from typing import Any, NamedTuple

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
        views = ["-res-usage", "-sass"] if LISTING else ["-res-usage"]
        shown = [subprocess.run([tool, x, file.name], capture_output=True, text=True, check=True) for x in views]
    used = {name: int(value) for name, value in re.findall("(REG|STACK|LOCAL):([0-9]+)", shown[0].stdout)}
    ptx = kernel.asm["ptx"]
    used |= {"prefetches": "prefetch.global.L2" in ptx.partition("griddepcontrol.wait")[0]}
    used |= {"shared": kernel.metadata.shared, "stages": kernel.metadata.num_stages}
    used |= {"threads": kernel.metadata.num_warps * 32, "early": options.get("launch_pdl", False)}
    used |= {"sass": re.findall(r"/\\*([0-9a-f]{4,})\\*/\\s+(.*?)\\s*;", shown[-1].stdout)}
    used |= {"architecture": ARCHITECTURE, "waits": "griddepcontrol.wait" in ptx}
    print(json.dumps({"name": self.__name__, "wgmma": "wgmma" in ptx, **used}))

triton.runtime.driver.set_active(Driver())
run, JITFunction.run = JITFunction.run, compile_only
tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
"""

END = "end of a script"


class Compiled(NamedTuple):
    """What one script compiled and printed."""

    kernels: list[dict[str, Any]]  # of each launch: name, registers, spills, shared bytes, threads, what its code uses
    # and, if asked for, `sass`: addresses (hexadecimal) and instructions
    printed: list[str]


def compiled(*scripts: str, architecture: int = 90, sass: bool = False) -> list[Compiled]:
    """Run scripts one after the other in a process of its own, in which a launch of a kernel only compiles it."""
    code = f"ARCHITECTURE, LISTING = {architecture}, {sass}\n" + STAND_IN + f"print({END!r})\n".join(scripts)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    parts = [part.splitlines() for part in done.stdout.split(f"{END}\n")]
    return [
        Compiled([json.loads(x) for x in lines if x.startswith("{")], [x for x in lines if not x.startswith("{")])
        for lines in parts
    ]
