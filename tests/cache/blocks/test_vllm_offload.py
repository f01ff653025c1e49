"""A host tier finds, stores and evicts blocks as vLLM 0.33's ``CPUOffloadingManager`` does.

``python tests/cache/blocks/test_vllm_offload.py CASES REQUESTS FILE`` compares random requests and
records them for the test.  Requests run one by one, fit into host memory, hit no device block, and
evict none of their blocks.  With ARC no evicted block returns.  docs/deviations.md gives reasons.
"""

import json
import random
import sys
from pathlib import Path

from cache import Sequence, make_manager

RECORDED = Path(__file__).with_name("vllm_offload.json")
DIFFERENCES = [  # vLLM stores nothing of the first request, and evicts "aa" for the last
    [[2, "lru", 1], [["aabbcc", [6], [0, ["aa", "aabb"], []]]]],
    [[2, "lru", 1], [["aab", [3], [0, ["aa"], []]], ["aabbccd", [7], [1, ["aabb"], []]]]],
]


def test_serves_recorded_requests_as_vllm_did():
    for case, steps in json.loads(RECORDED.read_text()) + DIFFERENCES:
        ours = Ours(*case)
        assert [[*step[:2], ours.serve(*step[:2])] for step in steps] == steps, case


class Ours:
    def __init__(self, size, policy, threshold):
        options = {"host_blocks": size, "host_policy": policy, "store_threshold": threshold}
        options |= {"num_blocks": 99, "store": "selective" if threshold > 1 else "through"}
        self.manager, self.names = make_manager("vllm_v1", block_size=2, **options), {}

    def serve(self, prompt, ends):
        """Compute ``prompt`` in steps.  Returns the number of loads, what is stored and evicted."""
        manager, pool, moves = self.manager, self.manager.tier.pool, []
        pool.events, seq = [], Sequence(0, map(ord, prompt))
        for end, key in enumerate(manager.tier.hasher.block_hashes(seq), 1):
            self.names[key] = prompt[: 2 * end]
        manager.admit(seq, hit := manager.find(seq), max(hit.num_tokens + 1, ends[0]))
        for end in [*ends, 0]:
            if end > seq.num_computed_tokens:
                manager.append(seq, end)
            moves += manager.take_transfers()[0]
        stored = [self.names[pool.block_hashes[host]] for _, host in moves]
        manager.free(seq)
        manager.allocate_slots(seq, 1, (), 2 * 99 - 1)  # with drafts in all device blocks
        manager.free(seq)
        return [len(hit.loads), stored, [self.names[key] for ((key,),) in pool.events]]


def serve_with_vllm(manager, context, prompt, ends):
    keys = [prompt[:end].encode() + bytes(4) for end in range(2, len(prompt) + 1, 2)]
    list(map(context.set_offload_key_position, keys, range(len(keys))))
    manager.on_new_request(context)
    found = [manager.lookup(key, context).name for key in keys[: (len(prompt) - 1) // 2]]
    loads, moved = keys[: [*found, "MISS"].index("MISS")], ([], [])
    manager.prepare_load(loads, context)
    manager.complete_load(loads, context)
    for first, end in zip([0, *ends[:-1]], ends, strict=True):
        output = manager.prepare_store(keys[max(len(loads), first // 2) : end // 2], context)
        manager.complete_store(output.keys_to_store, context)
        moved = moved[0] + output.keys_to_store, moved[1] + output.evicted_keys
    manager.on_request_finished(context)
    return [len(loads), *([key[:-4].decode() for key in keys] for keys in moved)]


if __name__ == "__main__":
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    records, num_cases, num_requests = [], *map(int, sys.argv[1:3])
    for rng in map(random.Random, range(num_cases)):
        size, policy, threshold = rng.randint(3, 16), rng.choice(["lru", "arc"]), rng.randint(1, 3)
        theirs = CPUOffloadingManager(size, policy, store_threshold=threshold)
        ours, steps, gone = Ours(size, policy, threshold), [["", [], []]], ()
        for number in range(num_requests):
            prompt = rng.choice(steps[-9:])[0][: rng.randint(0, 2 * size)]
            prompt += "".join(rng.choices("abc", k=rng.randint(1, rng.randint(1, 2 * size))))
            prompt = (chr(256 + number) * prompt.startswith(gone) + prompt)[: 2 * size + 1]
            ends = sorted({*rng.choices(range(1, len(prompt) + 1), k=2), len(prompt)})
            answer = serve_with_vllm(theirs, ReqContext(""), prompt, ends)
            if any(map(prompt.startswith, answer[2])):
                break
            assert ours.serve(prompt, ends) == answer, [*steps, prompt, ends, answer]
            steps.append([prompt, ends, answer])
            gone += tuple(answer[2]) if policy == "arc" else ()
        records.append([[size, policy, threshold], steps[1:]])
    Path(sys.argv[3]).write_text(json.dumps(records, separators=(",", ":")) + "\n")
    print(f"{sum(len(steps) for _, steps in records)} requests without a difference")
