"""Honest programs, in the style of generated answers with their tests: what passes in `code_eval` passes here.

`code_eval` (of Hugging Face's evaluate) removes functions that start or end processes and that delete or rename files;
no program in PROGRAMS needs those. The programs in BEYOND need them, or other arguments or more time, and pass here.
"""

import re

import pytest
from confinement import confined

from mtbench.evaluation.sandbox import Outcome, run_all

pytestmark = pytest.mark.whole


def _programs(text: str) -> dict[str, str]:
    """Return the programs of a text in which each follows a line with its name."""
    parts = re.split(r"^# --- (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


PROGRAMS = _programs(
    r"""
# --- empty

# --- a function and its check
def add(a, b):
    return a + b
def check(candidate):
    assert candidate(1, 2) == 3
check(add)
# --- its name
assert __name__ != '__main__'
# --- a main guard
import sys
if __name__ == '__main__':
    sys.exit(1)
# --- no input
try:
    input()
except (EOFError, OSError):
    pass
else:
    assert False
# --- 32 threads at once
import threading
barrier = threading.Barrier(33, timeout=8)
threads = [threading.Thread(target=barrier.wait) for _ in range(32)]
for thread in threads: thread.start()
barrier.wait()
for thread in threads: thread.join()
# --- a thread that goes on
import threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
# --- 700 MB
x = bytearray(700 * 2**20)
x[::4096] = b'1' * len(x[::4096])
assert x.count(b'1') == len(x) // 4096
# --- closing all descriptors, with its streams
import os
os.closerange(0, 2**20)
# --- much output
for n in range(10**5): print(n)
# --- a temporary file
import tempfile
with tempfile.TemporaryFile() as f:
    f.write(b'x')
    assert f.tell() == 1
# --- a file
open('a', 'w').write('x' * 2**20)
assert len(open('a').read()) == 2**20
# --- touched files
import pathlib
p = pathlib.Path('a')
p.touch()
p.touch()
assert p.exists()
# --- a zip file
import zipfile
with zipfile.ZipFile('a.zip', 'w') as z: z.writestr('x', 'y')
assert zipfile.ZipFile('a.zip').read('x') == b'y'
# --- a file in memory
import mmap
m = mmap.mmap(-1, 100)
m[:3] = b'abc'
m.flush()
assert m[:3] == b'abc'
# --- a locked file
import fcntl
f = open('a', 'w')
fcntl.flock(f, fcntl.LOCK_EX)
fcntl.lockf(f, fcntl.LOCK_EX)
# --- a file on disk
import os
f = open('a', 'w')
f.write('x')
f.flush()
os.fsync(f.fileno())
os.sync()
# --- sqlite with a log
import sqlite3
c = sqlite3.connect('a.db')
assert c.execute('pragma journal_mode=wal').fetchone() == ('wal',)
c.execute('create table t(a)')
c.execute('insert into t values (1)')
c.commit()
assert sqlite3.connect('a.db').execute('select * from t').fetchall() == [(1,)]
# --- asyncio
import asyncio
async def f(n):
    await asyncio.sleep(0.01)
    return n
async def main():
    return await asyncio.gather(*map(f, range(100)))
assert asyncio.run(main()) == list(range(100))
# --- an alarm
import signal, time
def late(*_): raise TimeoutError
signal.signal(signal.SIGALRM, late)
signal.alarm(1)
try:
    time.sleep(5)
except TimeoutError:
    pass
else:
    assert False
# --- deep recursion
import sys
sys.setrecursionlimit(10**5)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
assert depth(20_000) == 20_000
# --- too much memory
try:
    x = bytearray(2**40)
except MemoryError:
    pass
# --- unittest
import io, unittest
class T(unittest.TestCase):
    def test_it(self): self.assertEqual(1, 1)
suite = unittest.defaultTestLoader.loadTestsFromTestCase(T)
assert unittest.TextTestRunner(stream=io.StringIO()).run(suite).wasSuccessful()
# --- random numbers
import random, secrets, uuid
random.seed(1)
assert random.random() < 1 and secrets.token_hex() and uuid.uuid4()
# --- C functions
import ctypes
assert ctypes.CDLL(None).abs(-3) == 3
# --- an exit handler
import atexit
atexit.register(print, 'x')
"""
)
BEYOND = _programs(
    r"""
# --- two seconds
import time
start = time.process_time()
while time.process_time() - start < 1.5: pass
# --- logging
import logging
logging.basicConfig(filename='log')
logging.error('x')
assert open('log').read()
# --- shelve
import shelve
with shelve.open('a') as d: d['k'] = 1
with shelve.open('a') as d: assert d['k'] == 1
# --- copied files
import shutil
open('a', 'w').write('x')
shutil.copy2('a', 'b')
assert open('b').read() == 'x'
# --- its arguments
import sys
assert sys.argv == ['']
# --- a child
import subprocess, sys
assert subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True).stdout
# --- a forked child
import os
if not os.fork():
    os._exit(1)
assert os.wait()[1]
# --- a child process
import multiprocessing
ends = multiprocessing.Pipe()
process = multiprocessing.get_context('fork').Process(target=ends[0].send, args=(1,))
process.start()
process.join()
assert process.exitcode == 0 and ends[1].recv() == 1
# --- a child with 400 MB
import os
x = bytearray(400 * 2**20)
for _ in range(4):
    if not os.fork():
        os._exit(0)
    os.wait()
# --- a temporary folder
import os, tempfile
with tempfile.TemporaryDirectory() as d:
    open(os.path.join(d, 'x'), 'w')
assert not os.path.exists(d)
# --- numpy
import numpy
assert numpy.ones((500, 500)).dot(numpy.ones(500)).sum() == 250_000
# --- 700 MB in numpy
import numpy
x = numpy.ones(700 * 2**20 // 8)
assert x.sum() == len(x)
# --- a read-only library
import os
assert os.listdir(os.path.dirname(os.__file__))
"""
)
FAILURES = {
    "a wrong answer": ("assert 1 + 1 == 3", "AssertionError"),
    "an exit": ("import sys\nsys.exit(0)", "SystemExit"),
    "an unused test": ("import os\nos._exit(0)", "ended before its last line"),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """Run all honest programs at once."""
    programs = PROGRAMS | BEYOND
    return dict(zip(programs, run_all(list(programs.values())), strict=True))


@confined
@pytest.mark.parametrize("name", [*PROGRAMS, *BEYOND])
def test_an_honest_program_passes(name: str, outcomes: dict[str, Outcome]) -> None:
    """It has packages, threads, memory, files and children; what it closes or locks does not change its result."""
    assert outcomes[name] == Outcome(True)


@confined
@pytest.mark.parametrize("name", FAILURES)
def test_a_program_that_does_not_reach_its_end_fails(name: str) -> None:
    """The reason says how it ended."""
    program, reason = FAILURES[name]

    assert run_all([program]) == [Outcome(False, reason)]
