"""Next tokens from logits by the Gumbel-max trick (Gumbel, 1954; Maddison et al., 2014).

    token = argmax_v (logits_v + temperature * G_v)    with G_v = -log(-log(U_v)), U_v uniform

is a sample from softmax(logits / temperature); at temperature 0 it is the likeliest token. It needs
no normalisation and no sum over the vocabulary. So each program processes a part of a row, and
comparisons merge the parts' results in any order.

The noise comes from Philox-4x32-10 (Salmon et al., 2011), keyed by the row's seed. With S =
NOISE_SPAN, token v uses word (v // S) % 4 at counter v // (4 S) * S + v % S. So its noise depends
on the seed and v alone. A word x gives the exponential variable E = -log(1 - w), w = (x + 1/2) /
2^32, and G = -log(E). The relative error of E is at most 5e-7 even for the smallest E, so the upper
tail of G is as fine as 32 bits allow. G lies in [-3.14, 22.88].

Top-k and top-p keep the first tokens in descending order of logits. No sort is needed: a token
drawn from all tokens is accepted if its rank is below top_k and the tokens before it have a
probability below top_p. Otherwise it and all later tokens are excluded, and the next candidate is
the token with the best score among the tokens before it. The result equals sampling from masked
logits. (FlashInfer's rejection sampling draws new noise instead.) With both, the probability of the
top k is needed, so a radix search finds the k-th logit by three bits at a time.

Logarithms and exponentials are polynomials, products are not fused with sums, and probabilities are
added as integers. Results are then equal in any order and on every machine, so the kernel, Triton's
interpreter and the reference agree on every token.
"""

import torch
import triton
import triton.language as tl

from kernels.checks import FLOAT_DTYPES, FP32, INT64, Arg, TensorSpec, bounded, check_values
from kernels.launch import launch
from kernels.primitives import LN_2, LOG2_E, await_launches_before
from kernels.tiles import MAX_SPLITS, RESTRICT_TILE, cdiv, pdl_options, sample_num_splits, target_of
from kernels.torch_ops import functional_op

NOISE_SPAN = tl.constexpr(512)
# log(1 + f) = f (1 + f (t_0 + f (t_1 + ...))) for f from sqrt(1/2) - 1 to sqrt(2) - 1, fitted to
# minimise the largest relative error.
LOG_TERMS = tl.constexpr(
    (-0.500003219, 0.333347142, -0.249712288, 0.199068829, -0.172432244, 0.161805004, -0.100823775)
)
# 2^f = 1 + f (t_0 + f (t_1 + ...)) for f from 0 to 1, fitted in the same way.
EXP2_TERMS = tl.constexpr(
    (0.693147063, 0.240229309, 0.0554852821, 0.00967545155, 0.00124678446, 0.000216129207)
)
SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)
MIN_NORMAL = tl.constexpr(2.0**-126)
MAX_TEMPERATURE = 1e29
_TENSORS = TensorSpec(
    Arg("logits", "num_rows vocab_size", FLOAT_DTYPES, any_strides=True),
    Arg("temperatures", "num_rows", FP32, optional=True),
    Arg("noise_seeds", "num_rows", INT64, optional=True),
    Arg("min_ps", "num_rows", FP32, optional=True),
    Arg("top_ks", "num_rows", INT64, optional=True),
    Arg("top_ps", "num_rows", FP32, optional=True),
    rules=(bounded("logits", "vocab_size", 1),),
)


@triton.jit
def _philox(seed, counters):
    """Return four uint32 words for each uint32 counter; the int64 seed is the key."""
    M0: tl.constexpr = 0xD2511F53
    M1: tl.constexpr = 0xCD9E8D57
    W0: tl.constexpr = 0x9E3779B9
    W1: tl.constexpr = 0xBB67AE85
    key0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0, c1, c2, c3 = counters, counters * 0, counters * 0, counters * 0
    for _ in tl.static_range(10):
        high0, high2 = tl.umulhi(c0, M0), tl.umulhi(c2, M1)
        c1, c3, c0, c2 = (
            tl.mul(c2, M1, sanitize_overflow=False),
            tl.mul(c0, M0, sanitize_overflow=False),
            high2 ^ c1 ^ key0,
            high0 ^ c3 ^ key1,
        )
        key0 = tl.add(key0, W0, sanitize_overflow=False)
        key1 = tl.add(key1, W1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def _split(x):
    """Return (f, exponent) of normal x = (1 + f) 2^exponent > 0, 1 + f in [sqrt(1/2), sqrt(2)]."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    return (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0, exponent


@triton.jit
def _log(f, exponent):
    """Return log((1 + f) 2^exponent)."""
    p = LOG_TERMS[6]
    for i in tl.static_range(5, -1, -1):
        p = LOG_TERMS[i] + f * p
    return exponent.to(tl.float32) * LN_2 + f * (1.0 + f * p)


@triton.jit
def _gumbel(words):
    """Convert uniform uint32 words to standard Gumbel variables."""
    w = (words.to(tl.float32) + 0.5) * 2.0**-32
    f, exponent = _split(((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.0**-32)  # of 1 - w
    near = w < 0.25  # 1 - w has lost digits of w
    f, exponent = _split(-_log(tl.where(near, -w, f), tl.where(near, 0, exponent)))
    return -_log(f, exponent)


@triton.jit
def _weights(logits, largest, temperature):
    """Return 2^40 exp((logits - largest) / temperature), rounded down to int64. 0 below e^-28."""
    x = tl.maximum(tl.div_rn(logits - largest, temperature), -30.0) * LOG2_E
    exponent = tl.floor(x)
    f = x - exponent
    p = EXP2_TERMS[5]
    for i in tl.static_range(4, -1, -1):
        p = EXP2_TERMS[i] + f * p
    scale = (exponent.to(tl.int32) + (127 + 40)) << 23
    return ((1.0 + f * p) * scale.to(tl.float32, bitcast=True)).to(tl.int64)


@triton.jit
def _ordered_bits(x):
    """Map fp32 numbers (no NaN) to uint32 numbers in the same order. -0 and 0 map to one number."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _from_ordered_bits(bits):
    """Return the fp32 number that _ordered_bits maps to `bits`."""
    bits = tl.where(bits >> 31 != 0, bits ^ 0x80000000, bits ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load_logits(row_ptr, tokens, vocab_size, stride_token, floor):
    """Load logits as fp32. Past the vocabulary and below `floor` (if not None) they are -inf."""
    ptrs = row_ptr + tokens.to(tl.int64) * stride_token
    logits = tl.load(ptrs, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    return logits if floor is None else tl.where(logits < floor, float("-inf"), logits)


@triton.jit
def _comes_before(logits, tokens, pivot, pivot_token):
    """Whether tokens come before pivot_token in descending order of logits. Tokens with equal
    logits are in ascending order."""
    return (logits > pivot) | ((logits == pivot) & (tokens < pivot_token))


@triton.jit
def _candidates(row_ptr, tokens, vocab_size, stride_token, floor, pivot, pivot_token):
    """Return the scores without noise of [NOISE_SPAN] tokens. Excluded tokens get -inf.

    floor: smaller logits are excluded (None: no limit). pivot: logit of pivot_token; only tokens
    before pivot_token are allowed (None: all).
    """
    logits = _load_logits(row_ptr, tokens, vocab_size, stride_token, floor)
    scores = tl.where(logits == logits, logits, float("inf"))  # a NaN must not be ignored
    if pivot is not None:
        allowed = _comes_before(logits, tokens, pivot, pivot_token)
        scores = tl.where(allowed, scores, float("-inf"))
    return scores


@triton.jit
def _best_of_chunks(
    first, last, row_ptr, seed, vocab_size, stride_token, temperature, floor, pivot, pivot_token
):
    """Return a row's best score in chunks [first, last), and its lowest token. seed: or None."""
    lanes = tl.arange(0, NOISE_SPAN)
    best = tl.full([NOISE_SPAN], float("-inf"), tl.float32)
    best_tokens = tl.zeros([NOISE_SPAN], tl.int32)
    for chunk in range(first, last):
        scores = ()
        for i in tl.static_range(4):
            tokens = lanes + (chunk * 4 + i) * NOISE_SPAN
            score = _candidates(
                row_ptr, tokens, vocab_size, stride_token, floor, pivot, pivot_token
            )
            scores += (score,)
        has_candidate = True
        if floor is not None or pivot is not None:  # often none is left
            largest = tl.maximum(tl.maximum(scores[0], scores[1]), tl.maximum(scores[2], scores[3]))
            has_candidate = tl.max(largest, axis=0) > float("-inf")
        if has_candidate:
            if seed is not None:
                words = _philox(seed, (lanes + chunk * NOISE_SPAN).to(tl.uint32))
            for i in tl.static_range(4):
                score = scores[i]
                if seed is not None:
                    score += temperature * _gumbel(words[i])
                better = score > best  # tokens ascend, so the lowest token of equal scores stays
                best = tl.where(better, score, best)
                best_tokens = tl.where(better, lanes + (chunk * 4 + i) * NOISE_SPAN, best_tokens)
    score = tl.max(best, axis=0)
    return score, tl.min(tl.where(best == score, best_tokens, vocab_size), axis=0)


@triton.jit
def _largest_of(row, maxima_ptr, num_splits, MAX_SPLITS: tl.constexpr):
    """Return the largest logit of a row."""
    parts = tl.arange(0, MAX_SPLITS)
    maxima_ptrs = maxima_ptr + row * num_splits + parts
    return tl.max(tl.load(maxima_ptrs, mask=parts < num_splits, other=float("-inf")), axis=0)


@triton.jit
def _least_kept(largest, min_p, temperature):
    """Return the smallest logit that min-p keeps."""
    # A min_p of 0 excludes logits 87 temperatures below the largest; noise spans at most 27.
    f, exponent = _split(tl.maximum(min_p, MIN_NORMAL))
    return largest + temperature * _log(f, exponent)


@triton.jit(do_not_specialize=["num_splits", "chunks_per_split"])
def _sample_tokens_kernel(
    scores_ptr, tokens_ptr, logits_ptr,
    temperatures_ptr, noise_seeds_ptr, min_ps_ptr, maxima_ptr,
    vocab_size, num_splits, chunks_per_split,
    stride_row, stride_token,
    MAX_SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find the best score in a part of a row, and its token. Grid (num_rows, num_splits).

    Without temperatures the scores are the logits. maxima_ptr: (num_rows, num_splits), the largest
    logit of each part. It is read only with min_ps.
    """
    await_launches_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    temperature = None
    seed = None
    floor = None
    if temperatures_ptr is not None:
        temperature = tl.load(temperatures_ptr + row)
        seed = tl.load(noise_seeds_ptr + row)
    if min_ps_ptr is not None:
        largest = _largest_of(row, maxima_ptr, num_splits, MAX_SPLITS)
        floor = _least_kept(largest, tl.load(min_ps_ptr + row), temperature)
    first = split * chunks_per_split
    last = tl.minimum(first + chunks_per_split, tl.cdiv(vocab_size, 4 * NOISE_SPAN))
    score, token = _best_of_chunks(
        first, last, logits_ptr + row * stride_row, seed, vocab_size, stride_token, temperature,
        floor, None, None,
    )  # fmt: skip
    part = row * num_splits + split
    tl.store(scores_ptr + part, score)
    tl.store(tokens_ptr + part, token)


@triton.jit
def _kth_largest(row_ptr, k, vocab_size, stride_token, floor, LANES: tl.constexpr):
    """Find the k-th largest logit of a row, and how many of the top k tokens have this logit.

    Returns (ordered bits, number): the top k are all tokens above these bits and `number` tokens
    with exactly these bits. The radix search finds one base-8 digit per pass. A lane packs its
    eight counts into the bytes of an int64, so a row has at most 255 * LANES tokens.
    """
    lanes = tl.arange(0, LANES)
    found = (k * 0).to(tl.uint32)
    missing = k  # of the first k, those whose bits begin like `found`
    size = k * 0
    shift = 33
    searching = k > 0
    while searching:
        shift -= 3
        packed = tl.zeros([LANES], tl.int64)
        for start in range(0, vocab_size, LANES):
            tokens = start + lanes
            logits = _load_logits(row_ptr, tokens, vocab_size, stride_token, floor)
            bits = _ordered_bits(logits) >> shift
            counted = (bits >> 3 == found) & (tokens < vocab_size)
            one = tl.where(counted, 1, 0).to(tl.int64)
            packed += one << ((bits & 7) * 8).to(tl.int64)
        above, digit, skipped = k * 0, k * 0, k * 0
        for d in tl.static_range(7, -1, -1):
            count = tl.sum((packed >> (8 * d)).to(tl.int32) & 255, axis=0)
            here = (above < missing) & (above + count >= missing)
            digit = tl.where(here, d, digit)
            skipped = tl.where(here, above, skipped)
            size = tl.where(here, count, size)
            above += count
        missing -= skipped
        found = found * 8 + digit.to(tl.uint32)
        searching = (shift > 0) & (size > missing)
    bits = found << shift
    if size == missing:  # all tokens whose bits begin like these
        bits = tl.maximum(bits, 1) - 1
        missing = k * 0
    return bits, missing


@triton.jit(do_not_specialize=["num_splits"])
def _restrict_samples_kernel(
    tokens_ptr, logits_ptr,
    temperatures_ptr, noise_seeds_ptr, min_ps_ptr, top_ks_ptr, top_ps_ptr, maxima_ptr,
    vocab_size, num_splits,
    stride_row, stride_token,
    MAX_SPLITS: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Replace a row's token by the best-scoring token that top-k and top-p keep.

    Grid (num_rows). maxima_ptr: as in _sample_tokens_kernel, or None without min_ps and top_ps.
    """
    await_launches_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_row
    token = tl.load(tokens_ptr + row).to(tl.int32)
    temperature = tl.load(temperatures_ptr + row)
    seed = tl.load(noise_seeds_ptr + row)
    deciding = (token >= 0) & (temperature > 0)
    floor = None
    if maxima_ptr is not None:
        largest = _largest_of(row, maxima_ptr, num_splits, MAX_SPLITS)
    if min_ps_ptr is not None:
        floor = _least_kept(largest, tl.load(min_ps_ptr + row), temperature)
    top_k = vocab_size
    if top_ks_ptr is not None:
        top_k = tl.minimum(tl.load(top_ks_ptr + row), vocab_size).to(tl.int32)
    if top_ps_ptr is not None:
        top_p = tl.load(top_ps_ptr + row)
        above = (token * 0).to(tl.uint32)
        weight_at = (token * 0).to(tl.int64)
        if top_ks_ptr is not None and deciding & (top_k < vocab_size) & (top_p < 1):
            above, number = _kth_largest(row_ptr, top_k, vocab_size, stride_token, floor, LANES)
            if number > 0:
                weight_at = _weights(_from_ordered_bits(above), largest, temperature) * number
    while deciding:
        pivot = tl.load(row_ptr + token.to(tl.int64) * stride_token).to(tl.float32)
        before = tl.zeros([LANES], tl.int32)
        weight_before = tl.zeros([LANES], tl.int64)
        weight = tl.zeros([LANES], tl.int64)
        for start in range(0, vocab_size, LANES):
            tokens = start + tl.arange(0, LANES)
            logits = _load_logits(row_ptr, tokens, vocab_size, stride_token, floor)
            comes_before = _comes_before(logits, tokens, pivot, token)
            before += comes_before.to(tl.int32)
            if top_ps_ptr is not None:
                weights = _weights(logits, largest, temperature)
                weight_before += tl.where(comes_before, weights, 0)
                weight += tl.where(_ordered_bits(logits) > above, weights, 0)
        rank = tl.sum(before, axis=0)
        kept = rank < top_k
        if top_ps_ptr is not None:
            sought = (tl.sum(weight, axis=0) + weight_at).to(tl.float64) * top_p.to(tl.float64)
            kept &= (top_p >= 1) | (tl.sum(weight_before, axis=0).to(tl.float64) < sought)
        deciding = (rank > 0) & (kept == 0)
        if deciding:
            last = tl.cdiv(vocab_size, 4 * NOISE_SPAN)
            _, token = _best_of_chunks(
                0, last, row_ptr, seed, vocab_size, stride_token, temperature, floor, pivot, token
            )
    tl.store(tokens_ptr + row, token.to(tl.int64))


@triton.jit(do_not_specialize=["num_splits"])
def _merge_samples_kernel(
    out_ptr,
    scores_ptr,
    tokens_ptr,
    num_splits,
    vocab_size,
    MAX_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Return a row's lowest token with the best score, or -1 if this score is not finite."""
    await_launches_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, MAX_SPLITS)
    mask = parts < num_splits
    scores = tl.load(scores_ptr + row * num_splits + parts, mask=mask, other=float("-inf"))
    tokens = tl.load(tokens_ptr + row * num_splits + parts, mask=mask, other=vocab_size)
    score = tl.max(scores, axis=0)
    token = tl.min(tl.where(scores == score, tokens, vocab_size), axis=0)
    sound = (score > float("-inf")) & (score < float("inf"))
    tl.store(out_ptr + row, tl.where(sound, token, -1).to(tl.int64))


@functional_op(fake=lambda logits, *_, **__: logits.new_empty(len(logits), dtype=torch.int64))
def sample_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    noise_seeds: torch.Tensor | None = None,
    *,
    min_ps: torch.Tensor | None = None,
    top_ks: torch.Tensor | None = None,
    top_ps: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample a token from each row of logits, or take the likeliest token.

    A row's token depends on the row's logits and parameters alone. Among equal scores the lowest
    token wins. Tokens with a logit of -inf are never sampled. Min-p is applied first, then top-k,
    then top-p.

    Args:
        logits: (num_rows, vocab_size), fp16, bf16 or fp32, any strides.
        temperatures: (num_rows,) fp32, from 0 (likeliest token) to 1e29. None: 0 for all rows; then
            no noise is generated.
        noise_seeds: (num_rows,) int64, required with temperatures. Rows with equal seeds get equal
            noise. Unused at temperature 0.
        min_ps: (num_rows,) fp32, from 0 to 1, only with temperatures. A token is excluded if its
            probability at the temperature is below min_p * the largest probability (Nguyen et al.,
            2024). This adds a second, faster pass over the logits. None: 0 for all rows.
        top_ks: (num_rows,) int64, from 1, only with temperatures. The top_k largest logits are kept
            (Fan et al., 2018). Ties go to the lower token id. None: keep all.
        top_ps: (num_rows,) fp32, from 0 to 1, only with temperatures. A token is kept if the tokens
            before it (larger logit, or equal logit and lower id) have a total probability below
            top_p (Holtzman et al., 2020). The first token is always kept. At 1 all are. None: 1 for
            all rows.

    Returns:
        (num_rows,) int64 tokens. -1 if a row has a NaN or its largest logit is infinite.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; temperatures or noise_seeds is
            given without the other; min_ps, top_ks or top_ps without these two; top_ks and top_ps
            both with over 1,044,480 logits per row; a parameter in host memory is out of range.
    """
    _TENSORS(logits, temperatures, noise_seeds, min_ps, top_ks, top_ps)
    num_rows, vocab_size = logits.shape
    device = logits.device
    if (temperatures is None) != (noise_seeds is None):
        raise ValueError("noise_seeds: expected temperatures and noise_seeds together")
    for name, values in (("min_ps", min_ps), ("top_ks", top_ks), ("top_ps", top_ps)):
        if values is not None and temperatures is None:
            raise ValueError(f"{name}: expected with temperatures; without them nothing is sampled")
    tile = RESTRICT_TILE
    limit = 255 * tile.elements
    if top_ks is not None and top_ps is not None and vocab_size > limit:
        raise ValueError(
            f"logits: expected a vocab_size up to {limit} with top_ks and top_ps, got {vocab_size}"
        )
    check_values("temperatures", temperatures, 0, MAX_TEMPERATURE)
    check_values("min_ps", min_ps, 0, 1)
    check_values("top_ks", top_ks, 1)
    check_values("top_ps", top_ps, 0, 1)

    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return out
    num_chunks = cdiv(vocab_size, 4 * NOISE_SPAN.value)
    chunks_per_split = cdiv(num_chunks, sample_num_splits(num_rows, num_chunks, target_of(device)))
    num_splits = cdiv(num_chunks, chunks_per_split)

    def best_of_parts(*parameters: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.empty(num_rows, num_splits, dtype=torch.float32, device=device)
        tokens = torch.empty(num_rows, num_splits, dtype=torch.int32, device=device)
        launch(_sample_tokens_kernel, (num_rows, num_splits),
            scores, tokens, logits, *parameters,
            vocab_size, num_splits, chunks_per_split,
            *logits.stride(),
            MAX_SPLITS=MAX_SPLITS, enable_fp_fusion=False, **pdl_options(device),
        )  # fmt: skip
        return scores, tokens

    maxima = None
    if min_ps is not None or top_ps is not None:
        maxima, _ = best_of_parts(None, None, None, None)
    scores, tokens = best_of_parts(temperatures, noise_seeds, min_ps, maxima)
    launch(_merge_samples_kernel, (num_rows,),
        out, scores, tokens, num_splits, vocab_size,
        MAX_SPLITS=MAX_SPLITS, num_warps=1, **pdl_options(device),
    )  # fmt: skip
    if top_ks is not None or top_ps is not None:
        launch(_restrict_samples_kernel, (num_rows,),
            out, logits, temperatures, noise_seeds, min_ps, top_ks, top_ps, maxima,
            vocab_size, num_splits,
            *logits.stride(),
            MAX_SPLITS=MAX_SPLITS, LANES=tile.elements, enable_fp_fusion=False,
            num_warps=tile.num_warps, **pdl_options(device),
        )  # fmt: skip
    return out
