# %% [markdown]
# # 08 · Speculative decoding
#
# **How can a model say several tokens in one pass, and still say what it would have said?**
#
# Every notebook so far kept one habit: a pass of the model for each token. The passes are serial, and each reads all
# weights. Here somebody cheaper guesses the next few tokens, and the model checks all guesses in one pass. What does not
# fit its own probabilities is thrown away, so a bad guess costs time and never changes what the model tends to say: with
# greedy decoding the same tokens, with sampling the same *distribution* (not the same text for the same seed).
#
# | paper or system | year, venue | maturity | what we take from it |
# | --- | --- | --- | --- |
# | Leviathan et al., *Speculative decoding* | 2023, ICML | peer-reviewed | the rule, its proof, and the two formulas |
# | Chen et al., *Speculative sampling* | 2023, arXiv | preprint | the same rule, found independently; p and q swapped |
# | Miao et al., *SpecInfer* | 2024, ASPLOS | peer-reviewed | a tree of guesses, checked in one pass |
# | Saxena, *Prompt lookup decoding* | 2023 | code | guesses copied from the context: no second model |
# | Transformers 5.19 (assisted generation), vLLM 0.32 | now | maintained code | the real systems |

# %% tags=["parameters"]
PROFILE = "auto"
SEED = 0
OUT = None

# %%
import helpers

run = helpers.start("08_speculative_decoding", PROFILE, SEED, OUT)
run

# %% [markdown]
# ## What fails without it
#
# Token by token, a pass over the whole model yields one token. What does the machine do in it? It reads the weights, and
# makes two operations with each of them. Let us give the pass more tokens and look at the clock.

# %%
import time

import numpy as np
import pandas as pd
import torch
from IPython.display import Markdown, display
from scipy.stats import chisquare

from helpers import corpora, models, packed_linear, plots, quality
from helpers.acceptance import Acceptance
from helpers.errors import CourseError
from helpers.hardware import synchronize
from helpers.ledgers import show_seconds
from helpers.memory import release_free_memory
from helpers.stats import paired_ratio

# %%
device, dtype = run.profile.device, run.dtype
model_name, draft_name = run.profile.model, run.profile.small_model
tokenizer = models.load_tokenizer(model_name)
stock = models.load_model(model_name, dtype=dtype, device=device)
text = corpora.prose_ids(tokenizer, "evaluation", 16384).tolist()
WEIGHTS = models.weight_bytes(stock)


# %%
class Stopwatch:
    """Times passes of a model over some tokens behind `n_cached` others, for `n_rows` sequences at once."""

    def __init__(self, model, n_rows, n_cached, longest=9):
        from helpers import kv_adapter

        self.model, self.n_cached = model, n_cached
        self.cache = kv_adapter.new_cache("dynamic", model.config)
        ids = [text[7 * i : 7 * i + n_cached + longest] for i in range(n_rows)]
        self.ids = torch.tensor(ids, device=device)
        model(self.ids[:, :n_cached], past_key_values=self.cache, logits_to_keep=1)

    def seconds(self, n_tokens):
        from helpers import kv_adapter

        synchronize(device)
        started = time.perf_counter()
        new = self.ids[:, self.n_cached : self.n_cached + n_tokens]
        self.model(new, past_key_values=self.cache).logits[0, -1, 0].item()
        seconds = time.perf_counter() - started
        kv_adapter.truncate(self.cache, self.n_cached)
        return seconds


# %% [markdown]
# One trap of CPUs first. PyTorch on many of them (x86 with oneDNN) lays the weights anew for a product with several
# vectors, at *every* pass, which can take as long as the product. Our whole subject is passes over a few tokens, so there
# we lay the weights out once, in advance, as serving engines do (`helpers.packed_linear`). A GPU needs nothing of this.

# %%
GAMMA = 4
can_pack = dtype == "float32" and not packed_linear.refusal(device)


def packed(model):
    """The same model with its Linear layers packed for passes over gamma + 1 tokens, where that is possible; in place."""
    return packed_linear.pack_linears(model, GAMMA + 1) if can_pack else model


quick = packed(models.load_model(model_name, dtype=dtype, device=device)) if can_pack else stock
release_free_memory()

# %%
N_IN_PASS, TURNS = (1, 2, 3, 5, 9), range(run.profile.repeats)
watches = {"PyTorch as it is": Stopwatch(stock, 1, 32)}
watches |= {"weights packed once": Stopwatch(quick, 1, 32)} if can_pack else {}
turns = [(i, n, how) for i in TURNS for n in N_IN_PASS for how in watches]
timed = [{"turn": i, "tokens": n, "how": how, "seconds": watches[how].seconds(n)} for i, n, how in turns]
timed = [row for row in timed if row["turn"] > 0]  # the first turn warms up
passes = pd.DataFrame(timed).groupby(["how", "tokens"], sort=False)["seconds"].median().reset_index()
one = passes[passes["tokens"] == 1].set_index("how")["seconds"]
passes["over one token"] = passes["seconds"] / passes["how"].map(one)
figure = plots.lines(
    passes,
    x="tokens",
    y="over one token",
    hue="how",
    title="A pass over n tokens, relative to a pass over one",
    xlabel="tokens in the pass, batch 1",
    ylabel="seconds / seconds for one token",
)
run.figure(figure, "passes", passes, n=len(TURNS) - 1)

# %%
ratio_of = passes.set_index(["how", "tokens"])["over one token"]
run.measured("pass_of_5_over_pass_of_1", ratio_of[list(watches)[-1], 5])
Markdown(
    f"The weights are {WEIGHTS / 1e6:.0f} MB. "
    + " ".join(
        f"*{how}*: one token takes {show_seconds(one[how])}, five take **{ratio_of[how, 5]:.2f}** times as long."
        for how in watches
    )
)

# %% [markdown]
# As far as five tokens cost less than five passes, the pass is bound by reading the weights, not by arithmetic. Only, to
# run five tokens in one pass one must *know* five tokens, and the second depends on the first. That is the problem.
#
# ## Predict
#
# Write your own numbers into the next cell before you run it. The defaults are guesses, and some of them are poor.

# %% tags=["predict"]
run.predict(
    alpha_chat=0.6,  # share of the target's tokens, greedy, chat, that the draft model would have guessed
    alpha_chat_temperature_1=0.6,  # the chance that a guess is accepted when both sample at temperature 1
    tokens_per_pass_copied_lookup=3,  # prompt lookup (guesses copied from the context), a paragraph to be copied
    cost_ratio_c=0.2,  # a pass of the draft over a pass of the target, one token each
    speedup_draft_chat=1.5,  # wall clock, batch 1, gamma 4, ours
    speedup_lookup_copied=2,  # the same for prompt lookup on copied text
    tree_over_chain=1.3,  # tokens per pass, a tree of guesses (3, then 2 each, then 1 each) over a single line of 3
)

# %% [markdown]
# ## The idea
#
# A **draft** proposes $\gamma$ tokens $x_1 \dots x_\gamma$, each drawn from its distribution $q_i$ (a vector of
# `vocab_size` probabilities). The **target** runs the last known token and all $\gamma$ proposals in *one* pass. That
# gives $\gamma + 1$ rows of logits, so all its own distributions $p_1 \dots p_{\gamma+1}$ at once. Then, from left to
# right:
#
# - accept $x_i$ with probability $\min(1, p_i(x_i) / q_i(x_i))$;
# - at the first rejection draw from the **residual** $\max(0, p_i - q_i)$, made to sum to one, and stop;
# - if all are accepted, draw one more token from $p_{\gamma+1}$: the pass has paid for it.
#
# A round emits between 1 and $\gamma + 1$ tokens. Why is the result distributed as $p$, whatever $q$ is? A token $x$
# comes out in two ways. It was drafted and accepted: $q(x) \min(1, p(x)/q(x)) = \min(p(x), q(x))$. Or something was
# rejected, which happens with probability $1 - \sum_y \min(p, q)$, and $x$ came from the residual. But
# $\sum_y \max(0, p - q)$ is that same number, so the second way contributes exactly $\max(0, p(x) - q(x))$. And
# $\min(p, q) + \max(0, p - q) = p$.
#
# So the chance to be accepted is $\alpha = \sum_x \min(p(x), q(x))$: one minus the total variation distance of the two
# (TV, half the sum of $|p - q|$). The paper calls the number at one place $\beta$, and its mean $\alpha$. If it were the
# same everywhere, and independent, a round would emit (Leviathan, equation 1)
#
# $$E = \frac{1 - \alpha^{\gamma+1}}{1 - \alpha}$$
#
# tokens on average. In units of one target pass a round costs $\gamma c + v$, where $c$ is a draft pass and $v$ the pass
# over $\gamma + 1$ tokens, so the speed-up is $S = E / (\gamma c + v)$. The paper sets $v = 1$ (theorem 3.8). We measure
# it.
#
# Two notes on notation. Leviathan and this notebook call the target's distribution $p$ and the draft's $q$; Chen calls
# them $q$ and $p$. And greedy decoding needs no rule of its own: with temperature 0 both are one-hot, and the ratio is 1
# or 0.

# %% [markdown]
# ## From scratch
#
# ### From logits to probabilities
#
# What is compared must be what is sampled from. So temperature, top-k (only the k most probable tokens) and top-p (only
# the fewest that hold a share p of the mass) come first, for draft and target alike.
# (They need not be the same for both. But whatever the draft really drew from is q.)

# %% tags=["algorithm"]
from dataclasses import dataclass, field

import torch


def warp(logits, temperature=1.0, top_k=0, top_p=1.0):
    """What is really sampled from: logits ``[..., vocab_size]`` to probabilities of the same shape.

    Temperature first, then the `top_k` most probable tokens (0: all), then the fewest of these that hold `top_p` of what is
    left. Temperature 0 is greedy: all mass on the first largest logit. float32, or float64 where the logits are.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p < 1:
        ranked, order = logits.sort(dim=-1, descending=True, stable=True)
        probs = ranked.softmax(-1)
        before = probs.cumsum(-1) - probs  # mass of all tokens that are more probable
        ranked = ranked.masked_fill((before >= top_p) & (before > 0), -torch.inf)
        logits = torch.empty_like(logits).scatter_(-1, order, ranked)
    return logits.softmax(-1)


# %% [markdown]
# ### A rule for one token


# %% tags=["algorithm"]
def draw(probs, generator):
    """One token id from `probs`, ``[vocab_size]``: a uniform number, looked up in the cumulative distribution."""
    cdf = probs.double().cumsum(-1)
    u = torch.rand((), generator=generator, dtype=torch.float64) * cdf[-1]
    return int(torch.searchsorted(cdf, u, right=True).clamp(max=len(probs) - 1))


def residual(p, q):
    """What the target still wants to say beyond what the draft offers: max(0, p - q), made to sum to one; ``[vocab_size]``.

    Where nothing is left (p is q) nothing is ever rejected, and p is as good an answer as any.
    """
    left = (p - q).clamp(min=0)
    mass = left.sum()
    return left / mass if mass > 0 else p


def verify(p, q, drafted, generator):
    """The tokens that a round emits: those accepted, and one more of the target's own (Leviathan, Algorithm 1).

    Parameters
    ----------
    p : ``[gamma + 1, vocab_size]``, the target's warped probabilities at each drafted token, and after the last one.
    q : ``[gamma, vocab_size]``, what each drafted token was drawn from.
    drafted : gamma token ids.
    """
    for i, token in enumerate(drafted):
        u = torch.rand((), generator=generator, dtype=torch.float64)
        if u * q[i, token] >= p[i, token]:  # rejected, with probability 1 - min(1, p / q)
            return [*drafted[:i], draw(residual(p[i], q[i]), generator)]
    return [*drafted, draw(p[len(drafted)], generator)]


# %% [markdown]
# That is the whole of speculative sampling. The rest of the notebook feeds it.
#
# ### Lossless, tested: a small vocabulary
#
# Eight tokens, two made-up distributions, hundreds of thousands of rounds. If the first emitted token is distributed as
# p, a chi-square test should not tell the counts from p's: its p-value, the chance of counts at least so odd, is small
# for a wrong rule only. Beside the right rule, three wrong ones that look reasonable.


# %% tags=["algorithm"]
def first_tokens(p, q, n, generator, after_rejection=residual, compared=None):
    """`n` independent rounds with gamma 1 at once: ``(first token emitted, whether the draft was accepted)``, shape ``[n]``.

    The rule of `verify` for p and q of shape ``[vocab_size]``, written for many draws. The last two arguments are there to
    break it: what is drawn from after a rejection, and the pair that is compared instead of p and q.
    """

    def draws(probs):
        cdf = probs.double().cumsum(-1)
        u = torch.rand(n, generator=generator, dtype=torch.float64) * cdf[-1]
        return torch.searchsorted(cdf, u, right=True).clamp(max=len(probs) - 1)

    drafted = draws(q)
    u = torch.rand(n, generator=generator, dtype=torch.float64)
    p_compared, q_compared = compared or (p, q)
    accepted = u * q_compared[drafted] < p_compared[drafted]
    return torch.where(accepted, drafted, draws(after_rejection(p, q))), accepted


# %%
def against(tokens, p):
    """``(chi-square's p-value, total variation distance)`` of drawn tokens to p; tokens expected less than 5 times are pooled."""
    counts = torch.bincount(tokens, minlength=len(p)).double()
    expected = p.double() / p.double().sum() * len(tokens)
    tv = float((counts / len(tokens) - expected / len(tokens)).abs().sum() / 2)
    if counts[expected == 0].sum() > 0:
        return 0.0, tv  # a token that p cannot say
    rare = (expected < 5) & (expected > 0)
    seen = [*counts[expected >= 5].tolist(), *([float(counts[rare].sum())] if rare.any() else [])]
    hoped = [*expected[expected >= 5].tolist(), *([float(expected[rare].sum())] if rare.any() else [])]
    return float(chisquare(seen, hoped).pvalue) if len(seen) > 1 else 1.0, tv


def noise_of(p, n):
    """The total variation distance that `n` draws from p itself are expected to have."""
    return float((2 * p.double() * (1 - p.double()) / (np.pi * n)).sqrt().sum() / 2)


# %%
N_DRAWS = 400_000
dice = torch.Generator().manual_seed(SEED)
RARE = 1e-6  # a p-value below it is called a mistake, not chance
logits_p = torch.tensor([2.3, -0.4, -3.3, 0.9, -1.6, -2.1, 0.6, 1.3])
logits_q = torch.tensor([1.7, -0.8, -3.7, 1.0, -2.3, -1.2, -0.3, 1.4])
small = {"temperature": 0.7, "top_p": 0.95}
p, q = warp(logits_p, **small), warp(logits_q, **small)
RULES = {
    "as above": {},
    "forget the residual: draw from p": {"after_rejection": lambda p, q: p},
    "compare before temperature": {"compared": (warp(logits_p), warp(logits_q))},
    "swap p and q": {"compared": (q, p)},
}
verdicts = []
for rule, change in RULES.items():
    tokens, accepted = first_tokens(p, q, N_DRAWS, dice, **change)
    p_value, tv = against(tokens, p)
    row = {"rule": rule, "chi-square p": f"{p_value:.1e}", "TV to p": tv, "TV of pure noise": noise_of(p, N_DRAWS)}
    verdicts.append({**row, "accepted": float(accepted.double().mean()), "lossless": p_value > RARE})
verdicts = pd.DataFrame(verdicts)
assert list(verdicts["lossless"]) == [True, False, False, False]
alpha_small = float(torch.minimum(p, q).sum())
print(f"sum of min(p, q): {alpha_small:.4f}")
verdicts.round(4)

# %% [markdown]
# The first line passes, and its accepted share is the sum of min(p, q). The p-value of the others is 0 to machine
# precision, though their text would read just as well: nobody *sees* a biased sampler. The second is the commonest
# mistake. It double-counts what the draft likes, and it accepts exactly as often as the right rule, so no acceptance rate
# betrays it.
#
# `first_tokens` is a copy of the rule for many draws. So `verify` itself, round by round, must agree: in the token at each
# position (each gets its own p and q here), and in the number of tokens per round, for which the idea had a formula.


# %% tags=["algorithm"]
def expected_tokens(alpha, gamma):
    """Tokens that a round emits, on average, where each draft is accepted with probability `alpha` (Leviathan, equation 1)."""
    return gamma + 1.0 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def expected_speedup(alpha, gamma, c, v=1.0):
    """How many times faster than token by token (Leviathan, theorem 3.8, where `v` is 1).

    Everything is counted in target passes over one token: `c` is a draft pass, `v` the target's pass over gamma + 1 tokens.
    """
    return expected_tokens(alpha, gamma) / (gamma * c + v)


# %%
ROUNDS = 6000
gamma_small = 3
p_rows, q_rows = (torch.stack([probs.roll(i) for i in range(gamma_small + 1)]) for probs in (p, q))
q_rows, emitted = q_rows[:gamma_small], []
for _ in range(ROUNDS):
    drafted = [draw(row, dice) for row in q_rows]
    emitted.append(verify(p_rows, q_rows, drafted, dice))
said_at = [[tokens[i] for tokens in emitted if len(tokens) > i] for i in range(gamma_small + 1)]
p_value_rounds = min(against(torch.tensor(said), row)[0] for said, row in zip(said_at, p_rows, strict=True))
lengths = np.array([len(tokens) for tokens in emitted])
hoped, error = expected_tokens(alpha_small, gamma_small), lengths.std() / ROUNDS**0.5
assert p_value_rounds > RARE and abs(lengths.mean() - hoped) < 5 * error
Markdown(
    f"`verify`, {ROUNDS} rounds with gamma {gamma_small}: {lengths.mean():.3f} ± {error:.3f} tokens a round, the formula says "
    f"**{hoped:.3f}**; smallest chi-square p of the {gamma_small + 1} positions: {p_value_rounds:.2f}."
)


# %% [markdown]
# ### A model that can take words back
#
# Two models, each with its own KV cache. A rejected token leaves keys and values behind, and every later token would
# attend to them. So the cache must be cut back to what was really said: the **rollback**. With it, a model can be told
# what to have heard by giving it the whole list of ids; it finds out itself what to forget and what to read.


# %% tags=["algorithm"]
class CachedModel:
    """A model with its own KV cache. `ids` are the tokens whose keys and values are in it.

    `forward`, if given, is called instead of the model.
    """

    def __init__(self, model, forward=None):
        self.model, self.forward = model, forward or model
        self.reset()

    def reset(self):
        from helpers import kv_adapter

        self.ids, self.cache = [], kv_adapter.new_cache("dynamic", self.model.config)

    def rollback(self, n):
        """Forget all but the first `n` tokens."""
        from helpers import kv_adapter

        if n == 0:
            self.reset()
        elif n < len(self.ids):
            kv_adapter.truncate(self.cache, n)
            del self.ids[n:]

    @torch.no_grad()
    def feed(self, ids, n_logits=0, **how):
        """Run `ids` behind what is cached; logits of all (or of the last `n_logits`), float32 on the CPU, ``[n, vocab_size]``."""
        device = next(self.model.parameters()).device
        rows = torch.tensor([ids], device=device)
        logits = self.forward(rows, past_key_values=self.cache, logits_to_keep=n_logits, **how).logits[0]
        self.ids = [*self.ids, *ids]
        return logits.cpu() if logits.dtype == torch.float64 else logits.float().cpu()


# %% tags=["algorithm"]
class Speaker(CachedModel):
    """A cached model that can be told what to have heard."""

    def keep_common(self, ids):
        """Roll back to the longest beginning that the cache shares with `ids`; returns its length."""
        n = 0
        while n < min(len(self.ids), len(ids)) and self.ids[n] == ids[n]:
            n += 1
        self.rollback(n)
        return n

    def prefill(self, ids):
        """Make the cache hold exactly `ids`."""
        n = self.keep_common(ids)
        if n < len(ids):
            self.feed(ids[n:], n_logits=1)

    def follow(self, ids):
        """The same, and the logits of what had to be fed, which is the last token at least."""
        n = self.keep_common(ids[:-1])
        return self.feed(ids[n:])


# %% [markdown]
# ### The loop


# %% tags=["algorithm"]
@dataclass(frozen=True)
class Round:
    """One target pass: how many tokens were drafted for it, and how many of them it accepted."""

    drafted: int
    accepted: int

    @property
    def emitted(self):
        """The accepted tokens, and the one that the target adds."""
        return self.accepted + 1


@dataclass
class Generation:
    """What was said (without the prompt), and in which rounds."""

    ids: list = field(default_factory=list)
    rounds: list = field(default_factory=list)


def draft_tokens(speaker, ids, gamma, warping, generator):
    """Let the draft go on from `ids`: ``(gamma token ids, the distributions they were drawn from [gamma, vocab_size])``."""
    drafted, q = [], []
    while len(drafted) < gamma:
        q.append(warp(speaker.follow([*ids, *drafted])[-1], **warping))
        drafted.append(draw(q[-1], generator))
    return drafted, torch.stack(q) if q else None


# %% tags=["algorithm"]
def speculate(target, propose, prompt_ids, n_tokens, gamma, warping, generator):
    """`n_tokens` tokens after the prompt, several in a pass where the draft guesses well; returns a Generation.

    ``propose(ids, gamma)`` returns at most gamma token ids and their distributions ``[n, vocab_size]``, or None for these where
    nothing was drawn by chance, or without regard to the models: then each guess counts as one of probability one.
    """
    said, rounds = [], []
    target.prefill(prompt_ids[:-1])
    while len(said) < n_tokens:
        ids = [*prompt_ids, *said]
        drafted, q = propose(ids, min(gamma, n_tokens - len(said) - 1))  # the last token of a round is the target's own
        logits = target.feed([ids[-1], *drafted])  # the one pass; row i predicts what follows drafted token i
        p = warp(logits, **warping)
        if q is None:
            q = torch.nn.functional.one_hot(torch.tensor(drafted, dtype=torch.long), p.shape[-1]).to(p.dtype)
        emitted = verify(p, q, drafted, generator)
        said += emitted
        rounds.append(Round(len(drafted), len(emitted) - 1))
        target.rollback(len(ids) + len(emitted) - 1)  # keys and values of rejected tokens must go
    return Generation(said, rounds)


def plain(target, prompt_ids, n_tokens, warping, generator):
    """The same without speculation: one token in a pass."""
    return speculate(target, lambda ids, gamma: ([], None), prompt_ids, n_tokens, 0, warping, generator)


# %% [markdown]
# `verify` may emit gamma + 1 tokens. The loop asks for one fewer near the end, so no round is cut, the token that the
# target adds is counted once, and the emitted tokens of all rounds add up to the answer.
#
# ### A draft that costs nothing
#
# Much of what a model says stands in its context already: names, quotations, code to be edited. So look up where the last
# few tokens occurred before, and propose what followed them there. No model, no probabilities: each proposal has $q = 1$.


# %% tags=["algorithm"]
def lookup(ids, gamma, n_max=3, n_min=1, earliest=False):
    """Prompt lookup: what followed the last few tokens when they stood in `ids` before; at most `gamma` ids, [] if never.

    The longest n-gram with n_min <= n <= n_max that occurs twice decides; of several earlier places the latest, or the
    `earliest` (as in vLLM 0.32 and Transformers 5.19).
    """
    for n in range(min(n_max, len(ids) - 1), n_min - 1, -1):
        starts = range(len(ids) - n - 1, -1, -1)
        for start in reversed(starts) if earliest else starts:
            if ids[start] == ids[-n] and ids[start : start + n] == ids[-n:]:
                return list(ids[start + n : start + n + gamma])
    return []


# %% [markdown]
# ### Two real models
#
# The draft must speak the target's language token by token: the same id must mean the same piece of text. Equal sizes do
# not prove that. It is checked by content, and refused otherwise. Here is a tokenizer in which two tokens have changed
# places:

# %%
models.check_draft(model_name, draft_name)
doctored = models.load_tokenizer(draft_name)
pieces = doctored.get_vocab()
a, b = doctored.convert_ids_to_tokens([1000, 1001])
doctored.get_vocab = lambda: {**pieces, a: pieces[b], b: pieces[a]}
try:
    models.check_same_tokens(tokenizer, doctored, model_name, "the doctored draft")
    raise AssertionError("a draft with another vocabulary was let in")
except CourseError as refusal:
    print(refusal)

# %%
small_model = models.load_model(draft_name, dtype=dtype, device=device)
DRAFT_WEIGHTS = models.weight_bytes(small_model)
small_model = packed(small_model)
target, draft = Speaker(quick), Speaker(small_model)
GREEDY = {"temperature": 0}
N_PROMPTS = 3
N_TOKENS = min(5 * run.profile.max_tokens // 8, 48)  # longer runs would go on behind the end of a copied paragraph
LONG = 5 * N_TOKENS // 4

# %% [markdown]
# Four kinds of text. *Chat*: questions whose answers take a while. *Prose*: a novel to be continued. *Code*: small
# programming tasks. *Copied*: a paragraph that is to be copied and corrected, the kind of answer that repeats its prompt.
# The course's own draft saw none of these texts, but texts of their kind: other chat prompts with the same sentence
# patterns, another novel of the same author. On foreign text it will accept less.

# %%
COPY = "Copy this paragraph and correct spelling mistakes, if there are any.\n\n"


def n_ids(passage):
    return len(tokenizer(passage, add_special_tokens=False)["input_ids"])


paragraphs = [" ".join(passage.split()) for passage in corpora.prose("evaluation")[:60000].split("\n\n")]
paragraphs = [passage for passage in paragraphs if 45 <= n_ids(passage) <= 70]
asked = {"chat": ("explain", "plan", "compare"), "code": ("code",)}
of_kind = {kind: [p.text for p in corpora.chat_prompts() if p.kind == kind] for kind in sum(asked.values(), ())}
PROMPTS = {
    "chat": [corpora.chat_ids(tokenizer, of_kind[kind][0]) for kind in asked["chat"]],
    "prose": [text[start : start + 64] for start in (2000, 5000, 9000)],
    "code": [corpora.chat_ids(tokenizer, prompt) for prompt in of_kind["code"]],
    "copied": [corpora.chat_ids(tokenizer, COPY + passage) for passage in paragraphs],
}
PROMPTS = {kind: prompts[:N_PROMPTS] for kind, prompts in PROMPTS.items()}
pd.DataFrame([{"kind": k, "prompts": len(p), "tokens": [len(ids) for ids in p]} for k, p in PROMPTS.items()])

# %% [markdown]
# ### Lossless, tested: the real pair
#
# First the same test as above on the real thing: the next-token distributions of both models after some prompts, once
# with a temperature and top-p, which leave few tokens, and once with neither, over the whole vocabulary. Beside it the
# commonest mistake again, and the distance by which it must miss.

# %%
WARPED, UNWARPED = {"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.0}
verdicts_real = []
for kind, warping in ((kind, warping) for warping in (WARPED, UNWARPED) for kind in PROMPTS):
    p_real, q_real = (warp(speaker.follow(PROMPTS[kind][1])[-1], **warping) for speaker in (target, draft))
    tokens, accepted = first_tokens(p_real, q_real, N_DRAWS, dice)
    p_value, tv = against(tokens, p_real)
    wrong, _ = against(first_tokens(p_real, q_real, N_DRAWS, dice, lambda p, q: p)[0], p_real)
    common = torch.minimum(p_real, q_real)
    bias = float(
        (common - common.sum() * p_real).abs().sum() / 2
    )  # TV to p of a rule that draws from p after a rejection
    assert wrong < RARE or bias < 0.03, "a test that lets this mistake pass proves nothing"
    row = {"after a prompt of": kind, "tokens possible": int((p_real > 0).sum()), "chi-square p": f"{p_value:.2g}"}
    row |= {"TV to p": tv, "TV of pure noise": noise_of(p_real, N_DRAWS), "accepted": float(accepted.double().mean())}
    row |= {"sum of min(p, q)": float(common.sum()), "lossless": p_value > RARE}
    verdicts_real.append({**row, "without residual": f"{wrong:.1e}", "its TV": bias})
verdicts_real = pd.DataFrame(verdicts_real)
assert verdicts_real["lossless"].all()
verdicts_real.round(4)

# %% [markdown]
# Then greedy decoding, where lossless means *the same tokens*. Three ways through each prompt, in turns: plain, with the
# draft model, with prompt lookup. They run on the clock too, since we want the seconds anyway. The prompt is read before
# the clock starts.

# %%
proposals = {
    "plain": None,
    "draft": lambda ids, gamma: draft_tokens(draft, ids, gamma, GREEDY, dice),
    "lookup": lambda ids, gamma: (lookup(ids, gamma), None),
}


def clocked(how, prompt, n_tokens, gamma=GAMMA, propose=None):
    """``(Generation, seconds)`` of a greedy answer, prompt already read."""
    for speaker in (target, draft):
        speaker.prefill(prompt[:-1])
    propose = propose or proposals[how]
    synchronize(device)
    started = time.perf_counter()
    if propose is None:
        said = plain(target, prompt, n_tokens, GREEDY, dice)
    else:
        said = speculate(target, propose, prompt, n_tokens, gamma, GREEDY, dice)
    return said, time.perf_counter() - started


runs = []
for turn, (kind, index) in enumerate((kind, index) for index in range(2) for kind in PROMPTS):
    for how in list(proposals)[:: (1, -1)[turn % 2]]:
        said, seconds = clocked(how, PROMPTS[kind][index], N_TOKENS)
        runs.append({"kind": kind, "prompt": index, "how": how, "said": said, "seconds": seconds})
runs = pd.DataFrame(runs)


# %%
def margin_at(prompt, ids, index):
    """By how much the target prefers its best token to its second, as logits, where it says ``ids[index]``."""
    top = target.follow([*prompt, *ids[:index]])[-1].topk(2).values
    return float(top[0] - top[1])


def judged(prompt, reference, other):
    """``identical``; ``tie`` where the first difference is a near-tie (margin below 1e-3); else ``differs``."""
    match = quality.greedy_match(reference, other)
    if not match.identical:
        match = match.model_copy(update={"margin": margin_at(prompt, reference, match.agree)})
    return match.verdict


references = {(r.kind, r.prompt): r.said.ids for r in runs.itertuples() if r.how == "plain"}
runs["verdict"] = [
    judged(PROMPTS[r.kind][r.prompt], references[r.kind, r.prompt], r.said.ids) for r in runs.itertuples()
]
assert "differs" not in set(runs["verdict"]) or dtype != "float32"
if can_pack:
    as_it_is = [plain(Speaker(stock), PROMPTS[kind][0], N_TOKENS // 4, GREEDY, dice).ids for kind in PROMPTS]
    kernels_agree = sum(ids == references[kind, 0][: len(ids)] for ids, kind in zip(as_it_is, PROMPTS, strict=True))
    print(
        f"answers by PyTorch's own kernels that begin like those by packed weights: {kernels_agree} of {len(PROMPTS)}"
    )
del stock, watches
release_free_memory()
runs.groupby("how", sort=False)["verdict"].value_counts().unstack(fill_value=0)

# %% [markdown]
# In fp32 the same tokens, but for ties. In bf16 there are more of them: logits between 16 and 32 are an eighth apart, and a
# pass over five tokens may add in another order than a pass over one, layer after layer. A difference then is *either*
# such a tie, *or* a bug. To tell, we measure the noise there: how far the logits of that place differ between a pass over
# all tokens and one over the last alone. So: plain greedy decoding in bf16, then speculation whose draft is that very
# answer. A perfect draft must be accepted whole, except at ties.


# %%
def knows(prompt, answer):
    """A draft that proposes a known answer."""
    return lambda ids, gamma: (answer[len(ids) - len(prompt) :][:gamma], None)


half = quick if dtype == "bfloat16" else None
if half is None and run.hardware.capabilities["bf16"].available:
    half = models.load_model(model_name, dtype="bfloat16", device=device)
if half is None:
    print("not run here:", run.hardware.capabilities["bf16"].reason)
else:
    speaker, rows = Speaker(half), []
    for kind in ("chat", "prose"):
        prompt = PROMPTS[kind][0]
        reference = plain(speaker, prompt, N_TOKENS // 2, GREEDY, dice).ids
        other = speculate(speaker, knows(prompt, reference), prompt, len(reference), GAMMA, GREEDY, dice).ids
        match = quality.greedy_match(reference, other)
        row = {"kind": kind, "tokens": match.n, "agree": match.agree, "margin": None, "verdict": match.verdict}
        if not match.identical:
            so_far = [*prompt, *reference[: match.agree]]
            alone = speaker.follow(so_far)[-1]
            speaker.reset()
            noise = float((alone - speaker.feed(so_far)[-1]).abs().max())
            top = alone.topk(2).values
            step = 2.0 ** float(torch.log2(top[0].abs()).floor() - 7)  # the distance of neighbouring bf16 numbers there
            margin = float(top[0] - top[1])
            row |= {"margin": margin, "noise": noise, "verdict": "tie" if margin <= 2 * noise + step else "bug"}
        rows.append(row)
    assert "bug" not in {row["verdict"] for row in rows}
    del speaker, half
    display(pd.DataFrame(rows))


# %% [markdown]
# ## The accounting
#
# "Acceptance rate" is used for at least three numbers. So one record keeps the counts, and every rate says of what:
#
# - a position is **reached** where everything before it was accepted; $\alpha$ is accepted over *reached*;
# - accepted over *drafted* also counts the tokens behind a rejection, which nobody looked at (vLLM's log calls this one
#   the "avg draft acceptance rate");
# - **tokens per pass** is emitted over target passes: each pass adds one token of the target's own.

# %%
drafted_runs = runs[runs["how"] != "plain"]


def acceptance_of(frame):
    """The acceptance record of all runs in a frame, together."""
    return Acceptance.from_rounds(r for said in frame["said"] for r in said.rounds)


parts = dict(list(drafted_runs.groupby(["how", "kind"])))
counted = {(how, kind): acceptance_of(parts[how, kind]) for how in ("draft", "lookup") for kind in PROMPTS}
assert all(c.emitted == 2 * N_TOKENS for c in counted.values())
table = pd.DataFrame([{"how": how, "kind": kind, **c.row()} for (how, kind), c in counted.items()])
table["formula"] = [expected_tokens(c.alpha, GAMMA) if c.alpha is not None else None for c in counted.values()]
run.measured("tokens_per_pass_copied_lookup", counted["lookup", "copied"].tokens_per_pass)
table.round(2)

# %% [markdown]
# The last column puts $\alpha$ of the same runs into the formula. For drafts that always have gamma tokens and an even
# acceptance it should come close. For prompt lookup it is too high: the formula believes that every round drafts gamma
# tokens, and lookup finds fewer, or none. Formulas have premises; the table shows *drafted* for that reason.
#
# The other premise is that all positions are alike. Are they?

# %%
positions = []
for how in ("draft", "lookup"):
    together = sum((c for (h, _), c in counted.items() if h == how), Acceptance.from_rounds([]))
    positions.append(together.frame().assign(how=how))
positions = pd.concat(positions)
figure = plots.lines(
    positions.assign(position=positions["position"] + 1),
    x="position",
    y="rate",
    hue="how",
    band=("low", "high"),
    title="Accepted at each position, of those that were reached",
    xlabel="position of the drafted token",
    ylabel="share accepted",
)
figure.axes[0].set(ylim=(0, 1.02), xticks=range(1, GAMMA + 1))
run.figure(figure, "positions", positions, n=int(positions["attempts"].sum()))

# %% [markdown]
# Who gets to position 4 is on an easy stretch of text: tokens are not alike, and easy ones come in runs. So rates by
# position usually *rise* with the position, in spite of the draft's having to guess from its own guesses. The bands are
# 95 % intervals.
#
# ### A text knows the fate of every draft
#
# How does all this depend on gamma, on temperature, on the kind of text? Running everything would take an hour. There is
# a better way. The output of speculation is distributed like the target's own text, so take such a text and ask
# backwards. Given that $x$ came out at some place, the chance that it came out *as an accepted draft* is
#
# $$\frac{\min(p(x), q(x))}{p(x)} = \min\left(1, \frac{q(x)}{p(x)}\right).$$
#
# This number does not depend on where the round began: what comes before $x$ is the text. So one pass of each model over
# a text gives the chances of all its places, and a short recursion gives the expected passes for *every* gamma. With
# lookup the chance is 0 or 1.


# %% tags=["algorithm"]
def expected_rounds(accept, n_tokens, gamma):
    """What speculation does along a known text of `n_tokens`: ``(passes, drafted, attempts, accepted)``, expected counts.

    ``accept(start, gamma)`` is the chance of each token that a round beginning at `start` drafts (at most gamma) to come out as
    accepted, if those before it did. `attempts` and `accepted` have an entry for each position.
    """
    begins = [1.0] + [0.0] * n_tokens  # the chance that a round begins there
    drafted, attempts, accepted = 0.0, [0.0] * gamma, [0.0] * gamma
    for start in range(n_tokens):
        reach, end = begins[start], start
        chances = accept(start, min(gamma, n_tokens - start - 1)) if reach else []
        drafted += reach * len(chances)
        for i, chance in enumerate(chances):
            attempts[i] += reach
            accepted[i] += reach * chance
            begins[start + i + 1] += reach * (1 - chance)  # the target's own token, and a new round behind it
            reach, end = reach * chance, start + i + 1
        begins[end + 1] += reach  # all accepted: the added token follows
    return sum(begins[:n_tokens]), drafted, attempts, accepted


# %%
TEMPERATURES = (0, 0.7, 1.0)


@torch.no_grad()
def answers(prompts, n_tokens):
    """The target's answers to all prompts at all TEMPERATURES in one batch: rows of (prompt, temperature, ids, p of each)."""
    from helpers import kv_adapter

    asked = [(prompt, t) for prompt in prompts for t in TEMPERATURES]
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p, _ in asked], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in asked], device=device)
    cache, said, chances = kv_adapter.new_cache("dynamic", quick.config), [], []
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    for _ in range(n_tokens):
        how = dict(attention_mask=mask, position_ids=places, logits_to_keep=1)
        logits = quick(ids, past_key_values=cache, **how).logits[:, -1].float().cpu()
        p = torch.stack([warp(row, t) for row, (_, t) in zip(logits, asked, strict=True)])
        token = torch.tensor([draw(row, dice) for row in p])
        said.append(token)
        chances.append(p.gather(1, token[:, None])[:, 0])
        ids, places = token[:, None].to(device), places[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    rows = zip(asked, torch.stack(said, 1).tolist(), torch.stack(chances, 1), strict=True)
    return [(prompt, t, ids, p) for (prompt, t), ids, p in rows]


# %% [markdown]
# A text ends where the model ends its turn: what a model says after that is no workload.

# %%
ENDS = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
kinds = [kind for kind, prompts in PROMPTS.items() for _ in prompts for _ in TEMPERATURES]
said_all = answers([prompt for prompts in PROMPTS.values() for prompt in prompts], LONG)
texts = []
for kind, (prompt, temperature, ids, p) in zip(kinds, said_all, strict=True):
    n = next((i + 1 for i, token in enumerate(ids) if token in ENDS), len(ids))
    draft.reset()
    logits = draft.feed([*prompt, *ids[: n - 1]], n_logits=n)
    q = warp(logits, temperature).gather(1, torch.tensor(ids[:n])[:, None])[:, 0]
    ratios = (q / p[:n]).clamp(max=1).tolist()
    texts.append({"kind": kind, "temperature": temperature, "prompt": prompt, "ids": ids, "n": n, "ratios": ratios})
texts = pd.DataFrame(texts)


# %%
def fate(row, how, gamma, n_tokens=None):
    """Expected counts along the first `n_tokens` of a text."""
    n = min(row.n, n_tokens or row.n)

    def accept(start, gamma):
        if how == "draft":
            return row.ratios[start : start + gamma]
        guess = lookup([*row.prompt, *row.ids[:start]], gamma)
        return [float(a == b) for a, b in zip(guess, row.ids[start:], strict=False)]

    passes, drafted, attempts, accepted = expected_rounds(accept, n, gamma)
    counts = {"drafting": attempts[0], "attempts": np.array(attempts), "accepted": np.array(accepted)}
    return {"emitted": n, "passes": passes, "drafted": drafted, **counts}


# %% [markdown]
# At temperature 0 nothing is left to chance, so in fp32 the recursion must reproduce the real runs above exactly: the same
# passes, and the same acceptances at each position.

# %%
compared = checked = 0
for (kind, index), ids in references.items():
    greedy = texts[(texts["kind"] == kind) & (texts["temperature"] == 0)].iloc[index]
    n = min(greedy.n, N_TOKENS)
    if n < N_TOKENS or greedy.ids[:n] != ids[:n]:
        continue  # the turn ended, or a near-tie fell the other way in the large batch
    for how in ("draft", "lookup"):
        part = runs[(runs["kind"] == kind) & (runs["prompt"] == index) & (runs["how"] == how)]
        if part["said"].iloc[0].ids != ids:
            continue  # a tie
        real, told = acceptance_of(part), fate(greedy, how, GAMMA, N_TOKENS)
        at_positions = told["accepted"][: len(real.accepted_per_position)]
        equal = abs(told["passes"] - real.steps) < 1e-6 and np.allclose(at_positions, real.accepted_per_position)
        assert equal or dtype != "float32", (kind, index, how, told, real)
        compared, checked = compared + 1, checked + equal
print(f"{checked} of {compared} real runs reproduced, pass by pass")

# %% [markdown]
# Now the sweep costs nothing.

# %%
GAMMAS = (1, 2, 3, 4, 6, 8)


def sweep(texts, gammas=GAMMAS, n_tokens=None):
    """Counts for each draft, kind, temperature and gamma, over the texts (or their first `n_tokens`)."""
    rows = []
    for (kind, temperature), part in texts.groupby(["kind", "temperature"], sort=False):
        for how in ("draft", "lookup"):
            for gamma in gammas:
                fates = [fate(row, how, gamma, n_tokens) for row in part.itertuples()]
                total = {key: np.sum([f[key] for f in fates]) for key in fates[0]}
                rows.append({"how": how, "kind": kind, "temperature": temperature, "gamma": gamma, **total})
    frame = pd.DataFrame(rows)
    frame["alpha"] = frame["accepted"] / frame["attempts"].where(frame["attempts"] > 0)
    frame["accepted/drafted"] = frame["accepted"] / frame["drafted"].where(frame["drafted"] > 0)
    frame["tokens per pass"] = frame["emitted"] / frame["passes"]
    return frame


swept = sweep(texts)
by_gamma = swept[(swept["how"] == "draft") & (swept["temperature"] == 0)]
titles = {"tokens per pass": "tokens per pass", "alpha": "accepted / reached", "accepted/drafted": "accepted / drafted"}
figure = plots.panels(
    by_gamma, x="gamma", ys=titles, hue="kind", title="The draft model, greedy: three rates", xlabel="gamma", log_x=True
)
run.figure(figure, "three_rates", by_gamma, n=N_PROMPTS)

# %% [markdown]
# The right panel is the trap. Accepted over drafted falls with gamma *by arithmetic*: longer drafts have more tokens
# behind the first rejection. The draft is no worse: the middle panel need not fall (it may rise, see the positions above).
# Whoever tunes gamma by the right panel ends at 1 or near it. (With $\alpha = 0.8$ and $\gamma = 5$ accepted over drafted
# is 0.54.)
#
# What is $\alpha$ then? The mean chance over *all* places of the texts, which no gamma can bend (counted only where rounds
# begin, even at gamma 1, it is a biased sample: the place behind an accepted draft is skipped):

# %%
places = texts[["kind", "temperature", "ratios"]].explode("ratios").astype({"ratios": float})
alphas = places.groupby(["kind", "temperature"], sort=False)["ratios"].mean()
run.measured("alpha_chat", alphas["chat", 0])
run.measured("alpha_chat_temperature_1", alphas["chat", 1.0])
alphas.unstack().round(3)

# %% [markdown]
# Columns are temperatures. At temperature 0 a draft hits the target's best token or not. Above, $\alpha$ is how much the
# two distributions overlap. Which is higher depends on the draft. And compare *copied* with the row of prompt lookup in
# the table before: copying from a context takes attention that a draft of a few layers may not have learned, and lookup
# can do nothing else.
#
# Now the formula with this $\alpha$, against the tokens per pass at all gammas:

# %%
ruled = by_gamma.assign(rule=[expected_tokens(alphas[r.kind, 0], r.gamma) for r in by_gamma.itertuples()])
figure = plots.points_and_rule(
    ruled,
    x="gamma",
    measured="tokens per pass",
    rule="rule",
    hue="kind",
    title="Tokens per pass: measured, and by the formula",
    xlabel="gamma",
    ylabel="tokens per pass",
)
run.figure(figure, "formula", ruled, n=N_PROMPTS)

# %% [markdown]
# Where the dots leave the line, places are not independent: a hard place ends a round, and the next one begins behind it.
# An answer also ends, and its last round is short.


# %% [markdown]
# ## The clock
#
# Tokens per pass are not seconds. A round costs $\gamma$ draft passes and one wider target pass. What does it come to, in
# units of a target pass over one token? Here the passes of both models, alone and in batches: they also feed the cost
# model of the map below.


# %% tags=["algorithm"]
def pass_features(n_rows, n_tokens, n_cached):
    """What the seconds of a pass depend on: `n_rows` sequences, `n_tokens` new tokens each behind `n_cached` old ones."""
    tokens = n_rows * n_tokens
    return (
        1.0,  # the weights are read
        float(tokens > 1),  # no longer a matrix-vector product
        float(tokens),  # products with the weights
        float(n_rows * (n_cached + n_tokens)),  # keys and values read
    )


@dataclass
class Costs:
    """Seconds of a pass, as fitted by `fit_costs`."""

    coefficients: list

    def seconds(self, n_rows, n_tokens, n_cached):
        features = pass_features(n_rows, n_tokens, n_cached)
        return sum(c * f for c, f in zip(self.coefficients, features, strict=True))


def fit_costs(samples):
    """Fit `pass_features` to measured passes ``(n_rows, n_tokens, n_cached, seconds)``: relative errors, no negative terms."""
    import numpy as np
    from scipy.optimize import nnls

    features = np.array([pass_features(*sample[:3]) for sample in samples])
    seconds = np.array([sample[3] for sample in samples])
    scale = features.max(axis=0)
    weights, _ = nnls(features / seconds[:, None] / scale, np.ones(len(seconds)))
    return Costs((weights / scale).tolist())


# %%
def pass_samples(model, n_rows, n_cached, token_counts):
    """Median seconds of passes of `n_rows` sequences over each number of tokens, behind `n_cached` others; in turns."""
    watch = Stopwatch(model, n_rows, n_cached)
    turns = [[watch.seconds(n) for n in token_counts] for _ in range(3)]
    return [(n_rows, n, n_cached, float(s)) for n, s in zip(token_counts, np.median(turns[1:], axis=0), strict=True)]


samples = {"target": [], "draft": []}
for n_rows, n_cached in ((1, 32), (1, 192), (4, 48), (16, 32)):
    samples["target"] += pass_samples(quick, n_rows, n_cached, (1, 2, 3, 5, 9) if n_rows == 1 else (1, 3, 9))
    samples["draft"] += pass_samples(small_model, n_rows, n_cached, (1,))
costs = {who: fit_costs(of_whom) for who, of_whom in samples.items()}
held_out = pass_samples(quick, 8, 64, (1, 2, 5))
cost_errors = [costs["target"].seconds(*sample[:3]) / sample[3] - 1 for sample in held_out]
print("held-out passes of 8 rows over 1, 2 and 5 tokens, error of the model:", [f"{e:+.0%}" for e in cost_errors])

# %%
seconds_of = {(who, s[0], s[1], s[2]): s[3] for who, of_whom in samples.items() for s in of_whom}
one_token = seconds_of["target", 1, 1, 32]
c = seconds_of["draft", 1, 1, 32] / one_token
v = {n - 1: seconds_of["target", 1, n, 32] / one_token for n in (1, 2, 3, 5, 9)}
run.measured("cost_ratio_c", c)
sizes = [(models.load_config(name), n) for name, n in ((draft_name, DRAFT_WEIGHTS), (model_name, WEIGHTS))]
layers = [config.num_hidden_layers for config, _ in sizes]
item = getattr(torch, dtype).itemsize
heads = [config.vocab_size * config.hidden_size * item / n for config, n in sizes]
Markdown(
    f"At batch 1: c = **{c:.2f}**, and v = "
    + ", ".join(f"{cost:.2f} (gamma {gamma})" for gamma, cost in v.items())
    + f". The draft has {layers[0]} of {layers[1]} layers; its output head is {heads[0]:.0%} of its weights, the target's "
    f"{heads[1]:.0%} of its own."
)

# %% [markdown]
# The head cannot be made smaller, since both speak one vocabulary. Leviathan's drafts are about a hundredth of the target;
# c was below 0.05 there.
#
# Predicted against measured. For each kind: $\alpha$, $c$ and $v$ in the formula; the recursion's tokens per pass instead
# of the formula's; and the clock, prompt by prompt against plain decoding in turns.

# %%
wide = runs.pivot(index=["kind", "prompt"], columns="how", values="seconds")
clock = []
for how in ("draft", "lookup"):
    for kind in PROMPTS:
        count, part = counted[how, kind], wide.loc[kind]
        measured = paired_ratio(list(part["plain"]), list(part[how]), seed=SEED)
        c_how = c if how == "draft" else 0.0
        drafted = np.array([r.drafted for said in parts[how, kind]["said"] for r in said.rounds])
        spent = float(np.mean(np.interp(drafted, list(v), list(v.values())) + c_how * drafted))
        formula = expected_speedup(count.alpha or 0.0, GAMMA, c_how, v[GAMMA])
        row = {"how": how, "kind": kind, "formula": formula, "tokens per pass / cost": count.tokens_per_pass / spent}
        clock.append({**row, "clock": measured.ratio, "low": measured.low, "high": measured.high, "n": measured.n})
clock = pd.DataFrame(clock).set_index(["how", "kind"])
run.measured("speedup_draft_chat", clock.loc[("draft", "chat"), "clock"])
run.measured("speedup_lookup_copied", clock.loc[("lookup", "copied"), "clock"])
clock.round(2)

# %% [markdown]
# Below 1.0 speculation makes it slower. The middle column counts what was drafted, so it should be near the clock; what
# remains is Python, the warping of the logits, and a machine that drifts. Low and high are a bootstrap's; with two pairs
# that is simply the smaller and the larger of the two ratios, and it knows nothing of the machine's drift.

# %% [markdown]
# One more point, at another gamma, each prompt against plain decoding in turns. It will be a check of the map.

# %%
CHECKS = (("lookup", "copied", 8),)
check_runs = []
for turn in range(N_PROMPTS):
    for how, kind, gamma in CHECKS:
        prompt = PROMPTS[kind][turn]
        for who in ("plain", how)[:: (1, -1)[turn % 2]]:
            said, seconds = clocked(who, prompt, N_TOKENS, gamma)
            key = {"how": how, "kind": kind, "gamma": gamma, "who": who, "turn": turn}
            check_runs.append({**key, "seconds": seconds, "said": said})
check_runs = pd.DataFrame(check_runs)
checks = []
for how, kind, gamma in CHECKS:
    part = check_runs[(check_runs["how"] == how) & (check_runs["kind"] == kind) & (check_runs["gamma"] == gamma)]
    alone, helped = part[part["who"] == "plain"], part[part["who"] != "plain"]
    for turn, (a, b) in enumerate(zip(alone["said"], helped["said"], strict=True)):
        assert judged(PROMPTS[kind][turn], a.ids, b.ids) != "differs" or dtype != "float32"
    gained = paired_ratio(list(alone["seconds"]), list(helped["seconds"]), seed=SEED)
    row = {"how": how, "kind": kind, "gamma": gamma, "tokens per pass": acceptance_of(helped).tokens_per_pass}
    checks.append({**row, "clock": gained.ratio, "low": gained.low, "high": gained.high})
checks = pd.DataFrame(checks)
checks.round(2)


# %% [markdown]
# ## A tree instead of a chain
#
# A chain of guesses is lost at its first mistake. SpecInfer lets the draft name several candidates at each place. The
# guesses then form a tree, and *one* pass of the target checks all its paths: the keys of all nodes lie in the cache side
# by side, and a mask lets each node see the context, its own ancestors and itself. Two siblings have the same position
# and do not see each other.


# %% tags=["algorithm"]
@dataclass
class TokenTree:
    """Guesses that share beginnings. ``parents[i]`` is a node before i, or -1: node i continues the context itself."""

    tokens: list = field(default_factory=list)
    parents: list = field(default_factory=list)

    def children(self, node):
        """The nodes that continue `node` (-1: the context), in the order in which they were proposed."""
        return [i for i, parent in enumerate(self.parents) if parent == node]


def tree_mask(parents, n_context):
    """Who may look at whom, bool ``[n, n_context + n]``: a node sees the context, its ancestors and itself."""
    n = len(parents)
    mask = torch.zeros(n, n_context + n, dtype=torch.bool)
    mask[:, :n_context] = True
    for i, parent in enumerate(parents):
        if parent >= 0:
            mask[i] = mask[parent]
        mask[i, n_context + i] = True
    return mask


def tree_positions(parents, n_context):
    """The position of each node, int64 ``[n]``: siblings share one."""
    positions = []
    for parent in parents:
        positions.append(n_context if parent < 0 else positions[parent] + 1)
    return torch.tensor(positions, dtype=torch.long)


# %%
shown_parents = [-1, -1, 0, 0, 1]
shown_mask = pd.DataFrame(
    tree_mask(shown_parents, 2).int().numpy(), columns=["context"] * 2 + [f"node {i}" for i in range(5)]
)
shown_mask.insert(0, "parent", shown_parents)
shown_mask.insert(1, "position", tree_positions(shown_parents, 2))
shown_mask

# %% [markdown]
# Growing it takes the draft one pass a level: all nodes of a level at once, behind the nodes that are there.


# %% tags=["algorithm"]
def feed_tree(speaker, tokens, parents, n_done=0):
    """Run the nodes from `n_done` on in one pass, behind the context and the nodes before them; logits ``[n, vocab_size]``."""
    device = next(speaker.model.parameters()).device
    n_context = len(speaker.ids) - n_done
    how = dict(attention_mask=tree_mask(parents, n_context)[None, None, n_done:].to(device))
    how["position_ids"] = tree_positions(parents, n_context)[None, n_done:].to(device)
    return speaker.feed(tokens[n_done:], **how)


def grow_tree(draft, ids, widths):
    """A tree of the draft's guesses after `ids`: each node of level i gets the ``widths[i]`` most probable tokens as children.

    One draft pass a level. The draft's cache holds `ids` afterwards.
    """
    tree, frontier, logits = TokenTree(), [-1], draft.follow(ids)[-1:]
    for level, width in enumerate(widths):
        n_done = len(tree.tokens)
        for node, row in zip(frontier, logits, strict=True):
            tree.tokens += row.topk(width).indices.tolist()
            tree.parents += [node] * width
        frontier = list(range(n_done, len(tree.tokens)))
        if level + 1 < len(widths):
            logits = feed_tree(draft, tree.tokens, tree.parents, n_done)
    draft.rollback(len(ids))
    return tree


# %% [markdown]
# ### One pass, or one for each path?
#
# The tree's pass must give each node the logits that it would have at the end of its own path, run alone.

# %%
WIDTHS = (3, 2, 1)
tree = grow_tree(draft, PROMPTS["chat"][0], WIDTHS)
target.prefill(PROMPTS["chat"][0])
together = feed_tree(target, tree.tokens, tree.parents)
target.rollback(len(PROMPTS["chat"][0]))


def path_to(node):
    return [] if node < 0 else [*path_to(tree.parents[node]), tree.tokens[node]]


apart = torch.stack([target.follow([*PROMPTS["chat"][0], *path_to(node)])[-1] for node in range(len(tree.tokens))])
tree_error = float((together - apart).abs().max())
assert tree_error < 1e-3 or dtype != "float32"
print(f"{len(tree.tokens)} nodes, logits of one pass and of separate passes: largest difference {tree_error:.1e}")
pd.DataFrame({"path": [tokenizer.decode(path_to(node)) for node in range(len(tree.tokens))]}).T

# %% [markdown]
# ### Verification of a tree
#
# Greedy: walk down while a child says what the target says. Sampling: try the children of a node one after another by the
# rule that we know, but hold each against what is *left*. After a rejection the target wants the residual, so the
# residual takes the place of p. If all children fail, draw from what is left in the end. (SpecInfer, Algorithm 2. Its
# candidates come in random order; ours are independent draws from q, whose order means nothing.)


# %% tags=["algorithm"]
def verify_tree_greedy(tree, logits_root, logits_nodes):
    """Walk down as long as a child says what the target says: ``(nodes accepted, the target's own token after them)``.

    `logits_root`, ``[vocab_size]``, predicts the first level; row i of `logits_nodes`, ``[n, vocab_size]``, what follows node i.
    """
    path, node = [], -1
    while True:
        best = int((logits_root if node < 0 else logits_nodes[node]).argmax())
        matching = [child for child in tree.children(node) if tree.tokens[child] == best]
        if not matching:
            return path, best
        node = matching[0]
        path.append(node)


def verify_tree_sampling(children, p, qs, generator):
    """Multi-step speculative sampling at one node: ``(index of the child that is accepted, or None; the token)``.

    SpecInfer, Algorithm 2, with the candidates tried in the order in which they were drawn.

    Parameters
    ----------
    children : candidate token ids.
    p : ``[vocab_size]``, the target's warped probabilities at this node.
    qs : for each candidate, ``[vocab_size]``, what it was drawn from *given those before it*: the same q for independent draws,
        q without the earlier tokens (made to sum to one) for draws without replacement, one-hot for a fixed choice.
    """
    for index, (token, q) in enumerate(zip(children, qs, strict=True)):
        if torch.rand((), generator=generator, dtype=torch.float64) * q[token] < p[token]:
            return index, token
        p = residual(p, q)  # the next candidate has to make up for less
    return None, draw(p, generator)


# %% [markdown]
# Is it still lossless? The test again, with 1 to 4 candidates, on the real distributions after a chat prompt, the whole
# vocabulary. Once more with a mistake that is easily made: comparing every candidate with the original p. (For one
# candidate that is no mistake: the rules are the same.)

# %%
p_real, q_real = (warp(speaker.follow(PROMPTS["chat"][1])[-1], **UNWARPED) for speaker in (target, draft))


def first_of_several(p, q, n_candidates, n, renew=residual):
    """`verify_tree_sampling` for `n` draws at once: (tokens, share that was accepted)."""
    tokens, accepted = torch.full((n,), -1), torch.zeros(n, dtype=torch.bool)
    for _ in range(n_candidates):
        drafted = torch.multinomial(q, n, replacement=True, generator=dice)
        u = torch.rand(n, generator=dice, dtype=torch.float64)
        now = ~accepted & (u * q[drafted] < p[drafted])
        tokens[now], accepted = drafted[now], accepted | now
        p, last = renew(p, q), residual(p, q)
    rest = torch.multinomial(last, n, replacement=True, generator=dice)
    return torch.where(accepted, tokens, rest), float(accepted.double().mean())


several, told_apart = [], 0.1 < float(torch.minimum(p_real, q_real).sum()) < 0.9
for k in (1, 2, 3, 4):
    tokens, share = first_of_several(p_real, q_real, k, N_DRAWS)
    p_value, tv = against(tokens, p_real)
    wrong, _ = against(first_of_several(p_real, q_real, k, N_DRAWS, renew=lambda p, q: p)[0], p_real)
    row = {"candidates": k, "accepted": share, "chi-square p": f"{p_value:.2g}", "TV to p": tv}
    several.append({**row, "lossless": p_value > RARE, "always compared with the first p": f"{wrong:.1e}"})
    assert k == 1 or wrong < RARE or not told_apart, "a test that lets this mistake pass proves nothing"
several = pd.DataFrame(several)
assert several["lossless"].all()

# %%
few = [0, 1, 3, 4, 6, 7]
p_few, q_few = warp(logits_p[few]), warp(logits_q[few])
one_by_one = []
for _ in range(4000):
    candidates = [draw(q_few, dice) for _ in range(3)]
    one_by_one.append(verify_tree_sampling(candidates, p_few, [q_few] * 3, dice)[1])
p_value_node, _ = against(torch.tensor(one_by_one), p_few)
assert p_value_node > RARE
print(f"verify_tree_sampling itself, {len(one_by_one)} draws of a small vocabulary: chi-square p = {p_value_node:.2f}")
several.round(4)

# %% [markdown]
# ### Tree against chain
#
# Same draft, same depth, greedy: the chain is the tree's first branch. So the tree can never accept less in a round. It
# costs more: the target's pass is over all nodes, and each level takes the draft one pass, over all nodes of the level.
# After the pass only the keys of the accepted path stay, moved together.


# %% tags=["algorithm"]
def keep_path(speaker, n_context, path):
    """Of the tree behind the first `n_context` tokens keep the nodes of `path` only, moved together; the rest is forgotten."""
    from helpers import kv_adapter

    for tensors in kv_adapter.layer_tensors(speaker.cache):
        for stored in tensors:
            for slot, node in enumerate(path):  # node >= slot: nothing is overwritten that is still needed
                stored[..., n_context + slot, :] = stored[..., n_context + node, :]
    tokens = [speaker.ids[n_context + node] for node in path]
    speaker.rollback(n_context + len(path))
    speaker.ids[n_context:] = tokens


def speculate_tree(target, draft, prompt_ids, n_tokens, widths):
    """Greedy decoding with a tree of guesses in each pass; returns a Generation (a Round's `drafted` is the tree's depth)."""
    said, rounds = [], []
    target.prefill(prompt_ids[:-1])
    while len(said) < n_tokens:
        ids = [*prompt_ids, *said]
        levels = widths[: n_tokens - len(said) - 1]
        tree = grow_tree(draft, ids, levels)
        tokens, parents = [ids[-1], *tree.tokens], [-1, *(parent + 1 for parent in tree.parents)]
        logits = feed_tree(target, tokens, parents, 0)  # node 0 is the last token said: its keys are not cached yet
        path, bonus = verify_tree_greedy(tree, logits[0], logits[1:])
        keep_path(target, len(ids) - 1, [0, *(node + 1 for node in path)])
        said += [*(tree.tokens[node] for node in path), bonus]
        rounds.append(Round(len(levels), len(path)))
    return Generation(said, rounds)


# %%
N_CONTEST, contest = N_TOKENS, []
for turn, kind in enumerate(("chat", "prose", "code")):
    prompt, row = PROMPTS[kind][0], {"kind": kind}
    for way in ("chain", "tree")[:: (1, -1)[turn % 2]]:
        for speaker in (target, draft):
            speaker.prefill(prompt[:-1])
        synchronize(device)
        started = time.perf_counter()
        if way == "tree":
            said = speculate_tree(target, draft, prompt, N_CONTEST, WIDTHS)
        else:
            said = speculate(target, proposals["draft"], prompt, N_CONTEST, len(WIDTHS), GREEDY, dice)
        row[f"{way}: seconds"] = time.perf_counter() - started
        row[f"{way}: passes"] = len(said.rounds)
        row[f"{way}: verdict"] = judged(prompt, references[kind, 0][:N_CONTEST], said.ids)
    contest.append({**row, "n": len(said.ids)})
contest = pd.DataFrame(contest)
assert not {"differs"} & set(contest[["chain: verdict", "tree: verdict"]].to_numpy().ravel()) or dtype != "float32"

# %%
tree_gain = run.measured("tree_over_chain", contest["chain: passes"].sum() / contest["tree: passes"].sum())
tree_clock = contest["chain: seconds"].sum() / contest["tree: seconds"].sum()
shown = contest[["kind"]].copy()
for way in ("chain", "tree"):
    shown[f"{way}: tokens per pass"] = contest["n"] / contest[f"{way}: passes"]
shown["tree over chain, clock"] = contest["chain: seconds"] / contest["tree: seconds"]
print(
    f"{len(tree.tokens)} nodes in a tree: {tree_gain:.2f} times the tokens per pass of the chain, {tree_clock:.2f} on the clock"
)
shown.round(2)

# %% [markdown]
# More tokens per pass need not be more tokens per second. Where a pass over 16 tokens costs little more than one over
# four, the tree wins on both counts. That holds for a large model on a GPU at batch 1, and not everywhere else.


# %% [markdown]
# ## Workload map
#
# When does speculation pay? Five things decide: gamma, temperature, batch, the length of the answer, and the kind of
# text. Below is the whole map. **Tokens per pass** are measured (by the recursion along the target's own texts).
# **Speed-ups are simulated**: tokens per pass, divided by the cost model's price of a round, for a batch that stays full.
# Numbers in brackets are runs on the clock, or real runs counted.

# %%
clock_points = pd.concat([clock.reset_index().assign(gamma=GAMMA), checks], ignore_index=True)
names = {"draft": "draft model", "lookup": "prompt lookup"}
MAPPED = (1, 2, 4, 8)
tokens_map = swept[swept["gamma"].isin(MAPPED)].assign(draft=lambda frame: frame["how"].map(names))
counted_points = pd.concat(
    [table[["how", "kind", "tokens per pass"]].assign(gamma=GAMMA), checks[["how", "kind", "gamma", "tokens per pass"]]]
)
counted_points = counted_points.assign(
    temperature=0.0, draft=counted_points["how"].map(names), measured=counted_points["tokens per pass"]
)
figure = plots.heatmaps(
    tokens_map,
    x="gamma",
    y="temperature",
    column="kind",
    row="draft",
    value="tokens per pass",
    points=counted_points,
    title=f"Tokens per target pass, {N_PROMPTS} texts a cell (in brackets: counted in real runs)",
    xlabel="gamma",
    ylabel="temperature",
    label="tokens per pass",
)
run.figure(figure, "map_tokens", tokens_map, n=N_PROMPTS)

# %% [markdown]
# Rows are temperatures. Look at prompt lookup on prose: a small model that always says its most probable token repeats
# itself, and lookup lives on repetition, so a temperature may cost it most there. On copied text it gains only while the
# answer stays a copy.


# %%
BATCHES = (1, 2, 4, 8, 16)


def simulated_speedups(swept, batches=BATCHES, n_tokens=LONG):
    """A row for each line of `swept` and each batch: the cost model's plain seconds a token over those with speculation."""
    lengths = texts.groupby("kind", sort=False)["prompt"].agg(lambda prompts: np.mean([len(p) for p in prompts]))
    rows = []
    for r in swept.itertuples():
        n_cached, per_pass = lengths[r.kind] + n_tokens / 2, r.drafted / r.passes
        for batch in batches:
            alone = costs["target"].seconds(batch, 1, n_cached)
            idle = max(0.0, 1 - r.drafting / r.passes) ** batch  # nobody drafts: an ordinary step
            spent = idle * alone
            if idle < 1:
                spent += (1 - idle) * costs["target"].seconds(batch, 1 + per_pass / (1 - idle), n_cached)
            if r.how == "draft":
                spent += per_pass * costs["draft"].seconds(batch, 1, n_cached)
            key = {"how": r.how, "kind": r.kind, "temperature": r.temperature, "gamma": r.gamma, "batch": batch}
            rows.append({**key, "speed-up": r.emitted / r.passes * alone / spent})
    return pd.DataFrame(rows)


speedups = simulated_speedups(swept)

# %% [markdown]
# Where should the draft model gain most, alone and greedy? The cost model names a place, and then it is measured: six
# pairs on the clock, each prompt in both orders. (To measure many places and report the best would make a gain of noise.)

# %%
at_one = speedups[(speedups["how"] == "draft") & (speedups["batch"] == 1) & (speedups["temperature"] == 0)]
at_one = at_one[at_one["gamma"].isin(MAPPED)]
top, trial = at_one.loc[at_one["speed-up"].idxmax()], []
for turn in range(2 * N_PROMPTS):
    prompts = PROMPTS[top["kind"]]
    prompt, pair = prompts[turn % len(prompts)], {}
    for who in ("plain", "draft")[:: (1, -1)[turn % 2]]:
        pair[who] = clocked(who, prompt, N_TOKENS, int(top["gamma"]))
    assert (
        judged(prompt, *(said.ids for said in (pair["plain"][0], pair["draft"][0]))) != "differs" or dtype != "float32"
    )
    trial.append({who: seconds for who, (_, seconds) in pair.items()})
draft_gain = paired_ratio([t["plain"] for t in trial], [t["draft"] for t in trial], seed=SEED)
where = {"how": "draft", "kind": top["kind"], "gamma": int(top["gamma"])}
on_clock = {"clock": draft_gain.ratio, "low": draft_gain.low, "high": draft_gain.high}
clock_points = pd.concat([clock_points, pd.DataFrame([where | on_clock])], ignore_index=True)
clock_points = clock_points.drop_duplicates(["how", "kind", "gamma"], keep="last")
print(f"{top['kind']}, gamma {top['gamma']}: simulated {top['speed-up']:.2f}, on the clock {draft_gain}")

# %%
speed_map = speedups[speedups["temperature"].isin([0, 1]) & speedups["gamma"].isin(MAPPED)]
row_names = [f"{how}, T={t:g}" for how, t in zip(speed_map["how"], speed_map["temperature"], strict=True)]
speed_map = speed_map.assign(row=row_names).sort_values("row", kind="stable")
speed_points = clock_points.assign(batch=1, row=clock_points["how"] + ", T=0", measured=clock_points["clock"])
figure = plots.heatmaps(
    speed_map,
    x="gamma",
    y="batch",
    column="kind",
    row="row",
    value="speed-up",
    limit=1.0,
    points=speed_points,
    title=f"Speed-up over plain decoding, simulated, {N_PROMPTS} texts a cell (in brackets: on the clock); hatched: slower",
    xlabel="gamma",
    ylabel="batch",
    label="speed-up",
)
run.figure(figure, "map_speedup", speed_map, n=N_PROMPTS)

# %%
both = speed_points.merge(speedups[(speedups["temperature"] == 0)], on=["how", "kind", "gamma", "batch"])
map_error = float((both["speed-up"] / both["clock"] - 1).abs().median())
same_side = int(((both["speed-up"] > 1) == (both["clock"] > 1)).sum())
Markdown(
    f"Against the clock at {len(both)} points: median error **{map_error:.0%}**, the same side of 1.0 at {same_side} of them. "
    f"The map's texts are answers to {N_PROMPTS} prompts, at most {LONG} tokens each; the clock's have {N_TOKENS}."
)

# %% [markdown]
# The same with batch on the axis, gamma as in the runs above. Where a curve goes below the line, speculation should be
# switched off. A batch has already bought what speculation sells: many tokens in a pass. Once it is so large that
# arithmetic binds, nothing is to spare, and each rejected token takes the place of somebody's real one.

# %%
at_gamma = speedups[(speedups["gamma"] == GAMMA) & (speedups["temperature"] == 0)]
by_batch = at_gamma.pivot(index=["kind", "batch"], columns="how", values="speed-up").reset_index()
by_batch["kind"] = pd.Categorical(by_batch["kind"], list(PROMPTS))
by_batch = by_batch.sort_values(["kind", "batch"]).astype({"kind": str})
figure = plots.panels(
    by_batch,
    x="batch",
    ys={how: f"speed-up, {name}" for how, name in names.items()},
    hue="kind",
    title=f"Speed-up by batch (simulated, greedy, gamma {GAMMA})",
    xlabel="batch",
    log_x=True,
)
for axes in figure.axes:
    axes.axhline(1.0, color="0.2", linestyle="--", linewidth=1)
    axes.set_ylim(0, max(1.2, axes.get_ylim()[1]))
run.figure(figure, "speedup_by_batch", by_batch, n=N_PROMPTS)

# %% [markdown]
# And the length of the answer: at batch 1, greedy.

# %%
ANSWERS = tuple(LONG * i // 5 for i in (1, 2, 3, 5))
greedy_texts = texts[texts["temperature"] == 0]
by_length = [simulated_speedups(sweep(greedy_texts, MAPPED, n), (1,), n).assign(tokens=n) for n in ANSWERS]
by_length = pd.concat(by_length, ignore_index=True)
by_length = by_length.assign(draft=by_length["how"].map(names))
figure = plots.heatmaps(
    by_length,
    x="gamma",
    y="tokens",
    column="kind",
    row="draft",
    value="speed-up",
    limit=1.0,
    title="Speed-up by length of the answer (simulated, greedy, batch 1)",
    xlabel="gamma",
    ylabel="tokens of the answer",
    label="speed-up",
)
run.figure(figure, "map_length", by_length, n=N_PROMPTS)

# %% [markdown]
# Short answers leave lookup nothing to look up but the prompt; a round may not draft past the end, so large gammas are
# wasted on them too. The prompt's own pass is not part of this map: the shorter the answer, the larger its share, and
# speculation does not touch it.

# %%
best = speedups.loc[speedups.groupby(["how", "kind", "temperature", "batch"], sort=False)["speed-up"].idxmax()]
best = best[best["batch"].isin([1, 16]) & best["temperature"].isin([0, 1])]
best = best.assign(shown=[f"{s:.2f} (gamma {g})" for s, g in zip(best["speed-up"], best["gamma"], strict=True)])
best.pivot(index=["how", "kind"], columns=["batch", "temperature"], values="shown")

# %% [markdown]
# The best gamma of each place on the map, and what it brings (simulated). There is no best gamma for a server: it depends
# on the text, the temperature and on who else is there. A number below 1 says that even the best of our gammas loses.


# %% [markdown]
# ## Controls that should not help
#
# **A draft that knows nothing** proposes random tokens. The answer must stay the same, the acceptance must be next to
# nothing, and the clock cannot show a gain beyond its noise. If it did, we would be measuring something else.

# %%
chaos = torch.Generator().manual_seed(SEED)


def know_nothing(ids, gamma):
    return torch.randint(len(tokenizer), (gamma,), generator=chaos).tolist(), None


control_runs = []
for turn in range(2):
    prompt, pair = PROMPTS["chat"][turn], {}
    for who in ("plain", "random")[:: (1, -1)[turn % 2]]:
        pair[who] = clocked("plain", prompt, N_TOKENS // 2, propose=know_nothing if who == "random" else None)
    assert judged(prompt, pair["plain"][0].ids, pair["random"][0].ids) != "differs" or dtype != "float32"
    control_runs.append(pair)
random_acceptance = Acceptance.from_rounds(r for pair in control_runs for r in pair["random"][0].rounds)
random_clock = paired_ratio(*([pair[who][1] for pair in control_runs] for who in ("plain", "random")), seed=SEED)
assert random_acceptance.accepted <= 0.02 * random_acceptance.attempted
print(f"accepted {random_acceptance.accepted} of {random_acceptance.attempted} reached; clock {random_clock}")

# %% [markdown]
# ### A mismatch that costs only speed
#
# **The draft's own temperature.** The draft need not be sampled at the target's temperature: q is whatever it was drawn
# from, and the result is exact for all of them. But $\alpha$ is not the same. Along the target's answers at temperature
# 1:

# %%
overlap = []
for row in texts[(texts["temperature"] == 1.0) & (texts["kind"] == "chat")].itertuples():
    logits = []
    for speaker in (target, draft):
        speaker.reset()
        logits.append(speaker.feed([*row.prompt, *row.ids[: row.n - 1]], n_logits=row.n))
    for t in (0, 0.5, 0.7, 1.0, 1.5):
        common = torch.minimum(warp(logits[0]), warp(logits[1], t)).sum(-1)
        overlap += [{"draft temperature": t, "alpha": float(alpha)} for alpha in common]
overlap = pd.DataFrame(overlap).groupby("draft temperature")["alpha"].mean()
overlap.round(3).to_frame().T


# %% [markdown]
# ## The real system
#
# vLLM speculates in the same three moves, for all rows of a step at once. The scheduler hands a decoding request `1 + n`
# tokens, n of them drafted; one pass runs them; a rejection sampler keeps what the target accepts. Rolling back costs
# nothing: the count of computed tokens is lowered, and the next step writes over the slots of the rejected ones (notebook
# 02). The rules are the papers'. The choices are not always ours:
#
# | | ours | vLLM 0.32 | Transformers 5.19 |
# | --- | --- | --- | --- |
# | the n-gram occurs several times: | the latest place | the earliest place | the earliest place |
# | longest n-gram, by default | 3 | 5 (`prompt_lookup_max`) | 2 (`max_matching_ngram_size`) |
# | shortest n-gram, by default | 1 | 5 (`prompt_lookup_min`) | 1 |
# | the draft model, sampling | draws from q | names its best token: q is one-hot (`draft_sample_method`) | draws from q |
# | length of a draft | gamma | `num_speculative_tokens` | at most 20, less where the draft is unsure |
#
# (Unsure is below 0.4, a threshold that adapts where scikit-learn is installed.) So "n-gram does not help" may mean that
# five tokens in a row never occurred twice. Below, everybody gets our numbers.

# %%
from itertools import product

from helpers.engines.transformers_engine import run_loaded
from helpers.engines.vllm_engine import VllmEngine
from helpers.ledgers import make_card
from helpers.workload import Request, Workload

vllm_capability = run.hardware.capabilities["vllm"]
ANSWER, N_ROWS = 3 * N_TOKENS // 4, 2 * max(run.profile.batches)


def load_of(name, prompts, n_tokens, rows=1):
    """Greedy answers of `n_tokens` tokens to `prompts`, `rows` of them at once."""
    requests = tuple(
        Request(request_id=f"{name} {i}", prompt_ids=tuple(prompt), max_tokens=n_tokens)
        for i, prompt in enumerate(prompts)
    )
    return Workload(name=name, requests=requests, concurrency=rows)


loads = {kind: load_of(kind, PROMPTS[kind][:2], ANSWER) for kind in ("copied", "chat")}
ends = [prompt[-16:] for kind in ("chat", "code", "prose") for prompt in PROMPTS[kind]]
loads["large batch"] = load_of("large batch", [ends[i % len(ends)] for i in range(N_ROWS)], ANSWER // 2, N_ROWS)
LOADS_OF = {"n-gram": ("copied", "chat"), "draft": ("chat", "large batch")}

# %% [markdown]
# First our own loop on the same prompts, for comparison. vLLM drafts from the second token on, since its prefill brings
# the first one; so ours begins behind that token here. And its lookup takes the earliest place. Then our models make room.
# (To go back to a cell above, run the cells that load them again.)

# %%
like_theirs = {"n-gram": lambda ids, gamma: (lookup(ids, gamma, earliest=True), None), "draft": proposals["draft"]}
our_rounds = {}
for method, names_of in LOADS_OF.items():
    for kind, i in product(names_of, range(2)):
        if kind in PROMPTS:
            begun = [*PROMPTS[kind][i], references[kind, i][0]]
            said = speculate(target, like_theirs[method], begun, ANSWER - 1, GAMMA, GREEDY, dice)
            our_rounds.setdefault((method, kind), []).append(said.rounds)
del target, draft, quick, small_model, speaker, doctored, pieces, together, apart  # vLLM needs their room
release_free_memory()

# %% [markdown]
# ### vLLM, off and on
#
# One engine with prompt lookup, one with the draft model. Each runs each load both ways, since a machine drifts:
# `use_speculation` takes the drafting out of the scheduler and the model runner, and puts it back. Both ways run without
# asynchronous scheduling and without CUDA graphs. vLLM's plain default has both, and its n-gram method gives up the
# first: on a GPU compare with a plain server before you switch it on.

# %%
METHODS = {
    "n-gram": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "draft": {"method": "draft_model", "model": draft_name},
}
served, again = {}, {}


def off_and_on(engine, method):
    """Each load without and with speculation, the first of them without a second time; the next one begins with it."""
    for turn, name in enumerate(LOADS_OF[method]):
        for at, on in enumerate(((False, True, False), (True, False))[turn % 2]):
            engine.call("use_speculation", enabled=on)
            record = engine.run(loads[name], warmup=1 if turn == 0 and at < 2 else 0)  # both ways warm
            (again if at == 2 else served)[method, name, on] = record


if vllm_capability.available:
    sizes = {"block_size": 32, "num_kv_blocks": 2 * N_ROWS + 12} if device == "cpu" else {}
    settings = dict(dtype=dtype, max_model_len=512, max_num_seqs=N_ROWS, max_num_batched_tokens=256, **sizes)
    for method, config in METHODS.items():
        options = {"speculative_config": {**config, "num_speculative_tokens": GAMMA}}
        with VllmEngine(model_name, options=options, **settings) as engine:
            off_and_on(engine, method)
        release_free_memory()
print("" if served else f"not run here: {vllm_capability.reason}")


# %%
def latencies(record):
    """Medians of a run's latencies, seconds, and its tokens per chunk."""
    ledger = make_card("", record).latency
    clocks = {"TTFT": ledger.ttft, "chunk gap": ledger.chunk_gap, "ITL": ledger.itl, "TPOT": ledger.tpot}
    return {name: summary.p50 for name, summary in clocks.items()} | {"tokens per chunk": ledger.tokens_per_chunk}


def times_faster(befores, after):
    """TPOT of some runs over TPOT of another, request by request."""
    alone = [trace.tpot for before in befores for trace in before.traces]
    return paired_ratio(alone, [trace.tpot for trace in after.traces] * len(befores), seed=SEED)


to_judge = []  # (prompt, answer, other answer): ties or bugs, as will be seen when a target is loaded again


def same_answers(before, after):
    """How many answers are the same, token by token."""
    rows = zip(before.workload.requests, before.traces, after.traces, strict=True)
    others = [(list(r.prompt_ids), a.output_ids, b.output_ids) for r, a, b in rows if a.output_ids != b.output_ids]
    to_judge.extend(others)
    return f"{len(before.traces) - len(others)}/{len(before.traces)}"


# %%
rows, vllm_gain = [], {}
for method, name in dict.fromkeys(key[:2] for key in served):
    off, on = served[method, name, False], served[method, name, True]
    offs = [off, *(record for key, record in again.items() if key == (method, name, False))]
    vllm_gain[method, name] = times_faster(offs, on)
    for how, record in (("off", off), ("on", on)):
        times = latencies(record)
        row = {"method": method, "load": name, "drafting": how}
        row["tokens per chunk"] = f"{times.pop('tokens per chunk'):.2f}"
        row |= {clock: show_seconds(seconds) for clock, seconds in times.items()}
        if how == "on":
            gain = vllm_gain[method, name]  # rows of one batch share every step: one sample
            shown = str(gain) if off.workload.concurrency == 1 else f"{gain.ratio:.2f}, one run each way"
            row |= {"TPOT off/on": shown, "same tokens": same_answers(off, on)}
        rows.append(row)
if served:
    drift = [latencies(served[method, "chat", False])["TPOT"] for method in METHODS]
    print("chat, off, in the two engines:", " and ".join(map(show_seconds, drift)), "a token")
pd.DataFrame(rows).fillna("").set_index(["method", "load", "drafting"] if rows else [])

# %% [markdown]
# The line above the table is a control: the same work in two engines, nothing drafted. So far the machine, or the engine,
# drifts between two starts, and no absolute time of one block should be held against the other. Within an engine it drifts
# too: the first load of each ran off, on, and off again (4 pairs), the others once each way, and an interval of two pairs
# is only their smaller and larger ratio.
#
# Medians of several clocks (notebook 00), and several answers. **TTFT** does not gain. The first token comes out of the
# prefill; a draft model reads the prompt too, and vLLM makes the first draft before it hands out the first token. The
# **gap between chunks** is a step: it grows by the draft's passes and the larger verification, so a reader sees larger
# bursts, further apart. A benchmark that calls this gap an inter-token latency reports that speculation made things worse.
# **ITL** spreads a gap over the tokens it brought, and **TPOT** is the mean of that. Only these two say what was gained,
# and only beside the tokens per chunk.


# %%
def stream(method, name, on):
    """How many tokens of the load's first answer were there, and when."""
    trace = served[method, name, on].traces[0]
    counts = np.cumsum([chunk.n_tokens for chunk in trace.token_chunks]).tolist()
    label = f"{name}, {method if on else 'off'}"
    times = [chunk.time - trace.first for chunk in trace.token_chunks]
    return pd.DataFrame({"stream": label, "seconds": times, "tokens": counts})


if served:
    shown = [(method, load, on) for method, load in (("n-gram", "copied"), ("draft", "chat")) for on in (False, True)]
    arrived = pd.concat([stream(*key) for key in shown])
    title = "Tokens received from vLLM, in chunks"
    words = dict(title=title, xlabel="seconds after the first token", ylabel="tokens")
    display(run.figure(plots.lines(arrived, x="seconds", y="tokens", hue="stream", **words), "vllm_streams", arrived))

# %% [markdown]
# ### Do vLLM's counters say what ours say?
#
# Same prompts, same draft, same gamma, greedy. The counters are sums, and sums can agree by luck. The chunks know more:
# each holds what one round emitted, so the rounds can be compared one by one.


# %%
def first_position(counted):
    """The share accepted at the first position with its 95 % interval, in words; and the interval."""
    if not counted.attempted:
        return "nothing drafted", (0.0, 1.0)
    low, high = counted.interval(0)
    return f"{counted.per_position[0]:.0%} [{low:.0%}, {high:.0%}]", (low, high)


rows, agreement = [], {}
for (method, kind), ours_each in our_rounds.items() if served else ():
    record = served[method, kind, True]
    theirs, ours = (
        Acceptance.from_counters(record.counters),
        Acceptance.from_rounds([r for each in ours_each for r in each]),
    )
    counts = zip(ours_each, record.traces, strict=True)
    same = [[r.emitted for r in each] == [chunk.n_tokens for chunk in t.token_chunks[1:]] for each, t in counts]
    spans = {who: first_position(of_whom)[1] for who, of_whom in (("vLLM", theirs), ("ours", ours))}
    overlap = max(low for low, _ in spans.values()) <= min(high for _, high in spans.values())
    agreement[method, kind] = overlap and (all(same) or dtype != "float32")
    row = {"method": method, "load": kind, "answers with equal rounds": f"{sum(same)}/{len(same)}"}
    for who, counted_by in (("vLLM", theirs), ("ours", ours)):
        row[f"{who}: drafted"], row[f"{who}: accepted"] = counted_by.drafted, counted_by.accepted
        row[f"{who}: first position"] = first_position(counted_by)[0]
    rows.append(row)
pd.DataFrame(rows)

# %% [markdown]
# Equal rounds, and yet other sums? In the last round vLLM does not know that the answer is about to end. It drafts in
# full, and counts what was accepted behind the end, which nobody receives. With short answers that alone moves a rate.
#
# ### Transformers: `assistant_model` and `prompt_lookup_num_tokens`
#
# Here it is one argument of `generate`. The assistant is told to draft exactly gamma tokens.

# %%
stock, assistant = (models.load_model(name, dtype=dtype, device=device) for name in (model_name, draft_name))
assistant.generation_config.update(
    num_assistant_tokens=GAMMA, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
)
ASSISTED = {
    "plain": {},
    "assistant_model": {"assistant_model": assistant},
    "prompt_lookup": {"prompt_lookup_num_tokens": GAMMA, "max_matching_ngram_size": 3},
}
WAYS = {"chat": ["plain", "assistant_model"], "copied": ["prompt_lookup", "plain"]}
generated, rows = {}, []
for name, ways in WAYS.items():
    for how in ways:
        settings = dict(name=model_name, max_model_len=512, warmup=0 if generated else 1)
        generated[how, name] = run_loaded(stock, loads[name], options=ASSISTED[how], **settings)
for how, name in sorted(generated, key=lambda key: (key[1], list(ASSISTED).index(key[0]))):
    alone, record = generated["plain", name], generated[how, name]
    passes, n = record.counters["passes"], sum(trace.n for trace in record.traces)
    row = {"load": name, "generate": how, "passes": int(passes), "tokens per pass": f"{n / passes:.2f}"}
    row["draft passes"], row["TPOT"] = (
        int(record.counters.get("draft_passes", 0)),
        show_seconds(latencies(record)["TPOT"]),
    )
    row |= {"TPOT plain/this": f"{times_faster([alone], record).ratio:.2f}", "same tokens": same_answers(alone, record)}
    rows.append(row)
target = Speaker(stock)
verdicts_late = [judged(*answers_of) for answers_of in to_judge]
assert "differs" not in verdicts_late or dtype != "float32", verdicts_late
pd.DataFrame(rows)

# %% [markdown]
# Count the passes of both models. Where `passes` falls and TPOT does not, a pass has become more expensive (these weights
# are not packed), or the draft's own passes ate what was saved.
#
# ## Ledgers
#
# vLLM on copied text, prompt lookup off and on; vLLM on chat, draft model off and on; Transformers on chat, plain and
# assisted. Within each pair one variable changes. All answers are held against our own plain greedy ones.

# %%
pairs = {
    ("vLLM, n-gram", "copied"): [served.get(("n-gram", "copied", on)) for on in (False, True)],
    ("vLLM, draft", "chat"): [served.get(("draft", "chat", on)) for on in (False, True)],
    ("Transformers, draft", "chat"): [generated[how, "chat"] for how in ("plain", "assistant_model")],
}
comparisons = []
for (who, name), (off, on) in pairs.items():
    cards, own = [], [references[name, i][:ANSWER] for i in range(2)]
    for how, record in (("off", off), ("on", on)):
        if record is not None:
            outputs = [trace.output_ids for trace in record.traces]
            held = quality.greedy_agreement(own, outputs, "held against ours, plain, greedy")
            cards.append(run.card(make_card(f"{who} {how}", record, [held], seed=SEED)))
    if cards:
        ratios = cards[0].compare(cards[1]).frame().set_index("quantity").iloc[:, 0]
        comparisons.append(ratios.rename(f"{who}: on / off"))
pd.concat(comparisons, axis=1)

# %%
run.cards()

# %% [markdown]
# Compare the memory of the two vLLM engines, not of off and on: a draft that rests is still loaded. Its weights are a
# second model, and its keys and values lie beside the target's in every block. So a draft model also takes room away from
# other requests, which no tokens per pass can show.
#
# ## Where it loses
#
# Prompt lookup on chat is the control: an answer in new words repeats little. And the draft model with many rows:
# a step with many rows is no longer bound by reading the weights, so each drafted token costs its share of arithmetic,
# accepted or not.

# %%
if served:
    control, many = vllm_gain["n-gram", "chat"], vllm_gain["draft", "large batch"]
    per_chunk = latencies(served["draft", "large batch", True])["tokens per chunk"]
    print(f"n-gram on chat: {control} (TPOT off/on)")
    print(
        f"draft model, {N_ROWS} rows at once: {many.ratio:.2f}x, one run each way, {per_chunk:.2f} tokens per chunk and row"
    )


# %% [markdown]
# So these are the places where it can lose; the tables say where it did here:
#
# - **Lookup on new text, an unrelated draft**: little is accepted, and each round with a draft pays for the wider pass.
# - **Full batches**: see the hatched part of the map, and the runs of vLLM with many rows.
# - **Large gamma**: every further token is reached less often and costs as much as the first.
# - **Short answers**: the prompt's pass is a larger share of the time, and a draft model has to read the prompt as well.
# - **Memory**: the draft's weights and its own keys and values take room in which other requests could run.

# %%
losing = speedups[speedups["speed-up"] < 1]
share_losing = (losing.groupby("batch").size() / speedups.groupby("batch").size()).fillna(0)
pair = (("target", model_name), ("draft", draft_name))
memory = {who: models.kv_bytes(models.load_config(name), dtype=dtype) for who, name in pair}
print(f"keys and values of a token: {memory['target']} bytes in the target, {memory['draft']} more in the draft")
share_losing.rename("share of the map's cells where speculation is slower (simulated)").map(
    "{:.0%}".format
).to_frame().T

# %% [markdown]
# ## Claims
#
# Identities and distributions can be reproduced anywhere. Speeds of other machines cannot; their direction can.

# %% tags=["claim"]
by_model = table[table["how"] == "draft"]
formula_off = (by_model["formula"] / by_model["tokens per pass"] - 1).abs().max()
run.claim(
    "leviathan-formula",
    abs(lengths.mean() - hoped) < 5 * error,
    f"{lengths.mean():.3f} ± {error:.3f} tokens a round in {ROUNDS} rounds of verify, formula {hoped:.3f} (alpha "
    f"{alpha_small:.3f}, gamma {gamma_small}); on real text, alpha of the same runs, off by at most {formula_off:.0%}",
)
said_same = runs[runs["how"] != "plain"]["verdict"].value_counts()
run.claim(
    "leviathan-lossless",
    bool(verdicts["lossless"].iloc[0] and not verdicts["lossless"].iloc[1:].any() and p_value_rounds > RARE)
    and ("differs" not in said_same or dtype != "float32"),
    f"{N_DRAWS} draws: chi-square p = {verdicts['chi-square p'].iloc[0]}, three wrong rules all rejected; greedy answers: "
    + ", ".join(f"{n} {verdict}" for verdict, n in said_same.items()),
)
run.claim(
    "chen-lossless",
    bool(verdicts_real["lossless"].all() and (verdicts_real["tokens possible"] > 1).mean() >= 0.5),
    f"{N_DRAWS} draws of the real pair's next-token distributions at {len(verdicts_real)} places (of "
    f"{verdicts_real['tokens possible'].min()} to {verdicts_real['tokens possible'].max()} tokens): chi-square p "
    f"{', '.join(verdicts_real['chi-square p'])}; TV at most {verdicts_real['TV to p'].max():.4f}",
)
run.claim(
    "leviathan-speedup",
    draft_gain.low > 1,
    f"{draft_gain.ratio:.2f}x ({draft_gain.low:.2f} to {draft_gain.high:.2f}, n = {draft_gain.n}), {top['kind']}, gamma "
    f"{top['gamma']}, on the clock, c = {c:.2f}; simulated at the best gamma: "
    + ", ".join(f"{kind} {value:.2f}" for kind, value in at_one.groupby("kind")["speed-up"].max().items()),
)
_ = run.claim("chen-speedup", None, "", reason="needs a 70B model on several accelerators")

# %% tags=["claim"]
n_places = places[places["temperature"] == 0].groupby("kind")["ratios"].size()
run.claim(
    "draft-acceptance",
    min(alphas["chat", 0], alphas["prose", 0]) >= 0.4,
    "greedy, held out: " + ", ".join(f"{kind} {alphas[kind, 0]:.2f} of {n_places[kind]} tokens" for kind in PROMPTS),
)
fp32 = dtype == "float32"
run.claim(
    "specinfer-tree-equal",
    (tree_error < 1e-3 and "differs" not in set(contest["tree: verdict"])) if fp32 else None,
    reason="" if fp32 else f"needs fp32: in {dtype} near-ties decide",
    ours=f"{len(tree.tokens)} nodes: logits differ by at most {tree_error:.1e} from separate passes; greedy answers: "
    f"{', '.join(contest['tree: verdict'])}",
)
run.claim(
    "specinfer-tree-sampling",
    bool(several["lossless"].all() and p_value_node > RARE),
    f"1 to 4 candidates, {N_DRAWS} draws each: chi-square p {', '.join(several['chi-square p'])}"
    + (" (never renewing p: each below 1e-6)" if told_apart else "")
    + f"; accepted {several['accepted'].iloc[0]:.2f} to {several['accepted'].iloc[-1]:.2f}",
)
run.claim(
    "specinfer-tree-over-chain",
    tree_gain > 1.1,
    f"{tree_gain:.2f}x the tokens per pass of a chain of the same depth, {len(contest)} prompts; on the clock {tree_clock:.2f}x "
    "the chain",
)
copied = check_runs[(check_runs["kind"] == "copied") & (check_runs["gamma"] == 8)]
copied = copied.assign(who=copied["who"].where(copied["who"] == "plain", "lookup"))
pairs_copied = copied.pivot(index="turn", columns="who", values="seconds").pipe(lambda t: t["plain"] / t["lookup"])
_ = run.claim(
    "prompt-lookup-gain",
    np.exp(np.log(pairs_copied).mean()) > 1.2 and pairs_copied.min() > 1,
    f"{len(pairs_copied)} pairs: {', '.join(f'{ratio:.2f}x' for ratio in pairs_copied)} at gamma 8, copied text, greedy, batch 1",
)

# %% tags=["claim"]
gained = vllm_gain.get(("n-gram", "copied"))
run.claim(
    "prompt-lookup-gain-vllm",
    gained.ratio > 1.2 and gained.low > 1 if gained else None,
    f"TPOT off/on: {gained.ratio:.2f}x, {gained.n} pairs from {gained.low:.2f}x to {gained.high:.2f}x, gamma {GAMMA}"
    if gained
    else "",
    reason="" if gained else vllm_capability.reason,
)
run.claim(
    "speculation-counters-agree",
    all(agreement.values()) if agreement else None,
    f"{'rounds equal one by one' if fp32 else 'intervals overlap'} in {sum(agreement.values())} of {len(agreement)} comparisons"
    if agreement
    else "",
    reason="" if agreement else vllm_capability.reason,
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
# Write into the cell that raises `NotImplementedError` and run it. Then **skip the collapsed cell** after the hint: it
# holds a solution and, once run, replaces your function. Then run the check. (*Run All* runs the solutions too, so its
# PASS says nothing about you.)
#
# ### 08.1 Acceptance and residual (easy)
#
# Both numbers of the idea above, for many positions at once and without a loop. One identity tells whether you have them:
# $\min(p, q) + (1 - \text{acceptance}) \cdot \text{residual} = p$.


# %% tags=["exercise"]
def acceptance_and_residual(p, q):
    """``(acceptance [n], residual [n, V])``; `p` and `q` are float64 tensors ``[n, V]`` whose rows are distributions.

    Row by row: the chance that a token drawn from q is accepted, and the distribution of what is drawn after a rejection.
    Where nothing is ever rejected, the residual is p.
    """
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>Both come from the minimum of p and q. A row without anything left must not be divided by
# its sum.</details>


# %% tags=["solution"]
def acceptance_and_residual(p, q):
    common = torch.minimum(p, q)
    left = p - common
    total = left.sum(dim=1, keepdim=True)
    return common.sum(dim=1), torch.where(total > 0, left / total, p)


# %% tags=["check"]
run.check("08.1", acceptance_and_residual)

# %% [markdown]
# ### 08.2 The best gamma (easy)
#
# You measured the acceptance rate alpha, the cost ratio c, and what a pass over several tokens costs the target. How far
# should the draft look ahead, and what is gained? The honest answer may be: not at all (gamma 0, speed-up 1).


# %% tags=["exercise"]
def best_gamma(alpha, c, costs):
    """``(gamma, speed-up)``: the gamma from 0 to ``len(costs) - 1`` with the largest expected speed-up over plain decoding.

    Each draft is accepted with chance `alpha` (0 to 1, both included) if those before it were. `c` is the cost of a pass of
    the draft, ``costs[g]`` that of a pass of the target over g + 1 tokens; both count in passes of the target over one token,
    so ``costs[0]`` is 1. Of equals take the smallest gamma.
    """
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>Expected tokens over cost, for every gamma. The closed form divides by 1 - alpha; a sum of
# powers does not. Costs need not rise evenly, so do not stop at the first gamma that is worse.</details>


# %% tags=["solution"]
def best_gamma(alpha, c, costs):
    best = (0, 1.0 / costs[0])
    for gamma in range(1, len(costs)):
        speedup = sum(alpha**i for i in range(gamma + 1)) / (gamma * c + costs[gamma])
        if speedup > best[1]:
            best = (gamma, speedup)
    return best


# %% tags=["check"]
run.check("08.2", best_gamma)

# %% [markdown]
# ### 08.3 Find the bug (medium)
#
# A colleague wrote a verify step of his own. Every test at temperature 1 is green, and so is the acceptance rate. A user
# writes at temperature 0.4 and finds that, with speculation on, the answers are livelier than without. The tests are
# right, and so is the user.
# Return a version that keeps the target's distribution at every temperature.


# %% tags=["exercise"]
def buggy_verify(target_logits, draft_logits, drafted, temperature, generator):
    """The ids that a round emits: accepted drafts and one more.

    `target_logits` is a float64 tensor ``[gamma + 1, V]``, `draft_logits` ``[gamma, V]``. `drafted` holds gamma ids, drawn by
    the draft from ``softmax(draft_logits / temperature)``, one for each row; `temperature` is above 0.
    """

    def draw(probs):
        heated = probs ** (1 / temperature)
        return int(torch.multinomial(heated / heated.sum(), 1, generator=generator))

    p, q = target_logits.softmax(dim=-1), draft_logits.softmax(dim=-1)
    for i, token in enumerate(drafted):
        if torch.rand((), generator=generator) >= p[i, token] / q[i, token]:
            return [*drafted[:i], draw((p[i] - q[i]).clamp(min=0))]
    return [*drafted, draw(p[-1])]


def mended_verify(target_logits, draft_logits, drafted, temperature, generator):
    """Your version of buggy_verify. All chance comes from `generator` (a ``torch.Generator`` on the CPU)."""
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>From which distribution did the drafted token really come, and with which one is it
# compared? Write down q as it is used in the proof.</details>


# %% tags=["solution"]
def mended_verify(target_logits, draft_logits, drafted, temperature, generator):
    # The draft drew from q at this temperature, but the ratio compared p and q at temperature 1; the proof needs the q that
    # was drawn from and the p that is wanted. Heating the residual afterwards does not help: it is not the residual of the
    # heated p and q. At temperature 1 all of it is the same.
    p, q = (target_logits / temperature).softmax(dim=-1), (draft_logits / temperature).softmax(dim=-1)

    def draw(probs):
        return int(torch.multinomial(probs, 1, generator=generator))

    for i, token in enumerate(drafted):
        if torch.rand((), generator=generator) >= p[i, token] / q[i, token]:
            return [*drafted[:i], draw((p[i] - q[i]).clamp(min=0))]
    return [*drafted, draw(p[-1])]


# %% tags=["check"]
run.check("08.3", mended_verify)

# %% [markdown]
# ### 08.4 Acceptance by position (medium)
#
# The closed form takes one alpha for all positions. Whether that is fair can be seen only by position, and a careless
# count answers another question: *accepted at position 3 over all rounds* falls with the position even where every draft
# is equally good. Short drafts (prompt lookup) and answers that end within a round need care too. There is always at
# least one round.


# %% tags=["exercise"]
def per_position(rounds):
    """``(rates, tokens a pass)`` of `rounds`, a list of (drafted, accepted, emitted) counts, one for each pass of the target.

    ``rates[i]`` is the share of accepted drafts among those that were *judged* at position i (from 0): the target judges
    drafts from the left and stops at the first that it rejects. There are as many rates as the longest draft has tokens;
    None where no draft was judged. `emitted` is accepted + 1, or less where the answer was cut; drafts that were judged in a
    cut round still count. A round may have drafted nothing.
    """
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>A round with a accepted of d drafted has judged a + 1 of them if a < d, and d of them if
# a = d.</details>


# %% tags=["solution"]
def per_position(rounds):
    rates = []
    for position in range(max(drafted for drafted, _, _ in rounds)):
        judged = sum(drafted > position and accepted >= position for drafted, accepted, _ in rounds)
        rates.append(sum(accepted > position for _, accepted, _ in rounds) / judged if judged else None)
    return rates, sum(emitted for _, _, emitted in rounds) / len(rounds)


# %% tags=["check"]
run.check("08.4", per_position)

# %% [markdown]
# ### 08.5 When to stop drafting (research)
#
# A fixed gamma drafts as far into a hard name as into a list of numbers. A draft knows something about it: the
# probability that it gives to its own token, its *confidence*. Write a rule that decides, token by token, whether one
# more is worth its cost. The bars: 5 to 10 % above the best fixed gamma where confidence tells something, at least 0.93
# of it where it does not, and 0.9 with a useless draft, which should rest.
#
# Mind one trap. A rule may look at all tokens drafted so far, but a token that was drawn must be verified: who drops it
# because its confidence is low has no longer drawn from q, and the text is no longer the target's.
#
# Then the open part. Put your rule into `draft_tokens`, and plot the draft's confidence against what the target accepted.
# (The models are gone by now: `load = lambda name: packed(models.load_model(name, dtype=dtype, device=device))`, then
# `target, draft = Speaker(load(model_name)), Speaker(load(draft_name))` brings them back.)
# Is it calibrated on chat, on code, at temperature 1? Does your rule beat the best fixed gamma on each kind of text, in
# tokens per second and not only in tokens per pass?


# %% tags=["exercise"]
def wants_more(confidences, recent, c):
    """Whether the draft should propose one more token in this round: True or False.

    `confidences` are those of the tokens drafted so far in this round (none at first): each is accepted with that chance if
    all before it were. The next one's confidence is not known. `recent` holds (drafted, accepted) of up to 20 rounds before
    this one, the last one at the end. `c` is the cost of a draft pass in passes of the target, which costs 1 for any number of
    tokens. The caller stops at 8 drafted tokens by itself.
    """
    raise NotImplementedError


# %% [markdown]
# <details><summary>Hint</summary>One more token costs c and comes out with chance (product of the confidences) x (a guess of
# the next one). Compare its tokens per cost with those of the round as it stands. Before the first token, guess from the
# recent rounds; 20 rounds without a draft are no evidence, so the rule tries again by itself.</details>


# %% tags=["solution"]
def wants_more(confidences, recent, c):
    accepted = sum(a for _, a in recent)
    judged = sum(a + (a < d) for d, a in recent)
    following = confidences[-1] if confidences else (accepted + 1) / (judged + 1.5)
    all_right, tokens = 1.0, 1.0
    for confidence in confidences:
        all_right *= confidence
        tokens += all_right
    return all_right * following * (1 + c * len(confidences)) > tokens * c


# %% tags=["check"]
run.check("08.5", wants_more)


# %% [markdown]
# ## Pitfalls and further reading
#
# - **Ask which acceptance rate.** Accepted over drafted falls with gamma by arithmetic; tokens per pass may or may not
#   count the target's own token.
# - **Warp first, compare then.** Temperature, top-k and top-p belong into p and q. Test at temperature 0 too: it is the
#   same code.
# - **After a rejection draw from the residual.** Drawing from p looks right, reads right, accepts as often, and is wrong.
# - **A draft may stop early, but not take a word back.** Whether it goes on may depend on what it has drawn so far.
#   Dropping a token *after* seeing that it was an unlikely one changes q, and the rule then compares with the wrong one.
# - **A gap between chunks is not a time between tokens.** Speculation makes chunks rarer and larger.
# - **Equal vocabulary sizes prove nothing, and unequal ones little**: embeddings are padded. Compare the tokens.
# - **A difference in greedy output is a tie or a bug.** Look at the margin before you believe either.
# - **Measure at your batch.** A gain at batch 1 says nothing of a full server, and the other way round.
#
# Further reading:
#
# - Leviathan, Kalman, Matias, [Fast inference from transformers via speculative
#   decoding](https://arxiv.org/abs/2211.17192), ICML 2023.
# - Chen et al., [Accelerating large language model decoding with speculative sampling](https://arxiv.org/abs/2302.01318),
#   2023.
# - Miao et al., [SpecInfer](https://arxiv.org/abs/2305.09781), ASPLOS 2024: section 4 for the tree, algorithm 2 for
#   sampling.
# - Saxena, [Prompt lookup decoding](https://github.com/apoorvumang/prompt-lookup-decoding), 2023.
# - vLLM, [Speculative decoding](https://docs.vllm.ai/en/latest/features/spec_decode/), and Transformers, [Assisted
#   decoding](https://huggingface.co/docs/transformers/main/en/generation_strategies): the maintained systems.
#
# Drafts that learn from the target's own hidden states, heads instead of models, and early exits are the subject of
# notebook 09.

# %%
run.finish()
