# %% [markdown]
# # 00 · Six ledgers
#
# **Somebody says that their system is faster. Faster at what, for whom, at which quality, and compared with what?**
#
# Almost every paper in this course opens with a factor: 2x, 7x, 30x. Each factor is one cell of a much larger table. This
# notebook builds that table. We follow one request through a real engine, keep six ledgers on it, and learn when two sets of
# ledgers may be compared and when they must not be. Everything after this notebook uses what is set up here.
#
# | source | year, venue | maturity | what we take from it |
# | --- | --- | --- | --- |
# | Williams et al., *Roofline* | 2009, CACM | peer-reviewed | two ceilings that bound every kernel |
# | `vllm bench serve` | 2023 to now | maintained code | its definitions of TTFT, TPOT and ITL |
# | GuideLLM | 2024 to now | maintained code | a TPOT that means something else |
# | GenAI-Perf | 2024 to 2025 | code, succeeded by AIPerf | an ITL that means something else again |
# | Tene, *How NOT to Measure Latency*; vLLM issue 54101 | 2013 talk; issue | talk and bug report | coordinated omission |
# | Zhong et al., *DistServe* | 2024, OSDI | peer-reviewed | goodput: what is served within every limit, not what is served |

# %% tags=["parameters"]
PROFILE = "auto"
SEED = 0
OUT = None

# %%
import helpers

run = helpers.start("00_six_ledgers", PROFILE, SEED, OUT)
run

# %% [markdown]
# ## What fails without it
#
# Here is a server whose schedule we know, because we wrote it: the first token after 0.2 s, then a chunk of three tokens
# every 60 ms. It is scripted, but the stream is real: HTTP on this machine, read by the course's own client.

# %%
import functools
import time

import pandas as pd
import torch
from IPython.display import Markdown

from helpers import corpora, kv_adapter, memory, models, plots, quality, stats, workload
from helpers.engines.fake_server import FakeServer, StreamScript
from helpers.engines.openai_client import OpenAIEngine
from helpers.errors import MeasurementRefused
from helpers.hardware import best_seconds, measure_roofline, synchronize
from helpers.ledgers import SLO, make_card, show_seconds

# %%
script = StreamScript(ttft=0.2, gap=0.06, n_tokens=31, tokens_per_chunk=(1, 3), role_at=0.05)
with FakeServer(script) as server, OpenAIEngine(server.url, "fake") as client:
    scripted = client.run(workload.single(range(100, 116), 31, name="scripted"), warmup=1).traces[0]
[(round(chunk.time - scripted.sent, 3), chunk.n_tokens) for chunk in scripted.chunks][:5]

# %% [markdown]
# Each pair is a chunk: seconds since sending, and the tokens in it. The first holds none; it only says that an answer is on
# its way. Now ask the most ordinary question there is: how long does a token take?

# %%
arrivals = [chunk.time for chunk in scripted.chunks]
answers = {
    "gap between all chunks": (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1),
    "gap between chunks that hold tokens": sum(scripted.chunk_gaps) / len(scripted.chunk_gaps),
    "first token to last, over the tokens in between": scripted.tpot,
    "sending to last token, over all tokens": (scripted.last - scripted.sent) / scripted.n,
}
pd.Series({name: show_seconds(value) for name, value in answers.items()}, name="seconds a token").to_frame()

# %% [markdown]
# One stream, four honest calculations. All four are printed by some tool under the name "inter-token latency" or "time per
# output token". A paper that takes its own number from one row and its rival's from another can claim almost anything, and
# nobody has lied.

# %% [markdown]
# ## Predict
#
# Write your own numbers before you go on. The defaults are guesses, and some of them are poor.

# %% tags=["predict"]
run.predict(
    forward_passes_for_the_longest_answer=5,  # times the model runs for an answer of `max_tokens` tokens, prompt included
    batch_1_decode_share_of_peak_flops=0.5,  # FLOP/s of decode at batch 1, over this machine's measured peak
    largest_batch_over_batch_1_step_time=6,  # time of a decode step at the profile's largest batch, over batch 1
    guidellm_over_vllm_tpot=1.05,  # the two tools' TPOT on one and the same vLLM request
    p99_of_20_samples_spread=1.3,  # 95th over 5th percentile of the "p99" that 20 samples give
    open_over_closed_ttft=1.5,  # median TTFT from schedule at three times the rate that can be served, over a closed loop's
    vllm_over_transformers_tokens_per_second=3,  # same model, same requests, four at a time
)

# %% [markdown]
# ## The idea
#
# A request has a life. It is **due** when the workload says so, it is **sent**, it **waits**, its prompt is read in one go
# (**prefill**), and then one forward pass after another makes one token each (**decode**). Write $t_\text{due}$,
# $t_\text{sent}$, $t_\text{first}$, $t_\text{last}$ for the moments, $n$ for the output tokens and $n_1$ for those in the
# first chunk.
#
# $$\text{TTFT} = t_\text{first} - t_\text{sent}\ \ (\text{and}\ t_\text{first} - t_\text{due}), \qquad
# \text{TPOT} = \frac{t_\text{last} - t_\text{first}}{n - n_1}, \qquad \text{E2E} = t_\text{last} - t_\text{due}.$$
#
# Six ledgers, and each answers one question:
#
# | ledger | question |
# | --- | --- |
# | latency | how long does *one user* wait, for the first token and for each later one? |
# | throughput | how much work does *one device* finish, and how much of it in time (goodput)? |
# | memory | where do the bytes go: weights, KV cache, workspace? |
# | quality | are the answers still right, and by which protocol do we know? |
# | implementation | what ran, in which version, on what? |
# | workload | what was asked, and when? |
#
# The first three are what papers advertise. They mean nothing without the last three: a faster wrong answer is no result, and
# a faster answer to another question is no comparison.

# %% [markdown]
# ## From scratch
#
# ### Three tools, one trace
#
# The formulas of three load generators, written out over a list of `(time, n_tokens)` chunks that all hold tokens. For
# GenAI-Perf there are two: its README describes one value for each response, while its code reports another headline and
# keeps the described one for a plot.

# %% tags=["algorithm"]
from itertools import pairwise


def vllm_bench(sent, chunks):
    """vllm bench serve: ITL is the gap between chunks, however many tokens they hold; TPOT leaves one token out."""
    n, first, last = sum(k for _, k in chunks), chunks[0][0], chunks[-1][0]
    ttft, latency = first - sent, last - sent
    return {
        "TTFT": ttft,
        "TPOT": (latency - ttft) / (n - 1) if n > 1 else None,
        "ITL": [b - a for (a, _), (b, _) in pairwise(chunks)],
    }


def guidellm(sent, chunks):
    """GuideLLM: ITL is a mean over n - 1; TPOT starts at sending, so that the first token is in it."""
    n, first, last = sum(k for _, k in chunks), chunks[0][0], chunks[-1][0]
    return {
        "TTFT": first - sent,
        "TPOT": (last - sent) / n,
        "ITL": [(last - first) / (n - 1)] if n > 1 else [],
    }


def genai_perf(sent, chunks):
    """GenAI-Perf as its README has it (ITL: one value for each response) and as its code reports it (TPOT's formula)."""
    n, first, last = sum(k for _, k in chunks), chunks[0][0], chunks[-1][0]
    return {
        "TTFT": first - sent,
        "ITL": [(b - a) / k for (a, _), (b, k) in pairwise(chunks)],
        "ITL in code": (last - first) / (n - 1) if n > 1 else None,
    }


# %% [markdown]
# Four streams: one token in each chunk; three in each later chunk, as speculative decoding or a slow reader produce; four
# tokens already in the first; and chunks of unequal size.


# %%
def regular(sizes, gap=0.06, ttft=0.2):
    """(seconds since sending, tokens) of chunks that come `gap` seconds apart."""
    return [(ttft + index * gap, size) for index, size in enumerate(sizes)]


streams = {
    "31 chunks of 1": regular([1] * 31),
    "1, then 10 of 3": regular([1] + [3] * 10),
    "4, then 9 of 3": regular([4] + [3] * 9),
    "1, then 1 to 9 in turn": regular([1, 1, 9, 2, 8, 3, 7]),
}


# %%
def mean(values):
    return sum(values) / len(values)


tools = pd.DataFrame(
    [
        {
            "stream": name,
            "vLLM TPOT": 1e3 * vllm_bench(0, c)["TPOT"],
            "vLLM ITL": 1e3 * mean(vllm_bench(0, c)["ITL"]),
            "GuideLLM TPOT": 1e3 * guidellm(0, c)["TPOT"],
            "GuideLLM ITL": 1e3 * guidellm(0, c)["ITL"][0],
            "GenAI-Perf ITL (README)": 1e3 * mean(genai_perf(0, c)["ITL"]),
            "GenAI-Perf ITL (code)": 1e3 * genai_perf(0, c)["ITL in code"],
            "this course's TPOT": 1e3 * (c[-1][0] - c[0][0]) / (sum(k for _, k in c) - c[0][1]),
        }
        for name, c in streams.items()
    ]
).set_index("stream")
tools.round(2)

# %% [markdown]
# Milliseconds. Only in the first row do the decode columns agree, and even there GuideLLM's TPOT stands apart, because it
# contains the prefill. In the third row everything that divides by $n - 1$ spreads the time over tokens that were there
# when the clock started; the last column does not. In the fourth, a mean over responses is not a mean over tokens.
#
# The differences are exact, so they can be converted. With $m$ chunks that hold tokens:


# %% tags=["algorithm"]
def relations(sent, chunks):
    """What turns one tool's number into another's: each identity as (left, right)."""
    n, m, n1 = sum(k for _, k in chunks), len(chunks), chunks[0][1]
    v, g, p = vllm_bench(sent, chunks), guidellm(sent, chunks), genai_perf(sent, chunks)
    later = [k for _, k in chunks[1:]]
    weighted = sum(k * itl for k, itl in zip(later, p["ITL"], strict=True)) / sum(later)
    return {
        "GuideLLM TPOT - vLLM TPOT = (TTFT - vLLM TPOT) / n": (g["TPOT"] - v["TPOT"], (v["TTFT"] - v["TPOT"]) / n),
        "vLLM ITL / vLLM TPOT = (n - 1) / (m - 1)": (sum(v["ITL"]) / (m - 1) / v["TPOT"], (n - 1) / (m - 1)),
        "token-weighted GenAI-Perf ITL = our TPOT": (weighted, v["TPOT"] * (n - 1) / (n - n1)),
        "GenAI-Perf ITL in code = GuideLLM ITL": (p["ITL in code"], g["ITL"][0]),
    }


# %%
identities = pd.DataFrame(
    {
        name: {law: abs(left - right) for law, (left, right) in relations(0.0, chunks).items()}
        for name, chunks in streams.items()
    }
)
assert identities.to_numpy().max() < 1e-12
identities.map("{:.0e}".format)

# %% [markdown]
# The table holds the disagreement between the two sides of each identity. So a number from one tool can be turned
# into another's, *if* TTFT, $n$ and the chunk sizes were kept. If only the mean was published, it cannot.

# %% [markdown]
# ### Why a hundred tokens are a hundred iterations
#
# Count how often the model itself is called while it writes. A hook on the model is enough.

# %%
device = run.profile.device
model = models.load_model(run.profile.model, dtype=run.dtype, device=device)
tokenizer = models.load_tokenizer(run.profile.model)
prompt = torch.tensor([tokenizer("The harbour was", add_special_tokens=False)["input_ids"]], device=device)
shapes = []
hook = model.register_forward_pre_hook(
    lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
)


def generate_seconds(n_tokens):
    """Seconds of one greedy answer of exactly `n_tokens` tokens, and the shapes that went through the model."""
    shapes.clear()
    synchronize(device)
    start = time.perf_counter()
    model.generate(prompt, max_new_tokens=n_tokens, min_new_tokens=n_tokens, do_sample=False, pad_token_id=0)
    synchronize(device)
    return time.perf_counter() - start, list(shapes)


# %%
generate_seconds(2)  # warm-up
lengths = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n <= run.profile.max_tokens]
timed = {n: generate_seconds(n) for n in lengths}
hook.remove()
passes = run.measured("forward_passes_for_the_longest_answer", len(timed[lengths[-1]][1]), "passes")
Markdown(
    f"{lengths[-1]} tokens took **{passes} forward passes**. The first three had input shapes {timed[lengths[-1]][1][:3]}."
)

# %% [markdown]
# The first pass reads the whole prompt and yields the first token. Every later pass reads exactly one token, the one just
# written, and yields the next. Nothing can be started early, because its input does not exist yet. If that is so, time
# against length is a line: its slope is the price of a token, and where it meets $n = 1$ is the prefill. A hundred tokens
# then take the prefill and 99 slopes, however fast the machine.

# %%
from numpy.polynomial import Polynomial

seconds = [timed[n][0] for n in lengths]
line = Polynomial.fit(lengths, seconds, 1).convert()
fit = pd.DataFrame(
    {
        "tokens": lengths * 2,
        "seconds": seconds + [line(n) for n in lengths],
        "what": ["measured"] * len(lengths) + ["least-squares line"] * len(lengths),
    }
)
run.measured("slope_of_time_in_tokens", line.coef[1], "s/token")
run.figure(
    plots.lines(
        fit, x="tokens", y="seconds", hue="what", title="Time of one answer", xlabel="output tokens", ylabel="seconds"
    ),
    "line",
    fit,
)

# %% [markdown]
# Every idea that makes a single stream faster must bend this line: cheaper steps (quantization, a shorter cache), or more
# than one token a step (speculation). Every idea that makes a *server* faster puts more sequences into each step.

# %% [markdown]
# ### How fast could a step be? The roofline
#
# A step does arithmetic and it moves bytes. If the machine does at most $P$ FLOP/s and moves at most $B$ bytes/s, then work
# with $I$ FLOPs for each byte moved runs at no more than $\min(P, B \cdot I)$. The intensity at which the two ceilings meet,
# $P/B$, is the ridge. Both counts come from the model's shape. A product with a weight costs two FLOPs for each weight and
# token; attention costs $4\, d_\text{head}$ for each query head, layer and pair of tokens. Bytes are the weights once, plus
# the KV cache read and written.


# %% tags=["algorithm"]
def forward_flops(n_body, n_head, n_layers, n_q_heads, head_dim, batch, n_new, n_past=0):
    """FLOPs of a forward pass over `n_new` tokens after `n_past` cached ones, logits for the last token only.

    n_body, n_head: weights in the layers' matrices and in the output head. Masked pairs are counted as the reference
    counter does; norms, rotations and softmax are left out.
    """
    linear = 2 * batch * (n_body * n_new + n_head)
    attention = 4 * batch * n_layers * n_q_heads * head_dim * n_new * (n_past + n_new)
    return linear + attention


def forward_bytes(n_body, n_head, weight_bytes, kv_bytes_per_token, batch, n_new, n_past=0):
    """Bytes that a pass must move at the least: every weight once, the past cache read, the new cache written.

    Activations are left out: they are small beside the weights and may stay in on-chip caches.
    """
    return (n_body + n_head) * weight_bytes + batch * (n_past + n_new) * kv_bytes_per_token


# %% [markdown]
# FLOPs first, and at once held against PyTorch's own counter. Its counter does not see inside the fused attention kernel of a
# CPU, so for this check the model runs with plain attention.

# %%
from torch.utils.flop_counter import FlopCounterMode

shape = models.kv_shape(model.config)
n_head = model.lm_head.weight.numel()
n_body = sum(p.numel() for name, p in model.model.named_parameters() if p.dim() == 2 and "embed" not in name)
counts = (n_body, n_head, shape.n_layers, shape.n_q_heads, shape.head_dim)
weight_size = torch.finfo(model.dtype).bits // 8
kv_token = models.kv_bytes(model.config, dtype=run.dtype)
token = torch.full((1, 1), 100, device=device)


def step(batch, n_new, cache=None):
    return model(token.expand(batch, n_new), past_key_values=cache, use_cache=cache is not None, logits_to_keep=1)


def prefilled(batch, n_past):
    """A cache that holds `n_past` tokens of `batch` sequences."""
    cache = kv_adapter.new_cache("dynamic", model.config)
    step(batch, n_past, cache)
    return cache


# %%
model.set_attn_implementation("eager")
counted = {}
for batch, n_new, n_past in [(1, 48, 0), (2, 24, 0), (1, 1, 24), (4, 1, 24)]:
    cache = prefilled(batch, n_past) if n_past else None
    with FlopCounterMode(display=False) as counter:
        step(batch, n_new, cache)
    counted[f"batch {batch}, {n_new} new, {n_past} cached"] = (
        forward_flops(*counts, batch, n_new, n_past),
        counter.get_total_flops(),
    )
model.set_attn_implementation("sdpa")
flops_check = pd.DataFrame(counted, index=["formula", "torch.utils.flop_counter"]).T
assert (flops_check["formula"] == flops_check["torch.utils.flop_counter"]).all()
flops_check.map("{:,}".format)

# %% [markdown]
# Equal to the last operation. Now the two ceilings of this machine, measured: a large matrix product, and a STREAM-like triad
# over arrays that fit in no cache.

# %%
roof = measure_roofline(run.dtype, device)
Markdown(
    f"**{roof.flops_per_second / 1e9:.1f} GFLOP/s**, **{roof.bytes_per_second / 1e9:.1f} GB/s**, in {run.dtype}. "
    f"The ridge lies at **{roof.ridge:.1f} FLOP/byte**."
)


# %%
def decode_seconds(batch, n_past):
    cache = prefilled(batch, n_past)
    return best_seconds(lambda: step(batch, 1, cache), repeats=3, device=device)


def point(label, batch, n_new, n_past, seconds):
    flops = forward_flops(*counts, batch, n_new, n_past)
    moved = forward_bytes(n_body, n_head, weight_size, kv_token, batch, n_new, n_past)
    return {
        "label": label,
        "seconds": seconds,
        "intensity": flops / moved,
        "flops": flops / seconds,
        "share of peak": flops / seconds / roof.flops_per_second,
        "share of roof": flops / seconds / roof.attainable(flops / moved),
    }


# %%
past = run.profile.contexts[0] // 4
decodes = [point(f"decode, batch {b}", b, 1, past, decode_seconds(b, past)) for b in run.profile.batches]
prefills = [
    point(f"prefill, {n} tokens", 1, n, 0, best_seconds(lambda n=n: step(1, n), repeats=1, device=device))
    for n in run.profile.contexts[:3]
]
points = pd.DataFrame(decodes + prefills)
run.measured("batch_1_decode_share_of_peak_flops", decodes[0]["share of peak"])
run.measured("largest_batch_over_batch_1_step_time", decodes[-1]["seconds"] / decodes[0]["seconds"])
points.assign(ms=1e3 * points["seconds"]).drop(columns=["seconds", "flops"]).round(3)

# %%
run.figure(plots.roofline(roof, points, title="Prefill and decode under this machine's roof"), "roofline", points, n=3)

# %% [markdown]
# Decode at batch 1 does about half a FLOP for each byte in fp32 (one in 16 bits): it reads every weight to use it once. It
# lies far to the left of the ridge, and no amount of arithmetic would help it. A larger batch uses the same weights for more
# sequences and moves to the right. If bandwidth were all, its step would take no longer until it reaches the ridge; the
# column *ms* says what it takes on this machine. Prefill is the same trick within one sequence: its tokens share the weights.
# This one picture is the reason for batching (notebook 03), speculation (08) and weight quantization (10).
#
# Points lie under the roof, some far under. The roof is an upper bound, not a prediction: a model of many small layers also
# pays for each kernel it starts, and a small matrix does not fill the machine.
#
# ### Percentiles, and when not to print them
#
# Users remember the worst request. So papers print p99. With 20 requests, what is printed under that name? Below we draw
# samples from a latency distribution whose true p99 we know (a lognormal; **simulated**) and look at the p99 that each sample
# gives.

# %% tags=["algorithm"]
import numpy as np


def estimates(q, n, rng, repeats=2000, sigma=0.5):
    """What `repeats` samples of size `n` from a lognormal of median 1 give as their q-th percentile; shape [repeats]."""
    return np.percentile(rng.lognormal(0.0, sigma, size=(repeats, n)), q, axis=1)


def true_percentile(q, sigma=0.5):
    """The q-th percentile of that lognormal: exp(sigma * z_q)."""
    from statistics import NormalDist

    return float(np.exp(sigma * NormalDist().inv_cdf(q / 100)))


# %%
rng = np.random.default_rng(run.seed)
rows = []
for q in (50, 95, 99):
    for n in (10, 20, 50, 100, 300, 1000):
        low, middle, high = np.percentile(estimates(q, n, rng), [5, 50, 95]) / true_percentile(q)
        rows.append({"percentile": f"p{q}", "n": n, "low": low, "median": middle, "high": high})
spread = pd.DataFrame(rows)
twenty = spread[(spread["percentile"] == "p99") & (spread["n"] == 20)].iloc[0]
run.measured("p99_of_20_samples_spread", twenty["high"] / twenty["low"])
words = dict(title="Simulated: estimated over true percentile", xlabel="samples", ylabel="estimate / truth (5 to 95 %)")
figure = plots.lines(spread, x="n", y="median", hue="percentile", band=("low", "high"), log_x=True, **words)
run.figure(figure, "percentiles", spread, n=2000)

# %% [markdown]
# Two things go wrong at once for p99 of a small sample. The band is wide: a rerun would print another number. And its middle
# lies below one: with fewer than seventy samples, more often than not none lies beyond the true p99 ($0.99^{69}$ is one half),
# so the printed "p99" flatters. The course prints p95 from 20 samples on and p99 from 100, and says "n too small" below. At
# those sizes they are still rough, as the figure shows; the floor only keeps out the numbers that say nothing.

# %%
latencies = np.random.default_rng(run.seed).lognormal(-1, 0.5, size=120).tolist()
pd.DataFrame({f"n={n}": stats.summarize(latencies[:n]).model_dump() for n in (8, 24, 120)}).map(
    lambda value: "n too small" if value is None or value != value else f"{value:.3g}"
)

# %% [markdown]
# ### Coordinated omission
#
# A load generator often limits the requests in flight. When the server stalls, such a client stops sending. Its next request
# starts late, and its clock starts late too: client and server have agreed to leave the bad moments out. **Simulated** here:
# a server that answers in 40 ms, a request due every 50 ms, and one hiccup of two seconds.


# %% tags=["algorithm"]
def limited_client(due, service, limit):
    """A client that keeps at most `limit` requests in flight: when each of them was sent and done, seconds.

    due : when the schedule wants each request, ascending. service : how long the server works on each.
    """
    free = [0.0] * limit
    sent, done = [], []
    for want, seconds in zip(due, service, strict=True):
        slot = min(range(limit), key=free.__getitem__)
        sent.append(max(want, free[slot]))
        free[slot] = sent[-1] + seconds
        done.append(free[slot])
    return sent, done


# %%
due = [0.05 * i for i in range(200)]
service = [2.0 if i == 60 else 0.04 for i in range(200)]
sent, done = limited_client(due, service, limit=1)
omission = pd.DataFrame(
    {
        "due": due,
        "from sending": [b - a for a, b in zip(sent, done, strict=True)],
        "from schedule": [b - a for a, b in zip(due, done, strict=True)],
    }
)
summary = (
    omission[["from sending", "from schedule"]]
    .describe(percentiles=[0.5, 0.95, 0.99])
    .loc[["mean", "50%", "95%", "99%", "max"]]
)
summary.map(show_seconds)

# %%
long = omission.melt("due", var_name="clock", value_name="seconds")
figure = plots.lines(
    long,
    x="due",
    y="seconds",
    hue="clock",
    title="Simulated: one hiccup, two clocks",
    xlabel="request was due at (s)",
    ylabel="latency (s)",
)
run.figure(figure, "omission", long, n=len(due))

# %% [markdown]
# From sending, one request in two hundred was slow. From the schedule, everyone behind the hiccup waited: each request wins
# back 10 ms, so that the queue had not drained when the run ended. Both clocks are right about what they time. Only the
# second times what a user sees. The ledgers keep both, and goodput uses the second.

# %% [markdown]
# ## The real system
#
# Now vLLM: its scheduler and its kernels, in a child process. We run everything that we need from it at once, and read the
# records afterwards. `max_num_seqs=4` lets at most four sequences share a step, so that a fifth has to queue where we can see
# it.

# %%
from helpers.engines.transformers_engine import TransformersEngine
from helpers.engines.vllm_engine import VllmEngine

vocab_size = model.config.vocab_size
text = corpora.prose_ids(tokenizer, "evaluation", 20_000).tolist()
size = run.profile.max_model_len // 6
n_requests = run.profile.n_requests // 3
chat = workload.make_workload(
    "short-short",
    n_requests=n_requests,
    max_model_len=size,
    vocab_size=vocab_size,
    concurrency=4,
    text_ids=text,
    seed=run.seed,
)
life = workload.single(text[: size // 2], run.profile.max_tokens // 2, name="one-life")
del model
memory.release_free_memory()


# %%
def shifted(base, rate):
    """The same requests, due at `rate` requests a second whether or not the engine keeps up."""
    drawn = workload.poisson_arrivals(len(base.requests), rate, np.random.default_rng(run.seed))
    due = [t * (len(drawn) - 1) / (rate * drawn[-1]) for t in drawn]
    requests = tuple(r.model_copy(update={"arrival": t}) for r, t in zip(base.requests, due, strict=True))
    return base.model_copy(update={"name": f"{base.name}-open", "requests": requests, "kind": "open"})


# %% [markdown]
# One workload is declared *cold* and is not: it asks the same long question twice. We come back to it. The last run offers
# three times the rate that the closed loop achieved, whatever this machine is; its Poisson gaps are scaled so that the offered
# rate is exact. The first run warms up with four other prompts at once, since a batch of four uses shapes that a single
# request never meets; the runs after it find a warm engine.

# %%
repeated = workload.Workload(
    name="asked-twice",
    cache="cold",
    requests=tuple(
        workload.Request(request_id=f"ask-{i}", prompt_ids=tuple(text[1000 : 1000 + size // 2]), max_tokens=4)
        for i in range(2)
    ),
)
can_serve = run.hardware.capabilities["vllm"]
served = "vLLM" if can_serve.available else "Transformers, standing in for vLLM"
common = dict(dtype=run.dtype, max_model_len=2 * size)


def serving():
    """vLLM where it runs; elsewhere Transformers stands in, and the cells that need vLLM's scheduler say so."""
    if not can_serve.available:
        return TransformersEngine(run.profile.model, device=device, **common)
    pool = 96 if device == "cpu" else None  # blocks of 32 tokens; a GPU sizes its own pool
    options = dict(max_num_seqs=4, block_size=32, num_kv_blocks=pool, enable_prefix_caching=True)
    return VllmEngine(run.profile.model, **common, **options)


# %%
with serving() as engine:
    closed = engine.run(chat, warmup=4)
    twins = [engine.run(chat, warmup=0) for _ in range(2)]
    one = engine.run(life, warmup=0)
    asked_twice = engine.run(repeated, warmup=0)
    opened = engine.run(shifted(chat, 3 * make_card("closed", closed).throughput.requests_per_second), warmup=0)
Markdown(f"{engine.info.engine} {engine.info.version}, started in {engine.start_seconds:.0f} s")

# %% [markdown]
# ### One life
#
# First the request that had the engine to itself. The engine reports how long it queued; every step's end is a chunk.

# %%
trace = one.traces[0]
gaps = trace.chunk_gaps
stages = [
    ("due to sent", trace.send_lag, ""),
    ("queued in the engine", trace.queued, ""),
    ("prefill, and the first token", trace.ttft - (trace.queued or 0), f"{trace.prompt_tokens} tokens in one pass"),
    ("decode", trace.last - trace.first, f"{len(gaps)} steps of one token"),
    ("  the fastest step", min(gaps), ""),
    ("  the slowest step", max(gaps), ""),
]
pd.DataFrame([(name, show_seconds(value), note) for name, value, note in stages], columns=["stage", "time", ""])

# %% [markdown]
# Prefill reads many tokens in one pass, decode one token in each of many. Divide and compare: a prompt token is far cheaper
# than an output token. The roofline said so. Now the same requests under pressure, due faster than the engine can serve them.

# %%
order = sorted(opened.traces, key=lambda t: t.scheduled)[:12]
run.figure(
    plots.request_timeline(
        order,
        title=f"Requests on {served}, offered at three times the rate it can serve",
        labels=[f"request {i}" for i in range(len(order))],
    ),
    "timeline",
    {"traces": [t.model_dump(mode="json", exclude={"output_ids", "chunks"}) for t in order]},
    n=len(order),
)

# %% [markdown]
# Read it row by row. Four requests decode side by side; their ticks line up, because they share each step. A later request
# stays orange until one of the four ends: that is queueing, and it is inside TTFT. Where a new request's prompt is read, the
# others' ticks stand further apart: that is interference, and notebook 03 is about it.
#
# ### The tools' formulas on the real trace

# %%
received = [(c.time, c.n_tokens) for c in trace.token_chunks]
v, g, p = vllm_bench(trace.sent, received), guidellm(trace.sent, received), genai_perf(trace.sent, received)
run.measured("guidellm_over_vllm_tpot", g["TPOT"] / v["TPOT"])
real_tools = pd.DataFrame(
    {
        "vLLM bench": {"TTFT": v["TTFT"], "TPOT": v["TPOT"], "ITL, mean": mean(v["ITL"])},
        "GuideLLM": {"TTFT": g["TTFT"], "TPOT": g["TPOT"], "ITL, mean": g["ITL"][0]},
        "GenAI-Perf": {"TTFT": p["TTFT"], "TPOT": None, "ITL, mean": mean(p["ITL"])},
        "this course": {"TTFT": trace.ttft, "TPOT": trace.tpot, "ITL, mean": mean(trace.itl)},
    }
)
real_tools.map(lambda value: show_seconds(None if value != value else value))

# %% [markdown]
# vLLM gives one token in each chunk here, so the decode columns agree. GuideLLM's TPOT does not, and the shorter the answer,
# the further it is off: TTFT is spread over fewer tokens.

# %% [markdown]
# ## Ledgers
#
# Now a comparison. One thing changes, the engine: Transformers' own `generate`, with static batches of four, against vLLM
# with at most four sequences. Model, dtype, prompts, lengths and concurrency stay.

# %%
with TransformersEngine(run.profile.model, device=device, **common) as engine:
    plain = engine.run(chat, warmup=4)
Markdown(f"{engine.info.engine} {engine.info.version}, started in {engine.start_seconds:.0f} s")

# %% [markdown]
# ### Quality, before any ratio
#
# Are they the same answers? Two ways to ask. Strictly: is the whole greedy output identical? Fairly: given the tokens before
# it, is each token the one that the reference puts first? The reference is the model in this process, one pass, no cache.
# Perplexity stands beside them, and says something about the weights in this dtype, not about an engine.

# %%
model = models.load_model(run.profile.model, dtype=run.dtype, device=device)
prompts = [request.prompt_ids for request in chat.requests]


def reference(ids):
    return model(ids.to(device)).logits.cpu()


@functools.cache
def scored(outputs):
    return quality.top1_agreement(
        reference, prompts, outputs, f"Transformers {run.dtype} without a cache, {chat.digest}"
    )


def judged(record):
    """The record's quality; equal outputs are scored once."""
    return scored(tuple(tuple(t.output_ids) for t in record.traces))


# %%
agreement = {served: judged(closed), "Transformers": judged(plain)}
identical = quality.greedy_agreement(
    [t.output_ids for t in plain.traces],
    [t.output_ids for t in closed.traces],
    f"whole output, {served} against Transformers",
)
window = run.profile.quality_window // 2
ppl = quality.perplexity(
    reference, corpora.prose_ids(tokenizer, "evaluation", 2 * window), window=window, corpus="prose_evaluation"
)
pd.DataFrame(
    [q.model_dump(exclude={"note"}) for q in [*agreement.values(), identical, ppl]],
    index=[*agreement, f"{served} = Transformers", "weights"],
).round(4)

# %% [markdown]
# Where outputs differ though the arithmetic is the same, the two best tokens were nearly tied, and another order of additions
# decided. So the strict question is the harder one to pass, and the fairer one is what the cards carry.
#
# ### Six ledgers, filled
#
# An SLO needs limits. We have no users to ask, so we take four times the median TTFT and twice the median TPOT of the serving
# engine's own closed run. A limit taken from one contestant suits that contestant: read the attainment of its own open loop
# against its closed one, and not as a race between engines.

# %%
slo = SLO(ttft=4 * make_card("", closed).latency.ttft.p50, tpot=2 * make_card("", closed).latency.tpot.p50)
in_flight = max(len(r.prompt_ids) + r.max_tokens for r in chat.requests) * 4
kv_formula = models.kv_bytes(model.config, in_flight, dtype=run.dtype)
before = run.card(
    make_card("Transformers", plain, [agreement["Transformers"], ppl], slo=slo, kv_formula=kv_formula, seed=run.seed)
)
after = run.card(make_card(served, closed, [agreement[served]], slo=slo, kv_formula=kv_formula, seed=run.seed))
run.cards()

# %% [markdown]
# `KV used` from the formula is four sequences of the longest length at once. Transformers comes near it, because it pads. vLLM
# holds whole blocks of 32 tokens for what is really there; rounded up, that may exceed the formula where requests are short.
# With so few requests the tails of TTFT, TPOT and E2E stay empty, as they should; ITL has more samples.
#
# ### A comparison that is accepted

# %%
comparison = before.compare(after)
run.measured("vllm_over_transformers_tokens_per_second", comparison.ratios["generated tokens/s"])
comparison.frame()

# %% [markdown]
# Ratios of latencies are paired by request: each request is its own control, and the interval comes from resampling the
# pairs. Where it contains 1, the row says *undecided*. The quality stands in the same table, by one protocol; perplexity is
# missing from it, since only one card has it.
#
# ### Comparisons that are refused

# %%
crowded = make_card(f"{served}, open loop", opened, [agreement[served]], slo=slo, seed=run.seed)
unjudged = make_card(f"{served}, not judged", closed, seed=run.seed)
for left, right in [(after, crowded), (before, unjudged)]:
    try:
        left.compare(right)
        display(Markdown(f"{left.name} and {right.name} were compared"))
    except MeasurementRefused as refusal:
        display(Markdown(f"**Refused.** {refusal.symptom}"))

# %% [markdown]
# The first pair ran the same prompts on the same engine. Only the arrivals differ, and that is enough: it is another
# workload. The second pair is the one that papers print most often, two speeds and no quality.
#
# ### A cold cache that was warm
#
# The workload that asks one question twice called itself cold. The engine's own prefix cache knew better.

# %%
try:
    make_card("asked twice", asked_twice)
    refused_warm = "accepted: this engine reports no prefix cache" if not can_serve.available else "accepted"
except MeasurementRefused as refusal:
    refused_warm = f"**Refused.** {refusal.symptom}"
times = ", ".join(show_seconds(t.ttft) for t in asked_twice.traces)
Markdown(f"{refused_warm}\n\nTTFT of the two questions: {times}.")

# %% [markdown]
# A benchmark with a fixed seed, run twice against one server, does this by accident. Its second run measures the cache, and
# its curve bends for reasons that have nothing to do with the system under test.
#
# ### Closed loop and open loop, measured
#
# The same requests and the same engine as in the timeline. A closed loop waits for an answer before it asks again, so that it
# can never be in a queue longer than its own limit. An open loop asks when users ask.

# %%
ttft_ratio = run.measured("open_over_closed_ttft", crowded.latency.ttft_schedule.p50 / after.latency.ttft_schedule.p50)
loops = {card.name: card for card in (after, crowded)}
pd.DataFrame(
    {
        name: {
            "offered requests/s": f"{card.throughput.offered_rate:.2f}" if card.throughput.offered_rate else "(closed)",
            "completed requests/s": f"{card.throughput.requests_per_second:.2f}",
            "TTFT from schedule, p50": show_seconds(card.latency.ttft_schedule.p50),
            "TPOT, p50": show_seconds(card.latency.tpot.p50),
            "SLO attained": f"{card.throughput.slo_attainment:.0%}",
            "goodput, requests/s": f"{card.throughput.goodput:.2f}",
        }
        for name, card in loops.items()
    }
)

# %% [markdown]
# Past what an engine can serve, completed requests a second stop growing, whatever is offered. So throughput cannot tell the
# two runs apart for long. Goodput can: finishing the work is not finishing it in time.
#
# Now coordinated omission on the real engine. It ran at most four sequences at once, and it told us how long each request
# queued for that. Had the client kept the limit instead, the queue would have been inside the client, before its clock
# started. So subtract it, and see what such a client would have reported for this very run.

# %%
waits = pd.DataFrame(
    {
        "from schedule": [t.ttft_schedule for t in opened.traces],
        "from sending, queue in the engine": [t.ttft for t in opened.traces],
        "from sending, queue in the client": [t.ttft - (t.queued or 0.0) for t in opened.traces],
    }
)
hidden_here = waits["from schedule"].mean() / waits["from sending, queue in the client"].mean()
run.measured("mean_ttft_hidden_by_a_limited_client", hidden_here, "x")
waits.describe().loc[["mean", "50%", "max"]].map(show_seconds)

# %% [markdown]
# ## A control that should not help
#
# vLLM against itself: same engine, same settings, same requests, twice more. Every ratio should contain 1.

# %%
controls = []
for index, twin in enumerate(twins, 1):
    ratios = after.compare(make_card(f"twin {index}", twin, [judged(twin)])).ratios
    controls += [
        {
            "run": f"twin {index} / first run",
            "metric": name,
            "low": r.low,
            "ratio": r.ratio,
            "high": r.high,
            "says": "undecided" if r.undecided else "a difference",
        }
        for name, r in ratios.items()
        if name in ("ttft", "tpot", "e2e")
    ]
control = pd.DataFrame(controls)
run.measured("control_intervals_without_1", int((control["says"] != "undecided").sum()), f"of {len(control)}")
control.round(3)

# %% [markdown]
# If some row says "a difference", the row is not to be deleted, and vLLM did not become another program. The interval
# resamples requests *within* one pair of runs. It cannot see that a whole run had a busier neighbour or a warmer processor,
# since the requests of one run share that. The honest unit is the run. So take the widest interval over the twins, metric by
# metric, as this machine's noise today. Only an effect whose own interval lies outside it may be called one. Even that is
# generous: the twins ran within a minute of each other, the two engines did not. A result to be published would alternate
# them, A B A B.

# %%
verdicts = []
for metric, twin_rows in control.groupby("metric", sort=False):
    low, high = twin_rows["low"].min(), twin_rows["high"].max()
    effect, quiet = comparison.ratios[metric], bool((twin_rows["says"] == "undecided").all())
    outside = effect.low > max(high, 1) or effect.high < min(low, 1)
    verdicts.append(
        {
            "metric": metric,
            "against itself": f"{low:.2f} to {high:.2f}",
            "the control": "undecided, as it must be" if quiet else "the machine drifted",
            f"{served} / Transformers": f"{effect.low:.2f} to {effect.high:.2f}",
            "the effect": "outside the noise" if outside else "undecided",
        }
    )
pd.DataFrame(verdicts).set_index("metric")

# %% [markdown]
# ## Where it loses
#
# A ledger is a summary, and a summary forgets. Here are two streams that agree in TTFT, TPOT, E2E, tokens and throughput
# (**constructed**).

# %%
from helpers.trace import Chunk, StreamTrace


def stream(times):
    return StreamTrace(
        request_id="constructed",
        scheduled=0.0,
        sent=0.0,
        completion_tokens=len(times),
        token_source="ids",
        chunks=[Chunk(time=t, n_tokens=1) for t in times],
    )


steady = stream([0.2 + 0.1 * i for i in range(31)])
stalled = stream([0.2 + 0.02 * i for i in range(15)] + [3.2 - 0.02 * i for i in reversed(range(16))])
pd.DataFrame(
    {
        name: {"TTFT": t.ttft, "TPOT": t.tpot, "E2E": t.e2e, "longest gap": max(t.chunk_gaps)}
        for name, t in {"steady": steady, "stalled": stalled}.items()
    }
).map(show_seconds)

# %% [markdown]
# The second reader stared at a frozen screen for more than two seconds. A mean over a request cannot see it; the ITL's tail
# can, if there are enough tokens and if each token's time is known. And the method has a price of its own: repeats, controls
# and quality runs took most of this notebook's time. It is the wrong tool for a first look, and the right one before a claim.

# %% [markdown]
# ## Claims

# %% tags=["claim"]
uneven = streams["1, then 1 to 9 in turn"]
threes = [(chunk.time, chunk.n_tokens) for chunk in scripted.token_chunks]
tokens_per_chunk = mean([k for _, k in threes[1:]])
gap_over_tpot = mean(vllm_bench(scripted.sent, threes)["ITL"]) / vllm_bench(scripted.sent, threes)["TPOT"]
run.claim(
    "vllm-bench-tpot",
    abs(gap_over_tpot - tokens_per_chunk) < 1e-6,
    f"on the scripted stream, mean chunk gap over TPOT is {gap_over_tpot:.3f}; later chunks hold {tokens_per_chunk:.3f} tokens",
)
left, right = relations(trace.sent, received)["GuideLLM TPOT - vLLM TPOT = (TTFT - vLLM TPOT) / n"]
run.claim(
    "guidellm-tpot",
    abs(left - right) < 1e-9 and left > 0,
    f"on a real vLLM request the two sides are {1e3 * left:.4f} and {1e3 * right:.4f} ms",
)
by_response = mean(genai_perf(0.0, uneven)["ITL"])
weighted, tpot = relations(0.0, uneven)["token-weighted GenAI-Perf ITL = our TPOT"]
run.claim(
    "genai-perf-itl",
    abs(weighted - tpot) < 1e-12 and abs(by_response / tpot - 1) > 0.01,
    f"chunks of unequal size: {1e3 * by_response:.2f} ms a response, {1e3 * weighted:.2f} ms weighted by tokens, "
    f"TPOT {1e3 * tpot:.2f} ms",
)
run.claims()[["paper", "quoted", "ours", "verdict"]]

# %% tags=["claim"]
first_decode, best_prefill = decodes[0], max(prefills, key=lambda row: row["share of peak"])
run.claim(
    "roofline-decode-memory-bound",
    first_decode["intensity"] < roof.ridge < best_prefill["intensity"]
    and best_prefill["share of peak"] > first_decode["share of peak"],
    f"ridge {roof.ridge:.1f} FLOP/byte; decode at batch 1: {first_decode['intensity']:.2f}, "
    f"{first_decode['share of peak']:.0%} of peak; "
    f"{best_prefill['label']}: {best_prefill['intensity']:.0f}, {best_prefill['share of peak']:.0%} of peak",
)
hidden = summary.loc["mean", "from schedule"] / summary.loc["mean", "from sending"]
run.claim(
    "coordinated-omission",
    hidden_here > 1.5,
    f"from the queue times that {opened.engine.engine} measured: mean TTFT from schedule is {hidden_here:.1f}x what a client "
    f"with the same limit would report (simulated hiccup: {hidden:.1f}x)",
)
run.claims()[["paper", "quoted", "ours", "verdict"]]

# %% [markdown]
# "Direction only" is the best that a claim about another machine's milliseconds can earn here. The first three are identities
# between definitions, transcribed from each tool's source: they would fail if the formulas did not relate as stated, and they
# do not test the tools. `python3 -m helpers bench client` does that for `vllm bench serve`, on the same prompts. One thing it
# would show on a chat endpoint: that tool starts TTFT at the first chunk with a choice in it, a bare role marker included.
#
# ### Your predictions

# %%
guesses = run.predictions()
run.figure(plots.predictions(guesses.dropna(), title="Predicted over measured"), "predictions", guesses)

# %% [markdown]
# ## Exercises
#
# Write into the cell that raises `NotImplementedError` and run it. Then **skip the collapsed cell** after the hint: it holds a
# solution and, once run, replaces your function. Then run the check. (*Run All* runs the solutions too, so its PASS says
# nothing about you.)
#
# ### 00.1 · Metrics from chunks (easy)
#
# Chunks are `(time, n_tokens)`. Some hold no token, the first may hold several. Return `{"ttft": ..., "tpot": ..., "itl":
# [...]}` by this course's formulas; TPOT is `None` where no token came after the first chunk.


# %% tags=["exercise"]
def metrics(sent, chunks):
    """TTFT, TPOT (seconds) and one ITL for each token after the first chunk that holds tokens."""
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>
#
# Drop the empty chunks first. A chunk of k tokens that came g seconds after the one before gives k values g/k.
#
# </details>


# %% tags=["solution"]
def metrics(sent, chunks):
    held = [(t, k) for t, k in chunks if k > 0]
    later = sum(k for _, k in held[1:])
    itl = []
    for (a, _), (b, k) in pairwise(held):
        itl += [(b - a) / k] * k
    tpot = (held[-1][0] - held[0][0]) / later if later else None
    return {"ttft": held[0][0] - sent, "tpot": tpot, "itl": itl}


# %% tags=["check"]
run.check("00.1", metrics)

# %% [markdown]
# ### 00.2 · Goodput (easy)
#
# `requests` are dicts with `scheduled`, `sent`, `first`, `last` (seconds), `n` (tokens) and `ok`. Here each chunk holds one
# token. Return requests a second that met both limits. Which clock? Which requests count?


# %% tags=["exercise"]
def goodput(requests, slo_ttft, slo_tpot, makespan):
    """Requests per second, over `makespan` seconds, whose TTFT from schedule and TPOT are within the limits."""
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>
#
# A failed request meets nothing. A request of one token has no TPOT to miss. Users wait from the schedule on.
#
# </details>


# %% tags=["solution"]
def goodput(requests, slo_ttft, slo_tpot, makespan):
    good = 0
    for r in requests:
        if not r["ok"] or r["first"] - r["scheduled"] > slo_ttft:
            continue
        good += r["n"] <= 1 or (r["last"] - r["first"]) / (r["n"] - 1) <= slo_tpot
    return good / makespan


# %% tags=["check"]
run.check("00.2", goodput)

# %% [markdown]
# ### 00.3 · Find the bug
#
# This function passed its author's tests. A user reports a TPOT a third too large from a chat server. Correct it.


# %% tags=["exercise"]
def tpot_with_a_bug(chunks):
    """Seconds per token after the first chunk; chunks are (time, n_tokens). Wrong for some streams."""
    (first, n_first), (last, _) = chunks[0], chunks[-1]
    later = sum(k for _, k in chunks) - n_first
    return (last - first) / later if later > 0 else None


def tpot_fixed(chunks):
    """The same without the bug."""
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>
#
# What does a chat server send first, and what may it send last? How many tokens do those chunks hold?
#
# </details>


# %% tags=["solution"]
def tpot_fixed(chunks):
    held = [(t, k) for t, k in chunks if k > 0]
    (first, n_first), (last, _) = held[0], held[-1]
    later = sum(k for _, k in held) - n_first
    return (last - first) / later if later > 0 else None


# %% tags=["check"]
run.check("00.3", tpot_fixed)

# %% [markdown]
# ### 00.4 · The batch that reaches the ridge (harder)
#
# A decode step over `batch` sequences, each with `context` cached tokens, does `batch * (2 * n_weights + attention_flops *
# context)` FLOPs and moves `n_weights * weight_bytes + batch * context * kv_bytes` bytes. Return the smallest batch whose
# intensity reaches `ridge`, or `None` where no batch does. When is that?


# %% tags=["exercise"]
def smallest_batch_at_ridge(n_weights, weight_bytes, kv_bytes, attention_flops, context, ridge):
    """The smallest batch (int) with intensity >= ridge, or None.

    kv_bytes : bytes that one cached token takes. attention_flops : FLOPs that one cached token costs a decode step.
    """
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>
#
# Write the inequality and solve it for the batch. What if the batch's factor is not positive?
#
# </details>


# %% tags=["solution"]
def smallest_batch_at_ridge(n_weights, weight_bytes, kv_bytes, attention_flops, context, ridge):
    gain = 2 * n_weights + attention_flops * context - ridge * context * kv_bytes
    if gain <= 0:
        return None
    return max(1, int(np.ceil(ridge * n_weights * weight_bytes / gain)))


# %% tags=["check"]
run.check("00.4", smallest_batch_at_ridge)

# %% [markdown]
# ### 00.5 · Two engines swap ranks (research)
#
# Engine A batches statically: groups of four in the order given, one second a step, and a group lasts as long as its longest
# output. Engine B serves one request at a time, 0.4 seconds a step. Design two workloads with **equally many requests and
# equally many tokens**, so that A wins the first by 1.2x or more and B the second. Then ask of the next paper you read: which
# of the two workloads did they choose?


# %% tags=["exercise"]
def rank_swap():
    """Two lists of output lengths (tokens, in order): engine A wins the first, engine B the second."""
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>
#
# What does a group of four cost if one of its outputs is long and the others are not?
#
# </details>


# %% tags=["solution"]
def rank_swap():
    return [10, 10, 10, 10], [37, 1, 1, 1]


# %% tags=["check"]
run.check("00.5", rank_swap)

# %% [markdown]
# ## Pitfalls and further reading
#
# - **A name is not a definition.** Convert other tools' numbers by formula, or do not compare them.
# - **A chunk is not a token.** Parsers, speculation and slow readers put several into one. Count tokens by ids or by the
#   server's usage report, never by tokenizing the text again.
# - **The first request pays for start-up.** Warm-up is explicit here, shaped like the workload, with other prompts.
# - **A closed loop never overloads anything.** Use it to find the capacity, and an open loop to see what users get.
# - **Twice on one machine is not two machines.** Run the control that should not help, and believe its spread.
# - **A mean of ratios, a ratio of means and a paired ratio are three numbers.** Say which.
#
# Further reading:
#
# 1. S. Williams, A. Waterman, D. Patterson, [Roofline](https://doi.org/10.1145/1498765.1498785), CACM 2009.
# 2. Y. Zhong et al., [DistServe](https://www.usenix.org/conference/osdi24/presentation/zhong-yinmin), OSDI 2024: goodput, and
#    why TTFT and TPOT pull apart.
# 3. [vLLM's benchmark client](https://github.com/vllm-project/vllm/blob/main/vllm/benchmarks/serve.py): read how the numbers
#    are made.
# 4. [GuideLLM's metrics](https://github.com/vllm-project/guidellm/blob/main/docs/guides/metrics.md), the definitions compared
#    here.
# 5. T. Hoefler, R. Belli, [Scientific Benchmarking of Parallel Computing Systems](https://doi.org/10.1145/2807591.2807644),
#    SC 2015: twelve rules.

# %%
run.finish()
