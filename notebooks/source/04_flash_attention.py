# %% [markdown]
# # 04 · FlashAttention
#
# **Why is an exact algorithm that does *more* arithmetic the faster one?**
#
# Attention over $N$ tokens fills an $N \times N$ table of scores, reads it again to normalise it, and reads it once
# more to mix the values. The arithmetic is not what hurts: FlashAttention takes the same two matrix products, and in
# training even one more. The table is what hurts: it travels to slow memory and back. FlashAttention never writes it
# down. That needs one trick with the softmax and a good deal of care, and both fit into this notebook, down to a Triton
# kernel.
#
# | paper or system | year, venue | maturity | what we take from it |
# | --- | --- | --- | --- |
# | Milakov and Gimelshein, *Online normalizer calculation for softmax* | 2018, arXiv | preprint | maximum and sum in one pass |
# | Dao et al., *FlashAttention* | 2022, NeurIPS | peer-reviewed | tiles, and a count of the words moved |
# | Dao, *FlashAttention-2* | 2024, ICLR | peer-reviewed | the other loop order, and more units of work |
# | Shah et al., *FlashAttention-3* | 2024, NeurIPS | peer-reviewed | asynchrony, and FP8 with a rotation |
# | Dao, Haziza, Massa, Sizov, *Flash-Decoding* | 2023, PyTorch blog | project blog, code | keys split among workers |
# | Ye et al., *FlashInfer* | 2025, MLSys | peer-reviewed | ragged, paged and shared-prefix attention |
# | PyTorch SDPA, FlexAttention, `torch.compile`, CUDA graphs; Triton | now | maintained code | the same ideas, ready to call |

# %% tags=["parameters"]
PROFILE = "auto"
SEED = 0
OUT = None

# %%
import helpers

run = helpers.start("04_flash_attention", PROFILE, SEED, OUT)
run

# %% [markdown]
# ## What fails without it
#
# PyTorch ships both ways behind one function. Its *math* backend writes the table of scores down; its *flash* backend
# does not. (On a GPU without FlashAttention-2 we take the memory-efficient backend in its place.) Same inputs, same
# function, two kernels: how much memory does one call need beyond its inputs?

# %%
import math

import pandas as pd
import torch
import torch.nn.functional as F
from IPython.display import Markdown
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers import corpora, kv_adapter, memory, models, plots, quality
from helpers.hardware import best_seconds, measure_roofline, package_version
from helpers.ledgers import make_card, show_bytes
from helpers.stats import paired_ratio, step_seconds

# %%
device, dtype = run.profile.device, getattr(torch, run.dtype)
can_flash = device == "cpu" or run.hardware.capabilities["flash_attention_2"].available
BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION if can_flash else SDPBackend.EFFICIENT_ATTENTION,
}


def inputs(n_q, n_k=None, n_heads=4, head_dim=64, batch=1):
    """Random q, k, v of shape ``[batch, n_heads, n, head_dim]`` in this run's dtype."""
    return [torch.randn(batch, n_heads, n, head_dim, device=device).to(dtype) for n in (n_q, n_k or n_q, n_k or n_q)]


def sdpa(kernel, q, k, v, causal=True):
    with sdpa_kernel(BACKENDS[kernel]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


# %%
lengths = [256, 512, 1024, 2048, 4096] + ([8192, 16384] if device == "cuda" else [])


def peak_row(n):
    """Bytes that one call of each kernel needs at its highest point, beyond what was there before."""
    grown, q = {}, inputs(n)
    for kernel in BACKENDS:
        sdpa(kernel, *q)
        with memory.measure_device_peak(device) as peak:
            sdpa(kernel, *q)
        grown[kernel] = peak.grown
    return {"N": n, **grown, "math / flash": grown["math"] / grown["flash"]}


peaks = pd.DataFrame([peak_row(n) for n in lengths])
peaks.assign(math=peaks["math"].map(show_bytes), flash=peaks["flash"].map(show_bytes)).round(1)

# %% [markdown]
# Read the first column of bytes downwards: twice the tokens should be four times the memory. The second should grow with
# the output alone. No other buffer in a Transformer grows with the square of the context, so long before anything is
# slow, this is what no longer fits.

# %% [markdown]
# ## Predict
#
# Write your own numbers into the next cell before you run it. The defaults are guesses, and some of them are poor.

# %% tags=["predict"]
run.predict(
    math_over_flash_peak_memory=20,  # one call of each kernel at the longest N
    math_over_flash_time=2,  # the same call, this machine
    words_moved_standard_over_flash=3,  # counted: N = 4096, head_dim 64, a fast memory of 48 Ki words
    words_saved_by_twice_the_fast_memory=1.2,  # FlashAttention's words moved over those with twice the fast memory
    work_units_flash2_over_flash1=16,  # N = 4096, blocks of 64 queries
    fp8_error_saved_by_blocks_and_rotation=2.6,  # error with one scale over error with both, mean over layers of the real model
    decode_flops_per_byte=8,  # one query a head over a context of 4096, MHA, in this run's dtype
    prefix_rows_read_without_over_with_cascade=2,  # eight sequences behind one prefix
)

# %% [markdown]
# ## The idea
#
# One query $q$ looks at keys $k_1 \dots k_N$ and values $v_1 \dots v_N$, vectors of `head_dim` $= d$ elements. With
# scores $s_j = q \cdot k_j / \sqrt d$ the output is
#
# $$ o = \frac{\sum_j e^{s_j} v_j}{\sum_j e^{s_j}} . $$
#
# Both sums can be taken piece by piece; that is all. But $e^{s}$ overflows, so every library subtracts the largest
# score first, and the largest is known only at the end. The **online softmax** keeps a running maximum $m$ instead,
# with the sum $\ell$ and the mix $a$ relative to it. A new tile of scores $s$ with values $V$ changes them to
#
# $$ m' = \max(m, \max s), \quad
# \ell' = e^{m - m'} \ell + \sum_j e^{s_j - m'}, \quad
# a' = e^{m - m'} a + \sum_j e^{s_j - m'} V_j , $$
#
# and at the end $o = a / \ell$. The factor $e^{m - m'}$ is the **rescale**: whatever was summed under the old maximum
# shrinks when a larger score turns up. The pair $(o, L)$, where $L = m + \log \ell$ is the **log-sum-exp** of the row's
# scores, says everything about the tokens seen so far. Two such pairs over disjoint tokens merge into one:
#
# $$ L = \log(e^{L_a} + e^{L_b}), \qquad o = e^{L_a - L} o_a + e^{L_b - L} o_b . $$
#
# FlashAttention (the tiles of one query block), Flash-Decoding (tokens split among workers) and FlashInfer's cascade (a
# shared prefix and a private rest) are this one identity at three sizes.

# %% [markdown]
# ## From scratch
#
# ### Maximum and sum in one pass
#
# The textbook's softmax needs three passes over the scores: a maximum, a sum, a division. Without the first it breaks:

# %%
scores = torch.tensor([1000.0, 999.0, 0.0])
pd.DataFrame({"without maximum": scores.exp() / scores.exp().sum(), "with maximum": scores.softmax(dim=0)})

# %% [markdown]
# Here are maximum and sum together, in one pass, one score at a time. (A first score of $-\infty$ breaks it; the next
# section mends that.)


# %% tags=["algorithm"]
import math

import torch


def online_normalizer(scores):
    """The largest score and the sum of ``exp(score - largest)``, in one pass over a list."""
    highest, total = -math.inf, 0.0
    for score in scores:
        new_highest = max(highest, score)
        total = total * math.exp(highest - new_highest) + math.exp(score - new_highest)
        highest = new_highest
    return highest, total


# %%
row = (30 * torch.randn(1000, dtype=torch.float64)).tolist()
highest, total = online_normalizer(row)
exact = torch.tensor(row, dtype=torch.float64).logsumexp(dim=0).item()
assert abs(highest + math.log(total) - exact) < 1e-10
print(f"log of the sum of exponentials, one pass: {highest + math.log(total):.12f}, library: {exact:.12f}")

# %% [markdown]
# ### One tile
#
# The same for a whole tile of scores, with the mix of values carried along. A row may have seen nothing yet: its
# maximum is $-\infty$, and $-\infty - (-\infty)$ is not a number. So the base that we subtract is zero for such a row,
# and every exponential comes out as zero. Weights are rounded to the values' dtype before the second product, as on
# tensor cores; sums stay in fp32.


# %% tags=["algorithm"]
def fresh(shape, head_dim, dtype, device):
    """The state of rows that have seen nothing: maximum, sum, and mix of values."""
    highest = torch.full((*shape, 1), -math.inf, dtype=dtype, device=device)
    return highest, torch.zeros_like(highest), torch.zeros(*shape, head_dim, dtype=dtype, device=device)


def absorb(state, scores, v):
    """The state after one more tile: scores ``[..., rows, columns]``, minus infinity where unseen; v ``[..., columns, d]``."""
    highest, total, mixed = state
    new_highest = torch.maximum(highest, scores.amax(dim=-1, keepdim=True))
    base = new_highest.masked_fill(new_highest == -math.inf, 0.0)
    weights, shrink = (scores - base).exp(), (highest - base).exp()
    total = total * shrink + weights.sum(dim=-1, keepdim=True)
    mixed = mixed * shrink + weights.to(v.dtype).to(scores.dtype) @ v.to(scores.dtype)
    return new_highest, total, mixed


def finish(state):
    """Output and log-sum-exp of each row; a row that saw nothing gives zeros and minus infinity."""
    highest, total, mixed = state
    return mixed / torch.where(total > 0, total, 1.0), (highest + total.log())[..., 0]


# %% [markdown]
# ### The tiled forward pass
#
# The outer loop takes blocks of queries, the inner one walks over blocks of keys. Three things are easily lost here.
# The last tile may be *ragged*. Under **GQA** several query heads share one KV head, so queries are grouped, and keys
# are never copied. And a **causal** mask needs to know where the queries stand: as in FlashAttention since version 2.1,
# they are the *last* of the $n_k$ positions. (PyTorch's `is_causal` aligns them with the *first*; for a square table
# both agree, for a decode step they do not.)


# %% tags=["algorithm"]
def flash_forward(q, k, v, causal=True, block_q=64, block_k=64):
    """Attention that never holds more than one tile of scores for each head.

    q is ``[n_q_heads, n_q, head_dim]``, k and v are ``[n_kv_heads, n_k, head_dim]``; with `causal` the queries stand at the
    last n_q of the n_k positions. Returns the output in q's shape and dtype, and the log-sum-exp ``[n_q_heads, n_q]``.
    """
    n_q_heads, n_q, head_dim = q.shape
    n_kv_heads, n_k, _ = k.shape
    work = torch.promote_types(q.dtype, torch.float32)
    grouped = q.reshape(n_kv_heads, -1, n_q, head_dim).to(work) / head_dim**0.5
    out, lse = torch.empty_like(grouped), torch.empty(grouped.shape[:-1], dtype=work, device=q.device)
    for top in range(0, n_q, block_q):
        rows = slice(top, min(top + block_q, n_q))
        places = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + n_k - n_q
        state = fresh(grouped[:, :, rows].shape[:-1], head_dim, work, q.device)
        stop = min(n_k, rows.stop + n_k - n_q) if causal else n_k  # tiles beyond the diagonal are not visited
        for left in range(0, stop, block_k):
            columns = slice(left, min(left + block_k, n_k))
            scores = grouped[:, :, rows] @ k[:, None, columns].mT.to(work)
            if causal:
                seen = torch.arange(columns.start, columns.stop, device=q.device) <= places
                scores = scores.masked_fill(~seen, -math.inf)
            state = absorb(state, scores, v[:, None, columns])
        out[:, :, rows], lse[:, :, rows] = finish(state)
    return out.reshape(q.shape).to(q.dtype), lse.reshape(n_q_heads, n_q)


def dense_attention(q, k, v, causal=True):
    """The reference: every score at once. Shapes, mask and results as in `flash_forward`."""
    n_q, n_k, q_per_kv = q.shape[1], k.shape[1], q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(q_per_kv, dim=0), v.repeat_interleave(q_per_kv, dim=0)
    scores = q @ k.mT / q.shape[2] ** 0.5
    if causal:
        unseen = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device).triu(1 + n_k - n_q)
        scores = scores.masked_fill(unseen, -math.inf)
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse[..., None]).exp().masked_fill(scores == -math.inf, 0.0)
    return weights @ v, lse


# %% [markdown]
# ### Is it exact?
#
# "Exact" is what the paper says, and "bit for bit" is what people hear. We hold three programs against the same
# attention in fp64, on inputs that were rounded to their dtype first: PyTorch's math kernel, its flash kernel, and
# ours. The lengths are odd on purpose. The last column asks for identical bits.


# %%
def error_row(name, kind, scale=1.0, n=257):
    """Largest error against fp64, and whether our bits are those of PyTorch's math kernel."""
    q, k, v = ((scale if i == 0 else 1.0) * torch.randn(4, n, 64, device=device) for i in range(3))
    q, k, v = (x.to(kind) for x in (q, k, v))
    exact = dense_attention(q.double(), k.double(), v.double())[0]
    batch = [x[None] for x in (q, k, v)]
    use = ["math", "flash"] if device == "cpu" or kind != torch.float32 else ["math"]
    results = {f"SDPA {kernel}": sdpa(kernel, *batch)[0] for kernel in use}
    results["tiled"] = flash_forward(q, k, v)[0]
    errors = {title: (got.double() - exact).abs().max().item() for title, got in results.items()}
    same = torch.equal(results["tiled"], results["SDPA math"])
    return {"inputs": name, "dtype": str(kind).removeprefix("torch."), **errors, "same bits": same}


kinds = [torch.float32, torch.float16] + [torch.bfloat16] * run.hardware.capabilities["bf16"].available
cases = [("ordinary", 1.0), ("large logits", 30.0)]
errors = pd.DataFrame([error_row(name, kind, scale) for name, scale in cases for kind in kinds])
ours_fp32, math_fp32 = errors.loc[0, "tiled"], errors.loc[0, "SDPA math"]
errors.style.format("{:.1e}", subset=list(errors.columns[2:-1]), na_rep="-").hide()

# %% [markdown]
# Compare the errors along a row. Where they are of one size, no program is *the* right one: all round. And the bits
# differ, because sums are taken in another order. So the claim is this: the same function in exact arithmetic, and in
# floating point as close to it as the standard program. "Bit for bit" is false, and a test that demands it tests the
# wrong thing.
#
# What about rows that see nothing? With more queries than keys, the first queries stand before the first key.

# %%
few = torch.randn(2, 3, 16, device=device)
out, lse = flash_forward(torch.randn(2, 5, 16, device=device), few, few)
assert not out.isnan().any() and (out[:, :2] == 0).all() and (lse[:, :2] == -math.inf).all()
pd.DataFrame({"query": range(5), "keys seen": [0, 0, 1, 2, 3], "log-sum-exp of head 0": lse[0].tolist()}).round(3)

# %% [markdown]
# Zeros and $-\infty$, not NaN: such a pair merges with any other and changes nothing. PyTorch's `softmax` over such a
# row gives NaN, and one NaN in a batch spreads (exercise 04.2).

# %% [markdown]
# ### Counting words
#
# Now to the reason for all this. The paper's machine has a slow memory that holds everything, and a fast one of $M$
# words. We build it: every read and write goes through an object that counts words, notes the most that was held in
# fast memory at once, and counts those operations that are not part of a matrix product.


# %% tags=["algorithm"]
from collections import Counter


class SlowMemory:
    """Named tensors, a count of the words that cross between slow and fast memory, and of operations by kind."""

    def __init__(self, **tensors):
        self.tensors = tensors
        self.words = 0
        self.most_held = 0
        self.operations = Counter()

    def read(self, name, rows=slice(None)):
        part = self.tensors[name][rows]
        self.words += part.numel()
        return part

    def write(self, name, rows, part):
        if name not in self.tensors:  # a result that is written in one piece
            self.tensors[name] = torch.empty_like(part)
        self.tensors[name][rows] = part
        self.words += part.numel()

    def divide(self, part, by):
        self.operations["divisions"] += part.numel()
        return part / by

    def hold(self, *tensors):
        self.most_held = max(self.most_held, sum(t.numel() for t in tensors))


# %% tags=["algorithm"]
def standard_attention(memory):
    """Three kernels; each reads its inputs once and writes its result once (counted in its favour)."""
    whole = slice(None)
    q, k = memory.read("q"), memory.read("k")
    memory.write("s", whole, q @ k.T / q.shape[1] ** 0.5)
    scores = memory.read("s")
    weights = (scores - scores.amax(dim=1, keepdim=True)).exp()
    memory.write("p", whole, memory.divide(weights, weights.sum(dim=1, keepdim=True)))
    memory.operations.update(exponentials=scores.numel())
    memory.write("o", whole, memory.read("p") @ memory.read("v"))


# %% [markdown]
# FlashAttention, the paper's Algorithm 1. Blocks of keys are in the *outer* loop, and the output of every query block
# goes out and comes back once for each of them, divided anew each time. The outer blocks have $\lceil M/4d \rceil$
# rows, so that four such blocks fit; the inner ones have $d$ rows at most.


# %% tags=["algorithm"]
def blocks(n, size):
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def flash_1(memory, n, d, fast_words):
    """Algorithm 1 of FlashAttention (2022), one head, no mask: keys outside, queries inside.

    The paper rescales both terms of a new output; one of the two factors is folded into the exponential here.
    """
    block_k = -(-fast_words // (4 * d))
    block_q = min(block_k, d)
    memory.write("o", slice(None), torch.zeros(n, d))
    memory.write("l", slice(None), torch.zeros(n, 1))
    memory.write("m", slice(None), torch.full((n, 1), -math.inf))
    for columns in blocks(n, block_k):
        k, v = memory.read("k", columns), memory.read("v", columns)
        for rows in blocks(n, block_q):
            q, o, total, highest = (memory.read(name, rows) for name in "qolm")
            scores = q @ k.T / d**0.5
            memory.hold(k, v, q, o, scores)
            new_highest = torch.maximum(highest, scores.amax(dim=1, keepdim=True))
            weights, shrink = (scores - new_highest).exp(), (highest - new_highest).exp()
            new_total = total * shrink + weights.sum(dim=1, keepdim=True)
            memory.write("o", rows, memory.divide(total * shrink * o + weights @ v, new_total))
            memory.write("l", rows, new_total)
            memory.write("m", rows, new_highest)
            memory.operations.update(exponentials=scores.numel(), rescales=o.numel())


# %% [markdown]
# FlashAttention-2 turns the loops round. A block of queries stays in fast memory until it is done; its output is
# written once, and divided once. No two blocks of queries need anything from each other: each is a unit of work of its
# own.


# %% tags=["algorithm"]
def flash_2(memory, n, d, fast_words):
    """FlashAttention-2's forward pass (2023), one head, no mask: queries outside, keys inside."""
    block_q = -(-fast_words // (4 * d))
    block_k = min(block_q, d)
    memory.tensors.update(o=torch.empty(n, d), lse=torch.empty(n))
    for rows in blocks(n, block_q):
        q = memory.read("q", rows)
        state = fresh(q.shape[:1], d, q.dtype, q.device)
        for columns in blocks(n, block_k):
            k, v = memory.read("k", columns), memory.read("v", columns)
            scores = q @ k.T / d**0.5
            memory.hold(k, v, q, state[2], scores)
            state = absorb(state, scores, v)
            memory.operations.update(exponentials=scores.numel(), rescales=q.numel())
        highest, total, mixed = state
        memory.write("o", rows, memory.divide(mixed, total))
        memory.write("lse", rows, (highest + total.log())[:, 0])


# %% [markdown]
# The same counts follow from the loop bounds alone. We write them down too, since they reach sizes that no loop in
# Python should run, and check them against the instrumented runs word for word.


# %% tags=["algorithm"]
def words_moved(algorithm, n, d, fast_words):
    """Words that cross between slow and fast memory, from the loop bounds."""
    if algorithm == "standard":
        return 4 * n * d + 4 * n * n
    passes = math.ceil(n / math.ceil(fast_words / (4 * d)))
    if algorithm == "flash_1":  # o, l, m once at the start; k, v once; q, o, o and l, m twice in each pass
        return (n * d + 2 * n) + 2 * n * d + passes * (3 * n * d + 4 * n)
    return 2 * n * d + n + passes * 2 * n * d  # q and o and the log-sum-exp once; k and v in each pass


# %%
NAMES = {"standard": "standard", "flash_1": "FlashAttention", "flash_2": "FlashAttention-2"}
ALGORITHMS = {
    "standard": lambda m, n, d, fast: standard_attention(m),
    "flash_1": flash_1,
    "flash_2": flash_2,
}


def counted(algorithm, n, d, fast_words):
    """Run on an instrumented memory; check the result and the count; return a row."""
    memory_ = SlowMemory(**{name: torch.randn(n, d, dtype=torch.float64) for name in "qkv"})
    ALGORITHMS[algorithm](memory_, n, d, fast_words)
    exact = dense_attention(*(memory_.tensors[name][None] for name in "qkv"), causal=False)[0][0]
    assert (memory_.tensors["o"] - exact).abs().max() < 1e-5
    assert memory_.words == words_moved(algorithm, n, d, fast_words)
    held = memory_.most_held / fast_words if memory_.most_held else float("nan")  # the standard program knows no M
    return {"algorithm": algorithm, "N": n, "d": d, "M": fast_words, "words": memory_.words, "held / M": held}


sizes = [(97, 16, 512), (200, 16, 4096), (256, 32, 4096), (300, 64, 8192)]
instrumented = pd.DataFrame([counted(name, *size) for size in sizes for name in ALGORITHMS])
instrumented.replace(NAMES).round(2)

# %% [markdown]
# Every row has passed two checks: the output is attention, and the count is the formula's. `held / M` says how far the
# paper's block sizes really fit: they leave the tile of scores out of the sum, so up to a quarter more than $M$ is held.
# For the theorem that is a constant factor; for a kernel it is a crash, which is why kernels choose blocks by hand. Where a
# fast memory is as small as $2 d^2$, tiles may move *more* words than the table: the saving begins beyond about $3 d^2$.
#
# Now the large sizes, from the formula.

# %%
base = {"n": 4096, "d": 64, "fast_words": 48 * 1024}
by_length = pd.DataFrame(
    [
        {"N": n, "algorithm": NAMES[name], "million words": words_moved(name, **{**base, "n": n}) / 1e6}
        for name in ALGORITHMS
        for n in lengths
    ]
)
standard_over_flash = words_moved("standard", **base) / words_moved("flash_1", **base)
run.measured("words_moved_standard_over_flash", standard_over_flash)
doubled = words_moved("flash_1", **{**base, "fast_words": 96 * 1024})
run.measured("words_saved_by_twice_the_fast_memory", words_moved("flash_1", **base) / doubled)
figure = plots.lines(
    by_length,
    x="N",
    y="million words",
    hue="algorithm",
    log_x=True,
    log_y=True,
    title="Words moved for one head of 64 (counted), M = 48 Ki words",
    xlabel="tokens N",
    ylabel="million words",
)
run.figure(figure, "words_by_length", by_length)

# %% [markdown]
# The lines become parallel: FlashAttention is quadratic in $N$ too. (FlashAttention-2's line uses the first paper's block
# sizes, turned round; its own paper counts no words.) What differs is the constant, and FlashAttention's theorem says
# which: $\Theta(N^2 d^2 / M)$ against $\Theta(N d + N^2)$. Its exponents can be measured. We double or halve one of $N$,
# $d$, $M$ at a time and take the log-log slope of each step. Lower-order terms bend the slope and fade out step by step.
# So the exponent is the slope of the last step, and its interval is as wide as the last three slopes differ. (Counts have
# no noise, so this is no confidence interval: it says how far the slope still moves.)


# %%
def exponent(algorithm, what, values, base):
    """The last log-log slope along `values`, and the spread of the last three."""
    words = [words_moved(algorithm, **{**base, what: value}) for value in values]
    slopes = [
        math.log(b / a) / math.log(y / x) for a, b, x, y in zip(words, words[1:], values, values[1:], strict=False)
    ]
    return slopes[-1], max(slopes[-3:]) - min(slopes[-3:])


# %%
large = {"n": 2**17, "d": 64, "fast_words": 2**15}
along = {
    "n": [2**i for i in range(13, 20)],
    "d": [2**i for i in range(5, 10)],
    "fast_words": [2**i for i in range(19, 13, -1)],
}
theory = {"flash_1": (2, 2, -1), "flash_2": (2, 2, -1), "standard": (2, None, 0)}  # Nd + N^2 is no power of d
fits = pd.DataFrame(
    [
        {
            "algorithm": name,
            "exponent of": what,
            "expected": expected,
            **dict(zip(("exponent", "+-"), exponent(name, what, values, large), strict=True)),
        }
        for name, row in theory.items()
        for (what, values), expected in zip(along.items(), row, strict=True)
        if expected is not None
    ]
)
fits["within"] = (fits["exponent"] - fits["expected"]).abs() <= fits["+-"] + 1e-9
fits.replace({"n": "N", "fast_words": "M", **NAMES}).round(4)

# %% [markdown]
# An interval is worth something where it is narrow and holds the expected exponent; the claims below ask for both. So the
# words fall with the *size of the fast memory* and grow with the *square of the head's width*. The latter is
# where it loses: when $d^2$ is no longer small against $M$, the passes over the matrices cost more than the table of
# scores would.

# %%
by_width = pd.DataFrame(
    [
        {
            "d": d,
            "M (words)": fast,
            "flash / standard": words_moved("flash_1", 4096, d, fast) / words_moved("standard", 4096, d, fast),
        }
        for d in (32, 64, 128, 256, 512)
        for fast in (4096, 16384, 65536)
    ]
)
by_width.pivot(index="d", columns="M (words)", values="flash / standard").round(3)

# %% [markdown]
# Below one, FlashAttention moves fewer words. The bottom left corner is a wide head on a processor with little fast
# memory: there the table of scores is the cheaper thing to move.

# %% [markdown]
# ### FlashAttention-2: fewer non-matmul operations, more units of work
#
# An A100 multiplies matrices sixteen times faster than it does other arithmetic in FP32 (312 against 19.5 TFLOP/s), and
# an exponential is slower still. So a division is not just "one operation". We count both loop orders at one size, and
# beside them the units that can run at the same time. At this size both have blocks of 32 keys, so only the order of the
# loops differs. (With a larger fast memory the block rule above would give the second order smaller blocks of keys than
# the first, and so more rescales.)

# %%
n, d, fast = 512, 32, 4096
assert -(-fast // (4 * d)) <= d  # equal blocks of keys
counts = {}
for name in ("standard", "flash_1", "flash_2"):
    memory_ = SlowMemory(**{key: torch.randn(n, d) for key in "qkv"})
    ALGORITHMS[name](memory_, n, d, fast)
    counts[name] = {**memory_.operations, "words": memory_.words}
operations = pd.DataFrame(counts).T.fillna(0).astype(int)
operations["divisions an output element"] = operations["divisions"] / (n * d)
operations.loc["standard", "divisions an output element"] = float("nan")
operations.rename(index=NAMES)

# %% [markdown]
# The standard program divides weights, $N^2$ of them; the flash programs divide outputs. Count the rescales and
# divisions of an output element, then look at the units:


# %% tags=["algorithm"]
def work_units(version, batch, n_q_heads, n_q, block_q=64, n_splits=1):
    """Independent units of work of one attention call: what a GPU can spread over its multiprocessors."""
    if version == "flash_1":
        return batch * n_q_heads
    return batch * n_q_heads * -(-n_q // block_q) * n_splits


# %%
units = pd.DataFrame(
    [
        {"call": call, **{version: work_units(version, 1, 32, n_q) for version in ("flash_1", "flash_2")}}
        for call, n_q in (("prefill, 512 tokens", 512), ("prefill, 4096 tokens", 4096), ("decode, any context", 1))
    ]
)
more_units = work_units("flash_2", 1, 32, 4096) / work_units("flash_1", 1, 32, 4096)
run.measured("work_units_flash2_over_flash1", more_units)
units.rename(columns=NAMES)

# %% [markdown]
# Batch 1, 32 heads, and a GPU of 108 multiprocessors (an A100): the first version leaves most of them idle however long
# the prompt is. The last row shows that the second version has the same trouble when it decodes: one query is one
# block. That is Flash-Decoding's subject.

# %% [markdown]
# ### Flash-Decoding: split the keys, merge the parts
#
# For one query there is nothing to split but the keys. Each split gives its own output and log-sum-exp; the merge
# weighs them. It is the identity from above, and it costs one extra number for each row and split.


# %% tags=["algorithm"]
def merge(outputs, lses):
    """Merge states over disjoint tokens, along the first dimension: outputs ``[parts, ..., d]``, lses ``[parts, ...]``."""
    lse = lses.logsumexp(dim=0)
    weights = (lses - lse).exp().masked_fill(lses == -math.inf, 0.0)  # parts that saw nothing; NaN stays NaN
    return (weights[..., None] * outputs).sum(dim=0), lse


def split_kv_decode(q, k, v, n_splits):
    """One query for each head, q ``[n_q_heads, 1, d]``, over keys cut into at most `n_splits` pieces. As `flash_forward`."""
    size = -(-k.shape[1] // n_splits)
    parts = [flash_forward(q, k[:, part], v[:, part], causal=False) for part in blocks(k.shape[1], size)]
    out, lse = merge(torch.stack([o.float() for o, _ in parts]), torch.stack([s for _, s in parts]))
    return out.to(q.dtype), lse


# %%
q, k, v = torch.randn(9, 1, 64), torch.randn(3, 1000, 64), torch.randn(3, 1000, 64)
exact = dense_attention(q.double(), k.double(), v.double())[0]
split_errors = {n: (split_kv_decode(q, k, v, n)[0].double() - exact).abs().max().item() for n in (1, 2, 7, 64, 1000)}


# %%
def splits_for(context, tokens_per_split=256):
    return -(-context // tokens_per_split)


decode_units = pd.DataFrame(
    [
        {
            "context": n,
            "without splits": work_units("flash_2", 1, 32, 1),
            "with splits of 256 tokens": work_units("flash_2", 1, 32, 1, n_splits=splits_for(n)),
        }
        for n in (256, 1024, 4096, 16384)
    ]
)
print("largest error by number of splits:", {n: f"{e:.0e}" for n, e in split_errors.items()})
decode_units

# %% [markdown]
# The parallelism of a decode step now grows with its context, which is when it is needed.
#
# ### FlashInfer's cascade: read a shared prefix once
#
# Eight users ask about one long document. Their keys and values begin with the same rows, and with paged memory those
# rows exist once (notebook 02). A plain kernel still *reads* them once for each user. The cascade puts all users'
# queries together for the prefix, treats each private rest by itself, and merges. We count rows.


# %% tags=["algorithm"]
def cascade_decode(memory, n_seqs):
    """One step of sequences that share a prefix; the prefix is read once.

    `memory` holds q ``[n_seqs, n_q_heads, d]``, prefix_k and prefix_v ``[n_kv_heads, n_prefix, d]``, and for each sequence i
    its own rows k0, v0, k1, v1, ... Returns ``[n_seqs, n_q_heads, d]``.
    """
    q = memory.tensors["q"]
    shared, shared_lse = flash_forward(
        q.transpose(0, 1), memory.read("prefix_k"), memory.read("prefix_v"), causal=False
    )
    outputs = []
    for i in range(n_seqs):
        own, own_lse = flash_forward(q[i][:, None], memory.read(f"k{i}"), memory.read(f"v{i}"), causal=False)
        pair = torch.stack([shared[:, i], own[:, 0]]), torch.stack([shared_lse[:, i], own_lse[:, 0]])
        outputs.append(merge(*pair)[0])
    return torch.stack(outputs)


def plain_decode(memory, n_seqs):
    """The same without sharing: every sequence reads the prefix for itself."""
    outputs = []
    for i in range(n_seqs):
        k = torch.cat([memory.read("prefix_k"), memory.read(f"k{i}")], dim=1)
        v = torch.cat([memory.read("prefix_v"), memory.read(f"v{i}")], dim=1)
        outputs.append(flash_forward(memory.tensors["q"][i][:, None], k, v, causal=False)[0][:, 0])
    return torch.stack(outputs)


# %%
n_seqs, n_prefix, rest = 8, 512, [5, 64, 17, 33, 1, 90, 48, 20]
private = {f"{name}{i}": torch.randn(3, n, 64) for i, n in enumerate(rest) for name in "kv"}
group = dict(
    q=torch.randn(n_seqs, 9, 64),
    prefix_k=torch.randn(3, n_prefix, 64),
    prefix_v=torch.randn(3, n_prefix, 64),
    **private,
)
with_cascade, without = SlowMemory(**group), SlowMemory(**group)
cascade_error = (cascade_decode(with_cascade, n_seqs) - plain_decode(without, n_seqs)).abs().max().item()
private_words = sum(t.numel() for t in private.values())
prefix_reads = [(m.words - private_words) / (2 * 3 * n_prefix * 64) for m in (without, with_cascade)]
run.measured("prefix_rows_read_without_over_with_cascade", prefix_reads[0] / prefix_reads[1])
Markdown(
    f"The prefix is read **{prefix_reads[0]:g}** times without and **{prefix_reads[1]:g}** time with the cascade; all rows "
    f"together {without.words / with_cascade.words:.1f}x fewer; outputs differ by {cascade_error:.0e}."
)

# %% [markdown]
# ### FlashAttention-3: FP8 that survives outliers
#
# Half the bits are twice the arithmetic on a Hopper GPU, if the numbers survive. E4M3 keeps three bits of mantissa. One
# scale for a whole tensor is set by its largest element. FlashAttention-3 changes two things: one scale for each *head
# and block* of tokens, and **incoherent processing**: queries and keys are multiplied by the same random orthogonal
# matrix, which spreads an outlier over all channels. Since $(QR)(KR)^\top = QK^\top$, the scores do not change. The
# matrix is a Hadamard matrix with random signs. Here it is emulated: values are rounded to E4M3, products are taken in
# fp32.


# %% tags=["algorithm"]
def random_hadamard(size, generator):
    """A random orthogonal matrix ``[size, size]``, size a power of two: Hadamard with random signs."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    signs = 2.0 * torch.randint(0, 2, (size, 1), generator=generator) - 1
    return signs * matrix / size**0.5


def to_fp8(x, block=None):
    """Round ``[n_heads, n, d]`` to E4M3 and back, with one scale for the tensor, or for each head and `block` tokens."""
    rounded = torch.empty_like(x)
    for part in blocks(x.shape[1], block or x.shape[1]):
        largest = x[:, part].abs().amax(dim=(1, 2) if block else (0, 1, 2), keepdim=True)
        scale = (largest / 448).clamp_min(1e-30)  # 448 is the format's largest number
        rounded[:, part] = (x[:, part] / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
    return rounded


def fp8_attention(q, k, v, causal, block=None, rotation=None):
    """Attention with q, k, v and the weights in E4M3; sums in fp32. Shapes as in `flash_forward`.

    (The paper's baseline with one scale keeps its weights in FP16; here all ways round them alike.)
    """
    q_per_kv = q.shape[0] // k.shape[0]
    if rotation is not None:
        q, k = q @ rotation, k @ rotation
    q, k, v = (to_fp8(x, block) for x in (q, k, v))
    k, v = k.repeat_interleave(q_per_kv, dim=0), v.repeat_interleave(q_per_kv, dim=0)
    scores = q @ k.mT / q.shape[2] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -math.inf)
    weights = 256 * (scores - scores.amax(dim=-1, keepdim=True)).exp()  # up to 256 of the format's 448
    return weights.to(torch.float8_e4m3fn).to(v.dtype) @ v / weights.sum(dim=-1, keepdim=True)


# %% [markdown]
# The queries, keys and values are the real model's, over a page of prose: queries from a hook on the projection, turned
# by RoPE as the model does; keys and values from its cache. A second hook keeps what the model's own attention gave, so
# that we can tell whether we caught the right tensors. The last lines use the paper's own synthetic inputs, normal, with
# a normal ten times as wide added to one element in a thousand.

# %%
model = models.load_model(run.profile.model, dtype="float32" if device == "cpu" else run.dtype, device=device)
tokenizer = models.load_tokenizer(run.profile.model)
shape = models.kv_shape(model.config)
n_real = 384
ids = corpora.prose_ids(tokenizer, "evaluation", n_real).to(device)
layers = list(range(0, shape.n_layers, 3))
projected, attended, hooks = {}, {}, []
for i in layers:
    attention = model.model.layers[i].self_attn
    hooks.append(attention.q_proj.register_forward_hook(lambda _, __, y, i=i: projected.update({i: y[0]})))
    hooks.append(attention.o_proj.register_forward_pre_hook(lambda _, x, i=i: attended.update({i: x[0][0]})))
cache = kv_adapter.new_cache("dynamic", model.config)
model(ids[None], past_key_values=cache, logits_to_keep=1)
for hook in hooks:
    hook.remove()


# %%
def rotate(x):
    """RoPE in Transformers' layout: element i is paired with element i + d/2."""
    cos, sin = model.model.rotary_emb(x, torch.arange(n_real, device=device)[None])
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


# %%
pairs = kv_adapter.layer_tensors(cache)
real = {
    layer: tuple(
        x.float().cpu()
        for x in (
            rotate(projected[layer].view(n_real, -1, shape.head_dim).transpose(0, 1)),
            *(t[0] for t in pairs[layer]),
        )
    )
    for layer in layers
}
differences = {
    layer: (flash_forward(*real[layer])[0].transpose(0, 1).flatten(1) - attended[layer].float().cpu())
    .abs()
    .max()
    .item()
    / max(1.0, real[layer][2].abs().max().item())
    for layer in layers
}
assert max(differences.values()) < (1e-4 if model.dtype == torch.float32 else 3e-2)
print(
    f"our attention against the model's own, {len(layers)} layers: largest difference {max(differences.values()):.0e}"
)
{f"layer {layer}": [tuple(x.shape) for x in real[layer]] for layer in layers[:1]}


# %%
def fp8_row(name, q, k, v, causal):
    """Root mean square error of four ways to use FP8, against fp64."""
    exact = dense_attention(q.double(), k.double(), v.double(), causal)[0]
    rotation = random_hadamard(q.shape[2], torch.Generator().manual_seed(SEED))
    ways = {"one scale": (None, None), "scale a block": (64, None), "rotated": (None, rotation), "both": (64, rotation)}
    rmse = {
        way: (fp8_attention(q, k, v, causal, *options) - exact).pow(2).mean().sqrt().item()
        for way, options in ways.items()
    }
    return {"inputs": name, **rmse, "one scale / both": rmse["one scale"] / rmse["both"]}


def outliers(n):
    shape_ = (2, n, shape.head_dim)
    return torch.randn(shape_) + 10 * torch.randn(shape_) * (torch.rand(shape_) < 0.001)


def synthetic(n, draws=4):
    rows = [fp8_row(f"synthetic, {n} tokens, draw {i}", *(outliers(n) for _ in "qkv"), False) for i in range(draws)]
    return pd.DataFrame(rows)


# %%
fp8 = pd.DataFrame([fp8_row(f"layer {layer}", *real[layer], True) for layer in layers])
fp8_gain = paired_ratio(fp8["one scale"].tolist(), fp8["both"].tolist(), seed=SEED)
rotation_gain = paired_ratio(fp8["one scale"].tolist(), fp8["rotated"].tolist(), seed=SEED)
block_gain = paired_ratio(fp8["one scale"].tolist(), fp8["scale a block"].tolist(), seed=SEED)
run.measured("fp8_error_saved_by_blocks_and_rotation", fp8_gain.ratio)
short, long = synthetic(n_real), synthetic(2048)
short_gain, synthetic_gain = (
    paired_ratio(x["one scale"].tolist(), x["both"].tolist(), seed=SEED) for x in (short, long)
)
with_synthetic = pd.concat([fp8, long], ignore_index=True)
with_synthetic.style.format("{:.1e}", subset=list(fp8.columns[1:5])).format("{:.2f}", subset=[fp8.columns[5]]).hide()

# %%
tidy = fp8.melt(id_vars="inputs", value_vars=["scale a block", "rotated", "both"], var_name="way", value_name="rmse")
tidy["gain"] = tidy["inputs"].map(fp8.set_index("inputs")["one scale"]) / tidy["rmse"]
tidy["layer"] = tidy["inputs"].str.removeprefix("layer ").astype(int)
run.figure(
    plots.lines(
        tidy,
        x="layer",
        y="gain",
        hue="way",
        title="FP8 attention: error with one scale over error of each way (emulated)",
        xlabel="layer",
        ylabel="error ratio (1 = no gain)",
    ),
    "fp8_gain",
    tidy,
)

# %%
Markdown(
    f"Error with one scale over error with each way, mean over {fp8_gain.n} layers of one text with one rotation, and an "
    f"interval: blocks alone **{block_gain}**, rotation alone **{rotation_gain}**, both **{fp8_gain}**. The paper reports "
    f"2.6x on its synthetic inputs, of a length that it does not name; our emulation gave {short_gain} there on "
    f"{n_real} tokens and {synthetic_gain} on 2048."
)

# %% [markdown]
# Where a line is below one, that way made things worse. The paper's own ablation says which of the two
# matters (without rotation its error is back at the baseline's; without blocks it hardly moves). The size of the gain
# is a property of the inputs: how far the largest element of a tensor stands above the others, and a longer tensor has a
# larger one. A model without strong outliers in queries and keys gains little.
#
# ### FlashAttention-3: asynchrony, as a model
#
# A tile needs the tensor cores twice, with a softmax between. On an H100 matrix products run at 989 TFLOP/s in FP16,
# exponentials at 3.9; with a head of 128 that makes the exponentials cost half as long as both products. In order, the
# tensor cores wait. FlashAttention-3 lets two groups of warps take turns (*pingpong*). The timeline below is a
# **model** with exactly that ratio, not a measurement.


# %% tags=["algorithm"]
def timeline(n_workers, n_tiles, product=1.0, softmax=1.0):
    """Greedy schedule of tiles (product, softmax, product) on one tensor core and one exponential unit.

    Returns rows of worker, unit, start and stop; times in units of one product.
    """
    steps = [("tensor core", product), ("exponentials", softmax), ("tensor core", product)] * n_tiles
    done, ready = [0] * n_workers, [0.0] * n_workers
    free, rows = {"tensor core": 0.0, "exponentials": 0.0}, []
    while min(done) < len(steps):
        waiting = [w for w in range(n_workers) if done[w] < len(steps)]
        worker = min(waiting, key=lambda w: (max(ready[w], free[steps[done[w]][0]]), done[w]))
        unit, length = steps[done[worker]]
        start = max(ready[worker], free[unit])
        ready[worker] = free[unit] = start + length
        done[worker] += 1
        rows.append({"worker": worker, "unit": unit, "start": start, "stop": start + length})
    return rows


# %%
schedules = {workers: timeline(workers, 6 // workers) for workers in (1, 2)}
busy = {
    workers: sum(r["stop"] - r["start"] for r in rows if r["unit"] == "tensor core") / max(r["stop"] for r in rows)
    for workers, rows in schedules.items()
}
bars = pd.DataFrame(
    [
        {"row": "one group" if workers == 1 else f"two groups, no. {r['worker'] + 1}", **r}
        for workers, rows in schedules.items()
        for r in rows
    ]
)
run.figure(
    plots.gantt(bars, title="Six tiles by one group of warps, and by two (model)", xlabel="time (one product = 1)"),
    "pingpong",
    bars,
)

# %%
Markdown(f"Tensor cores busy (model): **{busy[1]:.0%}** with one group, **{busy[2]:.0%}** with two.")

# %% [markdown]
# The paper measured 570 TFLOP/s before and 620 to 640 after pingpong: the direction of the model, and far less of it,
# since real warps overlapped somewhat before and do not alternate so neatly after.

# %% [markdown]
# ### A kernel in Triton
#
# So far one Python loop did everything. A GPU kernel is the inner loop alone, started once for each unit of work: a
# *program* knows its number, loads its block of queries and walks over the keys. Triton compiles such a kernel for a
# GPU. Where there is none, Triton's interpreter runs the very same source on NumPy, which is slow and says nothing
# about speed, but it finds wrong indices and masks. One cell, two ways to run.


# %% tags=["algorithm"]
import contextlib
import importlib
import os
import types

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # read wherever a kernel is defined, those of Triton's own library included
try:
    import triton
    import triton.language as tl

    if INTERPRETED:  # some other library may have imported Triton before the variable was set
        importlib.reload(tl.standard)
        importlib.reload(tl)
        with contextlib.suppress(ImportError):  # else a first start loads it, and it looks for the variable in vain
            import triton.experimental.gluon
except ImportError:  # no Triton for this system: the kernels below are defined, and cannot be started
    triton, tl = None, types.SimpleNamespace(constexpr=None)


def kernel(function):
    """Make a Triton kernel of a function."""
    return triton.jit(function) if triton else function


# %% [markdown]
# Both kernels below share their inner step. It is `absorb` again, line by line.


# %% tags=["algorithm"]
@kernel
def absorb_tile(q, k, v, seen, scale, highest, total, mixed, UPCAST: tl.constexpr):
    """`absorb`, for one tile: q [rows, d], k and v [columns, d], seen [rows, columns]."""
    if UPCAST:  # the interpreter multiplies bf16 wrongly; rounded values in fp32 are the same numbers
        scores = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee") * scale
    else:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(seen, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp(scores - base[:, None])
    shrink = tl.exp(highest - base)
    total = total * shrink + tl.sum(weights, 1)
    if UPCAST:
        added = tl.dot(weights.to(v.dtype).to(tl.float32), v.to(tl.float32), input_precision="ieee")
    else:
        added = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_highest, total, mixed * shrink[:, None] + added


# %% [markdown]
# A kernel has no slices. It has pointers, offsets and masks. `head_dim` need not be a power of two, but a block must
# be: channels beyond the head are loaded as zeros and never stored. The same mask guards the ragged last tile. `stop`
# keeps a causal program from visiting tiles beyond the diagonal.


# %% tags=["algorithm"]
@kernel
def prefill_kernel(
    Q, K, V, OUT, LSE, n_q, n_k, scale,
    Q_PER_KV: tl.constexpr, CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head, over all keys they see."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channels = tl.arange(0, BLOCK_D)
    own = (rows[:, None] < n_q) & (channels < HEAD_DIM)
    at = (head * n_q + rows[:, None]) * HEAD_DIM + channels
    q = tl.load(Q + at, mask=own, other=0.0)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    stop = n_k
    if CAUSAL:
        stop = tl.minimum(n_k, (tl.program_id(0) + 1) * BLOCK_M + n_k - n_q)
    for start in range(0, stop, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        inside = (columns[:, None] < n_k) & (channels < HEAD_DIM)
        there = ((head // Q_PER_KV) * n_k + columns[:, None]) * HEAD_DIM + channels
        k = tl.load(K + there, mask=inside, other=0.0)
        v = tl.load(V + there, mask=inside, other=0.0)
        seen = (columns[None, :] < n_k) & (rows[:, None] < n_q)
        if CAUSAL:
            seen = seen & (columns[None, :] <= rows[:, None] + n_k - n_q)
        highest, total, mixed = absorb_tile(q, k, v, seen, scale, highest, total, mixed, UPCAST)
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(OUT + at, (mixed / divisor[:, None]).to(OUT.dtype.element_ty), mask=own)
    tl.store(LSE + head * n_q + rows, tl.where(total > 0, highest + tl.log(divisor), highest), mask=rows < n_q)


# %% [markdown]
# Block sizes are a matter of the machine, so where the kernel is compiled Triton tries several and keeps the fastest.


# %% tags=["algorithm"]
if triton and not INTERPRETED:
    tuned_prefill = triton.autotune(
        [
            triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
            for m, n, warps, stages in (
                (64, 32, 4, 2),
                (64, 64, 4, 3),
                (128, 32, 4, 3),
                (128, 64, 8, 3),
                (128, 128, 8, 2),
            )
        ],
        key=["n_q", "n_k", "HEAD_DIM", "CAUSAL"],
    )(prefill_kernel)


def triton_prefill(q, k, v, causal=True, block_m=64, block_n=64):
    """`flash_forward` by the kernel; block sizes are chosen by measurement where it is compiled."""
    n_q_heads, n_q, head_dim = q.shape
    n_kv_heads, n_k, _ = k.shape
    out, lse = torch.empty_like(q), torch.empty(n_q_heads, n_q, device=q.device)
    arguments = (q.contiguous(), k.contiguous(), v.contiguous(), out, lse, n_q, n_k, head_dim**-0.5)
    fixed = dict(
        Q_PER_KV=n_q_heads // n_kv_heads,
        CAUSAL=causal,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        UPCAST=INTERPRETED,
    )
    if INTERPRETED:
        prefill_kernel[triton.cdiv(n_q, block_m), n_q_heads](*arguments, **fixed, BLOCK_M=block_m, BLOCK_N=block_n)
    else:
        tuned_prefill[lambda meta: (triton.cdiv(n_q, meta["BLOCK_M"]), n_q_heads)](*arguments, **fixed)
    return out, lse


# %% [markdown]
# ### A decode kernel: split, and paged
#
# One program takes one sequence, one KV head *with all its query heads* (they share the keys, so they should share the
# read), and one split of the tokens. Keys and values lie in the pool of notebook 02, `[n_slots, n_kv_heads, head_dim]`,
# and are found through the block table. A contiguous cache is the special case of one block for each sequence.


# %% tags=["algorithm"]
@kernel
def decode_kernel(
    Q, K, V, TABLES, LENGTHS, OUT, LSE, table_width, scale,
    Q_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: one sequence, one KV head with its query heads, one split of the tokens."""
    sequence, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    n_kv_heads, n_splits = tl.num_programs(1), tl.num_programs(2)
    length = tl.load(LENGTHS + sequence)
    size = tl.cdiv(tl.cdiv(length, n_splits), BLOCK_N) * BLOCK_N
    stop = tl.minimum(length, (split + 1) * size)
    group, channels = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    own = (group[:, None] < Q_PER_KV) & (channels < HEAD_DIM)
    heads = kv_head * Q_PER_KV + group
    n_q_heads = n_kv_heads * Q_PER_KV
    q = tl.load(Q + (sequence * n_q_heads + heads[:, None]) * HEAD_DIM + channels, mask=own, other=0.0)
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    mixed = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(split * size, stop, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        block = tl.load(TABLES + sequence * table_width + places // BLOCK_SIZE, mask=places < stop, other=0)
        slots = block.to(tl.int64) * BLOCK_SIZE + places % BLOCK_SIZE
        inside = (places[:, None] < stop) & (channels < HEAD_DIM)
        there = (slots[:, None] * n_kv_heads + kv_head) * HEAD_DIM + channels
        k = tl.load(K + there, mask=inside, other=0.0)
        v = tl.load(V + there, mask=inside, other=0.0)
        seen = (places[None, :] < stop) & (group[:, None] < Q_PER_KV)
        highest, total, mixed = absorb_tile(q, k, v, seen, scale, highest, total, mixed, UPCAST)
    divisor = tl.where(total > 0, total, 1.0)
    row = (sequence * n_splits + split) * n_q_heads + heads
    tl.store(OUT + row[:, None] * HEAD_DIM + channels, mixed / divisor[:, None], mask=own)
    tl.store(LSE + row, tl.where(total > 0, highest + tl.log(divisor), highest), mask=group < Q_PER_KV)


# %% tags=["algorithm"]
def triton_decode(q, keys, values, tables, lengths, block_size, n_splits=1, block_n=64):
    """One decode step through block tables.

    q is ``[n_seqs, n_q_heads, head_dim]``, keys and values are pools ``[n_slots, n_kv_heads, head_dim]``, tables int32
    ``[n_seqs, width]``, lengths int32 ``[n_seqs]``. Returns the output ``[n_seqs, n_q_heads, head_dim]`` and its log-sum-exp.
    """
    n_seqs, n_q_heads, head_dim = q.shape
    n_kv_heads = keys.shape[1]
    out = torch.empty(n_seqs, n_splits, n_q_heads, head_dim, device=q.device)
    lse = torch.empty(n_seqs, n_splits, n_q_heads, device=q.device)
    q_per_kv = n_q_heads // n_kv_heads
    decode_kernel[n_seqs, n_kv_heads, n_splits](
        q.contiguous(),
        keys.contiguous(),
        values.contiguous(),
        tables.contiguous(),
        lengths,
        out,
        lse,
        tables.shape[1],
        head_dim**-0.5,
        Q_PER_KV=q_per_kv,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        UPCAST=INTERPRETED,
        BLOCK_SIZE=block_size,
        BLOCK_G=max(16, triton.next_power_of_2(q_per_kv)),
        BLOCK_N=block_n,
    )
    merged, merged_lse = merge(out.transpose(0, 1), lse.transpose(0, 1))
    return merged.to(q.dtype), merged_lse


if INTERPRETED:
    del os.environ["TRITON_INTERPRET"]  # child processes and torch.compile must not inherit it

# %% [markdown]
# Is the kernel right? Against fp64, in three dtypes, with GQA, ragged tiles, a head of 80 channels and queries that
# stand at the end of a longer context. The bounds are those that the course's tests use: 5e-6 in fp32, 4e-3 in fp16,
# 3e-2 in bf16, absolute.

# %%
BOUNDS = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
kernel_cases = [
    (2, 1, 130, 130, 64, True),
    (2, 1, 65, 65, 80, False),
    (3, 1, 20, 90, 128, True),
    (1, 1, 9, 5, 16, True),
]


def kernel_row(kind, n_q_heads, n_kv_heads, n_q, n_k, d, causal):
    q, k, v = (
        torch.randn(h, n, d, device=device).to(kind)
        for h, n in ((n_q_heads, n_q), (n_kv_heads, n_k), (n_kv_heads, n_k))
    )
    out, lse = triton_prefill(q, k, v, causal)
    exact, exact_lse = dense_attention(q.double(), k.double(), v.double(), causal)
    assert torch.equal(lse.isinf(), exact_lse.isinf())
    name = f"{n_q_heads}/{n_kv_heads} heads, {n_q} of {n_k}, d {d}{', causal' * causal}"
    return {"case": name, "dtype": str(kind).removeprefix("torch."), "error": (out.double() - exact).abs().max().item()}


# %%
not_here = "not run here: Triton has no wheel for this system" if triton is None else ""
rows = [] if not_here else [kernel_row(kind, *case) for kind in kinds for case in kernel_cases]
kernel_errors = pd.DataFrame(rows, columns=["case", "dtype", "error"])
assert all(row["error"] < BOUNDS[getattr(torch, row["dtype"])] for row in rows)
how = not_here or ("interpreted on NumPy" if INTERPRETED else "compiled")
print(f"prefill kernel, {how}; largest error against fp64:")
kernel_errors.pivot(index="case", columns="dtype", values="error").map("{:.0e}".format)

# %% [markdown]
# Now the decode kernel, over the block manager of notebook 02 with real keys and values of the model in its pool. Four
# sequences of unequal length share a prefix, so their tables name the same blocks. The reference gathers each sequence
# and uses dense attention.

# %%
from helpers.paged_kv import BlockManager, PagedKVCache

block_size, layer = 16, layers[1]
prompts = [list(range(100 + n)) for n in (0, 37, 4, 92)]
manager = BlockManager(64, block_size, enable_prefix_caching=True)
for i, prompt in enumerate(prompts):
    manager.allocate(f"s{i}", prompt)
    manager.commit(f"s{i}")
pool = PagedKVCache(1, 64, block_size, shape.n_kv_heads, shape.head_dim)
q_real, k_real, v_real = real[layer]
for i, prompt in enumerate(prompts):
    slots = torch.tensor(manager.slots(f"s{i}", 0, len(prompt)))
    pool.write(0, slots, k_real[:, : len(prompt)].transpose(0, 1), v_real[:, : len(prompt)].transpose(0, 1))
lists = [manager.table(f"s{i}") for i in range(len(prompts))]
tables = torch.tensor([t + [0] * (max(map(len, lists)) - len(t)) for t in lists], dtype=torch.int32)
lengths_ = torch.tensor([len(p) for p in prompts], dtype=torch.int32)
q_step = torch.stack([q_real[:, len(p) - 1] for p in prompts])
print(f"table entries {manager.n_logical}, physical blocks {manager.n_used}: {tables.tolist()}"[:150], "...")

# %%
dense = torch.stack(
    [
        dense_attention(q_step[i][:, None].double(), k_real[:, :n].double(), v_real[:, :n].double())[0][:, 0]
        for i, n in enumerate(lengths_.tolist())
    ]
)
placed = [x.to(device) for x in (q_step, pool.keys[0], pool.values[0], tables, lengths_)]
paged_errors = {}
for n_splits in (1, 4) if not not_here else ():
    got, _ = triton_decode(*placed, block_size, n_splits, block_n=32)
    paged_errors[n_splits] = (got.double().cpu() - dense).abs().max().item()
scores = q_real.unflatten(0, (shape.n_kv_heads, -1)) @ k_real[:, None].mT / shape.head_dim**0.5
largest_score = scores.abs().max().item()
allowed = (
    2e-6 * max(1.0, v_real.abs().max().item()) * max(1.0, largest_score / 16)
)  # fp32 rounds large scores more coarsely
print(f"paged decode kernel, {how}; error by number of splits:", {n: f"{e:.0e}" for n, e in paged_errors.items()})

# %% [markdown]
# ## The real system
#
# ### Time: math against flash
#
# Back to PyTorch's two kernels, and now the clock. The ratio is paired, and either kernel goes first in every other pair.


# %%
def time_pairs(first, second, repeats=2 * run.profile.repeats):
    """How many times longer `first` takes than `second`: every other pair is turned round, and one is dropped."""
    order = [which for i in range(repeats + 1) for which in ((0, 1) if i % 2 else (1, 0))]
    _, seconds = step_seconds(((first, second)[which]() for which in order), device)
    a, b = ([s for s, w in zip(seconds[2:], order[2:], strict=True) if w == which] for which in (0, 1))
    return paired_ratio(a, b, seed=SEED), min(a), min(b)


def time_row(n):
    q = inputs(n)
    repeats = min(2 * run.profile.repeats, max(4, 8192 // n))  # fewer of the long ones
    ratio, slow, quick = time_pairs(lambda: sdpa("math", *q), lambda: sdpa("flash", *q), repeats)
    return {
        "N": n,
        "math (ms)": 1e3 * slow,
        "flash (ms)": 1e3 * quick,
        "ratio": ratio.ratio,
        "low": ratio.low,
        "high": ratio.high,
        "n": ratio.n,
    }


# %%
times = pd.DataFrame([time_row(n) for n in lengths])
run.measured("math_over_flash_time", times["ratio"].iloc[-1])
run.measured("math_over_flash_peak_memory", peaks["math / flash"].iloc[-1])
times.round(2)

# %%
both = pd.concat(
    [
        pd.DataFrame({"N": peaks["N"], "ratio": peaks["math / flash"], "quantity": "peak memory"}),
        pd.DataFrame({"N": times["N"], "ratio": times["ratio"], "quantity": "time"}),
    ]
)
figure = plots.lines(
    both,
    x="N",
    y="ratio",
    hue="quantity",
    log_x=True,
    log_y=True,
    title="SDPA, math over flash: peak memory and time",
    xlabel="tokens N",
    ylabel="math / flash",
)
run.figure(figure, "sdpa_ratios", both)

# %% [markdown]
# Quadratic over linear is linear, so memory should be a line of slope one, give or take the kernel's own buffers; the
# claims below judge that slope. The time ratio is a real effect of this machine, caches and all. On a CPU it is **no
# evidence** for a number that was measured on a GPU, nor the other way round: there the slow memory is HBM and the fast
# one is 100 to 200 KB that the programmer fills by hand.
#
# ### On a GPU: our kernels, SDPA and the libraries
#
# The next cells are the same on every machine. Where there is a GPU they add our Triton kernels, and flash-attn and
# flashinfer where they are installed and the GPU can run them (which is asked of the GPU first: a package that imports
# is not a kernel that runs). Inputs are laid out for each program outside the clock.

# %%
roof = measure_roofline(run.dtype, device)
missing = []


def library(package, module):
    """The imported library, or None with a note of why it is not run here."""
    ability = run.hardware.capabilities["flash_attention_2"]
    if device != "cuda":
        missing.append(f"{package} needs an NVIDIA GPU")
    elif not ability.available:
        missing.append(f"{package}: {ability.reason}")
    elif not package_version(package):
        missing.append(f"{package} is not installed")
    else:
        return __import__(module)
    return None


flash_attn, flashinfer = library("flash-attn", "flash_attn"), library("flashinfer-python", "flashinfer")
programs = [f"SDPA {name}" for name in BACKENDS] + ["ours (Triton)"] * (device == "cuda" and triton is not None)
programs += ["flash-attn"] * bool(flash_attn) + ["flashinfer"] * bool(flashinfer)
print("not run here: " + "; ".join(missing) if missing else "all programs run")


# %%
def prepared(program, q, k, v):
    """A call of one program for one sequence ``[1, n_heads, n, d]``, and where its output holds the last query's row.

    A prefill where q is as long as k, else a decode step.
    """
    causal, n = q.shape[2] == k.shape[2], k.shape[2]
    by_token = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]  # [n, n_heads, d]
    if program.startswith("SDPA"):
        return lambda: sdpa(program.split()[1], q, k, v, causal), lambda out: out[0, :, -1]
    if program == "flash-attn":
        return lambda: flash_attn.flash_attn_func(*(x[None] for x in by_token), causal=causal), lambda out: out[0, -1]
    if program == "flashinfer" and causal:
        return lambda: flashinfer.single_prefill_with_kv_cache(*by_token, causal=True), lambda out: out[-1]
    if program == "flashinfer":
        return lambda: flashinfer.single_decode_with_kv_cache(by_token[0][0], *by_token[1:]), lambda out: out
    if causal:
        return lambda: triton_prefill(q[0], k[0], v[0])[0], lambda out: out[:, -1]
    table, length = (
        torch.full(size, value, dtype=torch.int32, device=device) for size, value in (((1, 1), 0), ((1,), n))
    )
    return lambda: triton_decode(*by_token, table, length, n, n_splits=splits_for(n))[0], lambda out: out[0]


# %% [markdown]
# Each program gets its error against fp64 on the last query (no speed without quality), its rates, its share of the
# measured roof, and a paired ratio to SDPA's flash kernel. That kernel is also held against itself: how far such a row
# is from one shows the noise of all the others. A causal prefill is credited with half of the table, whatever a kernel
# computes beyond it. More than 100 % of the roof means that a cache held what we count as slow memory.


# %%
def program_row(program, n_q, n_k, n_heads=8):
    """One program on one shape: useful FLOP/s (causal: half the table); intensity is counted from q, k, v and the output."""
    q, k, v = inputs(n_q, n_k, n_heads=n_heads)
    (call, last_row), (base_call, _) = prepared(program, q, k, v), prepared("SDPA flash", q, k, v)
    exact = dense_attention(q[0, :, -1:].double(), k[0].double(), v[0].double())[0][:, 0]
    error = (last_row(call()).double() - exact).abs().max().item()
    ratio, _, seconds = time_pairs(base_call, call, repeats=20)
    flops = 4 * n_q * n_k * 64 * n_heads / (2 if n_q == n_k else 1)
    n_bytes = 2 * (n_q + n_k) * 64 * n_heads * q.element_size()
    share = flops / seconds / roof.attainable(flops / n_bytes)
    call_name = f"prefill, {n_q}" if n_q == n_k else f"decode, {n_k}"
    row = [call_name, program, f"{error:.0e}", flops / seconds / 1e12, n_bytes / seconds / 1e9, 100 * share, str(ratio)]
    return dict(
        zip(("call", "program", "error", "TFLOP/s", "GB/s", "% of roof", "SDPA flash / program"), row, strict=True)
    )


calls = [(lengths[2], lengths[2]), (1, lengths[4])]
pd.DataFrame([program_row(program, *call) for call in calls for program in programs]).round(3)

# %% [markdown]
# FlashInfer's own paged, ragged and shared-prefix calls, held against dense attention and against themselves. Its
# log-sum-exp has base 2, FlashAttention's base e: merging one with the other without conversion is a quiet error
# (exercise 04.1).


# %%
def on_device(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def flashinfer_paged():
    """Largest difference of FlashInfer's paged decode from the dense reference."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(2**27, dtype=torch.uint8, device=device), "NHD")
    ends = torch.tensor([0, *map(len, lists)]).cumsum(0).tolist()
    last = [(n - 1) % block_size + 1 for n in lengths_.tolist()]
    sizes = shape.n_q_heads, shape.n_kv_heads, shape.head_dim, block_size
    indices = [block for table in lists for block in table]
    wrapper.plan(*map(on_device, (ends, indices, last)), *sizes, q_data_type=dtype, kv_data_type=dtype)
    pages = tuple(x[0].view(64, block_size, *x.shape[2:]).to(device, dtype) for x in (pool.keys, pool.values))
    return (wrapper.run(q_step.to(device, dtype), pages).double().cpu() - dense).abs().max().item()


# %%
def flashinfer_ragged(parts=(100, 37, 64)):
    """Largest difference of FlashInfer's ragged prefill from dense attention over each sequence."""
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(2**27, dtype=torch.uint8, device=device), "NHD"
    )
    ends = on_device([0, *torch.tensor(parts).cumsum(0).tolist()])
    wrapper.plan(ends, ends, shape.n_q_heads, shape.n_kv_heads, shape.head_dim, causal=True, q_data_type=dtype)
    rows = [[x[:, :n].transpose(0, 1) for x in real[layer]] for n in parts]
    got = wrapper.run(*(torch.cat(x).to(device, dtype).contiguous() for x in zip(*rows, strict=True)))
    exact = torch.cat([dense_attention(*(x[:, :n].double() for x in real[layer]))[0].transpose(0, 1) for n in parts])
    return (got.double().cpu() - exact).abs().max().item()


# %%
def flashinfer_cascade(n=96):
    """Largest difference of FlashInfer's merge of two parts from its own attention over the whole."""
    q, k, v = (x.transpose(0, 1).to(device, dtype).contiguous() for x in real[layer])
    attend = flashinfer.single_prefill_with_kv_cache
    first, second = (attend(q[-4:], k[s], v[s], return_lse=True) for s in (slice(n), slice(n, None)))
    return (flashinfer.merge_state(*first, *second)[0].float() - attend(q[-4:], k, v).float()).abs().max().item()


if flashinfer:
    print(f"paged {flashinfer_paged():.1e}, ragged {flashinfer_ragged():.1e}, cascade {flashinfer_cascade():.1e}")
else:
    print("not run here: " + next(m for m in missing if m.startswith("flashinfer")))

# %% [markdown]
# ### Prefill or decode: who gains?
#
# Arithmetic intensity decides. For one head, a causal prefill needs half of $4 N^2 d$ operations on $4 N d$ elements, and
# a decode step $4 N d$ on $2 N d$. We measure both kernels on the roofline. The intensity of the math kernel counts its
# table of scores, written and read twice. The last point packs four query heads of a KV head into one call, as our
# decode kernel does.

# %%
context, many = lengths[4], 8


def point(label, kernel, n_q, n_k, batch, causal):
    """One measured point: FLOP per byte moved to and from slow memory (by count), and FLOP/s.

    FLOP are the useful ones: half the table under a causal mask, though the math kernel computes all of it.
    """
    q = inputs(n_q, n_k, n_heads=4, batch=batch)
    seconds = best_seconds(lambda: sdpa(kernel, *q, causal=causal), repeats=run.profile.repeats, device=device)
    flops = 4 * n_q * n_k * 64 * 4 * batch / (2 if causal else 1)
    table = 4 * n_q * n_k if kernel == "math" else 0
    n_bytes = (2 * (n_q + n_k) * 64 + table) * 4 * batch * q[0].element_size()
    return {"label": label, "intensity": flops / n_bytes, "flops": flops / seconds}


# %%
points = pd.DataFrame(
    [
        *(point(f"prefill, {kernel}", kernel, 1024, 1024, 1, True) for kernel in BACKENDS),
        *(point(f"decode, {kernel}", kernel, 1, context, many, False) for kernel in BACKENDS),
        point("decode, 4 heads packed, flash", "flash", 4, context, many, False),
    ]
)
run.measured("decode_flops_per_byte", points.set_index("label")["intensity"]["decode, flash"])
figure = plots.roofline(roof, points, title=f"Attention on this machine's roofline ({run.dtype})")
run.figure(figure, "roofline", points, n=run.profile.repeats)

# %% [markdown]
# However long the prompt, the math kernel's intensity stays below $d / (2 \cdot \text{bytes per element})$, since its
# table grows as fast as its work. The flash kernel's grows with $N$. For a decode there is no table to leave out: both
# points stand at one intensity, and no kernel can climb above the slope there. What helps a decode step is fewer bytes
# for each query: packed heads, a shared prefix, a smaller cache. (Points may stand above the slope where a cache holds
# what we count as slow memory.)

# %% [markdown]
# ### FlexAttention and `torch.compile`
#
# A fused kernel is fast until someone wants something else: a soft cap on the scores, say. FlexAttention takes the
# change as a Python function of one score. Called directly it builds the table, as the math kernel does.
# `torch.compile` turns it into a fused kernel: what it removes are the intermediates between operations.

# %%
import shutil
import time
import warnings

from torch.nn.attention.flex_attention import flex_attention

warnings.filterwarnings("ignore", message=".*flex_attention called without.*")


def soft_cap(score, batch, head, q_index, kv_index):
    """Gemma 2's cap: scores never leave (-50, 50)."""
    return 50 * torch.tanh(score / 50)


# %%
can_compile = device == "cuda" or shutil.which("g++") is not None
q = inputs(1024)
flex_calls = {"FlexAttention, direct": lambda: flex_attention(*q, score_mod=soft_cap)}
if can_compile:
    compiled = torch.compile(flex_attention)
    flex_calls["FlexAttention, compiled"] = lambda: compiled(*q, score_mod=soft_cap)
    begun = time.perf_counter()
    got = flex_calls["FlexAttention, compiled"]()
    print(f"first call, compiling included: {time.perf_counter() - begun:.1f} s")
    difference = (got - flex_calls["FlexAttention, direct"]()).abs().max().item()
    assert difference < (1e-5 if run.dtype == "float32" else 3e-2)
else:
    print("not run here: torch.compile needs a C++ compiler (g++)")


# %%
def flex_row(name, call):
    call()
    with memory.measure_device_peak(device) as peak:
        call()
    return {"program": name, "peak": show_bytes(peak.grown), "ms": 1e3 * best_seconds(call, repeats=3, device=device)}


pd.DataFrame([flex_row(name, call) for name, call in flex_calls.items()]).round(1)

# %% [markdown]
# ### CUDA graphs
#
# A decode step on a GPU is a few hundred kernels of a few microseconds each, and starting one costs about as much. A
# CUDA graph records them once and replays them with a single start. It removes *launches*, neither bytes nor
# arithmetic, so it helps decode and not prefill. The cell below measures that where there is a GPU.


# %%
def graph_ratio(n_q, n_k, calls=32):
    """Time without over with a graph, for `calls` attention calls in a row."""
    q = inputs(n_q, n_k)
    for _ in range(3):
        sdpa("flash", *q, causal=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            sdpa("flash", *q, causal=False)
    return time_pairs(lambda: [sdpa("flash", *q, causal=False) for _ in range(calls)], graph.replay)[0]


graphs = run.hardware.capabilities["cuda_graphs"]
if graphs.available and device == "cuda":
    print(f"decode {graph_ratio(1, 1024)}, prefill {graph_ratio(4096, 4096)}")
else:
    print(f"not run here: {graphs.reason}")

# %% [markdown]
# ## Ledgers
#
# A whole model now, with one variable changed: how attention is computed. `eager` builds the table of scores in each of
# the layers; `sdpa` leaves the choice to PyTorch, which takes its flash kernel where the inputs allow it. Prompts are long
# and answers short, for that is where the difference must be.

# %%
from helpers.engines.transformers_engine import TransformersEngine
from helpers.workload import Request, Workload

n_prompt, n_answer = run.profile.max_model_len // 2, 4
text = corpora.prose_ids(tokenizer, "evaluation", n_prompt + 600).tolist()
requests = tuple(
    Request(request_id=f"r{i}", prompt_ids=tuple(text[start : start + n_prompt]), max_tokens=n_answer)
    for i, start in enumerate((0, 200, 400))
)
workload = Workload(
    name="three long prompts", requests=requests, seed=SEED, cache="any", note="nothing caches prefixes"
)


def run_with(attention):
    """The workload on Transformers with one kind of attention."""
    options = dict(dtype=run.dtype, device=device, max_model_len=run.profile.max_model_len)
    with TransformersEngine(run.profile.model, attention=attention, **options) as engine:
        return engine.run(workload, warmup=1)


records = {"eager attention": run_with("eager"), "SDPA": run_with("sdpa")}

# %% [markdown]
# The eager program's own tokens are the reference for quality, so its score is one by definition; what counts is the
# other's. A dozen tokens would show a broken kernel, and no finer difference.

# %%
outputs = {name: [trace.output_ids for trace in record.traces] for name, record in records.items()}
protocol = f"held against eager attention, {len(requests)} x {n_answer} tokens"
formula = models.kv_bytes(model.config, n_prompt + n_answer - 1, 1, run.dtype)
eager, fused = (
    run.card(
        make_card(
            name,
            record,
            [quality.greedy_agreement(outputs["eager attention"], outputs[name], protocol)],
            kv_formula=formula,
            seed=SEED,
        )
    )
    for name, record in records.items()
)
run.cards()

# %%
table_bytes = memory.tensor_bytes([torch.empty(shape.n_q_heads, n_prompt, n_prompt, dtype=dtype, device="meta")])
print(f"one layer's table of scores in eager attention: {show_bytes(table_bytes)}")
eager.compare(fused).frame()

# %% [markdown]
# Look at the TTFT and at *other* memory, where the tables lived: are they large enough at this length to show in the
# peak? If the TPOT falls as well, it is not for the table's sake: a decode step has a table of one row (see the
# control). Transformers' eager code also copies keys and values once for each *query* head, as our dense reference
# does, and a fused kernel need not. One variable was changed, and two things changed with it.

# %% [markdown]
# ## A control that should not help
#
# A decode step has one query. Its table of scores is one row, beside keys and values that are 128 times as large (for
# a head of 64). So against attention in three plain operations, a flash kernel cannot save memory worth the name. If it
# did, our measurement would be wrong. Time is another matter, and is only printed: kernels differ in more than traffic.


# %%
def plain(q, k, v):
    """Standard attention in three operations, no mask."""
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1) @ v


q = inputs(1, context, batch=many)
one_query = {name: lambda name=name: sdpa(name, *q, causal=False) for name in BACKENDS}
one_query["three operations"] = lambda: plain(*q)
kv_size, held = memory.tensor_bytes(q[1:]), {}
for name, call in one_query.items():
    call()
    with memory.measure_device_peak(device) as peak:
        call()
    held[name] = peak.grown / kv_size
assert abs(held["three operations"] - held["flash"]) < 0.05
decode_ratio = time_pairs(one_query["three operations"], one_query["flash"])[0]
Markdown(
    f"Peak memory of a decode step, as a share of the keys' and values' {show_bytes(kv_size)}: "
    + ", ".join(f"{name} **{share:.1%}**" for name, share in held.items())
    + f". Time, three operations over flash: {decode_ratio}."
)

# %% [markdown]
# The math kernel may stand out, and not because of its table: it multiplies queries *and keys* by the root of the scale
# before their product, which is safer in 16 bits, and so holds a copy of the keys. A comparison is only as good as its
# baseline.

# %% [markdown]
# ## Where it loses
#
# 1. **A wide head on a small fast memory** moves more words than the table would (the table by width, above).
# 2. **Few tokens.** A small table saves no traffic worth the name. The clock may still prefer flash: the math kernel starts
#    several operations, and for a handful of tokens starting them is most of the time. That gain is fusion's, not
#    FlashAttention's. Compare these lengths with 256 and 512 above:


# %%
def short_row(n):
    q = inputs(n)
    ratio = time_pairs(lambda: sdpa("math", *q), lambda: sdpa("flash", *q), repeats=20)[0]
    return {"N": n, "math / flash, time": str(ratio), "": "undecided" if ratio.undecided else ""}


pd.DataFrame([short_row(n) for n in (4, 16, 64)])

# %% [markdown]
# 3. **Whoever needs the weights.** They are never in memory. Methods that look at attention weights (notebooks 05 and 06)
#    must compute them again, or use the log-sum-exp.
# 4. **The backward pass does more arithmetic.** Training only: the scores were not kept, so they are computed again from
#    $Q$, $K$ and the log-sum-exp. That is the price the first sentence of this notebook spoke of. We count the matrix
#    products as PyTorch starts them, forward and backward, for autograd and for what FlashAttention keeps. (The backward
#    pass below still fills its table; exercise 04.4 is the tiled one.)


# %% tags=["algorithm"]
def backward_from_lse(q, k, v, out, lse, d_out):
    """Gradients of one head, no mask, from what FlashAttention keeps: the output and the log-sum-exp."""
    scale = q.shape[1] ** -0.5
    weights = (scale * q @ k.T - lse[:, None]).exp()  # the scores, once more
    d_scores = weights * (d_out @ v.T - (d_out * out).sum(dim=1, keepdim=True))
    return scale * d_scores @ k, scale * d_scores.T @ q, weights.T @ d_out


# %%
from torch.utils.flop_counter import FlopCounterMode


def standard_both(q, k, v, d_out):
    with torch.enable_grad():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(plain(*leaves), leaves, d_out)


def flash_both(q, k, v, d_out):
    out, lse = flash_forward(q[None], k[None], v[None], causal=False)
    return backward_from_lse(q, k, v, out[0], lse[0], d_out)


# %%
n, d = 256, 32
given, gradients, products = [torch.randn(n, d) for _ in range(4)], {}, {}
for name, program in (("standard", standard_both), ("flash_1", flash_both)):
    with FlopCounterMode(display=False) as counter:
        gradients[name] = program(*given)
    products[name] = counter.get_total_flops() / (2 * n * n * d)  # one product of N x N x d
assert all((a - b).abs().max() < 1e-4 for a, b in zip(*gradients.values(), strict=True))
print("matrix products, forward and backward:", {NAMES[name]: f"{count:g}" for name, count in products.items()})

# %% [markdown]
# ## Claims
#
# What the papers say, in their own figures, and what we can say after this run. A speed-up measured on a GPU is never
# "reproduced" on a CPU; counts, bytes and identities are the same everywhere.

# %% tags=["claim"]
on_gpu = device == "cuda"
gpu_only = "" if on_gpu else "a GPU's speed; this machine's CPU time is no evidence for it"
run.claim(
    "flashattention-exact",
    bool(ours_fp32 < BOUNDS[torch.float32] and ours_fp32 < 10 * math_fp32) and not errors["same bits"].all(),
    f"largest error against fp64 {ours_fp32:.1e} in fp32 (the math kernel's: {math_fp32:.1e}); bits differ",
    reason="the same function up to rounding; not bit for bit",
)
fitted = fits.set_index(["algorithm", "exponent of"])
run.claim(
    "flashattention-io",
    bool(fits["within"].all() and (fits["+-"] < 0.05).all() and standard_over_flash > 1),
    "exponents of N, d, M: "
    + ", ".join(f"{fitted['exponent']['flash_1', what]:.3f} +- {fitted['+-']['flash_1', what]:.3f}" for what in along)
    + f"; {standard_over_flash:.1f}x fewer words at N=4096",
)
octaves = math.log(lengths[-1] / lengths[0])
growth = {
    name: math.log(peaks[name].iloc[-1] / peaks[name].iloc[0]) / octaves for name in ("math", "flash", "math / flash")
}
run.claim(
    "flashattention-memory",
    growth["math"] > 1.7 and growth["flash"] < 1.25 and growth["math / flash"] > 0.75,
    f"exponents of N: math {growth['math']:.2f}, flash {growth['flash']:.2f}, ratio {growth['math / flash']:.2f}, from "
    f"{peaks['math / flash'].iloc[0]:.0f}x at {lengths[0]} to {peaks['math / flash'].iloc[-1]:.0f}x at {lengths[-1]} tokens",
)
fewer_words = words_moved("standard", 1024, 64, 48 * 1024) / words_moved("flash_1", 1024, 64, 48 * 1024)
run.claim(
    "flashattention-more-arithmetic",
    products["flash_1"] > products["standard"] and fewer_words > 1,
    f"{products['flash_1']:g} matrix products against {products['standard']:g}, forward and backward: "
    f"{products['flash_1'] / products['standard']:.2f}x (the paper's FLOP: {75.2 / 66.6:.2f}x); forward at N=1024, d=64: "
    f"{fewer_words:.1f}x fewer words",
)
speed = run.claim(
    "flashattention-speed",
    bool(times["low"].iloc[-1] > 1) if on_gpu else None,
    f"this machine: {times['ratio'].iloc[-1]:.1f}x at {lengths[-1]} tokens (SDPA, math over flash)",
    reason=gpu_only,
)
# %% tags=["claim"]
by_output = operations["divisions an output element"]
run.claim(
    "flashattention-2-work",
    bool(more_units == 64 and by_output["flash_2"] == 1 and by_output["flash_1"] > 1),
    f"{more_units:g}x the units at 4096 tokens (by formula); with equal blocks, divisions an output element: "
    f"{by_output['flash_1']:g}, then {by_output['flash_2']:g}",
)
run.claim("flashattention-2-speed", None, "-", reason="needs both versions' kernels on an A100")
run.claim(
    "flashattention-3-fp8",
    fp8_gain.low > 1 and synthetic_gain.low > 1,
    f"one scale over both: {fp8_gain} on {fp8_gain.n} layers of real q, k, v; {synthetic_gain.ratio:.2f}x on synthetic outliers",
    reason="emulated; the size of the gain depends on the inputs",
)
run.claim("flashattention-3-speed", None, "-", reason="needs a Hopper GPU")
unit_counts = decode_units["without splits"], decode_units["with splits of 256 tokens"]
run.claim(
    "flash-decoding-splits",
    max(split_errors.values()) < 1e-6
    and bool(unit_counts[1].is_monotonic_increasing and unit_counts[1].is_unique)
    and unit_counts[0].nunique() == 1,
    f"error {max(split_errors.values()):.0e} for 1 to 1000 splits; units from {unit_counts[1].iloc[0]} to "
    f"{unit_counts[1].iloc[-1]}, without splits {unit_counts[0].iloc[0]}",
)
run.claim(
    "flashinfer-paged-ragged",
    all(error <= allowed for error in paged_errors.values()) if paged_errors else None,
    "error "
    + ", ".join(f"{e:.0e}" for e in paged_errors.values())
    + f" (bound {allowed:.0e}) against dense attention, 1 and 4 splits; the kernel of this notebook, not FlashInfer's",
    reason=not_here,
)
run.claim(
    "flashinfer-cascade",
    prefix_reads == [n_seqs, 1] and cascade_error < 1e-5,
    f"counted in this notebook's program: prefix read {prefix_reads[1]:g} time instead of {prefix_reads[0]:g}; "
    f"outputs differ by {cascade_error:.0e}",
)
run.claim("flashinfer-itl", None, "-", reason="needs a GPU server with two attention backends")
run.claims()

# %% [markdown]
# And your predictions:

# %%
guesses = run.predictions()
run.figure(plots.predictions(guesses, title="Predicted over measured"), "predictions", guesses)

# %%
guesses

# %% [markdown]
# ## Exercises
#
# Write into the cell that raises `NotImplementedError` and run it. Then **skip the collapsed cell** after the hint: it holds a
# solution and, once run, replaces your function. Then run the check. (*Run All* runs the solutions too, so its PASS says
# nothing about you.)
#
# ### 04.1 Two libraries, one merge (easy)
#
# One half of the tokens was attended to by FlashAttention, whose log-sum-exp is natural; the other by FlashInfer, whose
# log-sum-exp has base 2. Merge them. (Libraries also disagree about rows that saw nothing; here both say $-\infty$. See the
# pitfalls.)


# %% tags=["exercise"]
def merge_mixed(out_a, lse_a, out_b, lse_b_base2):
    """Merge states over disjoint tokens: outputs ``[n_rows, d]``, log-sum-exps ``[n_rows]``, the second to base 2.

    Return the output and its natural log-sum-exp. A log-sum-exp may be minus infinity (nothing was seen; the output is
    then zeros), in one part or in both, and scores may be too large for a plain ``exp``.
    """
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>log2(x) = ln(x) / ln(2). Subtract the larger of the two before any exponential, but
# not where it is minus infinity.</details>


# %% tags=["solution"]
def merge_mixed(out_a, lse_a, out_b, lse_b_base2):
    lse_b = lse_b_base2 * math.log(2)
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = ((part - lse).exp().masked_fill(part == -math.inf, 0.0)[:, None] for part in (lse_a, lse_b))
    return weight_a * out_a + weight_b * out_b, lse


# %% tags=["check"]
run.check("04.1", merge_mixed)

# %% [markdown]
# ### 04.2 Find the bug (medium)
#
# This function takes any mask. Its author tested it on a hundred causal masks: no difference from dense attention. In
# production, with sliding windows and with prompts padded on the left, outputs turned into NaN. Return a mended version,
# and say why the author's test could not see it.


# %% tags=["exercise"]
def buggy_masked_attention(q, k, v, mask, block_k=16):
    """Tiled attention of one head; `mask` is bool ``[n_q, n_k]``, True where a query may look. Output ``[n_q, d]``."""
    highest = torch.full((len(q), 1), -math.inf)
    total, mixed = torch.zeros(len(q), 1), torch.zeros_like(q)
    for columns in blocks(len(k), block_k):
        scores = (q @ k[columns].T / q.shape[1] ** 0.5).masked_fill(~mask[:, columns], -math.inf)
        new_highest = torch.maximum(highest, scores.amax(dim=1, keepdim=True))
        weights, shrink = (scores - new_highest).exp(), (highest - new_highest).exp()
        total = total * shrink + weights.sum(dim=1, keepdim=True)
        mixed = mixed * shrink + weights @ v[columns]
        highest = new_highest
    return mixed / total


def mended_masked_attention(q, k, v, mask, block_k=16):
    """Your version of buggy_masked_attention; a row that sees nothing gives zeros."""
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>In a causal mask every query sees key 0. What is the running maximum of a row whose first
# tile is masked whole? There are two places where the row can become NaN.</details>


# %% tags=["solution"]
def mended_masked_attention(q, k, v, mask, block_k=16):
    # A row whose tiles so far were masked whole has a maximum of minus infinity, and (-inf) - (-inf) is NaN, which no later tile
    # removes. Under a causal mask every row sees key 0 in its first tile, so the author's test never came here.
    highest = torch.full((len(q), 1), -math.inf)
    total, mixed = torch.zeros(len(q), 1), torch.zeros_like(q)
    for columns in blocks(len(k), block_k):
        scores = (q @ k[columns].T / q.shape[1] ** 0.5).masked_fill(~mask[:, columns], -math.inf)
        new_highest = torch.maximum(highest, scores.amax(dim=1, keepdim=True))
        base = new_highest.masked_fill(new_highest == -math.inf, 0.0)
        weights, shrink = (scores - base).exp(), (highest - base).exp()
        total = total * shrink + weights.sum(dim=1, keepdim=True)
        mixed = mixed * shrink + weights @ v[columns]
        highest = new_highest
    return mixed / torch.where(total > 0, total, 1.0)


# %% tags=["check"]
run.check("04.2", mended_masked_attention)

# %% [markdown]
# ### 04.3 Words under a causal mask (medium)
#
# FlashAttention-2's loops skip tiles that no query of the block can see. Count the words that cross then. How much of
# the saving of one half is left when blocks are large?


# %% tags=["exercise"]
def causal_words(n, d, block_q, block_k):
    """Words moved for one head of n tokens: q read once, output and log-sum-exp written once, and for each block of queries
    the keys and values of every tile in which some query of the block sees some key. The last blocks may be ragged.
    """
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>For the block of queries that ends before position stop, the tiles reach up to
# ceil(stop / block_k) * block_k, but never beyond n.</details>


# %% tags=["solution"]
def causal_words(n, d, block_q, block_k):
    words = 2 * n * d + n
    for top in range(0, n, block_q):
        stop = min(top + block_q, n)
        words += 2 * d * min(n, -(-stop // block_k) * block_k)
    return words


# %% tags=["check"]
run.check("04.3", causal_words)

# %% [markdown]
# ### 04.4 The backward pass (hard)
#
# The forward pass kept $O$ and $L$ only. With $P_{ij} = e^{s_{ij} - L_i}$ computed again tile by tile, and
# $D_i = \sum_c dO_{ic} O_{ic}$,
#
# $$ dV = P^\top dO, \quad dS_{ij} = P_{ij} \, \big( (dO\, V^\top)_{ij} - D_i \big), $$
#
# $$ dQ = \tfrac{1}{\sqrt d}\, dS\, K, \quad dK = \tfrac{1}{\sqrt d}\, dS^\top Q . $$
#
# ($D_i$ is taken from every element of row $i$, and $s_{ij} = q_i \cdot k_j / \sqrt d$.) Write it without ever holding a full
# table: the checker looks at the size of every tensor that you make in PyTorch.


# %% tags=["exercise"]
def flash_backward(q, k, v, out, lse, d_out, causal, block=32):
    """Gradients ``(dq, dk, dv)`` of one head; all tensors ``[n, d]``, lse ``[n]``. No tensor may hold n * n elements."""
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>Loop over blocks of keys outside and blocks of queries inside. dk and dv of a block of
# keys are then complete when the inner loop ends; dq is added to. Under a causal mask P is zero where the key stands
# after the query.</details>


# %% tags=["solution"]
def flash_backward(q, k, v, out, lse, d_out, causal, block=32):
    scale, n = q.shape[1] ** -0.5, len(q)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    mean = (d_out * out).sum(dim=1, keepdim=True)
    for columns in blocks(n, block):
        for rows in blocks(n, block):
            weights = (scale * q[rows] @ k[columns].T - lse[rows, None]).exp()
            if causal:
                places = torch.arange(n)
                weights = weights.masked_fill(places[None, columns] > places[rows, None], 0.0)
            d_scores = weights * (d_out[rows] @ v[columns].T - mean[rows])
            dv[columns] += weights.T @ d_out[rows]
            dk[columns] += scale * d_scores.T @ q[rows]
            dq[rows] += scale * d_scores @ k[columns]
    return dq, dk, dv


# %% tags=["check"]
run.check("04.4", flash_backward)

# %% [markdown]
# ### 04.5 How many splits? (research)
#
# More splits fill more processors, and each one adds to the merge. Write the rule for a simple cost model. The open
# part: measure `merge_cost` on a machine of yours with many cores or a GPU (`triton_decode` above takes `n_splits`),
# and look for contexts and batches where your rule and the clock disagree. What does it miss when lengths in a batch
# differ?


# %% tags=["exercise"]
def best_splits(n_tokens, block_n, n_units, n_processors, merge_cost):
    """The number of splits with the least modelled time; of equal times the smallest number.

    A split takes whole blocks of `block_n` tokens, one unit of time a block; there may be at most as many splits as blocks.
    There are `n_units` times as many pieces of work as splits; `n_processors` of them run at once, in waves, and each wave
    takes as long as its longest split. With more than one split, the merge adds `merge_cost` for each split.
    """
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>Waves are a rounded-up quotient; so are the blocks of the longest split. Try every
# number, it is cheap.</details>


# %% tags=["solution"]
def best_splits(n_tokens, block_n, n_units, n_processors, merge_cost):
    n_blocks = -(-n_tokens // block_n)

    def modelled(n_splits):
        waves = -(-n_units * n_splits // n_processors)
        return waves * -(-n_blocks // n_splits) + (merge_cost * n_splits if n_splits > 1 else 0)

    return min(range(1, n_blocks + 1), key=lambda n_splits: (modelled(n_splits), n_splits))


# %% tags=["check"]
run.check("04.5", best_splits)

# %% [markdown]
# ## Pitfalls and further reading
#
# - **Where do the queries stand?** FlashAttention since 2.1 puts them at the end of the keys, PyTorch's `is_causal` at
#   the beginning. A square test sees no difference; a decode step then sees one key.
# - **Rows that see nothing** give zeros in good kernels, and NaN elsewhere. Their log-sum-exp is $-\infty$ here,
#   $+\infty$ from an unsplit call of FlashAttention-2, and one or the other from FlashAttention-3, by its version. vLLM turns
#   $+\infty$ round before it merges. Test windows and padding.
# - **Natural or base 2?** FlashAttention and FlashInfer disagree about the log-sum-exp.
# - **"Bit for bit" is not a test.** Compare with fp64, with a bound for each dtype.
# - **An interpreter is not a GPU.** Triton 3.9's multiplied bf16 wrongly here (hence `UPCAST`), and it cannot show a race, a
#   bank conflict or a time. Set `TRITON_INTERPRET` before Triton is imported (other libraries import it, too), and take
#   it back before anything else starts.
# - **Import is not ability.** FlashAttention-2 needs sm80, whatever is installed; a T4 falls back.
#
# Further reading:
#
# - Dao et al., [FlashAttention](https://arxiv.org/abs/2205.14135), 2022: theorem 2 and its proof in appendix C.
# - Dao, [FlashAttention-2](https://arxiv.org/abs/2307.08691), 2023: section 3.1 for the loops, 3.3 for warps.
# - Shah et al., [FlashAttention-3](https://arxiv.org/abs/2407.08608), 2024: section 3.3 and table 3 for FP8.
# - Dao et al., [Flash-Decoding](https://pytorch.org/blog/flash-decoding/), 2023: one page, with pictures.
# - Ye et al., [FlashInfer](https://arxiv.org/abs/2501.01005), 2025, and its post on
#   [cascade inference](https://flashinfer.ai/2024/02/02/cascade-inference.html).
# - Triton's [fused attention tutorial](https://triton-lang.org/main/getting-started/tutorials/06-fused-attention.html).

# %%
run.finish()
