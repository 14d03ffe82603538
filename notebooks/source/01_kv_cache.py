# %% [markdown]
# # 01 · The KV cache
#
# **What does it cost to remember every token, and what does it cost to forget them?**
#
# A language model writes one token at a time. At each step every earlier token is read again. The KV cache keeps what
# those earlier tokens have already worked out, so that a step costs one token of arithmetic instead of all of them.
# In exchange it fills memory: it is the reason why servers run out of memory, and the reason for half of the papers
# in this course.
#
# | paper or system | year, venue | maturity | what we take from it |
# | --- | --- | --- | --- |
# | Shazeer, *Fast Transformer Decoding* (MQA) | 2019, arXiv | preprint, widely used | one KV head for all query heads |
# | Ainslie et al., *GQA* | 2023, EMNLP | peer-reviewed | one KV head for each group of query heads |
# | DeepSeek-AI, *DeepSeek-V2* (MLA) | 2024, arXiv | technical report with open weights | one small latent for all heads |
# | Kwon et al., *PagedAttention* | 2023, SOSP | peer-reviewed | the figure of 800 KB a token (the rest is notebook 02) |
# | Hugging Face Transformers' cache classes | 2023 to now | maintained code | dynamic, static, offloaded and quantized caches |
#
# The KV cache itself has no single paper; it came with incremental decoding.

# %% tags=["parameters"]
PROFILE = "auto"
SEED = 0
OUT = None

# %%
import helpers

run = helpers.start("01_kv_cache", PROFILE, SEED, OUT)
run

# %% [markdown]
# ## What fails without it
#
# Take the model as the library gives it, and ask for the next token after contexts of growing length, each time from
# nothing. This is what every step of a decoder without a cache does.

# %%
import pandas as pd
import torch
from IPython.display import Markdown

from helpers import corpora, kv_adapter, memory, models, plots, quality
from helpers.ledgers import make_card, show_bytes, show_seconds
from helpers.stats import paired_ratio, step_seconds

# %%
device, contexts = run.profile.device, run.profile.contexts
model = models.load_model(run.profile.model, dtype=run.dtype, device=device)
tokenizer = models.load_tokenizer(run.profile.model)
text = corpora.prose_ids(tokenizer, "evaluation", contexts[-1] + 64)
shape = models.kv_shape(model.config)
shape.model_dump(include={"kind", "n_layers", "n_q_heads", "n_kv_heads", "head_dim"})


# %%
def next_token(n):
    return model(text[None, :n].to(device), logits_to_keep=1, use_cache=False).logits


next_token(contexts[0])  # the first call pays for things that later ones do not
_, seconds = step_seconds((next_token(n) for n in contexts), device)
pd.DataFrame({"context": contexts, "ms": [1e3 * t for t in seconds]}).round(1)

# %% [markdown]
# One more word, and the wait grows with everything that was said before. Almost all of that work repeats the step
# before it: the keys and values of old tokens do not change when a new token arrives, because attention is causal.

# %% [markdown]
# ## Predict
#
# Write your own numbers into the next cell before you run it. The defaults are guesses, and some of them are poor.

# %% tags=["predict"]
run.predict(
    kv_bytes_per_token=50_000,  # bytes that one token leaves in this model's cache, in this run's dtype
    projected_tokens_ratio=30,  # tokens projected to K and V, without a cache over with one, in `max_tokens` steps
    step_ratio_at_longest_context=8,  # time of one step without a cache over with one, at the longest context
    tokens_that_outweigh_the_weights=100_000,  # cached tokens at which the cache is larger than the model
    bits_an_element_of_the_4_bit_cache=4.0,  # scales and zero points included
    deepseek_v2_percent_saved_at_equal_bits=93.3,  # MLA of DeepSeek-V2 against DeepSeek 67B, both in 16 bits
)

# %% [markdown]
# ## The idea
#
# Write $x_t$ for the input of one attention layer at position $t$. Each head turns it into a query $q_t$, a key $k_t$
# and a value $v_t$, each of `head_dim` elements. The output at position $n$ is a weighted mean of values,
#
# $$o_n = \sum_{t \le n} \mathrm{softmax}_t\!\left(\frac{q_n \cdot k_t}{\sqrt{d_\text{head}}}\right) v_t .$$
#
# The query $q_n$ is used once. The pairs $(k_t, v_t)$ are used by every later position, and nothing later changes
# them. So keep them: after $n$ tokens a layer holds keys and values of shape `[n_kv_heads, n, head_dim]` each, and
# the whole model
#
# $$\text{KV bytes} = 2 \cdot n_\text{layers} \cdot n_\text{kv heads} \cdot d_\text{head} \cdot n \cdot
# \text{batch} \cdot \text{bytes per element} .$$
#
# Two things in this formula are often got wrong. It counts **KV heads**, not query heads. And `head_dim` is the
# model's own number, not always `hidden_size / n_q_heads`.
#
# Decoding $n$ tokens one by one projects $1 + 2 + \dots + n = n(n+1)/2$ tokens without a cache, and $n$ with one.

# %% [markdown]
# ## From scratch: a Llama in a hundred lines
#
# We write the forward pass of the real model ourselves, so that the cache is ours to open. First the small parts.
# RMSNorm scales a vector to unit root mean square. RoPE turns pairs of elements by an angle that grows with the
# position; following Transformers' convention, element $i$ is paired with element $i + d/2$.

# %% tags=["algorithm"]
import torch
import torch.nn.functional as F


def rms_norm(x, weight, eps):
    """Scale each vector of the last dimension to unit root mean square, then by `weight`."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def rope_tables(positions, head_dim, theta):
    """Cosines and sines, each ``[n_tokens, head_dim]``, of the angles ``position * theta ** (-2i / head_dim)``."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    angles = positions[:, None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x, cos, sin):
    """Rotate ``x[..., n_tokens, head_dim]``: element i is paired with element i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


# %% [markdown]
# Attention comes next. Queries have shape `[n_q_heads, n_new, head_dim]`; keys and values have `n_kv_heads` heads and
# may hold more tokens than the queries, because some of them come from the cache. A query at position $p$ sees keys
# at positions up to $p$.


# %% tags=["algorithm"]
def attend(q, k, v, query_positions, key_positions):
    """Causal grouped-query attention.

    q is ``[n_q_heads, n_new, head_dim]``; k and v are ``[n_kv_heads, n_tokens, head_dim]``.
    Returns ``[n_new, n_q_heads * head_dim]``.
    """
    n_q_heads, n_new, head_dim = q.shape
    q_per_kv = n_q_heads // k.shape[0]
    k = k.repeat_interleave(q_per_kv, dim=0)
    v = v.repeat_interleave(q_per_kv, dim=0)
    scores = q @ k.transpose(1, 2) / head_dim**0.5
    unseen = key_positions[None, :] > query_positions[:, None]
    weights = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
    return (weights @ v).transpose(0, 1).reshape(n_new, n_q_heads * head_dim)


# %% [markdown]
# The weights come from the Transformers model itself, under their own names. `rope_theta` is read from the
# configuration, and a bias is used where the model has one (Qwen2.5 does, SmolLM2 does not).


# %% tags=["algorithm"]
class Llama:
    """The weights and sizes of one Llama-like model, and a counter of the tokens whose keys were projected."""

    def __init__(self, weights, config):
        self.weights = weights
        self.n_layers = config.num_hidden_layers
        self.n_q_heads = config.num_attention_heads
        self.n_kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.theta = config.rope_parameters["rope_theta"]
        self.eps = config.rms_norm_eps
        self.projected_tokens = 0

    def linear(self, x, name):
        """Apply the projection called `name`; its bias is None where the model has none."""
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x, name):
        return rms_norm(x, self.weights[f"{name}.weight"], self.eps)

    def heads(self, x, name):
        """Project and split: ``[n_tokens, hidden] -> [n_heads, n_tokens, head_dim]``."""
        return self.linear(x, name).view(len(x), -1, self.head_dim).transpose(0, 1)


# %% [markdown]
# One function does everything: with `cache=None` the tokens are all there is; with a cache they are the newest ones,
# and their positions start where the cache ends. That offset is the one line that is easiest to get wrong (exercise
# 01.3).


# %% tags=["algorithm"]
def forward(llama, ids, cache=None):
    """Logits ``[n_new, vocab_size]`` of the tokens `ids` (``[n_new]``), which follow whatever the cache holds."""
    n_cached = 0 if cache is None else cache.n_tokens
    positions = torch.arange(n_cached, n_cached + len(ids), device=ids.device)
    key_positions = torch.arange(n_cached + len(ids), device=ids.device)
    cos, sin = rope_tables(positions, llama.head_dim, llama.theta)
    embedding = llama.weights["model.embed_tokens.weight"]
    x = embedding[ids]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    llama.projected_tokens += len(ids)
    for layer in range(llama.n_layers):
        name = f"model.layers.{layer}"
        h = llama.norm(x, f"{name}.input_layernorm")
        q = apply_rope(llama.heads(h, f"{name}.self_attn.q_proj"), cos, sin)
        k = apply_rope(llama.heads(h, f"{name}.self_attn.k_proj"), cos, sin)
        v = llama.heads(h, f"{name}.self_attn.v_proj")
        if cache is not None:
            k, v = cache.append(layer, k, v)
        x = x + llama.linear(attend(q, k, v, positions, key_positions), f"{name}.self_attn.o_proj")
        h = llama.norm(x, f"{name}.post_attention_layernorm")
        gate = F.silu(llama.linear(h, f"{name}.mlp.gate_proj"))
        x = x + llama.linear(gate * llama.linear(h, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
    x = llama.norm(x, "model.norm")
    return F.linear(x, llama.weights.get("lm_head.weight", embedding))


# %% [markdown]
# Before any talk of caches: is it the same model? We hold our logits against Transformers' own, element by element.
# The bound is absolute, on logits, in fp32; two correct programs that add in another order differ by about that much.
# In a 16-bit dtype it is looser.

# %%
llama = Llama(model.state_dict(), model.config)
probe = text[: run.profile.max_tokens].to(device)
worst = (forward(llama, probe) - model(probe[None]).logits[0]).abs().max().item()
tolerance = 1e-4 if run.dtype == "float32" else 0.5
assert worst < tolerance, worst
Markdown(f"Largest difference of any logit from Transformers' own: **{worst:.1e}** (bound {tolerance:g}).")

# %% [markdown]
# ### The cache, grown by concatenation
#
# The simplest cache is two tensors a layer, longer by one token at each step. `torch.cat` cannot grow a tensor in
# place: it makes a new one and copies the old. We count those copies, for they matter in a moment.


# %% tags=["algorithm"]
class CatCache:
    """Keys and values of each layer, ``[n_kv_heads, n_tokens, head_dim]``, grown by concatenation."""

    def __init__(self, n_layers):
        self.keys = [None] * n_layers
        self.values = [None] * n_layers
        self.copied_tokens = 0

    @property
    def n_tokens(self):
        return 0 if self.keys[-1] is None else self.keys[-1].shape[1]

    def append(self, layer, k, v):
        """Add the newest tokens of one layer and return all that it holds."""
        if self.keys[layer] is not None:
            self.copied_tokens += self.keys[layer].shape[1] if layer == 0 else 0
            k = torch.cat([self.keys[layer], k], dim=1)
            v = torch.cat([self.values[layer], v], dim=1)
        self.keys[layer], self.values[layer] = k, v
        return k, v

    def tensors(self):
        return [t for t in [*self.keys, *self.values] if t is not None]


# %% [markdown]
# Two decoders, which differ in one thing. Both are fed the same tokens (*teacher forcing*), so their logits can be
# compared position by position. They are generators: each `next` is one decode step, and the clock stands outside.


# %% tags=["algorithm"]
def decode_without_cache(llama, ids):
    """After each token of `ids`, the logits ``[vocab_size]`` for the next one; every step starts from nothing."""
    for n in range(1, len(ids) + 1):
        yield forward(llama, ids[:n])[-1]


def decode_with_cache(llama, ids, cache):
    """The same logits; every step feeds one token."""
    for n in range(len(ids)):
        yield forward(llama, ids[n : n + 1], cache)[-1]


# %%
llama.projected_tokens = 0
naive_logits, naive_seconds = step_seconds(decode_without_cache(llama, probe), device)
naive_tokens, llama.projected_tokens = llama.projected_tokens, 0
cache = CatCache(llama.n_layers)
cached_logits, cached_seconds = step_seconds(decode_with_cache(llama, probe, cache), device)
cached_tokens = llama.projected_tokens

# %%
n = len(probe)
run.measured("projected_tokens_ratio", naive_tokens / cached_tokens)
difference = (torch.stack(naive_logits) - torch.stack(cached_logits)).abs().max().item()
print(f"projected without a cache {naive_tokens}, n(n+1)/2 = {n * (n + 1) // 2}")
print(f"projected with a cache    {cached_tokens}, n = {n}")
print(f"largest difference of any logit at any step: {difference:.1e}")

# %% [markdown]
# The counts are exact, because they are counts. Logits need a bound, because a product over one row and one over many
# rows add in different orders. Our bound is 1e-5 **of the largest logit**, in fp32. Is what remains only rounding?
# Then it must vanish in float64, where we ask for 1e-9 absolute. The first four layers of the bundled model are enough for that.


# %%
def float64_difference(n_tokens=10, n_layers=4):
    bundled = model if device == "cpu" else models.load_model("smollm2-135m-instruct")
    layers = tuple(f"model.layers.{i}." for i in range(n_layers))
    rest = {k: v for k, v in bundled.state_dict().items() if k.startswith(layers) or ".layers." not in k}
    small, ids = Llama({k: v.double() for k, v in rest.items()}, bundled.config), torch.arange(100, 100 + n_tokens)
    small.n_layers = n_layers
    with_cache = torch.stack(list(decode_with_cache(small, ids, CatCache(n_layers))))
    return (torch.stack(list(decode_without_cache(small, ids))) - with_cache).abs().max().item()


scale = torch.stack(naive_logits).abs().max().item()
exact = float64_difference()
Markdown(
    f"Cached against uncached, {run.dtype}: **{difference:.1e}**, which is {difference / scale:.1e} of the largest logit "
    f"({scale:.1f}). In float64, four layers: **{exact:.1e}**."
)

# %% [markdown]
# ### Does it pay?
#
# Seconds for the first $n$ tokens, with and without. Then, for longer contexts, single steps: computing the whole
# context is the step without a cache, and the cache that this leaves behind serves the step with one.

# %%
times = pd.DataFrame({"n": range(1, n + 1), "without": naive_seconds, "with": cached_seconds})
times[["without", "with"]] = times[["without", "with"]].cumsum()
times["ratio"] = times["without"] / times["with"]
times[times["n"].isin([2**i for i in range(1, 12)])].round(2)


# %%
def step_pair(n_context):
    """Seconds of one step at this context: without a cache, and with one (the median of five)."""
    held = CatCache(llama.n_layers)
    ids = text[: n_context + 5].to(device)
    _, (whole,) = step_seconds((forward(llama, ids[:n_context], held) for _ in range(1)), device)
    _, single = step_seconds(decode_with_cache(llama, ids[n_context:], held), device)
    return {"context": n_context, "without a cache": whole, "with a cache": sorted(single)[2]}


steps = pd.DataFrame([step_pair(c) for c in contexts])
steps["ratio"] = steps["without a cache"] / steps["with a cache"]
run.measured("step_ratio_at_longest_context", steps["ratio"].iloc[-1])
steps.round(3)

# %%
long = steps.melt("context", ["without a cache", "with a cache"], "step", "seconds")
run.figure(
    plots.lines(
        long,
        x="context",
        y="seconds",
        hue="step",
        log_x=True,
        log_y=True,
        title="Seconds of one decode step",
        xlabel="context (tokens)",
        ylabel="seconds",
    ),
    "step_seconds",
    long,
)

# %% [markdown]
# Read the two slopes. A step with a cache is nearly flat: at these lengths it is the reading of all weights that takes the
# time. A step without one rises with the context. Then look at the table of the first tokens: its ratios stay far below the
# $(n+1)/2$ of the counts. Reading the weights costs the same for one row as for a few, so recomputing a few tokens is cheaper
# than counting them suggests.

# %% [markdown]
# ### Growing it without copying
#
# The counted copies were $n(n-1)/2$ tokens: the cache has replaced quadratic arithmetic by quadratic copying. The
# usual cure is to set the memory aside first and to write into it.


# %% tags=["algorithm"]
class PreallocatedCache(CatCache):
    """The same, written into memory that was set aside for `max_tokens`; nothing is ever copied."""

    def __init__(self, n_layers, n_kv_heads, head_dim, max_tokens, dtype=torch.float32, device="cpu"):
        super().__init__(n_layers)
        size = (n_layers, n_kv_heads, max_tokens, head_dim)
        self.buffers = torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device)

    def append(self, layer, k, v):
        start = 0 if self.keys[layer] is None else self.keys[layer].shape[1]
        end = start + k.shape[1]
        if end > self.buffers[0].shape[2]:
            raise ValueError(f"{end} tokens do not fit into a cache of {self.buffers[0].shape[2]}")
        for buffer, held, new in zip(self.buffers, (self.keys, self.values), (k, v), strict=True):
            buffer[layer, :, start:end] = new
            held[layer] = buffer[layer, :, :end]
        return self.keys[layer], self.values[layer]


# %% [markdown]
# A third way is to set aside a small block whenever the last one is full. It wastes at most one block and copies
# nothing, but a sequence then lies in pieces, and attention must be taught to read it. That is PagedAttention, and
# notebook 02. The costs of all three in tokens:


# %% tags=["algorithm"]
def growth_cost(way, n_tokens, max_tokens, block_size=16):
    """Tokens copied while a cache grows one by one to `n_tokens`, and the most tokens' memory held at one time."""
    if way == "concatenated":
        return {"copied": n_tokens * (n_tokens - 1) // 2, "held by a layer at most": 2 * n_tokens - 1}
    if way == "preallocated":
        return {"copied": 0, "held by a layer at most": max_tokens}
    return {"copied": 0, "held by a layer at most": -(-n_tokens // block_size) * block_size}


# %%
reserved = PreallocatedCache(llama.n_layers, llama.n_kv_heads, llama.head_dim, 1024, model.dtype, device)
again = torch.stack(list(decode_with_cache(llama, probe[:8], reserved)))
assert (again - torch.stack(cached_logits[:8])).abs().max() < tolerance and reserved.copied_tokens == 0
assert cache.copied_tokens == growth_cost("concatenated", n, 1024)["copied"]
ways = ("concatenated", "preallocated", "in blocks of 16")
pd.DataFrame([{"way": way, **growth_cost(way, n, 1024)} for way in ways])

# %% [markdown]
# Tokens, counted in one layer. While a layer is extended, its old and its new tensor exist at once; the layers take turns,
# so the whole cache peaks at $1 + 1/n_\text{layers}$ of its size. Worse for an allocator is that no freed piece is ever the
# size of the next one. Preallocation pays for the longest answer that might come. Neither is free.

# %% [markdown]
# ## How many bytes? By formula, and as tensors
#
# The course has one function that sizes a cache from a model's configuration. Here is its heart:

# %%
import inspect

print(inspect.getsource(models.kv_bytes).split('"""')[2])

# %% [markdown]
# A formula is worth as much as its agreement with memory that was really allocated. So: the real model, in our cache
# and in Transformers'; then small random models of every kind. All must agree to the byte.

# %%
theirs = kv_adapter.new_cache("dynamic", model.config)
model(probe[None], past_key_values=theirs, logits_to_keep=1)
formula = models.kv_bytes(model.config, n, 1, run.dtype)
assert memory.tensor_bytes(cache.tensors()) == kv_adapter.cache_bytes(theirs) == formula
per_token = run.measured("kv_bytes_per_token", formula // n, "bytes")
run.measured("tokens_that_outweigh_the_weights", models.weight_bytes(model) / per_token, "tokens")
Markdown(
    f"{shape.kind}, {shape.n_layers} layers, {shape.n_kv_heads} KV heads for {shape.n_q_heads} query heads: "
    f"**{per_token:,} bytes** a token in {run.dtype}, by formula and as tensors."
)

# %%
from transformers import AutoModelForCausalLM, DeepseekV2Config, LlamaConfig

SMALL = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=3, vocab_size=100, num_attention_heads=8)
RANKS = dict(kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, q_lora_rank=None)
toys = {
    "MHA": LlamaConfig(**SMALL, num_key_value_heads=8),
    "GQA": LlamaConfig(**SMALL, num_key_value_heads=2),
    "MQA": LlamaConfig(**SMALL, num_key_value_heads=1),
    "GQA, head_dim 24": LlamaConfig(**SMALL, num_key_value_heads=2, head_dim=24),
    "MLA": DeepseekV2Config(**SMALL, **RANKS, n_routed_experts=2, moe_intermediate_size=32, first_k_dense_replace=3),
}


# %%
def allocated(config, n_tokens=17, batch=2):
    """Bytes that Transformers really allocates when a random model of this shape reads `n_tokens` tokens."""
    toy = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    held = kv_adapter.new_cache("dynamic", config)
    toy(torch.ones(batch, n_tokens, dtype=torch.long), past_key_values=held)
    return kv_adapter.cache_bytes(held)


sizes = pd.DataFrame(
    {
        "formula": {name: models.kv_bytes(config, 17, 2, "float32") for name, config in toys.items()},
        "tensors": {name: allocated(config) for name, config in toys.items()},
        "2 x layers x hidden_size": {name: 2 * 3 * 64 * 17 * 2 * 4 for name in toys},
    }
)
assert (sizes["formula"] == sizes["tensors"]).all()
sizes

# %% [markdown]
# The third column is the rule of thumb that is still found in calculators and lecture notes. It is right for the
# first row only. MQA divides the cache by the number of query heads, GQA by the number of query heads in a group; MLA
# stores something else altogether.

# %% [markdown]
# ### MLA from scratch
#
# Multi-head latent attention keeps no keys and values. It keeps one vector $c_t$ of `kv_lora_rank` elements, from
# which *all* heads' keys and values can be made, and one rotary key of `qk_rope_head_dim` elements that all heads
# share. The rotary part stands apart because a rotation by position cannot be moved past the up-projection.


# %% tags=["algorithm"]
def read_mla(attention):
    """The weights of a Transformers DeepseekV2Attention, by head; rotary rows are reordered to the rotate-half convention."""
    nope, rope, rank = attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.kv_lora_rank
    halves = torch.cat([torch.arange(0, rope, 2), torch.arange(1, rope, 2)])
    q = attention.q_proj.weight.view(attention.num_heads, nope + rope, -1)
    down = attention.kv_a_proj_with_mqa.weight
    up = attention.kv_b_proj.weight.view(attention.num_heads, -1, rank)
    return {
        "q_nope": q[:, :nope],
        "q_rope": q[:, nope:][:, halves],  # [n_q_heads, nope or rope, hidden]
        "down": down[:rank],
        "k_rope": down[rank:][halves],  # [rank, hidden], [rope, hidden]
        "norm": attention.kv_a_layernorm.weight,
        "eps": attention.kv_a_layernorm.variance_epsilon,
        "up_k": up[:, :nope],
        "up_v": up[:, nope:],  # [n_q_heads, nope or v_head_dim, rank]
        "out": attention.o_proj.weight,
        "scale": attention.scaling,
        "theta": attention.config.rope_parameters["rope_theta"],
    }


def mla_latents(w, x, positions):
    """What MLA caches for tokens x ``[n, hidden]``: latents ``[n, rank]`` and rotary keys ``[n, rope]``."""
    cos, sin = rope_tables(positions, len(w["k_rope"]), w["theta"])
    return rms_norm(x @ w["down"].T, w["norm"], w["eps"]), apply_rope(x @ w["k_rope"].T, cos, sin)


def mla_queries(w, x, positions):
    """Queries without and with position, ``[n_q_heads, n, nope]`` and ``[n_q_heads, n, rope]``."""
    cos, sin = rope_tables(positions, len(w["k_rope"]), w["theta"])
    return torch.einsum("nd,hed->hne", x, w["q_nope"]), apply_rope(
        torch.einsum("nd,hed->hne", x, w["q_rope"]), cos, sin
    )


# %% [markdown]
# The **naive** form rebuilds every head's keys and values from the latents. The **absorbed** form multiplies the
# query into latent space instead, attends over the latents as if they were one shared key and value, and only then
# goes up to the heads. Since $q^\top (U_k c) = (U_k^\top q)^\top c$, the two are equal; only the absorbed one never
# builds the large tensors.


# %% tags=["algorithm"]
def mla_weights(w, scores, positions, n_tokens):
    unseen = torch.arange(n_tokens)[None, :] > positions[:, None]
    return (scores * w["scale"]).masked_fill(unseen, float("-inf")).softmax(dim=-1)


def mla_naive(w, x, positions, latents, rotary):
    """Attention output ``[n_new, hidden]``, keys and values rebuilt for every head and every cached token."""
    q_nope, q_rope = mla_queries(w, x, positions)
    keys = torch.einsum("tr,her->hte", latents, w["up_k"])
    values = torch.einsum("tr,her->hte", latents, w["up_v"])
    scores = q_nope @ keys.transpose(1, 2) + q_rope @ rotary.T
    heads = mla_weights(w, scores, positions, len(latents)) @ values
    return heads.transpose(0, 1).flatten(1) @ w["out"].T


def mla_absorbed(w, x, positions, latents, rotary):
    """The same output, from the latents themselves."""
    q_nope, q_rope = mla_queries(w, x, positions)
    q_latent = torch.einsum("hne,her->hnr", q_nope, w["up_k"])
    scores = q_latent @ latents.T + q_rope @ rotary.T
    mixed = mla_weights(w, scores, positions, len(latents)) @ latents
    heads = torch.einsum("hnr,her->hne", mixed, w["up_v"])
    return heads.transpose(0, 1).flatten(1) @ w["out"].T


# %% [markdown]
# Three checks at once: naive against Transformers' own DeepSeek-V2 layer, absorbed against naive, and the newest
# token alone, served by the cached latents, against the full pass.


# %%
def mla_check(n_tokens=21):
    toy = AutoModelForCausalLM.from_config(toys["MLA"], dtype=torch.float32, attn_implementation="eager").eval().model
    for parameter in toy.parameters():  # fresh weights are tiny; make every term count
        parameter.add_(0.15 * torch.randn_like(parameter))
    x, positions = torch.randn(n_tokens, 64), torch.arange(n_tokens)
    mask = torch.full((n_tokens, n_tokens), float("-inf")).triu(1)[None, None]
    rope = toy.rotary_emb(x[None], position_ids=positions[None])
    reference = toy.layers[0].self_attn(x[None], attention_mask=mask, position_embeddings=rope)[0][0]
    w = read_mla(toy.layers[0].self_attn)
    latents, rotary = mla_latents(w, x, positions)
    full = mla_naive(w, x, positions, latents, rotary)
    last = mla_absorbed(w, x[-1:], positions[-1:], latents, rotary)
    pairs = {
        "naive - Transformers": (full, reference),
        "cached absorbed - naive": (last, full[-1:]),
        "absorbed - naive": (mla_absorbed(w, x, positions, latents, rotary), full),
    }
    return {name: (a - b).abs().max().item() for name, (a, b) in pairs.items()}, memory.tensor_bytes([latents, rotary])


mla_differences, mla_layer_bytes = mla_check()
assert mla_layer_bytes * 3 == models.kv_bytes(toys["MLA"], 21, 1, "float32")
pd.Series(mla_differences, name="largest difference").map("{:.1e}".format).to_frame()

# %% [markdown]
# ### DeepSeek-V2's 93.3 %, taken apart
#
# The abstract of the DeepSeek-V2 report says that the KV cache shrank by 93.3 %. That is often quoted as what MLA
# does. It is worth an hour to find out what was compared with what. DeepSeek 67B, the model compared with, already
# used GQA (95 layers, 8 KV heads of 128; these sizes are taken from secondary sources). And the deployed V2 also
# stores its cache in about 6 bits an element.

# %%
v2 = models.kv_shape(DeepseekV2Config(num_hidden_layers=60, hidden_size=5120, num_attention_heads=128))
v1 = models.kv_shape(LlamaConfig(num_hidden_layers=95, hidden_size=8192, num_attention_heads=64, num_key_value_heads=8))
mha = models.kv_shape(LlamaConfig(num_hidden_layers=60, hidden_size=5120, num_attention_heads=128, head_dim=128))
cases = [
    ("MHA of\nV2's own shape", mha, 16),
    ("DeepSeek 67B,\nGQA", v1, 16),
    ("DeepSeek-V2,\nMLA", v2, 16),
    ("DeepSeek-V2,\nMLA, 6 bits", v2, 6),
]
deepseek = pd.DataFrame(
    [{"cache": name, "KB a token": s.elements_per_token * bits / 8 / 1000} for name, s, bits in cases]
)
run.figure(
    plots.bars(deepseek, x="cache", y="KB a token", title="KV cache of one token", xlabel="", ylabel="kilobytes"),
    "deepseek",
    deepseek,
)

# %%
kb = deepseek["KB a token"]
saved = {
    "MLA against MHA of the same shape, both 16 bits": 100 * (1 - kb[2] / kb[0]),
    "MLA against DeepSeek 67B's GQA, both 16 bits": 100 * (1 - kb[2] / kb[1]),
    "MLA in 6 bits against DeepSeek 67B in 16 bits": 100 * (1 - kb[3] / kb[1]),
    "DeepSeek 67B itself in 6 bits, without MLA": 100 * (1 - 6 / 16),
}
run.measured("deepseek_v2_percent_saved_at_equal_bits", saved["MLA against DeepSeek 67B's GQA, both 16 bits"], "%")
pd.Series(saved, name="% saved").round(2).to_frame()

# %% [markdown]
# Both of the first two rows are statements about MLA, and they differ because the baselines differ. The headline
# needs the third row: another model, another depth *and* another number of bits. Nothing in it is wrong. It is a
# statement about two deployments.

# %% [markdown]
# ## The memory ledger
#
# Memory in use is weights, plus KV cache, plus workspace (activations and whatever the kernels need while they run).
# We measure all three for the real model: one prefill for each bar, its peak taken by the operating system (or by the
# allocator, on a GPU).


# %%
def prefill_memory(n_tokens, batch, keep=1):
    ids = text[:n_tokens].to(device).repeat(batch, 1)
    held = kv_adapter.new_cache("dynamic", model.config)
    with memory.measure_device_peak(device) as peak:
        model(ids, past_key_values=held, logits_to_keep=keep)
    kv = kv_adapter.cache_bytes(held)
    assert kv == models.kv_bytes(model.config, n_tokens, batch, run.dtype)
    return {"weights": models.weight_bytes(model), "KV cache": kv, "workspace": max(0, peak.grown - kv)}


cells = [(c, 1) for c in (contexts[0], *contexts[2:])] + [(contexts[0], b) for b in run.profile.batches[1:3]]
ledger = pd.DataFrame({f"{c} x {b}": prefill_memory(c, b) for c, b in cells}).T / 2**20
ledger.loc[f"{contexts[-2]} x 1\nall logits"] = pd.Series(prefill_memory(contexts[-2], 1, keep=0)) / 2**20
run.figure(
    plots.stacked(ledger, title="Memory after and during prefill", xlabel="context x batch", ylabel="MiB"),
    "ledger",
    ledger.reset_index(names="case"),
)

# %% [markdown]
# The weights do not move; the cache grows with context times batch; the workspace depends on how the work is done.
# Compare the last bar with its twin without "all logits": asking for the logits of every prompt token, which nobody
# needs to generate, costs more than the whole cache. This model is small and its GQA is thrifty. At the scale of
# served models the picture turns over:

# %%
from transformers import Qwen2Config

# Sizes: each model's config.json as published on its hub page (Llama-2-7b-hf, Llama-3.1-8B, Qwen2.5-7B).
served = {
    "Llama-2-7B (MHA)": LlamaConfig(intermediate_size=11008, vocab_size=32000),
    "Llama-3.1-8B (GQA, 8 KV heads)": LlamaConfig(num_key_value_heads=8, intermediate_size=14336, vocab_size=128256),
    "Qwen2.5-7B (GQA, 4 KV heads)": Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
    ),
}


def served_gib(config, n_tokens=4096, batch=40):
    with torch.device("meta"):  # shapes without memory
        weights = 2 * AutoModelForCausalLM.from_config(config).num_parameters()
    return {"weights": weights / 2**30, "KV cache": models.kv_bytes(config, n_tokens, batch) / 2**30}


served_ledger = pd.DataFrame({name.replace(" (", "\n("): served_gib(config) for name, config in served.items()}).T
run.figure(
    plots.stacked(
        served_ledger,
        title="40 sequences of 4096 tokens, 16 bits (by formula)",
        xlabel="",
        ylabel="GiB",
        limit=80,
        limit_label="a GPU of 80 GiB",
    ),
    "served",
    served_ledger.reset_index(names="model"),
)

# %% [markdown]
# Three models of about seven billion parameters, one workload. For the cache only KV heads, their width and the layers
# count, and they decide whether a batch of 40 fits. One more, quoted in the PagedAttention paper: OPT-13B with MHA.

# %%
from transformers import OPTConfig

opt = models.kv_shape(OPTConfig(hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, ffn_dim=20480))
opt_token, opt_request = models.kv_bytes(opt, 1, 1, "float16"), models.kv_bytes(opt, 2048, 1, "float16")
print(f"a token: {opt_token:,} bytes = {opt_token / 1024:g} KiB")
print(f"2048 tokens: {opt_request / 2**20:g} MiB = {opt_request / 1e9:.2f} GB")

# %% [markdown]
# ### The boundary, predicted and met
#
# If the ledger is right, it must say in advance where memory ends. A child process gets a hard limit on its data. It
# loads the bundled model's weights and then allocates caches. First we measure what the interpreter and its libraries
# take; the rest is the formula.

# %%
CHILD = """
import glob, re, torch
from safetensors import safe_open
weights, outcomes = [], []
for path in sorted(glob.glob(arguments["folder"] + "/*.safetensors")) if arguments["folder"] else []:
    with safe_open(path, framework="pt") as file:
        weights += [file.get_tensor(name).clone() for name in file.keys()]
data = 1024 * int(re.search(r"VmData:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1))
n_layers, n_kv_heads, n_tokens, head_dim = arguments["shape"]
for batch in arguments["batches"]:
    cache = None
    try:
        size = (batch, n_kv_heads, n_tokens, head_dim)
        cache = [torch.zeros(size, dtype=torch.bfloat16) for _ in range(2 * n_layers)]
        outcomes.append("fits")
    except RuntimeError as error:
        outcomes.append("out of memory" if "allocate memory" in str(error) else str(error))
result = {"data": data, "outcomes": outcomes}
"""

# %%
folder = str(models.bundled_model())
bundled = models.kv_shape(models.load_config("smollm2-135m-instruct"))


def child(batches, n_tokens, limit, folder=folder):
    sizes = (bundled.n_layers, bundled.n_kv_heads, n_tokens, bundled.head_dim)
    return memory.run_limited(CHILD, limit, folder=folder, shape=sizes, batches=batches).value


can_limit = run.hardware.system == "Linux"
libraries = child([], 1, 2**33, folder="")["data"] if can_limit else 0
weights = models.checkpoint_bytes(folder, "bfloat16")
limit = libraries + weights + 2**29
parts = f"libraries {show_bytes(libraries)}, weights {show_bytes(weights)}, limit {show_bytes(limit)}"
print(parts if can_limit else "not run here: a limit on a process's memory needs Linux")


# %%
def boundary(n_tokens):
    """The largest batch that should fit, and what happened to it and to the next one."""
    one = models.kv_bytes(bundled, n_tokens)
    batch, spare = divmod(limit - libraries - weights, one)
    ends = child([batch, batch + 1], n_tokens, limit)["outcomes"]
    names = "context", "largest batch (predicted)", "spare", "that batch", "one more"
    return dict(zip(names, (n_tokens, batch, show_bytes(spare), *ends), strict=True))


edges = pd.DataFrame([boundary(c) for c in (1000, 3000)] if can_limit else [])
edges

# %% [markdown]
# "That batch" should read `fits`, "one more" `out of memory`. The prediction used no run of the batch itself: one
# measured number (what the libraries take) and two formulas. Real servers do the same at start-up, and set the rest
# aside as a pool.

# %% [markdown]
# ## The real system: Transformers' caches, side by side
#
# The library offers four kinds. *Dynamic* grows by concatenation, as ours did. *Static* is allocated once, so its
# shapes never change and a compiler can take it. *Offloaded* keeps only the layer at work on the GPU. *Quantized*
# stores all but the newest tokens in a few bits (here with HQQ), after KIVI.
#
# One protocol for all: the same context of prose, then the same tokens one by one; the dynamic cache's logits are the
# reference. Beside it, free greedy decoding of a few tokens: where two outputs part, the margin says whether it was a
# tie.

# %%
N_CONTEXT, N_STEPS, N_GREEDY = contexts[1], 14, 8
prose = text[: N_CONTEXT + N_STEPS]
protocol = f"Persuasion, {N_CONTEXT} tokens of context, then {N_STEPS} tokens one by one"
KINDS = {
    "dynamic": {},
    "static": {"max_cache_len": N_CONTEXT + N_STEPS},
    "offloaded": {},
    "quantized, 8 bits": {"nbits": 8},
    "quantized, 4 bits": {"nbits": 4},
    "quantized, 2 bits": {"nbits": 2},
}
refused = {name: kv_adapter.refusal(name.split(",")[0], run.hardware) for name in KINDS}
pd.Series({name: reason or "usable" for name, reason in refused.items()}, name="on this machine").to_frame()


# %%
def measure_kind(name):
    kind, options = name.split(",")[0], KINDS[name]
    forced = kv_adapter.decode_forced(model, kv_adapter.new_cache(kind, model.config, **options), prose, N_CONTEXT)
    free = kv_adapter.decode_greedy(model, kv_adapter.new_cache(kind, model.config, **options), prose[:64], N_GREEDY)
    return forced, free, kv_adapter.is_compileable(kv_adapter.new_cache(kind, model.config, **options))


seen = {name: measure_kind(name) for name in (k for k in KINDS if not refused[k])}
full_bytes = models.kv_bytes(model.config, len(prose), 1, run.dtype)


# %%
def cache_row(name):
    forced, (tokens, _), compileable = seen[name]
    reference, (ref_tokens, ref_logits), _ = seen["dynamic"]
    match = quality.greedy_match(ref_tokens, tokens, ref_logits)
    nll = torch.nn.functional.cross_entropy(forced.logits[:-1], prose[N_CONTEXT + 1 :])
    return {
        "cache": name,
        "step (ms)": 1e3 * sorted(forced.step_seconds)[N_STEPS // 2],
        "bytes": forced.cache_bytes,
        "of the 16-bit formula": forced.cache_bytes / models.kv_bytes(model.config, len(prose)),
        "KL to dynamic (nats)": quality.kl_divergence(reference.logits, forced.logits),
        "perplexity": float(nll.exp()),
        "greedy match": f"{match.agree}/{match.n}" + ("" if match.margin is None else f", margin {match.margin:.2f}"),
        "torch.compile": "yes" if compileable else "no",
    }


caches = pd.DataFrame([cache_row(name) for name in seen])
assert (caches["bytes"][:2] == full_bytes).all()
caches.round({"step (ms)": 1, "of the 16-bit formula": 3, "KL to dynamic (nats)": 5, "perplexity": 2})

# %%
run.figure(
    plots.bars(
        caches.assign(cache=caches["cache"].str.replace(", ", ",\n"), mib=caches["bytes"] / 2**20),
        x="cache",
        y="mib",
        title=f"Memory held for {len(prose)} tokens",
        xlabel="",
        ylabel="MiB",
    ),
    "caches",
    caches,
)

# %% [markdown]
# How to read the table. The bytes are compared with a 16-bit cache, so in fp32 a cache that stores nothing shorter reads 2.
# The newest tokens of a quantized cache, its residual window, stay in the run's dtype. Dynamic and static hold exactly what the
# formula says and give the same distribution. Static
# shapes are what a compiler or a CUDA graph needs; the last column is what Transformers declares (nothing was compiled
# here). Perplexity over so few tokens may even fall by chance; KL compares whole distributions and cannot. A margin beside
# the greedy match is the reference's lead of its first over its second choice at the place where the outputs part: far above
# a thousandth, it is no tie. A quantized cache is unpacked at every step. Whether that shows depends on how long the
# context is beside the weights, which every step reads as well.
#
# A "4-bit" cache does not hold 4 bits an element. Each group of elements brings a scale and a zero point:


# %%
def bits_an_element(name):
    """Bits of the quantized part: what is held, less the newest tokens that are still in full precision."""
    packed = seen[name][0].cache_bytes - models.kv_bytes(model.config, N_STEPS, 1, run.dtype)
    return 8 * packed / (shape.elements_per_token * N_CONTEXT)


bits = {name: bits_an_element(name) for name in seen if "bits" in name}
run.measured("bits_an_element_of_the_4_bit_cache", bits["quantized, 4 bits"], "bits")
pd.Series(bits, name="bits an element").round(2).to_frame()

# %% [markdown]
# ## Ledgers: one variable changed
#
# Now the whole machine: Transformers' `generate` in a process of its own, the same requests twice, with `use_cache`
# off and on. A speed is worth nothing without quality, so both outputs are held against our own decoder from above.

# %%
from helpers.engines.transformers_engine import TransformersEngine
from helpers.workload import Request, Workload

N_PROMPT, N_OUT = contexts[0], run.profile.max_tokens // 5
starts = [37 * i for i in range(4)]
requests = tuple(
    Request(request_id=f"prose-{i}", prompt_ids=tuple(text[i : i + N_PROMPT].tolist()), max_tokens=N_OUT)
    for i in starts
)
workload = Workload(
    name="four pieces of prose",
    requests=requests,
    seed=SEED,
    cache="any",
    note="prompts overlap; nothing caches prefixes",
)


def from_scratch(prompt_ids):
    """Greedy decoding with our own forward pass and our own cache."""
    held, fed, tokens = CatCache(llama.n_layers), torch.tensor(prompt_ids, device=device), []
    while len(tokens) < N_OUT:
        tokens.append(int(forward(llama, fed, held)[-1].argmax()))
        fed = torch.tensor(tokens[-1:], device=device)
    return tokens


ours = [from_scratch(request.prompt_ids) for request in requests]

# %%
kv_in_flight = models.kv_bytes(model.config, N_PROMPT + N_OUT - 1, 1, run.dtype)


def engine_card(name, cache_kind, formula):
    engine.use_cache(cache_kind)
    record = engine.run(workload, warmup=1)
    outputs = [trace.output_ids for trace in record.traces]
    judged = quality.greedy_agreement(ours, outputs, f"held against the decoder from scratch, {N_OUT} tokens each")
    return run.card(make_card(name, record, [judged], kv_formula=formula, seed=SEED))


with TransformersEngine(
    run.profile.model, dtype=run.dtype, device=device, max_model_len=run.profile.max_model_len
) as engine:
    without = engine_card("use_cache=False", "none", 0)
    with_cache = engine_card("dynamic cache", "dynamic", kv_in_flight)
run.cards()

# %%
without.compare(with_cache).frame()

# %% [markdown]
# The time to the first token should hardly move: prefill is the same work. Where it does by a tenth or two, remember that the
# two runs came one after the other, and that notebook 00 found runs of one engine to differ by as much; the interval knows
# only what varies inside a run. The time per token should fall by far more than that. The KV line
# rises from nothing to what the formula says for the tokens in flight (the last token generated is never fed back, so
# it leaves nothing in the cache).

# %% [markdown]
# ## A control that should not help
#
# Ask for exactly **one** token. There is no decode step, so a cache can only be filled, never read. If we find a gain
# here, our measurement is wrong.


# %%
def one_token_pair(_):
    ids = text[: contexts[0]].to(device)
    return step_seconds((forward(llama, ids, held) for held in (None, CatCache(llama.n_layers))), device)[1]


llama.projected_tokens = 0
pairs = [one_token_pair(i) for i in range(run.profile.repeats)][1:]
control = paired_ratio([a for a, _ in pairs], [b for _, b in pairs], seed=SEED)
assert llama.projected_tokens == 2 * run.profile.repeats * contexts[0]
word = "undecided" if control.undecided else "decided"
Markdown(f"Without over with, one token: **{control}** ({word}); projected tokens are equal in both.")

# %% [markdown]
# ## Where it loses
#
# 1. **Memory.** The cache outgrows the weights at a number of tokens that we predicted above; with a batch, those
#    tokens are shared out among its sequences.
# 2. **Short outputs and short contexts.** The ratios of the first tokens are small. While a step is bound by reading
#    weights, recomputing a few tokens beside it costs little.
# 3. **A static cache on a short context** pays for the longest one at once, in memory and in every step that attends
#    over empty slots:

# %%
room = kv_adapter.new_cache("static", model.config, max_cache_len=run.profile.max_model_len)
short = kv_adapter.decode_forced(model, room, text[: contexts[0] + 8], contexts[0])
used = models.kv_bytes(model.config, contexts[0] + 8, 1, run.dtype)
small = kv_adapter.decode_forced(
    model, kv_adapter.new_cache("dynamic", model.config), text[: contexts[0] + 8], contexts[0]
)
pd.DataFrame(
    [
        {
            "cache": "dynamic",
            "held": show_bytes(small.cache_bytes),
            "used": show_bytes(used),
            "step": show_seconds(sorted(small.step_seconds)[4]),
        },
        {
            "cache": "static",
            "held": show_bytes(short.cache_bytes),
            "used": show_bytes(used),
            "step": show_seconds(sorted(short.step_seconds)[4]),
        },
    ]
)

# %% [markdown]
# The gap between *held* and *used* is where notebook 02 begins.

# %% [markdown]
# ## Claims
#
# What the papers say, in their own figures, and what we can say after this run. A speed-up measured on a GPU is never
# "reproduced" on a CPU; counts, bytes and identities are the same everywhere.

# %% tags=["claim"]
same = difference / scale <= (1e-5 if run.dtype == "float32" else 0.02) and exact <= 1e-9
run.claim(
    "kv-cache-projections",
    naive_tokens == n * (n + 1) // 2 and cached_tokens == n and same,
    f"{naive_tokens} against {cached_tokens} for n={n}; logits differ by {difference / scale:.1e} of the largest "
    f"in {run.dtype}, by {exact:.0e} in float64",
)
run.claim(
    "kv-cache-time",
    bool(steps["ratio"].iloc[-1] > steps["ratio"].iloc[0]),
    f"one step: {steps['ratio'].iloc[0]:.1f}x at {contexts[0]} tokens, {steps['ratio'].iloc[-1]:.1f}x at {contexts[-1]}",
)
run.claim(
    "pagedattention-opt13b-800kb",
    opt_token == 800 * 1024 and opt_request == 1600 * 2**20,
    f"{opt_token / 1024:g} KiB a token, {opt_request / 2**20:g} MiB for 2048 tokens",
)
mha_bytes, gqa_bytes, mqa_bytes = (sizes["tensors"][kind] for kind in ("MHA", "GQA", "MQA"))
run.claim(
    "mqa-cache",
    mha_bytes == 8 * mqa_bytes,
    f"{mha_bytes} / {mqa_bytes} bytes = {mha_bytes / mqa_bytes:g}, with 8 query heads",
)
gqa = run.claim(
    "gqa-cache",
    mha_bytes == 4 * gqa_bytes,
    f"{mha_bytes} / {gqa_bytes} bytes = {mha_bytes / gqa_bytes:g}, with 8 query heads and 2 KV heads",
)
# %% tags=["claim"]
headline, equal_bits = (
    saved["MLA in 6 bits against DeepSeek 67B in 16 bits"],
    saved["MLA against DeepSeek 67B's GQA, both 16 bits"],
)
run.claim(
    "deepseek-v2-kv",
    abs(headline - 93.3) < 0.1 and abs(equal_bits - 93.3) > 5,
    f"{headline:.1f} % with a 6-bit cache; {equal_bits:.1f} % at equal bits",
    reason="arithmetic on published shapes (67B's from secondary sources); that the 6 bits close the gap is our inference",
)
groups = v2.elements_per_layer[0] / (2 * 128)
run.claim("mla-alone-kv", groups == 2.25, f"(512 + 64) / (2 x 128) = {groups:g} KV heads of 128")
run.claim(
    "mla-absorbed",
    max(mla_differences.values()) <= 1e-5,
    ", ".join(f"{name} {value:.0e}" for name, value in mla_differences.items()),
)
four = caches.set_index("cache").loc["quantized, 4 bits"]
share = bits["quantized, 4 bits"] / 16
run.claim(
    "quantized-cache-memory",
    bool(0.2 <= share <= 0.4 and four["KL to dynamic (nats)"] < 0.1),
    f"{share:.2f} of 16 bits beyond the residual window ({bits['quantized, 4 bits']:.1f} bits an element), "
    f"KL {four['KL to dynamic (nats)']:.3f} nats, perplexity {four['perplexity']:.1f} against {caches['perplexity'][0]:.1f}",
)
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
# ### 01.1 Bytes from a configuration (easy)
#
# Write the formula yourself, from a plain dictionary with the field names of a `config.json`.


# %% tags=["exercise"]
def my_kv_bytes(config, n_tokens, bytes_per_element):
    """Bytes of one sequence's keys and values.

    `config` has num_hidden_layers, num_attention_heads and hidden_size; it may have num_key_value_heads, head_dim, and
    sliding_window (every layer then keeps at most that many tokens). Missing and None mean the same.
    """
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>Three defaults: KV heads fall back to query heads, head_dim to hidden_size //
# num_attention_heads, and the window to no limit.</details>


# %% tags=["solution"]
def my_kv_bytes(config, n_tokens, bytes_per_element):
    n_kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kept = min(n_tokens, config.get("sliding_window") or n_tokens)
    return 2 * config["num_hidden_layers"] * n_kv_heads * head_dim * kept * bytes_per_element


# %% tags=["check"]
run.check("01.1", my_kv_bytes)

# %% [markdown]
# ### 01.2 One cached step of one head (easy)
#
# The newest token's query, key and value arrive; the earlier keys and values are in the cache.


# %% tags=["exercise"]
def cached_step(q, k, v, cached_k, cached_v):
    """q, k, v are ``[head_dim]``; the cache is ``[n, head_dim]`` twice, n may be 0.

    Return ``(output, new_k, new_v)`` of shapes ``[head_dim]``, ``[n + 1, head_dim]``, ``[n + 1, head_dim]``, and leave the
    inputs as they are.
    """
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>Append first, attend afterwards: a token sees itself. No mask is needed. Do not
# forget the square root.</details>


# %% tags=["solution"]
def cached_step(q, k, v, cached_k, cached_v):
    new_k = torch.cat([cached_k, k[None]])
    new_v = torch.cat([cached_v, v[None]])
    weights = (new_k @ q / len(q) ** 0.5).softmax(dim=0)
    return weights @ new_v, new_k, new_v


# %% tags=["check"]
run.check("01.2", cached_step)

# %% [markdown]
# ### 01.3 Find the bug (medium)
#
# This function was in use for a while. Its author tested it by decoding from an empty cache and comparing with full
# attention: no difference. In production, after a prefill, answers were slightly worse. Return a mended version, and
# say why the author's test could not see it.


# %% tags=["exercise"]
def buggy_rope_step(q, k, v, cached_k, cached_v, theta=10000.0):
    """One cached step with RoPE; `cached_k` holds rotated keys of positions 0 to n - 1. Shapes as in 01.2."""
    position = torch.tensor([len(cached_k) + 1])
    cos, sin = rope_tables(position, len(q), theta)
    new_k = torch.cat([cached_k, apply_rope(k[None], cos, sin)])
    new_v = torch.cat([cached_v, v[None]])
    scores = new_k @ apply_rope(q[None], cos, sin)[0] / len(q) ** 0.5
    return scores.softmax(dim=0) @ new_v, new_k, new_v


def mended_rope_step(q, k, v, cached_k, cached_v, theta=10000.0):
    """Your version of buggy_rope_step."""
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>RoPE makes scores depend on differences of positions only. Which difference is wrong
# after a prefill, and is any difference wrong if every token went through this function?</details>


# %% tags=["solution"]
def mended_rope_step(q, k, v, cached_k, cached_v, theta=10000.0):
    # The newest token's position is the number of tokens before it. Shifting *all* positions by one changes no difference of
    # positions, so a test that starts from an empty cache sees nothing; a prefill that begins at 0 does.
    position = torch.tensor([len(cached_k)])
    cos, sin = rope_tables(position, len(q), theta)
    new_k = torch.cat([cached_k, apply_rope(k[None], cos, sin)])
    new_v = torch.cat([cached_v, v[None]])
    scores = new_k @ apply_rope(q[None], cos, sin)[0] / len(q) ** 0.5
    return scores.softmax(dim=0) @ new_v, new_k, new_v


# %% tags=["check"]
run.check("01.3", mended_rope_step)

# %% [markdown]
# ### 01.4 The largest batch (medium)
#
# Memory is set aside in blocks, as in a paged server: every sequence's last block may be partly empty.


# %% tags=["exercise"]
def largest_batch(budget, weights, workspace_per_sequence, bytes_per_token, n_tokens, block_size):
    """The most sequences of `n_tokens` tokens that fit into `budget` bytes beside `weights` bytes; 0 where none does.

    A sequence takes whole blocks of `block_size` tokens, and `workspace_per_sequence` bytes besides.
    """
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>Round tokens up to blocks before multiplying, the quotient down, and never go below
# zero.</details>


# %% tags=["solution"]
def largest_batch(budget, weights, workspace_per_sequence, bytes_per_token, n_tokens, block_size):
    blocks = -(-n_tokens // block_size)
    one = blocks * block_size * bytes_per_token + workspace_per_sequence
    return max(0, (budget - weights) // one)


# %% tags=["check"]
run.check("01.4", largest_batch)

# %% [markdown]
# ### 01.5 Which cache? (research)
#
# A service has a memory budget and a bound on quality. Write the rule that chooses. Then use it on the table `caches`
# above with budgets and contexts of your own, and look for the context at which its answer changes. The open part:
# the KL of a quantized cache was measured at one context. Does it grow with the context, and would your rule still be
# right?


# %% tags=["exercise"]
def choose_cache(options, n_tokens, budget, max_kl):
    """The name of the fastest option that fits, or "none".

    `options` is a list of dicts with name, step_seconds, kl, bytes_per_token, residual_bytes_per_token and
    residual_tokens: the newest ``min(n_tokens, residual_tokens)`` tokens take residual_bytes_per_token each, older ones
    bytes_per_token. Of equally fast options take the smaller cache.
    """
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>First filter by budget and by KL, then take the minimum by (step_seconds,
# bytes).</details>


# %% tags=["solution"]
def choose_cache(options, n_tokens, budget, max_kl):
    def size(option):
        newest = min(n_tokens, option["residual_tokens"])
        return newest * option["residual_bytes_per_token"] + (n_tokens - newest) * option["bytes_per_token"]

    good = [o for o in options if size(o) <= budget and o["kl"] <= max_kl]
    return min(good, key=lambda o: (o["step_seconds"], size(o)))["name"] if good else "none"


# %% tags=["check"]
run.check("01.5", choose_cache)

# %% [markdown]
# ## Pitfalls and further reading
#
# - **`hidden_size` is not the cache's width.** Read `num_key_value_heads` and `head_dim`; check a formula against
#   tensors, as above.
# - **KB or KiB, GB or GiB?** OPT-13B's "800 KB" and "1.6 GB" are 800 KiB and 1600 MiB. That is 2.4 % and 4.9 % more than
#   the words say; between GB and GiB it is 7.4 %.
# - **Held is not used.** Logical bytes, bytes rounded to blocks, the reserved pool and what the device reports are
#   four numbers. Name the one you print.
# - **Test a cache after a prefill**, never only from empty; and test that the same prompt twice gives the same
#   answer.
# - **A sliding window bounds the cache** by the window in those layers that have one. Which they are stands in
#   `layer_types`.
#
# Further reading:
#
# - Shazeer, [Fast Transformer Decoding](https://arxiv.org/abs/1911.02150), 2019: the memory-bandwidth argument.
# - Ainslie et al., [GQA](https://arxiv.org/abs/2305.13245), 2023: how to turn MHA into GQA afterwards.
# - DeepSeek-AI, [DeepSeek-V2](https://arxiv.org/abs/2405.04434), 2024: section 2.1 and its appendix on the absorbed
#   form.
# - Liu et al., [KIVI](https://arxiv.org/abs/2402.02750), 2024: why keys want other groups than values (notebook 06).
# - Transformers, [Cache strategies](https://huggingface.co/docs/transformers/kv_cache): the four kinds, and how to
#   choose one.

# %%
run.finish()
