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

Top-k and top-p keep the first tokens in descending order of logits: a token is kept if the tokens
before it number fewer than top_k, and have a probability below top_p. So each excludes all tokens
after a limit. No sort is needed: a radix search finds the limit by one hexadecimal digit of the
logits per launch. A launch's programs sum the sizes of their parts' tokens (1, or the probability)
by the next digit, and the next launch's programs all derive the limit's digit from these sums. The
limit of top-k is found first, and the token is sampled within it. This token is right unless top-p
excludes it. If so, the limit of top-p lies before this token, and after a search among the tokens
before it the best score within the limit wins. Noise does not change, so the result equals sampling
from masked logits. (FlashInfer rejects tokens too, but draws new noise.) The number of launches
does not depend on the logits, and rows that need no search leave the later launches at once.

Logarithms and exponentials are polynomials, products are not fused with sums, and probabilities are
added as integers. Results are then equal in any order and on every machine, so the kernel, Triton's
interpreter and the reference agree on every token.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.checks import FLOAT_DTYPES, FP32, INT64, Arg, TensorSpec, bounded, check_values
from kernels.launch import launch, op
from kernels.primitives import LN_2, LOG2_E, await_launches_before
from kernels.tiles import MAX_SPLITS, RESTRICT_TILE, cdiv, pdl_options, sample_num_splits, target_of

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
BINS = tl.constexpr(16)
_DIGITS = {torch.bfloat16: 4, torch.float16: 5, torch.float32: 8}
"""Hexadecimal digits that tell logits of a dtype apart, the first digits of their fp32 numbers."""
_TENSORS = TensorSpec(
    Arg("logits", "num_rows vocab_size", FLOAT_DTYPES, any_strides=True),
    Arg("temperatures", "num_rows", FP32, optional=True),
    Arg("noise_seeds", "num_rows", INT64, optional=True),
    Arg("min_ps", "num_rows", FP32, optional=True),
    Arg("top_ks", "num_rows", INT64, optional=True),
    Arg("top_ps", "num_rows", FP32, optional=True),
    rules=(bounded("logits", "vocab_size", 1, 2**22),),
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
def _is_kept(keys, tokens, limit):
    """Whether tokens come before limit, a (key, token) pair, or are the limit."""
    return (keys > limit[0]) | ((keys == limit[0]) & (tokens <= limit[1]))


@triton.jit
def _best_of_chunks(
    first, last, row_ptr, seed, vocab_size, stride_token, temperature, floor, largest, limit, shift
):  # fmt: skip
    """Return a row's best score in chunks [first, last), its lowest token, and the kept weight.

    seed: or None. floor: smaller logits are excluded (None: no limit). largest: the row's largest
    logit, or None if no weight is needed. limit: the last kept (key, token), or None; a key is the
    first bits of a logit, _ordered_bits >> shift.
    """
    lanes = tl.arange(0, NOISE_SPAN)
    best = tl.full([NOISE_SPAN], float("-inf"), tl.float32)
    best_tokens = tl.zeros([NOISE_SPAN], tl.int32)
    kept_weight = tl.zeros([NOISE_SPAN], tl.int64)
    for chunk in range(first, last):
        scores = ()
        for i in tl.static_range(4):
            tokens = lanes + (chunk * 4 + i) * NOISE_SPAN
            logits = _load_logits(row_ptr, tokens, vocab_size, stride_token, floor)
            score = tl.where(logits == logits, logits, float("inf"))  # a NaN must not be ignored
            if limit is not None:
                kept = _is_kept(_ordered_bits(score) >> shift, tokens, limit)
                score = tl.where(kept, score, float("-inf"))
            scores += (score,)
        has_candidate = True
        if floor is not None or limit is not None:  # often none is left
            best_of_lanes = tl.maximum(
                tl.maximum(scores[0], scores[1]), tl.maximum(scores[2], scores[3])
            )
            has_candidate = tl.max(best_of_lanes, axis=0) > float("-inf")
        if has_candidate:
            if seed is not None:
                words = _philox(seed, (lanes + chunk * NOISE_SPAN).to(tl.uint32))
            for i in tl.static_range(4):
                score = scores[i]
                if largest is not None:
                    kept_weight += _weights(score, largest, temperature)
                if seed is not None:
                    score += temperature * _gumbel(words[i])
                better = score > best  # tokens ascend, so the lowest token of equal scores stays
                best = tl.where(better, score, best)
                best_tokens = tl.where(better, lanes + (chunk * 4 + i) * NOISE_SPAN, best_tokens)
    score = tl.max(best, axis=0)
    token = tl.min(tl.where(best == score, best_tokens, vocab_size), axis=0)
    return score, token, tl.sum(kept_weight, axis=0)


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


@triton.jit
def _narrowed(sums_ptr, state_ptr, row, split, num_splits, MAX_SPLITS: tl.constexpr):
    """Find the next digit of a row's limit from the sums of a launch of _search_limits_kernel.

    A token is kept if the tokens before it have a total size below a bound. Returns (key, before,
    bound, ties_before, ties). key: the digits found; `before` is the size of the tokens with larger
    keys. bound: negative if the row has no limit. Tokens that begin with key have size `ties` in
    part `split`; ties_before adds those of earlier parts to `before`.
    """
    key = tl.load(state_ptr + 3 * row)
    before = tl.load(state_ptr + 3 * row + 1)
    bound = tl.load(state_ptr + 3 * row + 2).to(tl.float64, bitcast=True)
    ties_before = before
    ties = before * 0
    if bound > 0:
        parts = tl.arange(0, MAX_SPLITS)
        bins = tl.arange(0, BINS)
        offsets = (row * num_splits + parts)[:, None] * BINS + bins[None, :]
        sums = tl.load(sums_ptr + offsets, mask=(parts < num_splits)[:, None], other=0)
        sizes = tl.sum(sums, axis=0)
        starts = before + tl.cumsum(sizes, axis=0) - sizes
        found = tl.max(tl.where((sizes > 0) & (starts.to(tl.float64) < bound), bins, 0), axis=0)
        size = tl.sum(sizes, axis=0)
        # The token after all counted tokens is kept: only in top-p, the sampled token.
        bound = tl.where((before + size).to(tl.float64) < bound, -1.0, bound)
        key = key * BINS + BINS - 1 - found
        before = tl.sum(tl.where(bins == found, starts, 0), axis=0)
        tied = tl.sum(tl.where((bins == found)[None, :], sums, 0), axis=1)
        ties_before = before + tl.sum(tl.where(parts < split, tied, 0), axis=0)
        ties = tl.sum(tl.where(parts == split, tied, 0), axis=0)
    return key, before, bound, ties_before, ties


@triton.jit(do_not_specialize=["num_splits", "chunks_per_split"])
def _sample_tokens_kernel(
    scores_ptr, tokens_ptr, weights_ptr, logits_ptr,
    temperatures_ptr, noise_seeds_ptr, min_ps_ptr, maxima_ptr, sums_ptr, state_ptr,
    vocab_size, num_splits, chunks_per_split,
    stride_row, stride_token,
    SHIFT: tl.constexpr, BY_WEIGHT: tl.constexpr, MAX_SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find the best score in a part of a row, and its token. Grid (num_rows, num_splits).

    Without temperatures the scores are the logits. weights_ptr: (num_rows, num_splits), for the
    weight of each part's kept tokens, or None. maxima_ptr: (num_rows, num_splits), the largest
    logit of each part. It is read only with min_ps, weights or BY_WEIGHT. sums_ptr and state_ptr:
    from the last launch of _search_limits_kernel, or None. BY_WEIGHT: this searched the limit of
    top-p; rows without this limit are skipped.
    """
    await_launches_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    temperature = None
    seed = None
    largest = None
    floor = None
    limit = None
    row_ptr = logits_ptr + row * stride_row
    first = split * chunks_per_split
    last = tl.minimum(first + chunks_per_split, tl.cdiv(vocab_size, 4 * NOISE_SPAN))
    if temperatures_ptr is not None:
        temperature = tl.load(temperatures_ptr + row)
        seed = tl.load(noise_seeds_ptr + row)
    if maxima_ptr is not None:
        largest = _largest_of(row, maxima_ptr, num_splits, MAX_SPLITS)
    if min_ps_ptr is not None:
        floor = _least_kept(largest, tl.load(min_ps_ptr + row), temperature)
    if state_ptr is not None:
        key, _, bound, before, ties = _narrowed(
            sums_ptr, state_ptr, row, split, num_splits, MAX_SPLITS
        )
        if BY_WEIGHT and bound < 0:
            return
        all_ties = (bound < 0) | ((before + ties).to(tl.float64) < bound)
        last_tie = tl.where(all_ties, vocab_size, -1)  # of those that are kept
        if (all_ties == 0) & (before.to(tl.float64) < bound):
            lanes = tl.arange(0, NOISE_SPAN)
            for span in range(4 * first, 4 * last):
                tokens = span * NOISE_SPAN + lanes
                logits = _load_logits(row_ptr, tokens, vocab_size, stride_token, None)
                tied = (_ordered_bits(logits) >> SHIFT == key) & (tokens < vocab_size)
                sizes = tied.to(tl.int64)
                if BY_WEIGHT:
                    sizes *= _weights(logits, largest, temperature)
                before_each = before + tl.cumsum(sizes, axis=0) - sizes
                kept = tied & (before_each.to(tl.float64) < bound)
                last_tie = tl.maximum(last_tie, tl.max(tl.where(kept, tokens, -1), axis=0))
                before += tl.sum(sizes, axis=0)
        limit = (key.to(tl.uint32), last_tie)
    score, token, weight = _best_of_chunks(
        first, last, row_ptr, seed, vocab_size, stride_token, temperature, floor,
        None if weights_ptr is None else largest, limit, SHIFT,
    )  # fmt: skip
    part = row * num_splits + split
    tl.store(scores_ptr + part, score)
    tl.store(tokens_ptr + part, token)
    if weights_ptr is not None:
        tl.store(weights_ptr + part, weight)


@triton.jit(do_not_specialize=["num_splits", "chunks_per_split", "shift"])
def _search_limits_kernel(
    sums_ptr, state_ptr, last_sums_ptr, last_state_ptr, logits_ptr, temperatures_ptr,
    top_ks_ptr, top_ps_ptr, tokens_ptr, maxima_ptr, weights_ptr,
    vocab_size, num_splits, chunks_per_split, shift,
    stride_row, stride_token,
    MAX_SPLITS: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum the sizes of a part's tokens by the next digit of their keys, from 15 down to 0.

    Grid (num_rows, num_splits). sums_ptr: (num_rows, num_splits, BINS). state_ptr: (num_rows, 3),
    the search before this digit: key, before and bound of _narrowed. last_*: from the launch for
    the digit before, or None. With top_ks every token has size 1. With top_ps sizes are weights,
    and only tokens before the row's sampled token count; if this token is kept there is no limit.
    """
    await_launches_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row_ptr = logits_ptr + row * stride_row
    temperature = tl.load(temperatures_ptr + row)
    if top_ps_ptr is not None:
        token = tl.load(tokens_ptr + row)
    if last_state_ptr is not None:
        key, before, bound, _, _ = _narrowed(
            last_sums_ptr, last_state_ptr, row, split, num_splits, MAX_SPLITS
        )
    else:
        key = row * 0
        before = row * 0
        if top_ks_ptr is not None:
            top_k = tl.load(top_ks_ptr + row)
            bound = top_k.to(tl.float64)
            limited = top_k < vocab_size
        else:
            top_p = tl.load(top_ps_ptr + row)
            parts = tl.arange(0, MAX_SPLITS)
            weights_ptrs = weights_ptr + row * num_splits + parts
            weight = tl.sum(tl.load(weights_ptrs, mask=parts < num_splits, other=0), axis=0)
            bound = tl.maximum(weight.to(tl.float64) * top_p.to(tl.float64), 1.0)
            limited = (token >= 0) & (top_p < 1)
        bound = tl.where(limited & (temperature > 0), bound, -1.0)
    if split == 0:
        tl.store(state_ptr + 3 * row, key)
        tl.store(state_ptr + 3 * row + 1, before)
        tl.store(state_ptr + 3 * row + 2, bound.to(tl.int64, bitcast=True))
    if bound < 0:
        return
    if top_ps_ptr is not None:
        pivot = tl.load(row_ptr + token * stride_token).to(tl.float32)
        largest = _largest_of(row, maxima_ptr, num_splits, MAX_SPLITS)
    bins = tl.arange(0, BINS)
    four = tl.arange(0, 4)
    sums = tl.zeros([4, 4], tl.int64)  # of bins [4, 4]
    first = split * chunks_per_split * 4 * NOISE_SPAN
    last = tl.minimum(first + chunks_per_split * 4 * NOISE_SPAN, vocab_size)
    for start in range(first, last, LANES):
        tokens = start + tl.arange(0, LANES)
        logits = _load_logits(row_ptr, tokens, vocab_size, stride_token, None)
        keys = _ordered_bits(logits) >> shift
        counted = (keys // BINS == key) & (tokens < vocab_size)
        if top_ps_ptr is not None:
            counted &= _comes_before(logits, tokens, pivot, token)
        digits = (keys % BINS ^ (BINS - 1)).to(tl.int32)
        if top_ps_ptr is not None:
            lowest = tl.min(tl.where(counted, digits, BINS), axis=0)
            highest = tl.max(tl.where(counted, digits, -1), axis=0)
            if lowest <= highest:
                weights = tl.where(counted, _weights(logits, largest, temperature), 0)
                for quarter in range(lowest // 4, highest // 4 + 1):
                    here = digits[None, :] == quarter * 4 + four[:, None]
                    added = tl.sum(tl.where(here, weights[None, :], 0), axis=1)
                    sums += tl.where(four[:, None] == quarter, added[None, :], 0)
        else:  # a thread counts its eight tokens in the sixteen half-bytes of an int64
            packed = counted.to(tl.int64) << (4 * digits).to(tl.int64)
            packed = tl.sum(tl.reshape(packed, [LANES // 8, 8]), axis=1)
            counts = (packed[:, None] >> (4 * bins).to(tl.int64)[None, :]).to(tl.int32) & 15
            sums += tl.reshape(tl.sum(counts, axis=0), [4, 4])
    bins = tl.reshape(bins, [4, 4])
    tl.store(sums_ptr + (row * num_splits + split) * BINS + bins, sums)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_samples_kernel(
    out_ptr,
    scores_ptr,
    tokens_ptr,
    state_ptr,
    num_splits,
    vocab_size,
    MAX_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Return a row's lowest token with the best score, or -1 if this score is not finite.

    state_ptr: of a search; rows without a limit keep their token. None: there was no search.
    """
    await_launches_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    if state_ptr is not None:
        bound = tl.load(state_ptr + 3 * row + 2)
        if bound < 0:  # the sign of a float is the sign of its bits
            return
    parts = tl.arange(0, MAX_SPLITS)
    mask = parts < num_splits
    scores = tl.load(scores_ptr + row * num_splits + parts, mask=mask, other=float("-inf"))
    tokens = tl.load(tokens_ptr + row * num_splits + parts, mask=mask, other=vocab_size)
    score = tl.max(scores, axis=0)
    token = tl.min(tl.where(scores == score, tokens, vocab_size), axis=0)
    sound = (score > float("-inf")) & (score < float("inf"))
    tl.store(out_ptr + row, tl.where(sound, token, -1).to(tl.int64))


@op
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
        logits: (num_rows, vocab_size), fp16, bf16 or fp32, any strides. vocab_size is at most
            2^22, so that 64 bits hold the sum of the weights.
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
            given without the other; min_ps, top_ks or top_ps without these two; a parameter in host
            memory is out of range.
    """
    _TENSORS(logits, temperatures, noise_seeds, min_ps, top_ks, top_ps)
    num_rows, vocab_size = logits.shape
    device = logits.device
    if (temperatures is None) != (noise_seeds is None):
        raise ValueError("noise_seeds: expected temperatures and noise_seeds together")
    for name, values in (("min_ps", min_ps), ("top_ks", top_ks), ("top_ps", top_ps)):
        if values is not None and temperatures is None:
            raise ValueError(f"{name}: expected with temperatures; without them nothing is sampled")
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
    sizes = (vocab_size, num_splits, chunks_per_split)
    options = {"MAX_SPLITS": MAX_SPLITS, **pdl_options(device)}
    num_digits = _DIGITS[logits.dtype]

    def new(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=device)

    def search(*parameters: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        now, other = [(new(num_splits, BINS.value), new(3)) for _ in range(2)]
        last: Sequence[torch.Tensor | None] = (None, None)
        for digit in range(num_digits):
            launch(_search_limits_kernel, (num_rows, num_splits),
                *now, *last, logits, temperatures, *parameters,
                *sizes, 28 - 4 * digit, *logits.stride(),
                LANES=RESTRICT_TILE.elements, num_warps=RESTRICT_TILE.num_warps,
                enable_fp_fusion=False, **options,
            )  # fmt: skip
            last, now, other = now, other, now
        return last

    def best_of_parts(
        weights: torch.Tensor | None, *parameters: torch.Tensor | None, by_weight: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores, tokens = new(num_splits, dtype=torch.float32), new(num_splits, dtype=torch.int32)
        launch(_sample_tokens_kernel, (num_rows, num_splits),
            scores, tokens, weights, logits, *parameters,
            *sizes, *logits.stride(),
            SHIFT=32 - 4 * num_digits, BY_WEIGHT=by_weight, enable_fp_fusion=False, **options,
        )  # fmt: skip
        return scores, tokens

    def merge(*parameters: torch.Tensor | None) -> None:
        launch(_merge_samples_kernel, (num_rows,),
            out, *parameters, num_splits, vocab_size,
            num_warps=1, **options,
        )  # fmt: skip

    maxima = weights = None
    limits: Sequence[torch.Tensor | None] = (None, None)
    if min_ps is not None or top_ps is not None:
        maxima, _ = best_of_parts(None, None, None, None, None, *limits)
    if top_ks is not None:
        limits = search(top_ks, None, None, None, None)
    if top_ps is not None:
        weights = new(num_splits)
    merge(*best_of_parts(weights, temperatures, noise_seeds, min_ps, maxima, *limits), None)
    if top_ps is not None:
        limits = search(None, top_ps, out, maxima, weights)
        drawn = temperatures, noise_seeds, None, maxima
        merge(*best_of_parts(None, *drawn, *limits, by_weight=True), limits[1])
    return out
