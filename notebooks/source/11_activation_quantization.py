# %% [markdown]
# # 11 · Activation quantization
#
# **Weights fit into eight bits almost for free. Why do activations not, and what makes them fit?**
#
# Notebook 10 made weights small, and computed in 16 bits as before. To *multiply* in eight bits or four, the inputs of each
# layer must be small integers too. A weight can be looked at for hours before it is stored. An activation is new for every
# token, and a few of them are a thousand times larger than the rest. Each paper below is an answer to these few.
#
# | paper or system | year, venue | maturity | what we take from it |
# | --- | --- | --- | --- |
# | Dettmers et al., *LLM.int8()* | 2022, NeurIPS | peer-reviewed | a scale for each row; outlier columns apart, in 16 bits |
# | Micikevicius et al., *FP8 formats for deep learning* | 2022, arXiv | preprint, industry standard | E4M3 and E5M2 |
# | Xiao et al., *SmoothQuant* | 2023, ICML | peer-reviewed | move the difficulty from inputs to weights |
# | Sun et al., *Massive activations* | 2024, COLM | peer-reviewed | where the largest ones sit, and in which tokens |
# | Ashkboos et al., *QuaRot* | 2024, NeurIPS | peer-reviewed | rotate the network; outliers are gone; 4 bits |
# | Liu et al., *SpinQuant* | 2025, ICLR | peer-reviewed | learn the rotation |
# | Lin et al., *QServe* | 2025, MLSys | peer-reviewed | W4A8KV4 whose integers never leave eight bits |
# | llm-compressor, torchao, bitsandbytes, vLLM, TensorRT-LLM | now | maintained code | the same, ready to use |
#
# **W8A8** means weights and activations of eight bits; **W4A8KV4**: weights 4, activations 8, keys and values in the cache 4.

# %% tags=["parameters"]
PROFILE = "auto"
SEED = 0
OUT = None
TOOLS = "none"  # the maintained libraries beside ours: none (results stored with the course are shown), or all

# %%
import helpers

run = helpers.start("11_activation_quantization", PROFILE, SEED, OUT, TOOLS=TOOLS)
run

# %% [markdown]
# ## What fails without it
#
# One scale for all of a layer's inputs, fixed beforehand from calibration text, is the simplest thing that an integer matrix
# unit can work with. First only the weights are rounded, with a scale for each row; then the inputs too.

# %%
import json
from collections import Counter

import pandas as pd
import torch
import torch.nn.functional as F
from IPython.display import Markdown

from helpers import corpora, models, plots, quality, toolbox
from helpers.hardware import best_seconds
from helpers.ledgers import make_card, show_bytes, show_seconds
from helpers.memory import release_free_memory
from helpers.paths import ROOT
from helpers.quantize import Calibration, QuantizationError, fake_quantize, linear_layers, stored_bits

# %%
device = run.profile.device
DTYPE = "float32"  # rounding is emulated: the emulation itself should not round
MODEL = run.profile.model if device == "cpu" else run.profile.small_model  # in float32, and twice while it is edited
model = models.load_model(MODEL, dtype=DTYPE, device=device)
tokenizer = models.load_tokenizer(MODEL)
layers = linear_layers(model)
config = model.config
WINDOW, N_WINDOWS = (run.profile.quality_window * 3 // 4, 1) if device == "cpu" else (run.profile.quality_window, 4)
calibration = corpora.prose_ids(tokenizer, "calibration", 4 * WINDOW).to(device).view(4, WINDOW)
evaluation = corpora.prose_ids(tokenizer, "evaluation", N_WINDOWS * WINDOW).to(device)

# %% [markdown]
# Quality is judged by two numbers on the same windows of text: perplexity, and the mean Kullback-Leibler divergence (KL) of
# the next-token distribution from that of the original model. KL says how much the model *changed*, and it is much less
# noisy on short texts. A window begins a text, and that will matter.

# %%
CORPUS = "Persuasion"
STRIDE = 2
reference_logits = []


def windows_of(logits_of):
    """Perplexity over the evaluation text, and every second position's logits, window by window, on the CPU."""
    kept = []

    def seen(ids):
        logits = logits_of(ids)
        kept.append(logits[0, ::STRIDE].float().cpu())
        return logits

    return quality.perplexity(seen, evaluation, window=WINDOW, corpus=CORPUS), kept


def quality_of(logits_of):
    """``(perplexity, KL to the original model in nats)``."""
    perplexity, kept = windows_of(logits_of)
    total = n = 0
    for before, after in zip(reference_logits, kept, strict=True):
        for a, b in zip(before.split(64), after.split(64), strict=True):
            total, n = total + len(a) * quality.kl_divergence(a, b), n + len(a)
    return perplexity, total / n


def forward(ids):
    return model(ids, use_cache=False).logits


original, reference_logits = windows_of(forward)
Markdown(f"Original model: perplexity **{original.value:.2f}** ({original.protocol}).")

# %% [markdown]
# ### Eight bits
#
# The failure needs a few lines, and they serve to the end of the notebook. A **scale** $s$ and a code $q$ stand for the value
# $s \cdot q$. With $b$ bits and $m = 2^{b-1} - 1$, the scale is $s = \max|x| / m$ and the code is $q = \mathrm{round}(x / s)$,
# from $-m$ to $m$. (Notebook 10's grids use all $2^b$ codes, and a zero $z$ is subtracted from them. In a product of two
# such tensors each $z$ would cost a sum of its own, so here $z = 0$, the range is the same on both sides, and one code is
# given away.) All of a tensor can share a scale, or each **row** has its own: a row of an input is a token, a row of a
# weight is an output channel. Both may be taken out of the sum over $k$:
#
# $$ y_{ij} = \sum_k x_{ik} w_{jk} \approx s^x_i\, s^w_j \sum_k q^x_{ik}\, q^w_{jk} , $$
#
# and the sum that remains has only integers in it. A scale for each **column** (input channel $k$) would sit inside the sum,
# where no integer unit can use it. That is the problem, because large activations come in columns (and, as we shall see, in
# single tokens).


# %% tags=["algorithm"]
import torch
import torch.nn.functional as F

from helpers.quantize import QuantizationError, linear_layers

SHARED = ("tensor", "row", "column")


def absmax_scale(x, bits, over, name="tensor"):
    """The scale of each part of `x` that shares one: the whole ``tensor``, each ``row``, or each ``column``.

    The result broadcasts against x, ``[..., rows, columns]``. A part that is all zero has the scale 1 / largest code.
    """
    if over not in SHARED or bits not in range(2, 9):
        raise QuantizationError(
            f"{name}: {bits} bits with one scale for each {over} were asked for.",
            f"Legal are 2 to 8 bits, and a scale for each of: {', '.join(SHARED)}.",
        )
    if x.numel() == 0:
        raise QuantizationError(f"{name} holds no values: its shape is {list(x.shape)}.", "Give at least one token.")
    dims = {"tensor": tuple(range(x.dim())), "row": (-1,), "column": tuple(range(x.dim() - 1))}[over]
    largest = x.abs().amax(dim=dims, keepdim=True)
    if not bool(torch.isfinite(largest).all()):
        raise QuantizationError(f"{name} holds NaN or infinite values.", "Look at where it was computed.")
    return torch.where(largest > 0, largest, 1.0) / (2 ** (bits - 1) - 1)


def to_codes(x, scale, bits):
    """Integer codes, int8, from minus to plus ``2**(bits - 1) - 1``; what lies beyond is clipped."""
    top = 2 ** (bits - 1) - 1
    return (x / scale).round().clamp(-top, top).to(torch.int8)


def rounded(x, scale, bits):
    """The values that the codes stand for, in the dtype of x: `to_codes` times the scale, without a detour through int8."""
    top = 2 ** (bits - 1) - 1
    return (x / scale).round_().clamp_(-top, top).mul_(scale)


# %% [markdown]
# And a way to run the real model with other arithmetic in its linear layers: each computes what `build(name, weight)` says,
# and after the `with` block it is the old one. The output head stays as it is, as in all these papers.


# %% tags=["algorithm"]
from contextlib import contextmanager
from functools import partial


def with_bias(compute, bias, x):
    return compute(x) + bias


@contextmanager
def computing(model, build):
    """Inside the block each decoder linear computes ``build(name, weight)(x)`` and adds its bias."""
    linears = linear_layers(model)
    try:
        for name, linear in linears.items():
            compute = build(name, linear.weight)
            linear.forward = compute if linear.bias is None else partial(with_bias, compute, linear.bias)
        yield model
    finally:
        for linear in linears.values():
            vars(linear).pop("forward", None)


# %% tags=["algorithm"]
def quantized(weights, inputs):
    """A build: ``weights(name, w)`` and ``inputs(name, x)`` take the place of weight and input, made anew at each call."""
    return lambda name, w: lambda x: F.linear(inputs(name, x), weights(name, w))


def untouched(name, x):
    return x


def dynamic(bits, over):
    """Round with scales taken from the tensor itself: for weights, and for inputs at each call."""
    return lambda name, x: rounded(x, absmax_scale(x, bits, over, name), bits)


def static(absmax, bits):
    """Round with one scale a layer, fixed beforehand from `absmax`, name to ``[n_in]``; larger inputs are clipped."""
    scales = {name: absmax_scale(largest, bits, "tensor", name) for name, largest in absmax.items()}

    def inputs(name, x):
        if name not in scales:
            raise QuantizationError(
                f"{name} has no static scale.", "Calibrate with all layers that are to be quantized."
            )
        return rounded(x, scales[name], bits)

    return inputs


# %%
with Calibration(layers, hessians=False) as seen:
    for ids in calibration:
        forward(ids[None])
absmax = seen.absmax

# %%
with computing(model, quantized(dynamic(8, "row"), untouched)):
    only_weights, _ = quality_of(forward)
with computing(model, quantized(dynamic(8, "row"), static(absmax, 8))):
    naive, naive_kl = quality_of(forward)
pd.DataFrame(
    {"perplexity": [original.value, only_weights.value, naive.value]},
    index=["original", "weights in 8 bits", "weights and activations in 8 bits"],
).round(2)

# %% [markdown]
# Same eight bits, same rounding. The weights hardly notice. The activations take a large part of the model with them.

# %% [markdown]
# ## Predict
#
# Write your own numbers into the next cell before you run it. The defaults are guesses, and some of them are poor.

# %% tags=["predict"]
run.predict(
    largest_over_median_activation=100,  # the most extreme layer input: its largest channel over its median channel
    percent_of_multiplications_in_int8=99.9,  # LLM.int8() at 6.0, this model
    percent_of_loss_left_by_smoothing=30,  # SmoothQuant's perplexity loss over that of naive W8A8 (static, weights by row)
    kurtosis_before_over_after_rotation=10,  # of the residual stream
    loss_without_over_with_rotation=5,  # KL at W4A4KV4
    worst_over_best_random_rotation=1.5,  # error of the same layers under many random rotations
    percent_groups_that_overflow=1,  # W4 in W8 without QServe's protective range
    int8_over_bf16_layer_prefill=2,  # one linear layer, seconds in bf16 over seconds in int8, 256 tokens
    int8_over_bf16_layer_decode=1.5,  # the same for one token
)

# %% [markdown]
# ## The idea
#
# Four ways round a column that is too large. The first three rewrite the product and are exact in real arithmetic; the last is
# another kind of code:
#
# | way | what is changed | who |
# | --- | --- | --- |
# | **split** | $XW^\top = X_{\bar O}W_{\bar O}^\top + X_O W_O^\top$: the few large columns $O$ stay in 16 bits | LLM.int8() |
# | **scale** | $XW^\top = (X S^{-1})(W S)^\top$ with a diagonal $S$: columns shrink, the weight's columns grow | SmoothQuant |
# | **rotate** | $XW^\top = (X R)(W R)^\top$ with $R R^\top = I$: one large number becomes many small ones | QuaRot, SpinQuant |
# | **float** | codes with an exponent: small values keep their *relative* precision beside large ones | FP8 |
#
# The second and the third cost nothing at run time if $S^{-1}$ and $R$ can be folded into whatever produced $X$. A norm's
# scale can take $S^{-1}$. A residual stream can be rotated as a whole, if every layer that reads it turns back and every
# layer that writes to it turns along. Inside the MLP `down_proj` reads a product of two vectors, channel by channel: one of
# the layers that make them, `up_proj`, can take $S^{-1}$. No rotation passes through the product: $R$ is computed online.

# %% [markdown]
# ## From scratch
#
# Integers with a scale are there already. Now the outliers, then one answer after another.
#
# ### Find the outliers
#
# No planting is needed. Of each layer's input we saw the largest magnitude in each channel. How far is the largest channel
# from the median one?

# %%
spread = pd.DataFrame(
    [
        {"layer": int(name.split(".")[2]), "kind": name.split(".")[-1], "largest": float(largest.max()),
         "median channel": float(largest.median()), "channels above 6": int((largest > 6).sum()),
         "channels": len(largest)}
        for name, largest in absmax.items()
        if name.split(".")[-1] in ("q_proj", "o_proj", "gate_proj", "down_proj")
    ]
)  # fmt: skip
spread["largest / median"] = spread["largest"] / spread["median channel"]
worst = spread.loc[spread["largest / median"].idxmax()]
run.measured("largest_over_median_activation", worst["largest / median"])
spread.sort_values("largest / median", ascending=False).head(6).round(1)

# %%
figure = plots.lines(
    spread.sort_values("layer"),
    x="layer", y="largest / median", hue="kind", log_y=True,
    title="How far the largest input channel stands out", xlabel="layer", ylabel="largest over median channel",
)  # fmt: skip
run.figure(figure, "outliers", spread)

# %% [markdown]
# Which tokens carry them? The residual stream itself, by position in the text: **massive activations** (Sun et al., 2024)
# sit in one or two channels, at the first token and a few others, with nearly the same value in every text.


# %%
def residuals(ids):
    """The residual stream after each layer, ``[n_layers, n_tokens, hidden]``."""
    states = model(ids[None], use_cache=False, output_hidden_states=True).hidden_states
    return torch.stack([state[0].float() for state in states[1:-1]])


streams = [residuals(ids) for ids in calibration[:2]]
middle = len(streams[0]) // 2
rows = []
for text, stream in enumerate(streams):
    magnitudes = stream[middle].abs()
    for token in magnitudes.amax(dim=1).topk(4).indices.tolist():
        channel = int(magnitudes[token].argmax())
        word = repr(tokenizer.decode(calibration[text, token : token + 1]))
        value = float(stream[middle, token, channel])
        rows.append({"text": text, "token": token, "is": word, "channel": channel, "value": value})
massive = pd.DataFrame(rows)
massive["over the median"] = [abs(row["value"]) / float(streams[row["text"]][middle].abs().median()) for row in rows]
massive.round(1)

# %% [markdown]
# Read the first row of each text: the first token, whatever it is, one channel, a similar value. The model uses it as a
# place to put attention that has nowhere to go (a later notebook meets it again as an attention sink). No linear layer reads
# that number: a norm stands before each. But one has to *write* it: a `down_proj` at the top of the first table, and its input
# at the first token is as extreme. A static scale that spans this one input leaves almost no codes for all other tokens.
#
# LLM.int8()'s paper has a criterion for a *systematic* outlier: a channel whose magnitude is at least 6 in at least a
# quarter of the layers and at 6 % of the tokens. These shares were chosen so that the smallest model looked at, of 125 million
# parameters, has a single one. What the paper saw appear suddenly, between 6 and 6.7 billion parameters, are channels that are
# so large in *all* layers and at about three quarters of the tokens. Here is a model of the small kind:

# %%
inputs_of = {"attention": "self_attn.q_proj", "MLP": "mlp.gate_proj"}
written_by = spread[spread["kind"] == "down_proj"].nlargest(2, "largest / median")["layer"]
writers = [f"model.layers.{i}.mlp.down_proj" for i in written_by]


def layer_inputs(names, ids):
    """What the layers `names` read for one text: name to ``[n_tokens, n_in]``."""
    kept, handles = {}, []
    for name in names:
        keep = lambda _, args, name=name: kept.update({name: args[0][0].float()})  # noqa: E731
        handles.append(layers[name].register_forward_pre_hook(keep))
    forward(ids[None])
    for handle in handles:
        handle.remove()
    return kept


def systematic(hit, layer_share=0.25, token_share=0.06):
    """Channels with at least `token_share` of hits in this share of the layers; hit ``[n_layers, hidden]``, shares of tokens."""
    in_layer = hit >= token_share
    return (in_layer.float().mean(dim=0) >= layer_share).nonzero().flatten().tolist()


read = layer_inputs([n for n in layers if n.endswith(tuple(inputs_of.values()))] + writers, calibration[0])
large = {name: (x.abs() >= 6).float().mean(dim=0) for name, x in read.items()}  # share of the tokens, each channel
hits = {w: torch.stack([hit for name, hit in large.items() if name.endswith(kind)]) for w, kind in inputs_of.items()}
hits["pooled (q, k, v, gate)"] = torch.cat([hits["attention"]] * 3 + [hits["MLP"]])
n_systematic = {where: len(systematic(hit)) for where, hit in hits.items()}
n_everywhere = {where: len(systematic(hit, 1.0, 0.75)) for where, hit in hits.items()}
for name in writers:
    by_token = read[name].abs().amax(dim=1)
    print(f"{name} reads up to {by_token[0]:.0f} at the first token and up to {by_token[1:].max():.0f} at all others")
del read
pd.DataFrame({"systematic": n_systematic, "in all layers, 75 % of tokens": n_everywhere, "of": config.hidden_size})

# %% [markdown]
# (The paper pools the layers that read the stream with `o_proj`, whose channels are those of heads. We leave it out.)
#
# ### Whose scale, and when?
#
# Back to W8A8. Two questions are asked at once, and papers do not always say which they answer. *Whose* scale: one for a
# tensor, or one for each token? *When*: **static** (from calibration, nothing to do at run time) or **dynamic** (the maximum
# is taken anew at each call)?


# %% tags=["algorithm"]
def scale_bits(layers, bits=16):
    """Bits that a scale of `bits` bits for each output channel adds to each weight, over all `layers`, name to linear layer."""
    n_scales = sum(layer.out_features for layer in layers.values())
    return bits * n_scales / sum(layer.weight.numel() for layer in layers.values())


# %%
table = []
n_linear = sum(layer.weight.numel() for layer in layers.values())
n_head = config.vocab_size * config.hidden_size
kv_elements = models.kv_shape(config).elements_per_token


def judge(method, w_bits, a_bits, kv_bits=16.0, family="", found=None):
    """Judge the model as it is now and add a row to the table. Bits are those of the codes *with* their scales' share.

    `found` is ``(perplexity, KL)`` where they are known already.
    """
    perplexity, kl = found or quality_of(forward)
    moved = (w_bits * n_linear + 16 * n_head + kv_bits * kv_elements * WINDOW) / 8
    row = {"method": method, "family": family or method, "W bits": w_bits, "A bits": a_bits, "KV bits": kv_bits}
    row |= {"perplexity": perplexity.value, "KL": kl, "bytes a token": moved, "computed": "fake-quantized"}
    table.append(row)
    return row


def result(method, column="perplexity"):
    return next(row[column] for row in table if row["method"] == method)


def loss(method):
    """Perplexity above the original's."""
    return result(method) - original.value


table.append(
    {"method": "original", "family": "original", "W bits": 16, "A bits": 16, "KV bits": 16, "perplexity": original.value,
     "KL": 0.0, "bytes a token": 2 * (n_linear + n_head + kv_elements * WINDOW), "computed": DTYPE}
)  # fmt: skip
ROW_SCALES = scale_bits(layers)
W8 = 8 + ROW_SCALES
_ = judge("W8A8 static", W8, 8, family="W8A8", found=(naive, naive_kl))

# %%
for method, bits, weights, inputs in (
    ("W8A8 static, all per tensor", 8, dynamic(8, "tensor"), static(absmax, 8)),
    ("W8A8 dynamic per tensor", W8, dynamic(8, "row"), dynamic(8, "tensor")),
    ("W8A8 dynamic per token", W8, dynamic(8, "row"), dynamic(8, "row")),
):
    with computing(model, quantized(weights, inputs)):
        judge(method, bits, 8, family="W8A8")
pd.DataFrame(table)[["method", "perplexity", "KL"]].round(4)

# %% [markdown]
# While the inputs of whole layers are rounded to zero, finer scales of weights cannot save the model, whatever the distance
# of the two static rows. Dynamic scales for a whole tensor help a little, as long as one massive token is in it. A scale for
# each *token* keeps the massive tokens from the others, and most of the loss is gone. **Here**: in table 1 of SmoothQuant's
# paper a scale for each token helps OPT no more than one for the tensor (175B: 31.7 and 32.3 % accuracy, 71.6 % in FP16).
# There the outliers are a few channels at *all* tokens, and against a channel no token's scale helps. **So whoever compares
# with "naive W8A8" must say whose scale it had.** SmoothQuant's paper compares with one scale for each tensor, taken at run
# time, and its first setting, O1, has a scale for each token itself.
#
# #### The integers, really multiplied
#
# So far a rounded input met a rounded weight in floating point: *fake quantization*, which is for quality only and says
# nothing of speed. `torch._int_mm` multiplies int8 matrices into int32. Same codes, same scales: the result must be the
# same.


# %% tags=["algorithm"]
def int8_linear(x, w_codes, w_scale, name="layer"):
    """A linear layer in int8: x ``[tokens, n_in]`` gets a scale for each token; codes ``[n_out, n_in]``, w_scale ``[n_out, 1]``.

    The products are summed in int32, exactly, and meet their two scales once, at the end.
    """
    x_scale = absmax_scale(x, 8, "row", name)
    codes = to_codes(x, x_scale, 8)
    if x.device.type == "cuda":  # the GPU kernel takes at least 17 rows
        codes = F.pad(codes, (0, 0, 0, -len(codes) % 32))
    sums = torch._int_mm(codes, w_codes.t())[: len(x)]
    return sums.to(x.dtype) * x_scale * w_scale.t()


# %%
w = layers[f"model.layers.{middle}.mlp.gate_proj"].weight.float()
x = torch.randn(64, w.shape[1], device=device)
x[0, 7] = 500
w_scale = absmax_scale(w, 8, "row")
w_codes = to_codes(w, w_scale, 8)
y_int = int8_linear(x, w_codes, w_scale)
y_fake = F.linear(rounded(x, absmax_scale(x, 8, "row"), 8), rounded(w, w_scale, 8))
difference = float((y_int - y_fake).norm() / y_fake.norm())
assert difference < 1e-5
print(f"int8 against fake-quantized: relative difference {difference:.1e}")

# %% [markdown]
# ### LLM.int8(): split
#
# A column of the input in which any value exceeds 6 is taken out, with its column of the weight, and multiplied in 16 bits.
# The rest gets a scale for each token and for each output channel. Nothing is calibrated: the columns are found in each
# batch anew.


# %% tags=["algorithm"]
def llm_int8(threshold=6.0, count=None):
    """A build: columns of the input with a magnitude above `threshold` are multiplied unrounded, the others in int8.

    `count`, a Counter, gets the multiplications of both kinds.
    """

    def build(name, w):
        w_rounded = rounded(w, absmax_scale(w, 8, "row", name), 8)

        def compute(x):
            rows = x.reshape(-1, x.shape[-1])
            outlier = (rows.abs() > threshold).any(dim=0)
            regular = rows.masked_fill(outlier, 0.0)
            y = F.linear(rounded(regular, absmax_scale(regular, 8, "row", name), 8), w_rounded)
            y = y + F.linear(rows[:, outlier], w[:, outlier])
            if count is not None:
                n_outlier = int(outlier.sum())
                count["int8"] += len(rows) * len(w) * (rows.shape[1] - n_outlier)
                count["16 bits"] += len(rows) * len(w) * n_outlier
                count[name.split(".")[-1], "columns"] += n_outlier
            return y.reshape(*x.shape[:-1], -1)

        return compute

    return build


# %%
products = Counter()
with computing(model, llm_int8(6.0, products)):
    found = quality_of(forward)
share_int8 = products["int8"] / (products["int8"] + products["16 bits"])
judge("LLM.int8()", W8 + 16 * (1 - share_int8), 8, found=found)  # all columns in int8, the outliers' in 16 bits as well
run.measured("percent_of_multiplications_in_int8", 100 * share_int8, "%")
columns = {
    kind: products[kind, "columns"] / N_WINDOWS / config.num_hidden_layers
    for kind in ("q_proj", "o_proj", "gate_proj", "down_proj")
}
print(
    f"{share_int8:.2%} of the multiplications in int8; perplexity {result('LLM.int8()'):.2f}, original {original.value:.2f}"
)
pd.DataFrame({"outlier columns a layer": columns}).round(1).T

# %% [markdown]
# The share depends on how many tokens are looked at together: a column is out as soon as *one* token is large in it. Alone, a
# token takes few columns with it; a long prompt takes the union. (The weight columns taken out must exist in 16 bits. The
# paper's formula uses the original ones, and so do we; bitsandbytes keeps int8 only and turns those columns back. Our table
# counts them for this text; to be ready for any text, all columns would have to be kept.)

# %%
shares = []
for n_tokens in (1, 16, 64, WINDOW):
    counted = Counter()
    with computing(model, llm_int8(6.0, counted)):
        model(evaluation[None, :n_tokens], use_cache=False)
    shares.append({"tokens together": n_tokens, "in int8": counted["int8"] / (counted["int8"] + counted["16 bits"])})
shares = pd.DataFrame(shares)
shares.assign(**{"in int8": shares["in int8"].map("{:.2%}".format)})

# %% [markdown]
# ### SmoothQuant: scale
#
# Divide column $j$ of the input by $s_j$ and multiply column $j$ of the weight by it: the product is the same. With
#
# $$ s_j = \frac{\max|X_j|^{\alpha}}{\max|W_j|^{1-\alpha}} $$
#
# and $\alpha = 1/2$ both sides get the same maximum; a larger $\alpha$ moves more of the difficulty into the weight. First one
# layer, where $\alpha$ can be swept in a second. Inputs get one static scale, weights one for each row.


# %% tags=["algorithm"]
def smoothing_scale(x_absmax, w_absmax, alpha, name="layer"):
    """``max|X_j|^alpha / max|W_j|^(1 - alpha)`` for each input channel j, shape ``[n_in]``; 1 where either maximum is zero."""
    if not 0 <= alpha <= 1:
        raise QuantizationError(f"{name}: alpha is {alpha}.", "Take 0 (weights decide) to 1 (inputs decide).")
    if not bool(torch.isfinite(x_absmax).all() and torch.isfinite(w_absmax).all()):
        raise QuantizationError(
            f"{name}: a maximum is NaN or infinite.", "Calibrate again, on text that does not overflow."
        )
    scale = x_absmax**alpha / w_absmax ** (1 - alpha)
    return torch.where((x_absmax > 0) & (w_absmax > 0), scale, 1.0)


# %%
SWEPT = {"worst layer": writers[0], "middle layer": f"model.layers.{middle}.mlp.down_proj"}
fitted, later = (layer_inputs(SWEPT.values(), ids) for ids in calibration[:2])


def smoothed_error(name, scale_of):
    """Relative output error of layer `name`, smoothed by `scale_of` its two maxima: static inputs per tensor, weights by row."""
    x, w, x_absmax = later[name], layers[name].weight.float(), fitted[name].abs().amax(dim=0)
    s = scale_of(x_absmax, w.abs().amax(dim=0))
    x_scale = absmax_scale(x_absmax / s, 8, "tensor")
    y = F.linear(rounded(x / s, x_scale, 8), rounded(w * s, absmax_scale(w * s, 8, "row"), 8))
    exact = F.linear(x, w)
    rest = slice(1, None)  # the massive first token has an output so large that it would hide all others
    return float((y - exact)[rest].norm() / exact[rest].norm())


def half(x_absmax, w_absmax):
    return smoothing_scale(x_absmax, w_absmax, 0.5)


def shuffled_by(seed):
    def scale(x_absmax, w_absmax):
        order = torch.randperm(len(x_absmax), generator=torch.Generator().manual_seed(seed))
        return half(x_absmax, w_absmax)[order.to(device)]

    return scale


# %%
sweep = {}
for label, name in SWEPT.items():
    errors = {"off": smoothed_error(name, lambda x, w: torch.ones_like(x))}
    for alpha in (0.0, 0.25, 0.5, 0.65, 0.8, 1.0):
        errors[alpha] = smoothed_error(name, partial(smoothing_scale, alpha=alpha))
    shuffles = [smoothed_error(name, shuffled_by(SEED + i)) for i in range(4)]
    errors["0.5, shuffled"] = sum(shuffles) / len(shuffles)
    errors["0.5, wrong side"] = smoothed_error(name, lambda x, w: 1 / half(x, w))
    sweep[label] = errors
sweep = pd.DataFrame(sweep).rename_axis("alpha")
print(", ".join(f"{label}: {name}" for label, name in SWEPT.items()))
sweep.round(4)

# %% [markdown]
# Errors are on a text that the maxima were not taken from, without its first token. The last two rows are controls that
# should not help: the same scales for the wrong channels (the mean of four shuffles), and on the wrong side. In the worst
# layer almost everything is rounded to zero without smoothing, so nothing can make it worse; the middle layer shows what a
# control is worth. No $\alpha$ is best in both: the paper's code has 0.5 as its default, and its README lists 0.85 to 0.9
# for Llama 2 and 3, 0.8 for Mistral and Mixtral, 0.6 and 0.7 for the two Falcons.
#
# #### Folded into the model
#
# At run time nobody divides. The norm before an attention block or an MLP takes the division into its own scale. `down_proj`
# reads $\mathrm{SiLU}(g) \odot u$, so the *rows* of `up_proj`, which make $u$, can take it. `o_proj` reads weighted sums of
# values, so the rows of `v_proj` can; but under GQA several query heads share one value head, and must share its scales.


# %% tags=["algorithm"]
@contextmanager
def edited(model):
    """Parameters may be replaced inside the block (``p.data = ...``, never in place); afterwards the old ones are back."""
    kept = {parameter: parameter.data for parameter in model.parameters()}
    head = model.lm_head.weight
    try:
        yield model
    finally:
        model.lm_head.weight = head
        for parameter, data in kept.items():
            parameter.data = data


def divide_rows(source, s):
    """Divide what `source` (a norm, or a linear layer with its bias) puts out by `s`, channel by channel."""
    shape = (-1,) + (1,) * (source.weight.dim() - 1)
    source.weight.data = source.weight / s.view(shape)
    if getattr(source, "bias", None) is not None:
        source.bias.data = source.bias / s


def head_parts(config):
    """``(n_kv_heads, q_per_kv, head_dim)``: how o_proj's input channels are ordered."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads, head_dim


# %% tags=["algorithm"]
def smooth(model, absmax, alpha, everywhere=True):
    """Fold smoothing scales into the model; returns the inputs' new maxima, name to ``[n_in]``.

    Always: into both norms of each layer. With `everywhere` also into up_proj (for down_proj) and v_proj (for o_proj, one scale
    for all query heads of a KV head). Use it inside `edited`.
    """
    absmax, (n_kv_heads, q_per_kv, head_dim) = dict(absmax), head_parts(model.config)

    def share(channels):
        return channels.view(n_kv_heads, q_per_kv, head_dim).amax(dim=1).flatten()

    def spread(channels):
        return channels.view(n_kv_heads, 1, head_dim).expand(-1, q_per_kv, -1).flatten()

    def move(source, prefix, readers, share=lambda v: v, spread=lambda v: v):
        names = [prefix + reader for reader in readers]
        linears = [model.get_submodule(name) for name in names]
        w_absmax = torch.stack([linear.weight.abs().amax(dim=0) for linear in linears]).amax(dim=0)
        s = smoothing_scale(share(absmax[names[0]]), share(w_absmax).float(), alpha, names[0])
        divide_rows(source, s.to(source.weight.dtype))
        for name, linear in zip(names, linears, strict=True):
            linear.weight.data = linear.weight * spread(s).to(linear.weight.dtype)
            absmax[name] = absmax[name] / spread(s)

    for index, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{index}."
        move(layer.input_layernorm, prefix, [f"self_attn.{kind}_proj" for kind in "qkv"])
        move(layer.post_attention_layernorm, prefix, ["mlp.gate_proj", "mlp.up_proj"])
        if everywhere:
            move(layer.mlp.up_proj, prefix, ["mlp.down_proj"])
            move(layer.self_attn.v_proj, prefix, ["self_attn.o_proj"], share, spread)
    return absmax


# %% [markdown]
# Before anything is rounded, the smoothed model must be the original one. Then the rounding:

# %%
ALPHA = 0.5
probe = evaluation[None, :WINDOW]
exact_logits = forward(probe)


def largest_change(exact):
    """Largest change of the probe's logits over the largest of `exact`. In place: the logits of a text are large."""
    return float(forward(probe).sub_(exact).abs_().max() / torch.maximum(exact.max(), -exact.min()))


with edited(model):
    smoothed_absmax = smooth(model, absmax, ALPHA)
    change = largest_change(exact_logits)
    with computing(model, quantized(dynamic(8, "row"), static(smoothed_absmax, 8))):
        judge("SmoothQuant", W8, 8)
    with computing(model, quantized(dynamic(8, "row"), dynamic(8, "row"))):
        judge("SmoothQuant, dynamic per token", W8, 8, family="SmoothQuant")
with edited(model):
    norms_absmax = smooth(model, absmax, ALPHA, everywhere=False)
    with computing(model, quantized(dynamic(8, "row"), static(norms_absmax, 8))):
        judge("SmoothQuant, norms only", W8, 8, family="SmoothQuant")
    with computing(model, quantized(dynamic(8, "row"), dynamic(8, "row"))):
        judge("SmoothQuant, norms only, dynamic per token", W8, 8, family="SmoothQuant")
del exact_logits
print(f"smoothed against original, unrounded: largest change {change:.1e} of the largest logit")

# %%
left = loss("SmoothQuant") / loss("W8A8 static")
run.measured("percent_of_loss_left_by_smoothing", 100 * left, "%")
smooth_rows = ["original", "W8A8 static", "SmoothQuant, norms only", "SmoothQuant"]
smooth_rows += ["W8A8 dynamic per token", *(f"{m}, dynamic per token" for m in smooth_rows[2:])]
dynamic_left = result("SmoothQuant, dynamic per token", "KL") / result("W8A8 dynamic per token", "KL")
display(pd.DataFrame([{c: result(m, c) for c in ("method", "perplexity", "KL")} for m in smooth_rows]).round(4))
Markdown(
    f"Static scales: smoothing leaves **{left:.0%}** of the perplexity loss. Dynamic scales for each token: it leaves "
    f"**{dynamic_left:.0%}** of the KL, which was small before."
)

# %% [markdown]
# Two lessons. The norms alone, which is what the paper folds into, are not enough here: in a gated MLP the worst input is
# `down_proj`'s, and OPT, on which the paper began, has no gate. And the last three rows: where the kernel takes a scale for
# each token, smoothing is no longer what saves *this* model (the
# paper's OPT models it does save, see above). It is still worth having here, as the ratio above says.

# %% [markdown]
# ### QuaRot: rotate
#
# A **Hadamard matrix** has only entries $\pm 1$ and orthogonal rows; divided by $\sqrt n$ it is a rotation
# (as these papers use the word: $R R^\top = I$, reflections included). It maps a vector
# with one large entry to one whose entries are all equally large: the worst case for a common scale becomes the best one.
# Sylvester doubles matrices, $n \to 2n$; Paley makes them from squares modulo a prime, which gives 12, 20, 28, 36, and with
# doubling most widths that models have. (Not from small ones: 92, 116, 156, 172 and others have Hadamard matrices that need
# other constructions. A width of 11008 = 64 x 172, as Llama 2 has it, gets a factor of 5504 here; QuaRot's code has 172.)


# %% tags=["algorithm"]
def paley(order):
    """A Hadamard matrix from the squares modulo a prime q: order q + 1 (q = 3 mod 4) or 2 (q + 1) (q = 1 mod 4), or None."""
    for q, rest in ((order - 1, 3), (order // 2 - 1, 1)):
        if q < 3 or q % 4 != rest or any(q % d == 0 for d in range(2, int(q**0.5) + 1)) or (rest == 1 and order % 2):
            continue
        squares = {i * i % q for i in range(1, q)}
        is_square = torch.tensor([0.0] + [1.0 if i in squares else -1.0 for i in range(1, q)], dtype=torch.float64)
        i = torch.arange(q)
        core = torch.zeros(q + 1, q + 1, dtype=torch.float64)
        core[0, 1:], core[1:, 0] = 1.0, 2.0 - rest
        core[1:, 1:] = is_square[(i[:, None] - i) % q]
        unit = torch.eye(q + 1, dtype=torch.float64)
        if rest == 3:
            return core + unit
        signs, turned = ([[1.0, 1.0], [1.0, -1.0]], [[1.0, -1.0], [-1.0, -1.0]])
        return torch.kron(core, core.new_tensor(signs)) + torch.kron(unit, core.new_tensor(turned))
    return None


# %% tags=["algorithm"]
def hadamard_factors(n):
    """``(A, B)``, float64 rotations, A of a power of two, B as small as `paley` has it (dense, so it is what costs).

    ``kron(A, B)`` is a Hadamard matrix of order n over its square root.
    """
    one = torch.ones(1, 1, dtype=torch.float64)
    base = n
    while base > 1 and base % 2 == 0:
        base //= 2
    while (found := one if base == 1 else paley(base)) is None:
        base *= 2
        if base < 1 or n % base:
            raise QuantizationError(
                f"No Hadamard matrix of order {n} is built here.",
                "Legal: 2^k times 1, 12, 20, 28, 36, 44, 60, 68, ... (not 52, 92, 100, 116, 156, 172).",
            )
    double = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5
    doubled = one
    while len(doubled) * base < n:
        doubled = torch.kron(doubled, double)
    return doubled, found / base**0.5


def times_hadamard(x, factors):
    """``x @ kron(A, B)`` for the last dimension of x, in ``n (a + b)`` instead of ``n^2`` steps a row."""
    a, b = (factor.to(x) for factor in factors)
    return (a.mT @ (x.reshape(*x.shape[:-1], len(a), len(b)) @ b)).reshape(x.shape)


# %%
def random_rotation(n, generator):
    """A rotation drawn uniformly (QR of a normal matrix, signs fixed), float32, ``[n, n]``."""
    q, r = torch.linalg.qr(torch.randn(n, n, generator=generator))
    return q * r.diagonal().sign()


HIDDEN, (N_KV_HEADS, Q_PER_KV, HEAD_DIM) = config.hidden_size, head_parts(config)
spike = torch.zeros(1, HIDDEN, dtype=torch.float64)
spike[0, HIDDEN // 3] = 24
residual_factors = hadamard_factors(HIDDEN)
flat = times_hadamard(spike, residual_factors)
assert torch.allclose(times_hadamard(flat, [f.T for f in residual_factors]), spike)
sizes = " x ".join(str(len(f)) for f in residual_factors)
print(
    f"one entry of 24 among {HIDDEN}: largest after rotation {flat.abs().max():.3f}, smallest {flat.abs().min():.3f}; {sizes}"
)

# %% [markdown]
# #### Rotate a network
#
# The residual stream $h$ becomes $hR$. Whoever writes to it (embedding, `o_proj`, `down_proj`) turns its output, whoever
# reads from it (`q`, `k`, `v`, `gate`, `up`, the head) turns back. Between them stands RMSNorm, which commutes with
# rotations, because they keep lengths, **if it has no scale of its own**. So its scale must go into the readers first.
# Values get a rotation within each head, undone by `o_proj`.
#
# What QuaRot has beside this and we leave out: an online Hadamard matrix across heads before `o_proj` (its stage 1c), so that
# with the one within heads a full Hadamard matrix acts on that input; random signs; and scales clipped below the maximum.


# %% tags=["algorithm"]
def fold_norms(model):
    """Move each RMSNorm's scale into the layers that read it; its own scale becomes 1. The head gets a weight of its own."""

    def fold(norm, *readers):
        for reader in readers:
            reader.weight.data = reader.weight * norm.weight
        norm.weight.data = torch.ones_like(norm.weight)

    head = model.lm_head
    head.weight = torch.nn.Parameter(head.weight.data, requires_grad=False)  # no longer tied to the embedding
    fold(model.model.norm, head)
    for layer in model.model.layers:
        fold(layer.input_layernorm, layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        fold(layer.post_attention_layernorm, layer.mlp.gate_proj, layer.mlp.up_proj)


def rotate(model, rotation, head_rotation=None):
    """Rotate the residual stream by `rotation` ``[hidden, hidden]``, each head's values by `head_rotation`; fold norms first."""

    def read(linear):
        linear.weight.data = linear.weight @ rotation.to(linear.weight)

    def write(linear):
        linear.weight.data = rotation.to(linear.weight).T @ linear.weight
        if linear.bias is not None:
            linear.bias.data = linear.bias @ rotation.to(linear.bias)

    model.model.embed_tokens.weight.data = model.model.embed_tokens.weight @ rotation.to(model.lm_head.weight)
    read(model.lm_head)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for reader in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            read(reader)
        for writer in (attention.o_proj, mlp.down_proj):
            write(writer)
        if head_rotation is not None:
            rotate_values(attention, head_rotation)


# %% tags=["algorithm"]
def rotate_values(attention, rotation):
    """Rotate the values within each head, `rotation` ``[head_dim, head_dim]``; o_proj turns back."""
    for linear, side in ((attention.v_proj, "out"), (attention.o_proj, "in")):
        w, r = linear.weight, rotation.to(linear.weight)
        if side == "out":
            heads = w.view(-1, len(r), w.shape[1])
            linear.weight.data = (r.T @ heads).reshape(w.shape)
            if linear.bias is not None:
                linear.bias.data = (linear.bias.view(-1, len(r)) @ r).flatten()
        else:
            linear.weight.data = (w.view(w.shape[0], -1, len(r)) @ r).reshape(w.shape)


def online_hadamard(build, factors):
    """A build that also rotates down_proj's input, which no layer before it can: online, and its weight along."""

    def rotating(name, w):
        if not name.endswith("down_proj"):
            return build(name, w)
        compute = build(name, times_hadamard(w, factors))
        return lambda x: compute(times_hadamard(x, factors))

    return rotating


# %% tags=["algorithm"]
@contextmanager
def quantized_kv(model, bits, rotation=None):
    """Attention reads keys (after RoPE) and values rounded to `bits`, with a scale and zero for each token and head.

    With `rotation` ``[head_dim, head_dim]``, queries and keys are rotated first: their products do not change.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from helpers.quantize import fake_quantize

    def stored(x):
        return fake_quantize(x.reshape(-1, x.shape[-1]), bits, -1, False, name="KV cache").view(x.shape)

    def attend(module, query, key, value, *arguments, **settings):
        if rotation is not None:
            query, key = query @ rotation.to(query), key @ rotation.to(key)
        return sdpa_attention_forward(module, query, stored(key), stored(value), *arguments, **settings)

    before = model.config._attn_implementation
    AttentionInterface.register("quantized_kv", attend)
    model.set_attn_implementation("quantized_kv")
    try:
        yield model
    finally:
        model.set_attn_implementation(before)


# %% [markdown]
# Is it still the same network? In exact arithmetic it is; here it must be, up to fp32's rounding. Then its residual stream:
# the **kurtosis** (fourth moment over squared variance) is 3 for a normal distribution, and grows with the weight of the
# tails.


# %%
def kurtosis(x):
    x = x.double() - x.double().mean()
    return float((x**4).mean() / (x**2).mean() ** 2)


def exact(name, w):
    return lambda x: F.linear(x, w)


mlp_factors, kv_rotation = hadamard_factors(config.intermediate_size), torch.kron(*hadamard_factors(HEAD_DIM))
hadamard_rotation = torch.kron(*residual_factors)
normal_tokens = slice(1, None)
release_free_memory()
before = kurtosis(residuals(calibration[0])[middle, normal_tokens])
exact_logits = forward(probe)
with edited(model):
    fold_norms(model)
    rotate(model, hadamard_rotation, kv_rotation)
    after = kurtosis(residuals(calibration[0])[middle, normal_tokens])
    with computing(model, online_hadamard(exact, mlp_factors)):
        change = largest_change(exact_logits)
assert change < 1e-3, change
rotation_change, kurtosis_gain = change, before / after
run.measured("kurtosis_before_over_after_rotation", kurtosis_gain)
del exact_logits
print(f"rotated against original, unrounded: largest change {change:.1e} of the largest logit")
print(f"kurtosis of the residual stream, first token left out: {before:.1f} before, {after:.1f} after")

# %% [markdown]
# Now four bits for everything: weights in groups of 64 (plain rounding, nothing of notebook 10), inputs with a scale for each
# token, keys and values with a scale and a zero for each token and head. (The bundled weights came from a four-bit grid in
# groups of 32; notebook 10 shows what that does to tables. Rotation leaves that grid. A symmetric grid in groups of 64 is not
# it either, so no row here profits from it.)


# %%
W4 = stored_bits(4, 64, True)
KV4 = stored_bits(4, HEAD_DIM, False)


def four_bit_weights(name, w):
    return fake_quantize(w, 4, 64, True, name=name)


def judge_four_bits(method, rotation=None, head_rotation=None, factors=None, family=""):
    """W4A4KV4, with the residual stream rotated by `rotation` (None: as it is)."""
    build = quantized(four_bit_weights, dynamic(4, "row"))
    with edited(model):
        if rotation is not None:
            fold_norms(model)
            rotate(model, rotation, head_rotation)
        build = online_hadamard(build, factors) if factors else build
        with computing(model, build), quantized_kv(model, 4, head_rotation):
            return judge(method, W4, 4, KV4, family=family)


# %%
four_bit_inputs = online_hadamard(quantized(untouched, dynamic(4, "row")), mlp_factors)
with computing(model, quantized(untouched, dynamic(4, "row"))):
    judge("A4", 16, 4, family="A4, not rotated")
judge_four_bits("W4A4KV4", family="A4, not rotated")
judge_four_bits("QuaRot W4A4KV4", hadamard_rotation, kv_rotation, mlp_factors, family="QuaRot")
with edited(model):
    fold_norms(model)
    rotate(model, hadamard_rotation, kv_rotation)
    with computing(model, four_bit_inputs):
        judge("QuaRot A4", 16, 4, family="QuaRot")
    eight = online_hadamard(quantized(dynamic(8, "row"), dynamic(8, "row")), mlp_factors)
    with computing(model, eight), quantized_kv(model, 8, kv_rotation):
        judge("QuaRot W8A8KV8", W8, 8, stored_bits(8, HEAD_DIM, False), family="QuaRot")

# %%
rotation_gain = result("W4A4KV4", "KL") / result("QuaRot W4A4KV4", "KL")
run.measured("loss_without_over_with_rotation", rotation_gain)
pd.DataFrame(table)[["method", "W bits", "A bits", "KV bits", "perplexity", "KL"]].tail(5).round(3)

# %% [markdown]
# A model of this size has little to spare, and four bits everywhere hurt it badly; what counts is by how much less with the
# rotation. The two rows with A4 round the inputs only, so they show what the rotation does to *activations*.

# %% [markdown]
# ### SpinQuant: learn the rotation
#
# Any rotation keeps the unrounded network; the rounded one depends on it. SpinQuant saw up to 13 points of accuracy between
# random rotations, and learns one instead. To stay a rotation during gradient descent, $R$ takes **Cayley** steps: with the
# gradient $G$ and the skew matrix $A = G R^\top - R G^\top$,
#
# $$ R' = \left(I + \tfrac{\eta}{2} A\right)^{-1} \left(I - \tfrac{\eta}{2} A\right) R , $$
#
# which is a rotation for any skew $A$. The paper descends on the whole network's loss; that takes a GPU. We take the output
# error of a few layers that read the residual stream, with rounded inputs: seconds. Rounding has no gradient; it is passed
# through as if it were not there (a straight-through estimate). The *scale* has one: it is a token's largest entry, and a
# rotation that makes that entry smaller makes every step finer. Leave that part of the gradient out, and less is learned.


# %% tags=["algorithm"]
def through(x, bits):
    """Round each row of x. The gradient passes the rounding as if it were not there, and it does see the scale."""
    scale = absmax_scale(x, bits, "row")
    steps = x / scale
    return (steps + (steps.round() - steps).detach()) * scale


def rotated_error(rotation, samples, bits=4):
    """Mean squared relative output error of layers whose input is rounded in rotated coordinates.

    `samples` holds pairs (x ``[tokens, hidden]``, w ``[n_out, hidden]``), norms folded. Weights are not rounded, as in the paper:
    they can be seen to later (GPTQ).
    """
    errors = []
    for x, w in samples:
        exact = x @ w.T
        got = through(x @ rotation, bits) @ (w @ rotation).T
        errors.append(((got - exact) ** 2).sum() / (exact**2).sum())
    return torch.stack(errors).mean()


def cayley_step(rotation, gradient, size):
    """One step down the gradient that stays a rotation; `size` is the step times the largest singular value of the direction."""
    direction = gradient @ rotation.T - rotation @ gradient.T
    direction = direction * (size / torch.linalg.matrix_norm(direction, 2).clamp_min(1e-30))
    unit = torch.eye(len(rotation)).to(rotation)
    return torch.linalg.solve(unit + direction / 2, (unit - direction / 2) @ rotation)


# %% tags=["algorithm"]
def learn_rotation(rotation, samples, n_steps, size=0.15, bits=4):
    """The best rotation met on a way of `n_steps` Cayley steps (their size falls linearly to zero), and all losses."""
    best, losses = (float("inf"), rotation), []
    for step in range(n_steps + 1):
        with torch.enable_grad():
            leaf = rotation.detach().requires_grad_()
            loss = rotated_error(leaf, samples, bits)
            (gradient,) = torch.autograd.grad(loss, leaf)
        losses.append(float(loss))
        if losses[-1] < best[0]:
            best = (losses[-1], rotation)
        rotation = cayley_step(rotation, gradient, size * (1 - step / max(1, n_steps)))
    return best[1], losses


# %%
N_LAYERS_LEARNED, N_ROWS = 4, 96


def layer_samples(texts):
    """Pairs of inputs and weight rows of a few layers, norms folded; inputs of all tokens of these texts."""
    chosen = [int(i * (config.num_hidden_layers - 1) / (N_LAYERS_LEARNED - 1)) for i in range(N_LAYERS_LEARNED)]
    names = [f"model.layers.{i}.mlp.gate_proj" for i in chosen]
    with edited(model):
        fold_norms(model)
        read = [layer_inputs(names, text[:128]) for text in texts]
        weights = {name: layers[name].weight[:N_ROWS].float().clone() for name in names}
    return [(torch.cat([one[name] for one in read]), weights[name]) for name in names]


train_samples, test_samples = layer_samples(calibration[:3]), layer_samples(calibration[3:])

# %% [markdown]
# Equal budgets: a step costs about three evaluations of the error (forward and backward), so the random search gets three
# draws for each step. Learning starts from the first of these draws, and once more from a Hadamard matrix. A Hadamard matrix
# whose rows get random signs is another one, so it gets draws too (one for each step: a third
# of the budget). Winners are chosen on three texts and judged on a fourth.

# %%
N_STEPS = 20
generator = torch.Generator().manual_seed(SEED)
first_rotation = best_rotation = random_rotation(HIDDEN, generator).to(device)
random_errors = [float(rotated_error(first_rotation, train_samples))]
for _ in range(3 * N_STEPS - 1):
    r = random_rotation(HIDDEN, generator).to(device)
    random_errors.append(float(rotated_error(r, train_samples)))
    best_rotation = r if random_errors[-1] == min(random_errors) else best_rotation
plain = hadamard_rotation.float().to(device)
signs = torch.randint(0, 2, (N_STEPS, HIDDEN, 1), generator=generator).to(device) * 2 - 1
best_signed = min((s * plain for s in signs), key=lambda r: float(rotated_error(r, train_samples)))
starts = {"a random one": first_rotation, "Hadamard": plain}
learned = {start: learn_rotation(r, train_samples, N_STEPS) for start, r in starts.items()}
learned_rotation = learned["Hadamard"][0]
identity = torch.eye(HIDDEN, device=device)
orthogonality = max(float((r.T @ r - identity).abs().max()) for r, _ in learned.values())

# %%
permutation = identity[torch.randperm(HIDDEN, generator=generator).to(device)]
rotations = {
    "none": identity, "a permutation (control)": permutation, "Hadamard": plain, "best of the random ones": best_rotation,
    "best of the signed Hadamards": best_signed, "learned from a random one": learned["a random one"][0],
    "learned from Hadamard": learned_rotation,
}  # fmt: skip
spins = {"texts it was chosen on": train_samples, "another text": test_samples}
spins = pd.DataFrame(
    {text: {name: float(rotated_error(r, samples)) for name, r in rotations.items()} for text, samples in spins.items()}
)
lowest, highest = min(random_errors), max(random_errors)
worst_over_best = highest / lowest
run.measured("worst_over_best_random_rotation", worst_over_best)
print(f"{len(random_errors)} random rotations: error {lowest:.5f} to {highest:.5f} ({worst_over_best:.3f}x)")
print(f"learned: R'R = I within {orthogonality:.1e}")
spins.round(5)

# %%
figure = plots.lines(
    pd.concat([pd.DataFrame({"step": range(len(e)), "error": e, "from": start}) for start, (_, e) in learned.items()]),
    x="step", y="error", hue="from", title="Cayley steps", xlabel="step", ylabel="squared relative output error",
)  # fmt: skip
axes = figure.axes[0]
axes.axhspan(lowest, highest, color="0.85", zorder=0)
axes.annotate("all random rotations", (0, highest), va="bottom", fontsize=8)
run.figure(
    figure, "cayley", {**{start: losses for start, (_, losses) in learned.items()}, "all random ones": random_errors}
)

# %% [markdown]
# A permutation is a rotation too, and it does nothing: it moves outliers without mixing them. That is the control. How far
# random ones differ is printed above: look before you repeat the paper's 13 points, which are accuracy of a whole network at
# its edge. And a better error in a few layers is not yet a better network. So the whole network, its inputs rounded to four
# bits:


# %%
def judge_inputs(method, rotation):
    """A4 with the residual stream rotated by `rotation`; values and down_proj's input rotated as before."""
    with edited(model):
        fold_norms(model)
        rotate(model, rotation, kv_rotation)
        with computing(model, four_bit_inputs):
            return judge(method, 16, 4, family="SpinQuant")


judge_inputs("SpinQuant A4", learned_rotation)
judge_four_bits("SpinQuant W4A4KV4", learned_rotation, kv_rotation, mlp_factors, family="SpinQuant")
spin_gains = {what: result(f"QuaRot {what}", "KL") / result(f"SpinQuant {what}", "KL") for what in ("A4", "W4A4KV4")}
signs_agree = (spin_gains["A4"] > 1) == (spin_gains["W4A4KV4"] > 1)
shown = ", ".join(f"{what} {gain:.2f}" for what, gain in spin_gains.items())
print(f"KL with Hadamard over KL with the learned one: {shown}")
verdict = f"The learned one is {'better' if spin_gains['A4'] > 1 else 'worse'} in both."
print(verdict if signs_agree else "They point in opposite ways: neither is the better one here.")
pd.DataFrame([row for row in table if row["A bits"] == 4])[["method", "W bits", "perplexity", "KL"]].round(3)

# %% [markdown]
# ### QServe: four-bit weights that never leave eight bits
#
# A four-bit weight needs a scale for each group of inputs, and groups end *inside* the sum over $k$. W4A4 multiplies in
# integers and has to leave them at every group's end: it turns partial sums into floating point. W4A16 turns the weights
# into floating point before it multiplies. Both happen in the main loop, on the slow units of a GPU, which QServe's authors
# found to take 20 to 90 % of the time.
#
# QServe quantizes twice. First each output channel to int8 with a 16-bit scale, then each group of these *integers* to four
# bits, with an *integer* scale and zero. In the main loop the weights become int8 again, by integer arithmetic; the 16-bit
# scale waits until the end. One trap: rounding twice may leave the range. So the first step uses codes up to **119** only,
# the *protective range*: a group spans at most 238, so its scale is at most 16, and rounding moves a value by at most 8:
# $119 + 8 = 127$.


# %% tags=["algorithm"]
from helpers.quantize import check_settings


def progressive(w, group_size, top=119, name="weight"):
    """QServe's two steps for a weight ``[n_out, n_in]``.

    Returns the four-bit codes (0 to 15), integer group scales and zeros ``[n_out, n_in / group_size]``, and the channels' scales
    ``[n_out, 1]``: the weight is about ``channel_scale * (code - zero) * group_scale``.
    """
    size = check_settings(w.shape[1], 4, group_size, name)
    largest = w.abs().amax(dim=1, keepdim=True)
    if not bool(torch.isfinite(largest).all()):
        raise QuantizationError(f"{name} holds NaN or infinite values.", "Look at where it was computed.")
    channel_scale = torch.where(largest > 0, largest, 1.0) / top
    groups = (w / channel_scale).round().view(len(w), -1, size)
    low, high = groups.amin(dim=-1, keepdim=True).clamp(max=0), groups.amax(dim=-1, keepdim=True).clamp(min=0)
    group_scale = ((high - low) / 15).round().clamp(min=1)
    zero = (-low / group_scale).round().clamp(0, 15)
    codes = ((groups / group_scale).round() + zero).clamp(0, 15)
    return codes.view(w.shape).int(), group_scale[..., 0].int(), zero[..., 0].int(), channel_scale


def to_int8_range(codes, group_scale, zero):
    """``(code - zero) * group_scale`` as int32, shape of `codes`: what must fit into -128 to 127."""
    groups = codes.view(len(codes), group_scale.shape[1], -1)
    return ((groups - zero[..., None]) * group_scale[..., None]).view(codes.shape)


# %%
def overflow(top):
    """Share of groups, over all layers, in which a twice rounded weight does not fit into int8; the widest value met."""
    n, bad, widest = 0, 0, 0
    for name, layer in layers.items():
        codes, scales, zeros, _ = progressive(layer.weight.float(), 64, top, name)
        values = to_int8_range(codes, scales, zeros).view(len(codes), -1, 64)
        outside = ((values > 127) | (values < -128)).any(dim=-1)
        n, bad, widest = n + outside.numel(), bad + int(outside.sum()), max(widest, int(values.abs().max()))
    return n, bad, widest


n_groups, bad_protected, widest_protected = overflow(119)
_, bad_full, widest_full = overflow(127)
run.measured("percent_groups_that_overflow", 100 * bad_full / n_groups, "%")
overflows = pd.DataFrame(
    {"codes up to": [119, 127], "groups": n_groups, "groups that overflow": [bad_protected, bad_full]}
)
overflows.assign(**{"widest value": [widest_protected, widest_full]})

# %% [markdown]
# #### Four weights in one register
#
# Turning four-bit codes into int8 is itself done four at a time: four codes lie in the four bytes of a 32-bit word. One
# multiplication by the group's scale serves all four, since $15 \cdot 16 = 240$ fits into a byte and nothing is carried into
# the neighbour. Then $z \cdot s$ is subtracted in each byte. The order matters: *subtract first* leaves negative bytes, and
# the multiplication smears them over their neighbours.


# %% tags=["algorithm"]
def pack(codes):
    """Four neighbouring codes of the last dimension in one 32-bit word (held in int64), first code in the lowest byte."""
    parts = codes.long().view(*codes.shape[:-1], -1, 4)
    return (parts << (8 * torch.arange(4, device=codes.device))).sum(dim=-1)


def unpack_int8(words):
    """The four bytes of each word as signed numbers, last dimension four times as long."""
    parts = (words[..., None] >> (8 * torch.arange(4, device=words.device))) & 0xFF
    return torch.where(parts > 127, parts - 256, parts).flatten(-2)


def subtract_bytes(a, b):
    """Bytewise ``a - b`` modulo 256 of two 32-bit words, without a borrow between bytes."""
    high = 0x80808080
    return ((a | high) - (b & ~high)) ^ ((a ^ ~b) & high)


def multiply_then_subtract(words, scale, zero):
    """QServe's order: ``code * scale - zero * scale`` in each byte, one multiplication for four weights."""
    return subtract_bytes(words * scale & 0xFFFFFFFF, zero * scale * 0x01010101)


def subtract_then_multiply(words, scale, zero):
    """The order that looks simpler: ``(code - zero) * scale``, with one multiplication for four weights."""
    return subtract_bytes(words, zero * 0x01010101) * scale & 0xFFFFFFFF


# %%
name = f"model.layers.{middle}.mlp.gate_proj"
codes, scales, zeros, _ = progressive(layers[name].weight.float(), 64)
n_out = len(codes)
words = pack(codes.view(n_out, -1, 64))  # [n_out, groups, 16]
truth = to_int8_range(codes, scales, zeros).view(n_out, -1, 64)
steps = scales[..., None].long(), zeros[..., None].long()
good = (unpack_int8(multiply_then_subtract(words, *steps)) == truth).float().mean()
wrong = (unpack_int8(subtract_then_multiply(words, *steps)) != truth).float().mean()
assert good == 1
print(f"multiply, then subtract: {good:.0%} of the weights right; subtract, then multiply: {wrong:.0%} wrong")

# %% [markdown]
# #### Count, do not time
#
# One tile of a matrix product, four ways. `tile_product` really computes each, and counts what a GPU would do outside of its
# matrix units: in the main loop (for each group) and at the end (once). Codes lie eight in a word. To spread them over two
# words of four bytes takes two masks and a shift; over four pairs of 16-bit floats four masks and a shift. Multiplications
# and the like then take four weights at once (W4A8) or two (W4A16). W4A4's codes go into the matrix unit as they are.


# %% tags=["algorithm"]
KINDS = {"W8A8": 8, "W4A16": 16, "W4A4": 4, "W4A8": 8}
"""Bits of the inputs."""


def tile_product(kind, x, w, group_size, count):
    """``x @ w.T`` for one tile, x ``[tokens, n_in]``, w ``[n_out, n_in]``; `count`, a Counter, gets the operations.

    Kinds: ``W8A8``, ``W4A16`` (weights become floating point), ``W4A4`` (partial sums do), ``W4A8`` (QServe).
    """
    if kind not in KINDS:
        raise QuantizationError(f"There is no kind {kind!r} of tile.", f"Legal: {', '.join(KINDS)}.")
    (m, k), n, a_bits = x.shape, len(w), KINDS[kind]
    size = check_settings(k, 4, group_size, kind)
    x_scale = None if a_bits == 16 else absmax_scale(x, a_bits, "row")
    x_codes = x if a_bits == 16 else to_codes(x, x_scale, a_bits).float()
    if kind == "W8A8":
        count["at the end"] += 2 * m * n  # two scales for each output
        w_scale = absmax_scale(w, 8, "row")
        return x_codes @ to_codes(w, w_scale, 8).float().T * x_scale * w_scale.T
    total = torch.zeros(m, n, device=x.device)
    if kind == "W4A8":
        codes, scales, zeros, channel_scale = progressive(w, size)
        values = to_int8_range(codes, scales, zeros).float()
    for start in range(0, k, size):
        part = slice(start, start + size)
        if kind == "W4A8":
            total += x_codes[:, part] @ values[:, part].T
            count["in the main loop"] += n * size * (3 + 2 + 2) // 8  # for eight: unpack, multiply, subtract
            continue
        w_scale = absmax_scale(w[:, part], 4, "row")
        w_codes = to_codes(w[:, part], w_scale, 4).float()
        if kind == "W4A16":
            total += x[:, part] @ (w_codes * w_scale).T
            count["in the main loop"] += n * size * (5 + 4 + 4) // 8  # for eight: unpack, convert, scale
        else:
            total += (x_codes[:, part] @ w_codes.T) * w_scale.T
            count["in the main loop"] += 2 * m * n  # convert and scale each partial sum
    count["at the end"] += 2 * m * n if kind == "W4A8" else 0 if kind == "W4A16" else m * n
    return total if kind == "W4A16" else total * x_scale * (channel_scale.T if kind == "W4A8" else 1.0)


# %%
N, K, GROUP = 128, 1024, 128
w_tile, counts = torch.randn(N, K, device=device), []
for m in (16, 64, 128):
    x_tile = torch.randn(m, K, device=device)
    exact = x_tile @ w_tile.T
    for kind in KINDS:
        count = Counter()
        error = float((tile_product(kind, x_tile, w_tile, GROUP, count) - exact).norm() / exact.norm())
        per = {place: count[place] / (m * N * K) for place in ("in the main loop", "at the end")}
        counts.append({"kind": kind, "tokens": m, **per, "error": error})
counts = pd.DataFrame(counts).pivot(index="kind", columns="tokens", values=["in the main loop", "at the end", "error"])
counts = counts.loc[list(KINDS)]
main_loop = counts["in the main loop"]
print(f"operations outside of matrix units for each multiplication; {N} outputs, {K} inputs, groups of {GROUP}")
counts.round(4)

# %% [markdown]
# A GPU's matrix units do tens of multiplications in the time that other units take for one operation, so even a hundredth of
# an operation for each is not small. What W4A8 and W4A16 do to *weights* is spread over all tokens of the tile: few tokens,
# much work for each multiplication. What W4A4 does to *partial sums* is the same for each, whatever the number of tokens. So
# of the three with four-bit weights W4A4 does least with few tokens, and QServe with many, its sums in integers; between
# W4A8 and W4A16 lies what four bytes in a word save over two halves. Left out in all of them: fetching scales, and the order
# in which a kernel must lay out its codes. These are operations, not seconds: which of them a GPU hides behind its memory is
# what the papers measured.
#
# And the quality of all three parts together: progressive weights, inputs of eight bits for each token, keys and values of
# four.


# %%
def progressive_weights(name, w):
    codes, scales, zeros, channel_scale = progressive(w.float(), 64, name=name)
    return (to_int8_range(codes, scales, zeros) * channel_scale).to(w.dtype)


QSERVE = 4 + (8 + 4) / 64 + ROW_SCALES  # codes; group scale and zero; channel scale
with computing(model, quantized(progressive_weights, dynamic(8, "row"))), quantized_kv(model, 4):
    judge("QServe W4A8KV4", QSERVE, 8, KV4, family="QServe")
with computing(model, quantized(four_bit_weights, untouched)):
    judge("W4A16 (plain rounding)", W4, 16, family="W4A16")
pd.DataFrame(table)[["method", "W bits", "A bits", "KV bits", "perplexity", "KL"]].tail(2).round(3)

# %% [markdown]
# (QServe's full recipe also smooths keys, rotates and clips; this is its number format alone.)
#
# ### FP8: a code with an exponent
#
# **E4M3** has four bits of exponent and three of mantissa and reaches 448; **E5M2** trades a bit and reaches 57344. An
# integer grid has one step size. A floating-point grid has a step that doubles with every power of two, so a small value
# beside a massive one still has three bits of its own. The nearest value is found by rounding in steps of the value's own
# exponent:


# %% tags=["algorithm"]
FP8 = {"e4m3": (4, 3, 448.0), "e5m2": (5, 2, 57344.0)}
"""Bits of exponent and of mantissa, and the largest finite value."""


def fp8_format(kind):
    if kind not in FP8:
        raise QuantizationError(f"There is no FP8 format {kind!r} here.", f"Legal: {', '.join(FP8)}.")
    return FP8[kind]


def to_fp8(x, kind):
    """The nearest FP8 value (ties to even), in the dtype of x; what is too large becomes the largest value."""
    exponent_bits, mantissa_bits, largest = fp8_format(kind)
    exponent = torch.frexp(x)[1] - 1  # x = 1.m * 2^exponent
    smallest = 2 - 2 ** (exponent_bits - 1)  # below this exponent the step no longer shrinks (subnormal numbers)
    step = torch.ldexp(torch.ones_like(x), exponent.clamp(min=smallest) - mantissa_bits)
    return ((x / step).round() * step).clamp(-largest, largest)


# %% tags=["algorithm"]
def fp8_rounded(x, kind, block=None, square=False, name="tensor"):
    """Scale so that the largest magnitude meets the format's largest value, round, and scale back.

    One scale for the tensor (`block` None), for each `block` neighbours of a row (-1: the whole row), or, with `square`, for each
    block x block of a weight: DeepSeek-V3's scheme for inputs and for weights.
    """
    top, parts, dims = fp8_format(kind)[2], x, tuple(range(x.dim()))
    if block is not None:
        size = check_settings(x.shape[-1], 8, block, name)
        parts, dims = x.unflatten(-1, (-1, size)), (-1,)
        if square:
            if len(x) % size:
                raise QuantizationError(
                    f"{name}: blocks of {size} do not divide its {len(x)} outputs.",
                    "Take a size that divides both sides.",
                )
            parts, dims = parts.unflatten(0, (-1, size)), (1, 3)
    largest = parts.abs().amax(dim=dims, keepdim=True)
    if not bool(torch.isfinite(largest).all()):
        raise QuantizationError(f"{name} holds NaN or infinite values.", "Look at where it was computed.")
    scale = torch.where(largest > 0, largest, 1.0) / top
    return (to_fp8(parts / scale, kind) * scale).reshape(x.shape)


# %%
line = torch.cat([torch.randn(20000) * 4.0**i for i in range(-9, 5)]).clamp(-400, 400)
for kind, theirs in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
    assert torch.equal(to_fp8(line, kind), line.to(theirs).float()), kind
print(f"equal to PyTorch's own conversion on {len(line)} numbers, subnormal ones included")

# %%
BLOCK = 64  # DeepSeek-V3's 128 does not divide this model's 576


def fp8(kind, block=None):
    """A build: weights and inputs in FP8."""
    return quantized(
        lambda name, w: fp8_rounded(w, kind, block, square=block is not None, name=name),
        lambda name, x: fp8_rounded(x, kind, block, name=name),
    )


for method, kind, block in (
    ("FP8 E4M3 per tensor", "e4m3", None),
    ("FP8 E4M3 blocks", "e4m3", BLOCK),
    ("FP8 E5M2 per tensor", "e5m2", None),
):
    with computing(model, fp8(kind, block)):
        judge(method, 8 + (16 / BLOCK**2 if block else 0), 8, family="FP8")
fp8_rows = ["W8A8 dynamic per tensor", "W8A8 dynamic per token"] + [r["method"] for r in table if r["family"] == "FP8"]
pd.DataFrame([{c: result(m, c) for c in ("method", "perplexity", "KL")} for m in fp8_rows]).round(4)

# %% [markdown]
# Compare the first row with the third: one scale for all inputs of a layer in both, the same eight bits (and the integer row
# even has a scale for each row of its weights). Integers break; E4M3 loses about as little as int8 with a scale for each
# token, the second row. That is why FP8 on recent GPUs is served without smoothing or splitting. Finer scales still lower
# its KL (blocks), and with four bits the tricks came back.

# %% [markdown]
# ## All of them
#
# One table, one protocol. *Bytes a token*: weights and head read once, and the keys and values of one window, for one
# decoded token at batch 1. Activations do not count in it, they hardly move; their bits decide *which unit multiplies*.
# Scales count 16 bits each (the checkpoint below stores them in 32).
# Every row is emulated in floating point: **fake-quantized, so no speed is claimed, and no column for it exists here.**

# %%
everything = pd.DataFrame(table)
everything["protocol"] = original.protocol
shown = everything.assign(**{"bytes a token": everything["bytes a token"].map(show_bytes)})
shown[["method", "W bits", "A bits", "KV bits", "bytes a token", "perplexity", "KL"]].round(3)

# %%
drawn = everything[everything["KL"] > 0].copy()
drawn["MB a token"] = drawn["bytes a token"] / 1e6
figure = plots.lines(
    drawn.sort_values(["MB a token", "KL"]), x="MB a token", y="KL", hue="family", log_y=True,
    title="Quality against bytes moved for a decoded token", xlabel="MB a token (batch 1)", ylabel="KL to the original (nats)",
)  # fmt: skip
for line in figure.axes[0].lines:
    line.set_linestyle("")  # what lies between two rows does not exist
figure.axes[0].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
run.figure(figure, "quality_and_bytes", everything, n=original.n)

# %% [markdown]
# Lower and further left is better; a colour is a family. Many eight-bit rows stand above one another: the same
# bytes, and what differs is whose scale it is, or what was done to the model before rounding.

# %% [markdown]
# ## The real system
#
# ### Is int8 faster? One layer
#
# Nothing so far has been faster than before. Now the layer is really computed in int8, and a decode step's product (one
# token) and a prefill's (many) are timed apart. `int8` is `int8_linear` above, with everything: the scales of the tokens,
# the codes, the integer product, the two scales at the end. `int8 product alone` is what a benchmark of the kernel would
# show.

# %%
w = layers[f"model.layers.{middle}.mlp.gate_proj"].weight.float()
w_scale = absmax_scale(w, 8, "row")
w_codes = to_codes(w, w_scale, 8)
w_bf16 = w.to(torch.bfloat16)
ROW_PAD = 32 if device == "cuda" else 1


def layer_seconds(n_tokens):
    """Seconds of one linear layer by arithmetic, the best of several groups of calls, in turns."""
    x = torch.randn(n_tokens, w.shape[1], device=device)
    x_bf16 = x.to(torch.bfloat16)
    x_codes = F.pad(to_codes(x, absmax_scale(x, 8, "row"), 8), (0, 0, 0, -n_tokens % ROW_PAD))
    ways = {
        "fp32": lambda: F.linear(x, w),
        "bf16": lambda: F.linear(x_bf16, w_bf16),
        "int8": lambda: int8_linear(x, w_codes, w_scale),
        "int8 product alone": lambda: torch._int_mm(x_codes, w_codes.t()),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(run.profile.repeats):
        for name, way in ways.items():
            best[name] = min(best[name], best_seconds(way, repeats=2, inner=20 if n_tokens == 1 else 4, device=device))
    return best


# %%
layer_times = pd.DataFrame({n: layer_seconds(n) for n in (1, 16, 256)})
layer_times.columns.name = "tokens"
int8_gain = {n: layer_times.loc["bf16", n] / layer_times.loc["int8", n] for n in layer_times}
run.measured("int8_over_bf16_layer_prefill", int8_gain[256])
run.measured("int8_over_bf16_layer_decode", int8_gain[1])
gains = ", ".join(f"{n} tokens {gain:.2f}x" for n, gain in int8_gain.items())
print(f"a layer of {w.shape[1]} inputs and {w.shape[0]} outputs; bf16 over int8: {gains}")
layer_times.map(show_seconds)

# %% [markdown]
# The gap between the last two rows is what a benchmark of the kernel leaves out: making the codes is work too, and in plain
# PyTorch it is several passes over the input. Engines do it in one kernel.
#
# ### A checkpoint that vLLM serves
#
# The smoothed model, its weights as int8 codes with a scale for each output channel, in the format of compressed-tensors that
# llm-compressor writes and vLLM reads. Inputs get a scale for each token, at run time.


# %% tags=["algorithm"]
def w8a8_config():
    """``quantization_config`` of a W8A8 checkpoint: weights by output channel, inputs by token and at run time."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def w8a8_tensors(model):
    """The tensors of the checkpoint: codes and scales of decoder linears, everything else in bf16; tied weights once."""
    tensors, linears = {}, linear_layers(model)
    for name, value in model.state_dict().items():
        layer, _, part = name.rpartition(".")
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if layer in linears and part == "weight":
            scale = absmax_scale(value.float(), 8, "row", layer)
            tensors[name] = to_codes(value.float(), scale, 8)
            tensors[f"{layer}.weight_scale"] = scale
        else:
            tensors[name] = value.to(torch.bfloat16)
    return {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}


# %%
from safetensors.torch import save_file

FOLDER = run.out / "smollm2-w8a8" if device == "cpu" else run.out / "w8a8"
FOLDER.mkdir(parents=True, exist_ok=True)
with edited(model):
    smooth(model, absmax, ALPHA)
    save_file(w8a8_tensors(model), FOLDER / "model.safetensors", metadata={"format": "pt"})
described = {**config.to_dict(), "quantization_config": w8a8_config(), "dtype": "bfloat16"}
(FOLDER / "config.json").write_text(json.dumps(described, indent=1))
tokenizer.save_pretrained(FOLDER)
written = (FOLDER / "model.safetensors").stat().st_size
with open(FOLDER / "model.safetensors", "rb") as file:  # it begins with a table of its tensors
    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
linear_parts = [header[f"{name}.{part}"]["data_offsets"] for name in layers for part in ("weight", "weight_scale")]
linear_bytes = sum(end - start for start, end in linear_parts)
whole_bf16 = 2 * sum(p.numel() for p in model.parameters())
print(f"codes and scales of linear layers {show_bytes(linear_bytes)} against {show_bytes(2 * n_linear)} in bf16")
print(f"the whole checkpoint {show_bytes(written)} against {show_bytes(whole_bf16)}")

# %% [markdown]
# Two loads: summaries (long prompts, short answers: prefill) and reports (decode). The same engine, the same sizes, first
# the original checkpoint in bf16, then ours. Quality stands beside speed: how many of the generated tokens would the
# original model, in this notebook's arithmetic, have put first as well (in the first two answers)? And for our checkpoint
# also: how many would its own fake-quantized twin?
#
# Hold the ratios of ttft and tpot against the layer above. Where a layer alone is faster in int8 and the served model is
# slower, the two contradict each other, as in notebook 10, and what the engine does around each product was not looked into
# here. Peak memory is that of the engine's process: its libraries and its KV cache do not shrink with the weights.

# %%
from helpers.engines.vllm_engine import VllmEngine
from helpers.workload import make_workload

vllm_capability = run.hardware.capabilities["vllm"]
sizes = dict(n_requests=4, max_model_len=512, vocab_size=config.vocab_size, seed=SEED)
sizes |= dict(text_ids=corpora.prose_ids(tokenizer, "evaluation", 4096).tolist())
loads = {
    "prefill": make_workload("long-short", name="summaries", **sizes),
    "decode": make_workload("long-long", name="reports", concurrency=4, **sizes | {"max_model_len": 256}),
}
engines = {"bf16": MODEL, "W8A8": str(FOLDER)}
records = {}
release_free_memory()
if vllm_capability.available:
    for name, place in engines.items():
        with VllmEngine(place, max_model_len=512, num_kv_blocks=128, block_size=32, max_num_seqs=8) as engine:
            records[name] = {load: engine.run(workload) for load, workload in loads.items()}
print(", ".join(records) or f"not run here: {vllm_capability.reason}")

# %%
AGREEMENT = f"tokens that the original model in {DTYPE} would have put first"


def agreement(record, protocol=AGREEMENT):
    prompts = [request.prompt_ids for request in record.workload.requests]
    outputs = [trace.output_ids for trace in record.traces]
    return quality.top1_agreement(lambda ids: forward(ids.to(device)).cpu(), prompts[:2], outputs[:2], protocol)


cards = {
    (name, load): run.card(make_card(f"vLLM {name}, {load}", record, [agreement(record)], seed=SEED))
    for name, by_load in records.items()
    for load, record in by_load.items()
}
for load in loads if cards else ():
    display(cards["bf16", load].compare(cards["W8A8", load]).frame())

# %%
twin = None
if records:
    with edited(model):
        smooth(model, absmax, ALPHA)
        with computing(model, quantized(dynamic(8, "row"), dynamic(8, "row"))):
            twin = agreement(records["W8A8"]["decode"], "tokens that the fake-quantized twin would have put first")
    assert twin.value > 0.8, twin
    print(
        f"tokens served that the fake-quantized twin puts first too: {twin.value:.1%} ({twin.low:.1%} to {twin.high:.1%})"
    )

# %% [markdown]
# Compare that with the share that the original model puts first, in the decode table above. If the twin's is no larger,
# eight bits are too near to the original for so few tokens to tell which of the two was served (notebook 10's four bits
# could be told). What the check rules out is a broken checkpoint.

# %% [markdown]
# ### The maintained libraries
#
# The same model, the same calibration text and the same windows, in the toolbox `quant`: llm-compressor's SmoothQuant with
# W8A8 (for Llama models it smooths at the two norms of a layer only, and so does the row beside it), torchao's dynamic
# int8, bitsandbytes' LLM.int8(). With `TOOLS = "all"` they run (`python3 -m helpers toolbox quant`
# brings them); otherwise the results of such a run, stored with the course, are shown with the perplexities that ours had
# in it.


# %%
SCRIPT = ROOT / "helpers" / "toolboxes" / "int8_libraries.py"
OURS = {
    "llm-compressor SmoothQuant W8A8": "SmoothQuant, norms only, dynamic per token",
    "torchao int8 dynamic": "W8A8 dynamic per token",
    "bitsandbytes LLM.int8()": "LLM.int8()",
}


def library_rows():
    """A row for each library with its perplexity on this notebook's windows, and where the rows are from."""
    if TOOLS == "none":
        return json.loads(corpora.data_file("quantizers.json").read_text())["11_activation_quantization"]
    asked = {"model": models.locate(MODEL), "window": WINDOW, "evaluation": evaluation.tolist()}
    asked |= {"calibration": calibration.tolist(), "alpha": ALPHA, "threads": run.hardware.cores}
    rows = toolbox.call("quant", SCRIPT, {**asked, "methods": list(OURS)}, timeout_s=600)["rows"]
    for row in rows:
        beside = OURS[row["method"]]
        row |= {"ours": result(beside), "beside ours": beside, "protocol": original.protocol}
    return {"where": f"run on {run.hardware.label}", "rows": rows}


# %%
answer = library_rows()
(run.out / "quantizers.json").write_text(json.dumps(answer, indent=1))
print("run here" if TOOLS != "none" else f"stored with the course, not run here: {answer['where']}")
columns = ["method", "version", "perplexity", "beside ours", "ours", "protocol", "error"]
libraries = pd.DataFrame(answer["rows"])[columns]
libraries["library / ours"] = libraries["perplexity"] / libraries["ours"]
libraries.round(3)

# %% [markdown]
# ### TensorRT-LLM's names for these things
#
# TensorRT-LLM needs an NVIDIA GPU, so nothing is run here. Its recipes, as its documentation lists them (1.4.0rc4, read on
# 2026-11-30), in this notebook's words:
#
# | recipe | here | scales |
# | --- | --- | --- |
# | FP8 per tensor | FP8 E4M3 per tensor | weights and inputs: one each, inputs' from calibration |
# | FP8 rowwise | E4M3 with the scales of "dynamic per token" | a token; an output channel |
# | FP8 block scaling | FP8 E4M3 blocks | 1 x 128 of inputs, 128 x 128 of weights (DeepSeek-V3) |
# | FP4 (NVFP4) | not built here; Blackwell GPUs only | blocks of 16, each with an FP8 scale |
# | W4A16 AWQ, W4A16 GPTQ | notebook 10 | groups of weights |
# | W4A8 AWQ, W4A8 GPTQ | notebook 10's weights; inputs in FP8 | groups; compare QServe, whose inputs are int8 |
# | FP8 KV cache, NVFP4 KV cache | notebook 06 | a tensor; blocks |
# | INT8 SmoothQuant | SmoothQuant | in the older TensorRT backend's precision page only, no longer in the list |
#
# The direction is plain: int8 tricks on Ampere and before, FP8 on Hopper and Ada, four-bit floats on Blackwell.

# %% [markdown]
# ## Controls, and where it loses
#
# **Controls.** Shuffled smoothing scales and a permutation as a rotation (both above) must not help. In numbers:

# %%
error_of = sweep["middle layer"]
spun = spins["another text"]
controls = pd.DataFrame(
    [
        {"off": error_of["off"], "control": error_of["0.5, shuffled"], "real": error_of[0.5]},
        {"off": spun["none"], "control": spun["a permutation (control)"], "real": spun["Hadamard"]},
    ],
    index=["smoothing, middle layer", "rotation, a few layers"],
)
assert controls.loc["smoothing, middle layer", "control"] >= 0.95 * error_of["off"]
assert abs(controls.loc["rotation, a few layers", "control"] / spun["none"] - 1) < 1e-3
controls.round(5)

# %% [markdown]
# **Where it loses.**
#
# - *Static scales and another text*: a token beyond the calibration's maximum is clipped. In how many layers, on
#   the evaluation text?

# %%
with Calibration(layers, hessians=False) as later:
    for ids in evaluation.view(-1, WINDOW):
        forward(ids[None])
beyond = pd.Series({name: float(later.absmax[name].max() / absmax[name].max()) for name in layers})
clipped = int((beyond > 1).sum())
print(
    f"{clipped} of {len(beyond)} layers meet an input beyond their static scale; the worst by a factor of {beyond.max():.2f}"
)

# %% [markdown]
# - *Rotation, for the quiet channels of small groups*: rotating spreads an outlier over all channels. With a scale for each
# *group* of channels, an outlier costs only its own group, and spreading it costs all of them a little:

# %%
x = torch.randn(512, HIDDEN, generator=torch.Generator().manual_seed(SEED)).to(device)
spiky = x.clone()
spiky[:, 7] *= 50


def grouped_error(x, rotation, group_size):
    """Relative rounding errors of four-bit inputs, a scale for each group and token: of all channels, of those from 64 on."""
    turned = (x @ rotation).unflatten(-1, (-1, group_size))
    turned = rounded(turned, absmax_scale(turned, 4, "row"), 4).flatten(-2) @ rotation.T
    return float((turned - x).norm() / x.norm()), float((turned - x)[:, 64:].norm() / x[:, 64:].norm())


by_group = []
for group_size in (HIDDEN, 64, 32, 16):
    for label, r in (("as it is", identity), ("rotated", plain)):
        whole, quiet = grouped_error(spiky, r, group_size)
        by_group.append({"group": group_size, "coordinates": label, "error": whole, "error of quiet channels": quiet})
by_group = pd.DataFrame(by_group)
by_group = by_group.pivot(index="group", columns="coordinates", values=["error", "error of quiet channels"])
by_group.sort_index(ascending=False).round(4)

# %% [markdown]
# By total error (the first two columns) the rotation wins at each group size, by less and less as groups shrink. The last
# two columns leave the outlier's neighbours out. With one scale a token, these quiet channels are lost unless they are
# rotated. In small groups they were safe from the outlier, and there the rotation loses. Formats with tiny blocks live in
# the last two rows: MXFP4 has blocks of 32, NVFP4 of 16.

# %% [markdown]
# ## Claims
#
# The papers' accuracies are of models a hundred times larger, their speeds of GPUs. What is checked here is said in each row.

# %% tags=["claim"]
run.claim(
    "llm-int8-share",
    share_int8 >= 0.999,
    f"{share_int8:.2%} of the multiplications in windows of {WINDOW} tokens; {shares['in int8'].iloc[0]:.2%} for one token alone",
)
run.claim(
    "llm-int8-quality",
    result("LLM.int8()") <= 1.05 * original.value
    and result("LLM.int8()", "KL") < 0.7 * result("W8A8 dynamic per token", "KL"),
    f"perplexity {result('LLM.int8()'):.2f} against {original.value:.2f}; KL {result('LLM.int8()', 'KL'):.4f}, without the split "
    f"{result('W8A8 dynamic per token', 'KL'):.4f} (per token) and {result('W8A8 dynamic per tensor', 'KL'):.4f} (per tensor)",
)
run.claim(
    "llm-int8-emergence",
    max(n_systematic.values()) <= 2 and max(n_everywhere.values()) == 0,
    f"systematic outlier channels: {', '.join(f'{where} {n}' for where, n in n_systematic.items())}; in all layers at 75 % of "
    f"the tokens: {max(n_everywhere.values())}; {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters",
)
_ = run.claim(
    "smoothquant-quality",
    loss("W8A8 static") > 0 and loss("SmoothQuant") < 0.5 * loss("W8A8 static"),
    f"perplexity {original.value:.2f} original, {result('W8A8 static'):.2f} W8A8 static, {result('SmoothQuant, norms only'):.2f} "
    f"smoothed at the norms, {result('SmoothQuant'):.2f} everywhere: {left:.0%} of the loss left ({original.protocol})",
)

# %% tags=["claim"]
served = cards and {load: cards["bf16", load].compare(cards["W8A8", load]).ratios for load in loads}
seen_speed = served and {
    "prefill": 1 / served["prefill"]["ttft"].ratio,
    "decode": 1 / served["decode"]["tpot"].ratio,
}
run.claim(
    "smoothquant-speed",
    min(served["prefill"]["ttft"].high, served["decode"]["tpot"].high) < 1 / 1.1 if served else None,
    f"vLLM, W8A8 over bf16: prefill {seen_speed['prefill']:.2f}x, decode {seen_speed['decode']:.2f}x" if served else "",
    reason="" if served else vllm_capability.reason,
)
run.claim(
    "smoothquant-memory",
    0.49 < linear_bytes / (2 * n_linear) < 0.51,
    f"linear layers in the saved file {show_bytes(linear_bytes)} against {show_bytes(2 * n_linear)} in bf16; the whole "
    f"checkpoint {show_bytes(written)} against {show_bytes(whole_bf16)}; activations are not counted",
)
run.claim(
    "quarot-exact",
    rotation_change < 1e-4 and kurtosis_gain > 5,
    f"logits change by {rotation_change:.0e} of the largest; kurtosis of the residual stream {before:.0f}, then "
    f"{after:.1f}",
)
run.claim(
    "quarot-four-bits",
    rotation_gain > 1.5 and result("A4", "KL") / result("QuaRot A4", "KL") > 3,
    f"KL at W4A4KV4: {result('W4A4KV4', 'KL'):.2f} without rotation, {result('QuaRot W4A4KV4', 'KL'):.2f} with; inputs only "
    f"{result('A4', 'KL'):.2f} and {result('QuaRot A4', 'KL'):.2f}; perplexity {result('QuaRot W4A4KV4'):.1f}, "
    f"original {original.value:.1f}",
)
_ = run.claim(
    "quarot-eight-bits",
    result("QuaRot W8A8KV8") < 1.03 * original.value,
    f"perplexity {result('QuaRot W8A8KV8'):.2f} against {original.value:.2f}, KL {result('QuaRot W8A8KV8', 'KL'):.4f}, "
    "nothing calibrated",
)

# %% tags=["claim"]
run.claim(
    "spinquant-learned",
    bool(orthogonality < 1e-4 and spun["learned from a random one"] < spun["best of the random ones"]),
    f"error of a few layers on another text: learned from a random one {spun['learned from a random one']:.5f}, best of "
    f"{len(random_errors)} random ones {spun['best of the random ones']:.5f}; from Hadamard {spun['learned from Hadamard']:.5f}, "
    f"Hadamard itself {spun['Hadamard']:.5f}, best of {len(signs)} with random signs "
    f"{spun['best of the signed Hadamards']:.5f}; R'R = I within {orthogonality:.0e}",
)
run.claim(
    "spinquant-network",
    min(spin_gains.values()) > 1,
    f"KL at W4A4KV4: learned {result('SpinQuant W4A4KV4', 'KL'):.3f}, Hadamard {result('QuaRot W4A4KV4', 'KL'):.3f}; with "
    f"only the inputs rounded {result('SpinQuant A4', 'KL'):.3f} and {result('QuaRot A4', 'KL'):.3f}; learned on "
    f"{N_LAYERS_LEARNED} layers' errors, not on the network's loss" + ("" if signs_agree else "; the signs differ"),
)
run.claim(
    "qserve-protective-range",
    bad_protected == 0 and widest_protected <= 127 and bad_full > 0,
    f"{n_groups} groups: {bad_protected} overflow with codes up to 119, {bad_full} ({bad_full / n_groups:.2%}) with "
    "codes up to 127",
)
run.claim(
    "qserve-dequantization",
    None,
    f"operations in the main loop for each multiplication, {' / '.join(map(str, main_loop.columns))} tokens: "
    + ", ".join(f"{kind} {' / '.join(f'{v:.4f}' for v in row)}" for kind, row in main_loop.T.items()),
    reason="the share of the run time needs the GPUs; operations are counted",
)
run.claim("qserve-throughput", None, "-", reason="needs an A100 or L40S and TensorRT-LLM")
run.claim(
    "fp8-e4m3",
    result("FP8 E4M3 per tensor", "KL") < result("FP8 E5M2 per tensor", "KL")
    and result("FP8 E4M3 per tensor", "KL") < result("W8A8 dynamic per tensor", "KL") / 4,
    f"KL, one scale a tensor: E4M3 {result('FP8 E4M3 per tensor', 'KL'):.4f}, E5M2 {result('FP8 E5M2 per tensor', 'KL'):.4f}, "
    f"int8 {result('W8A8 dynamic per tensor', 'KL'):.4f}; E4M3 in blocks {result('FP8 E4M3 blocks', 'KL'):.4f}",
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
# ### 11.1 A scale for each token (easy)
#
# The codes and scales that a dynamic int8 kernel makes of its input.


# %% tags=["exercise"]
def quantize_tokens(x):
    """``(codes, scales)`` of x ``[n_tokens, n_in]``: int8 codes, and one positive scale for each token, ``[n_tokens, 1]``.

    A token's scale is its largest magnitude over 127; codes are rounded to the nearest. A token that is all zero has codes 0 and
    the scale 1.
    """
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary><code>amax</code> with <code>keepdim=True</code> gives the shape. Zero divided by zero is
# not a number, and not every framework tells you.</details>


# %% tags=["solution"]
def quantize_tokens(x):
    largest = x.abs().amax(dim=-1, keepdim=True)
    scales = torch.where(largest > 0, largest / 127, 1.0)
    return (x / scales).round().clamp(-127, 127).to(torch.int8), scales


# %% tags=["check"]
run.check("11.1", quantize_tokens)

# %% [markdown]
# ### 11.2 Smooth what attention puts out (medium)
#
# `o_proj` reads $n_q$ heads, `v_proj` writes $n_{kv}$ of them. Fold SmoothQuant's scales from one into the other, so that
# nothing changes but the ranges. Query head $h$ reads the values of KV head $h \,//\, (n_q / n_{kv})$.


# %% tags=["exercise"]
def smooth_values(v_weight, o_weight, x_absmax, n_kv_heads, alpha):
    """``(v_weight, o_weight)`` with smoothing folded in.

    v_weight ``[n_kv_heads * head_dim, hidden]``, o_weight ``[hidden, n_q_heads * head_dim]``, and x_absmax ``[n_q_heads *
    head_dim]``, the largest magnitudes of o_proj's input. A channel of a KV head has *one* scale ``x^alpha / w^(1 - alpha)``,
    where x and w are the largest input and weight magnitudes over all query heads that read it; 1 where either is zero.
    """
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>View x as [n_kv_heads, q_per_kv, head_dim] and take the maximum over the middle. What divides
# the rows of v multiplies columns of o, once for each query head.</details>


# %% tags=["solution"]
def smooth_values(v_weight, o_weight, x_absmax, n_kv_heads, alpha):
    head_dim = len(v_weight) // n_kv_heads
    x = x_absmax.view(n_kv_heads, -1, head_dim).amax(dim=1)
    w = o_weight.abs().amax(dim=0).view(n_kv_heads, -1, head_dim).amax(dim=1)
    s = torch.where((x > 0) & (w > 0), x**alpha / w ** (1 - alpha), 1.0)
    q_per_kv = len(x_absmax) // s.numel()
    columns = s[:, None].expand(-1, q_per_kv, -1).flatten()
    return v_weight / s.flatten()[:, None], o_weight * columns


# %% tags=["check"]
run.check("11.2", smooth_values)

# %% [markdown]
# ### 11.3 Find the bug (medium)
#
# A block reads a residual stream $h$ (row vectors) through an RMSNorm with scale $g$: $h +
# \mathrm{relu}\big((\mathrm{rms}(h) \odot g)\, W_{in}^\top\big)\, W_{out}^\top$. A colleague rotates it. The tests, with
# freshly initialised norms, are green; a trained model answers nonsense. Return weights with which the same block, on the
# rotated stream $hR$, gives the rotated output.


# %% tags=["exercise"]
def buggy_rotate_block(g, w_in, w_out, rotation):
    """``(g, w_in, w_out)`` of the rotated block; g ``[n]``, w_in ``[m, n]``, w_out ``[n, m]``, rotation ``[n, n]``."""
    return g, w_in @ rotation, rotation.T @ w_out


def mended_rotate_block(g, w_in, w_out, rotation):
    """Your version of buggy_rotate_block."""
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>Which two operations do not commute? A freshly initialised norm has a scale of
# ones.</details>


# %% tags=["solution"]
def mended_rotate_block(g, w_in, w_out, rotation):
    # A rotation commutes with the division by the length, but not with a scale for each channel. Fold the scale into the reader
    # first; a norm of ones is what remains. With g = 1 both versions are the same, which is why fresh norms hid it.
    return torch.ones_like(g), (w_in * g) @ rotation, rotation.T @ w_out


# %% tags=["check"]
run.check("11.3", mended_rotate_block)

# %% [markdown]
# ### 11.4 The protective range (medium)
#
# Where does QServe's 119 come from, and what is it for other widths? A group of integers between `low` $\le 0$ and `high`
# $\ge 0$ gets codes of $b$ bits: with $c = 2^b - 1$, scale $s = \max(1, \mathrm{round}((high - low)/c))$, zero $z =
# \mathrm{clamp}(\mathrm{round}(-low/s), 0, c)$, code $\mathrm{clamp}(\mathrm{round}(v/s) + z, 0, c)$ for the value $v$,
# which comes back as $(code - z)\, s$. Rounding is to the nearest, ties to even (Python's `round`).


# %% tags=["exercise"]
def protective_top(bits, limit):
    """The largest `top` for which all groups with ``-top <= low <= 0 <= high <= top`` come back within -limit - 1 ... limit."""
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>All of these steps keep the order of values, so only the two ends of a group need a look.
# Find the bad group with the smallest reach.</details>


# %% tags=["solution"]
def protective_top(bits, limit):
    codes, reach = 2**bits - 1, limit + 1
    for low in range(-limit, 1):
        for high in range(limit + 1):
            scale = max(1, round((high - low) / codes))
            zero = min(max(round(-low / scale), 0), codes)
            back = [(min(max(round(v / scale) + zero, 0), codes) - zero) * scale for v in (low, high)]
            if min(back) < -limit - 1 or max(back) > limit:
                reach = min(reach, max(-low, high))
    return reach - 1


# %% tags=["check"]
run.check("11.4", protective_top)

# %% [markdown]
# ### 11.5 The best alpha, layer by layer (research)
#
# Choose $\alpha$ for one layer by its output error. Then the open part. Choose it for every layer of the model and put your
# choice into `smooth`: by how much does KL fall below that of 0.5 everywhere? Does choosing for down_proj alone do the same?
# Errors of layers are not losses of networks (SpinQuant's section shows it); can you choose by the network's KL at the same
# cost?


# %% tags=["exercise"]
def best_alpha(x_fit, x, w, alphas):
    """The alpha, of `alphas`, with the smallest output error ``||Y' - Y||`` on x.

    x_fit and x are ``[n_tokens, n_in]``, w is ``[n_out, n_in]``. Smoothing scales ``max|x_fit|^alpha / max|w|^(1 - alpha)``
    (1 where either is zero) and the input's one static int8 scale (largest magnitude of the smoothed x_fit over 127) come from
    x_fit. Smoothed inputs are rounded and clipped to -127 ... 127, smoothed weights rounded to int8 with a scale for each row.
    """
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary><code>smoothed_error</code> above is nearly all of it.</details>


# %% tags=["solution"]
def best_alpha(x_fit, x, w, alphas):
    def rounded_by(values, scale):
        return (values / scale).round().clamp(-127, 127) * scale

    def error(alpha):
        top_x, top_w = x_fit.abs().amax(dim=0), w.abs().amax(dim=0)
        s = torch.where((top_x > 0) & (top_w > 0), top_x**alpha / top_w ** (1 - alpha), 1.0)
        w_scale = ((w * s).abs().amax(dim=1, keepdim=True) / 127).clamp_min(1e-30)
        x_scale = ((x_fit / s).abs().amax() / 127).clamp_min(1e-30)
        return float((rounded_by(x / s, x_scale) @ rounded_by(w * s, w_scale).T - x @ w.T).norm())

    return min(alphas, key=error)


# %% tags=["check"]
run.check("11.5", best_alpha)

# %% [markdown]
# ## Pitfalls and further reading
#
# - **"Naive W8A8" is no baseline until its scales are named.** Static or dynamic, for a tensor or a token: between them lies
# more than between most papers.
# - **The first token of a text carries the largest activation.** Calibrate on texts with a beginning, and judge on such.
# - **RMSNorm's scale must be folded before a rotation.** Fresh norms hide the bug, trained ones do not.
# - **Under GQA a scale or rotation between values and `o_proj` is shared** by all query heads of a KV head.
# - **A better layer is not yet a better network.** Judge choices on what you serve.
# - **Fake-quantized means quality only.** Making codes takes time; a kernel's benchmark leaves it out.
# - **Read what a library really computed in.** A checkpoint named W8A8 may run as weights of 8 bits and 16-bit products
# where no kernel exists.
#
# Further reading:
#
# - Dettmers et al., [LLM.int8()](https://arxiv.org/abs/2208.07339), NeurIPS 2022: section 4 for the outliers' criterion.
# - Xiao et al., [SmoothQuant](https://arxiv.org/abs/2211.10438), ICML 2023: figures 4 and 5 are the whole idea.
# - Sun et al., [Massive activations in large language models](https://arxiv.org/abs/2402.17762), COLM 2024.
# - Ashkboos et al., [QuaRot](https://arxiv.org/abs/2404.00456), NeurIPS 2024; Liu et al.,
#   [SpinQuant](https://arxiv.org/abs/2405.16406), ICLR 2025.
# - Lin et al., [QServe](https://arxiv.org/abs/2405.04532), MLSys 2025: section 4 for the protective range, 5 for registers.
# - Micikevicius et al., [FP8 formats for deep learning](https://arxiv.org/abs/2209.05433), 2022; the scales of blocks in
#   [DeepSeek-V3](https://arxiv.org/abs/2412.19437), section 3.3.
# - [llm-compressor](https://docs.vllm.ai/projects/llm-compressor/en/latest/): what to use in earnest.

# %%
run.finish()
