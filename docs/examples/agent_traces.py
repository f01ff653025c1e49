"""Make traces of agents from two published repositories (see docs/sessions.md).

git clone https://github.com/LMCache/lmcache-agent-trace lmcache && git -C lmcache checkout 16a14ad
git clone https://github.com/eunomia-bpf/agentcgroup && git -C agentcgroup checkout 5af9e7b
python docs/examples/agent_traces.py lmcache_agents_16.jsonl.zst lmcache/{magagent,miniswe}
python docs/examples/agent_traces.py agentcgroup_claude_128.jsonl.zst \\
    agentcgroup/experiments/all_images_haiku
python docs/examples/agent_traces.py agentcgroup_glm_128.jsonl.zst \\
    agentcgroup/experiments/all_images_local
"""

import json
import sys
from datetime import datetime
from pathlib import Path

import numpy as np

import cache

STEP, CHARACTERS, HEAD, AT_ONCE = 64, 4, 0.77, 10  # HEAD: shared part of the shortest prompt
MISSING = "all_images_local/mwouts__jupytext-372"  # its file could not be read


def texts(folder):
    """Sessions of LMCache's agents: a file each.  Blocks of 16 tokens of 4 characters."""
    for path in sorted(Path(folder).glob("*.jsonl")):
        session = []
        records = sorted(map(json.loads, path.open()), key=lambda record: record["timestamp"])
        for before, record in zip([None, *records], records, strict=False):
            if not before or path.parent.name != "miniswe":
                prompt = record["input"]
            else:  # each prompt extends the previous one, but lacks the answers
                prompt += before["output"] + record["input"].removeprefix(before["input"])
            blocks = [prompt[i - STEP : i] for i in range(STEP, len(prompt) + 1, STEP)]
            lengths = len(prompt) // CHARACTERS, len(record["output"]) // CHARACTERS
            session.append((record["timestamp"] / 1000, *lengths, blocks, {"agent": 0}))
        yield session


def transcripts(folder):
    """Sessions of Claude Code.  Prompt lengths are the server's; each extends the previous one."""
    sessions, heads = [], {}
    for path in sorted(Path(folder).glob("*/attempt_1/trace.jsonl")):
        agents, times, answers, roots = {}, {}, {}, 0
        lines = "" if MISSING in str(path) else path.open()
        for line in (line for line in map(json.loads, lines) if "message" in line):
            name, parent, message = line["uuid"], line["parentUuid"], line["message"]
            roots += parent is None and line["isSidechain"]  # a sub-agent starts
            agents[name] = agents[parent] if parent else roots if line["isSidechain"] else 0
            times[name] = round(1000 * datetime.fromisoformat(line["timestamp"]).timestamp())
            length = sum(n for k, n in message.get("usage", {}).items() if "input_tokens" in k)
            if not length:  # not an answer of the model
                continue
            head = path.parts[-4], message["model"], agents[name] > 0  # system prompt and tools
            new = [times[parent], length, head, agents[name], 0, "end_turn", 0]
            answer = answers.setdefault(message["id"], new)
            heads[head] = min(heads.get(head, length), length)
            for part in message["content"]:
                words = part.get("text") or part.get("thinking") or json.dumps(part.get("input"))
                answer[4] += len(words) / CHARACTERS
                answer[5] = "tool_use" if part["type"] == "tool_use" else answer[5]
            if "claude" not in message["model"]:  # Claude's number is of an answer's start
                answer[4] = message["usage"]["output_tokens"]
            answer[6] = times[name]
        sessions.append(answers.values())
    for number, answers in enumerate(sessions):
        session, ends = [], {}
        for sent, prompt, head, agent, output, stop, end in answers:
            facts = {"think_time": max(0, sent - ends[agent])} if agent in ends else {}
            facts, ends[agent] = facts | {"agent": agent, "stop": stop}, end
            shared = int(HEAD * heads[head]) // 128
            blocks = [head if i < shared else (number, agent) for i in range(prompt // 128)]
            session.append((sent, prompt, int(output), blocks, facts))
        yield session


out, *folders = sys.argv[1:]
read, size = (transcripts, 128) if "all_images" in folders[0] else (texts, 16)
sessions = [session for folder in folders for session in read(folder) if session]
spans = [[pick(request[0] for request in session) for pick in (min, max)] for session in sessions]
starts = np.random.default_rng(0).uniform(0, np.diff(spans).sum() / AT_ONCE, len(spans)).round()
nodes, requests = {}, []
for number, (session, (begin, _), start) in enumerate(zip(sessions, spans, starts, strict=True)):
    for time, prompt, output, blocks, facts in session:
        ids = [-1]
        for block in blocks:
            ids.append(nodes.setdefault((ids[-1], block), len(nodes)))
        facts["session"], time = number, start + round(time - begin)
        requests.append((time, prompt, output, ids[1:], facts))
cache.save_trace(cache.Trace.from_requests(requests, name="agents", block_size=size), out)
print(out, cache.load_trace(out), cache.load_trace(out).digest)
