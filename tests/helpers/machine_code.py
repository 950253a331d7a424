"""The order of machine instructions on every path through a kernel (SASS as `cuobjdump -sass` prints it).

What our source orders, the compiler has to keep: partial sums that programs exchange, and the wait of a dependent
launch. Opcodes: CUDA Binary Utilities, "Instruction Set Reference".
"""

import re
from collections.abc import Iterable, Sequence

INSTRUCTION = re.compile(r"(@!?U?P\w+ +)?(\w+)")  # predicate, opcode
MEMORY = r"(LD|ST|LDG|STG|LDGSTS|ATOM|ATOMG|RED|REDG|UBLKCP|UBLKRED|UTMALDG|UTMASTG|UTMAREDG)\b"  # global
WAIT, START_NEXT = r"ACQBULK", r"PREEXIT"
STORE, ARRIVAL, STRONG_LOAD = r"(STG|ST|UTMASTG)\b", r"ATOMG?\b", r"LDG\S*\.STRONG\.GPU"
BARRIER, FENCE, FORGET = r"BAR\.SYNC", r"MEMBAR\.(ALL|SC)\.GPU", r"CCTL\.IVALL"


class Code:
    """A kernel's instructions and the paths through them."""

    def __init__(self, listing: Sequence[tuple[str, str]]) -> None:
        """Take addresses (hexadecimal) and instructions, in order."""
        self.texts = [text for _, text in listing]
        place = {int(address, 16): i for i, (address, _) in enumerate(listing)}
        self.after: list[list[int]] = [[] for _ in listing]
        self.before: list[list[int]] = [[] for _ in listing]
        for i, text in enumerate(self.texts):
            predicate, opcode = INSTRUCTION.match(text).groups()  # type: ignore[union-attr]
            if opcode in ("BRX", "JMX", "JMP"):
                raise NotImplementedError(f"a path through {text!r}")
            targets = [place[int(text.split()[-1], 16)]] if opcode == "BRA" else []
            if i + 1 < len(listing) and (predicate or opcode not in ("BRA", "EXIT", "RET")):
                targets.append(i + 1)
            for target in targets:
                self.after[i].append(target)
                self.before[target].append(i)

    def all(self, pattern: str) -> set[int]:
        """Return the instructions whose opcode begins so."""
        return {i for i, text in enumerate(self.texts) if re.match(pattern, text[len(self.predicate(i)) :])}

    def predicate(self, i: int) -> str:
        return INSTRUCTION.match(self.texts[i])[1] or ""  # type: ignore[index]

    def walk(self, begin: Iterable[int], until: set[int], *, back: bool = False) -> tuple[set[int], set[int]]:
        """Follow all paths from `begin`. Return where they end in `until`, and what they pass, `begin` excluded."""
        ends, passed, left = set[int](), set[int](), list(begin)
        while left:
            for i in (self.before if back else self.after)[left.pop()]:
                if i in until:
                    ends.add(i)
                elif i not in passed:
                    passed.add(i)
                    left.append(i)
        return ends, passed

    def before_wait(self) -> list[str]:
        """Return what a kernel does to global memory, other than prefetches, before it waits for the kernel before.

        It may not let the kernel after it start either, which may read what all kernels but the last one wrote.
        """
        _, passed = self.walk([0], self.all(WAIT))
        return [self.texts[i] for i in sorted(passed & self.all(f"{MEMORY}|{START_NEXT}"))]

    def disorder(self) -> list[str]:
        """Return what is wrong with the exchange of partial sums. The order on every path has to be

        STG → BAR → MEMBAR.GPU → ATOMG → CCTL.IVALL → BAR → LDG.STRONG.GPU

        All threads have stored, before one thread makes the stores of all visible to the GPU and counts. It forgets
        what its cache knows, before all threads load.
        """
        memory, stores, loads, barriers = map(self.all, (MEMORY, STORE, STRONG_LOAD, BARRIER))
        arrivals, fences, forgets = map(self.all, (ARRIVAL, FENCE, FORGET))
        first, last = {0}, self.all("EXIT")
        fences, to_fence = self.walk(arrivals, fences, back=True)
        stored, to_stored = self.walk(fences, barriers, back=True)
        _, to_stores = self.walk(stored, barriers, back=True)
        forgets, to_forget = self.walk(arrivals, forgets)
        told, to_told = self.walk(forgets, barriers)
        _, untold = self.walk(first, told)
        found = {
            "partial sums are not exchanged": not (arrivals and loads and to_stores & stores),
            "no fence before the arrival": not fences or to_fence & (memory | first),
            "no barrier between the stores and the fence": not stored or to_stored & (stores | first),
            "old lines stay in the cache": not forgets or to_forget & (memory | last),
            "no barrier between the arrival and the loads": not told or to_told & (memory | last),
            "partial sums are loaded before the arrival": untold & loads,
            "a fence has another condition than its arrival": len({*map(self.predicate, arrivals | fences | forgets)})
            > 1,
        }
        return [fault for fault, is_there in found.items() if is_there]
