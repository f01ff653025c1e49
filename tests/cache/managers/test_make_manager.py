import pytest
from manager_helpers import manager_of

from cache import UnsupportedByDesign, make_manager
from cache.policies.fifo import FIFO


@pytest.mark.parametrize(
    ("name", "own"), [("vllm_v1", "xxh3_128"), ("vllm_v0", "xxh3_128"), ("nano_vllm", "xxh64")]
)
def test_defaults(name, own):
    for asked in ("xxh3_128", "sha256"):
        manager = manager_of(name, hash_algorithm=asked)
        assert manager._hasher.algorithm == (own if asked == "xxh3_128" else asked)
    for num_blocks, watermark in ((99, 0), (250, 2)):
        if name == "vllm_v0":
            assert manager_of(name, num_blocks).watermark_blocks == watermark


ORACLE, UNCACHED = {"reservation": "oracle"}, {"enable_prefix_caching": False}
BAD = [
    ("vllm_v9", {}, r"manager='vllm_v9'.*vllm_v1"),
    ("vllm_v1", {"watermark": 0.1}, "no option watermark; its options: .*policy"),
    ("vllm_v1", {"policy": "mru2"}, "policy='mru2'.*lru"),
    ("vllm_v1", {"policy": FIFO}, "needs a name or an EvictionPolicy object"),
    ("vllm_v1", {"policy": "belady"}, "'belady' needs the future"),
    ("vllm_v1", {"hash_algorithm": "xxh64"}, r"'xxh64'.*128 bits.*xxh3_128, sha256"),
    ("nano_vllm", {"hash_algorithm": "md5"}, "hash_algorithm='md5'.*xxh64"),
    ("vllm_v0", {"watermark": -0.1}, "watermark=-0.1"),
    ("vllm_v0", {"watermark": 1}, "watermark=1"),
    ("vllm_v0", {"watermark": "x"}, "watermark='x'.*share of the blocks"),
    ("vllm_v0", {"clock": 3}, "clock=3: needs a function or None"),
    ("contiguous", {"final_length": 3}, "final_length=3: needs a function or None"),
    ("paged", {"enable_prefix_caching": "no"}, "enable_prefix_caching='no'.*True or False"),
    ("vllm_v1", {"queue_uncached": 1}, "queue_uncached=1: needs True or False"),
    ("vllm_v1", {"hash_algorithm": []}, r"hash_algorithm=\[\] is unknown"),
    ([], {}, r"manager=\[\] is unknown"),
    ("contiguous", {"reservation": "half"}, "reservation='half'.*max, pow2, oracle"),
    ("contiguous", ORACLE, "final_length=None.*oracle"),
    ("contiguous", {"max_model_len": 33}, "max_model_len=33.*num_blocks=10 .* 32 slots"),
    *((n, {"policy": "fifo"}, "offer a policy") for n in ("contiguous", "paged")),
    *((n, {"hash_algorithm": "md5"}, "offer a hash") for n in ("contiguous", "paged", "radix")),
    ("vllm_v0", {"sliding_window": 8}, "offer a sliding_window together with prefix caching"),
    ("vllm_v0", UNCACHED | {"policy": "fifo"}, "offer a policy .* without prefix"),
]


@pytest.mark.parametrize(("name", "options", "says"), BAD, ids=[f"{n}-{o}" for n, o, _ in BAD])
def test_bad_arguments(name, options, says):
    error = UnsupportedByDesign if says.startswith("offer") else ValueError
    with pytest.raises(error, match=says):
        make_manager(name, **{"num_blocks": 10, "block_size": 4} | options)
