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
    r'''
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
# --- ten threads
import threading
total, lock = 0, threading.Lock()
def work():
    global total
    for _ in range(1000):
        with lock:
            total += 1
threads = [threading.Thread(target=work) for _ in range(10)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert total == 10_000
# --- 32 threads at once
import threading
barrier = threading.Barrier(33, timeout=8)
threads = [threading.Thread(target=barrier.wait) for _ in range(32)]
for thread in threads: thread.start()
barrier.wait()
for thread in threads: thread.join()
# --- a pool of threads
from concurrent.futures import ThreadPoolExecutor
assert list(ThreadPoolExecutor(16).map(abs, range(-99, 0))) == list(range(99, 0, -1))
# --- a thread that goes on
import threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
# --- a queue
import queue, threading
q = queue.Queue()
threading.Thread(target=lambda: [q.put(n) for n in range(9)]).start()
assert [q.get(timeout=5) for _ in range(9)] == list(range(9))
# --- 700 MB
x = bytearray(700 * 2**20)
x[::4096] = b'1' * len(x[::4096])
assert x.count(b'1') == len(x) // 4096
# --- many small objects
x = [str(n) for n in range(10**6)]
assert len(set(x)) == 10**6
# --- closing all descriptors
import os
os.closerange(3, 256)
# --- closing all descriptors, with its streams
import os
os.closerange(0, 2**20)
# --- closing its streams
import sys
sys.stdin.close()
sys.stdout.close()
sys.stderr.close()
# --- much output
for n in range(10**5): print(n)
# --- replaced output
import contextlib, io
with contextlib.redirect_stdout(io.StringIO()) as out:
    print('x')
assert out.getvalue() == 'x\n'
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
# --- sqlite in memory
import sqlite3
c = sqlite3.connect(':memory:')
c.execute('create table t(a)')
c.executemany('insert into t values (?)', [(1,), (2,)])
assert c.execute('select sum(a) from t').fetchone() == (3,)
# --- sqlite in a file
import sqlite3
c = sqlite3.connect('a.db')
c.execute('create table t(a)')
c.execute('insert into t values (1)')
c.commit()
assert sqlite3.connect('a.db').execute('select * from t').fetchall() == [(1,)]
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
# --- asyncio with threads
import asyncio
assert asyncio.run(asyncio.to_thread(abs, -1)) == 1
# --- event loops in ten threads
import asyncio, threading
async def f(): await asyncio.sleep(0.1)
threads = [threading.Thread(target=lambda: asyncio.run(f())) for _ in range(10)]
for thread in threads: thread.start()
for thread in threads: thread.join()
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
# --- a timer
import signal, time
hits = []
signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.05)
time.sleep(0.2)
assert hits
# --- deep recursion
import sys
sys.setrecursionlimit(10**5)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
assert depth(20_000) == 20_000
# --- too deep recursion
def f(): f()
try:
    f()
except RecursionError:
    pass
# --- too much memory
try:
    x = bytearray(2**40)
except MemoryError:
    pass
# --- big integers
assert len(str(3**8000)) == 3817
assert pow(3, 10**6, 10**9 + 7) > 0
# --- decimal
from decimal import Decimal, getcontext
getcontext().prec = 50
assert str(Decimal(2).sqrt())[:6] == '1.4142'
# --- fractions
from fractions import Fraction
assert sum(Fraction(1, n) for n in (2, 3, 6)) == 1
# --- patterns
import re
assert re.findall(r'(?P<y>\d{4})-(\d\d)', '2020-01 2021-02') == [('2020', '01'), ('2021', '02')]
# --- data classes
from dataclasses import dataclass, field
@dataclass(order=True, frozen=True)
class P:
    x: int
    y: list = field(default_factory=list, compare=False)
assert P(1) < P(2)
# --- types
from typing import Dict, Generic, List, Optional, Protocol, Tuple, TypeVar
T = TypeVar('T')
class Box(Generic[T]):
    def __init__(self, x: Optional[T] = None): self.x = x
assert Box[int](1).x == 1
# --- enumerations
import enum
class C(enum.IntFlag):
    A = 1
    B = 2
assert C.A | C.B == 3
# --- unicode
import unicodedata
x = 'é\u2028ß😀'
assert len(x) == 4
assert unicodedata.normalize('NFD', x)[0] == 'e'
# --- heaps and caches
import bisect, functools, heapq, itertools
@functools.lru_cache(None)
def f(n): return n if n < 2 else f(n - 1) + f(n - 2)
assert f(90) == 2880067194370816120 and heapq.nsmallest(1, [3, 1]) == [1] and bisect.bisect([1, 3], 2) == 1
# --- doctest
import doctest
def f(x):
    """
    >>> f(1)
    2
    """
    return x + 1
test = doctest.DocTestFinder().find(f, 'f', module=False, globs={'f': f})[0]
assert doctest.DocTestRunner().run(test) == (0, 1)
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
# --- dates
import datetime
assert datetime.date(2024, 2, 29).isocalendar()[1] == 9 and datetime.datetime.now()
# --- hashes
import hashlib, zlib
assert hashlib.sha256(b'').hexdigest()[:4] == 'e3b0' and hashlib.md5(b'x')
# --- json, csv and pickle
import csv, io, json, pickle
assert json.loads(json.dumps({'a': [1]})) == pickle.loads(pickle.dumps({'a': [1]}))
assert list(csv.reader(io.StringIO('a,b'))) == [['a', 'b']]
# --- C functions
import ctypes
assert ctypes.CDLL(None).abs(-3) == 3
# --- a caught exit
import sys
try:
    sys.exit(1)
except SystemExit:
    pass
# --- an exit handler
import atexit
atexit.register(print, 'x')
# --- warnings
import warnings
warnings.warn('x')
assert not 'x'.isdigit()
# --- its limits
import gc, platform, sys
gc.collect()
assert platform.python_version() and sys.getsizeof([]) > 0
'''
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


def test_there_are_enough_honest_programs() -> None:
    """The comparison with `code_eval` covers at least 40 programs."""
    assert len(PROGRAMS) >= 40
