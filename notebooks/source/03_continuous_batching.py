# %% [markdown]
# # 03 · Continuous batching
#
# **Who runs in the next step, and who waits for whom?**
#
# Notebook 02 made room for many requests in one pool. Now somebody must decide, at every step of the model, which of
# them take part. That somebody is the scheduler: a few dozen lines that never touch a tensor, and that decide more about
# what users feel than any kernel does.
#
# | paper or system | year, venue | maturity | what we take from it |
# | --- | --- | --- | --- |
# | Yu et al., *Orca* | 2022, OSDI | peer-reviewed | schedule at every iteration; batch everything but attention |
# | Agrawal et al., *SARATHI* | 2023, arXiv | preprint | cut a prompt into chunks; let decodes ride on them |
# | Agrawal et al., *Sarathi-Serve* | 2024, OSDI | peer-reviewed | decodes first, a token budget for each step, no stalls |
# | vLLM, version 0 and Text Generation Inference (TGI) | 2023 | maintained code | new prompts go before everything else |
# | vLLM 0.32 (V1) | now | maintained code | the real system: chunked prefill is its default |

# %% tags=["parameters"]
PROFILE = "auto"
SEED = 0
OUT = None

# %%
import helpers

run = helpers.start("03_continuous_batching", PROFILE, SEED, OUT)
run

# %% [markdown]
# ## What fails without it
#
# Eight requests, one batch, the way `generate` does it. Most want a short answer, one wants a long one. The batch is a
# rectangle, as long as its longest row.

# %%
import numpy as np
import pandas as pd
import torch
from IPython.display import Markdown

from helpers import corpora, models, plots, quality
from helpers.engines.base import EngineInfo, MemoryReport, RunRecord
from helpers.ledgers import SLO, make_card, show_bytes, show_seconds
from helpers.stats import paired_ratio, percentile
from helpers.trace import Chunk, StreamTrace
from helpers.workload import Request, Workload, agent_sessions, gamma_arrivals, make_workload, replay

# %%
device, dtype = run.profile.device, run.dtype
max_len = run.profile.max_model_len
model = models.load_model(run.profile.model, dtype=dtype, device=device)
tokenizer = models.load_tokenizer(run.profile.model)
text = corpora.prose_ids(tokenizer, "evaluation", 16384).tolist()
shape = models.kv_shape(model.config)


# %%
def prompt_of(index, length):
    """`length` tokens of prose, another place for each index."""
    start = (997 * index) % (len(text) - length)
    return tuple(text[start : start + length])


N_SLOTS, SHORT, LONG = 8, 2, run.profile.max_tokens * 3 // 4
wanted = [LONG] + [SHORT] * (N_SLOTS - 1)
batch = torch.tensor([prompt_of(i, 16) for i in range(N_SLOTS)], device=device)
rectangle = model.generate(batch, max_new_tokens=LONG, min_new_tokens=LONG, do_sample=False, pad_token_id=0)[:, 16:]
computed, kept = rectangle.numel(), sum(wanted)
Markdown(f"{computed} tokens generated, {kept} wanted: **{1 - kept / computed:.0%}** of the rectangle is padding.")

# %% [markdown]
# The rows with two tokens to say were done after two steps. They kept their place to the end, and the next request in
# the queue waited outside an almost empty room. A longest answer sets everybody's time.

# %% [markdown]
# ## Predict
#
# Write your own numbers into the next cell before you run it. The defaults are guesses, and some of them are poor.

# %% tags=["predict"]
run.predict(
    percent_padding_static=50,  # of the rows of all steps, static batching, our engine on the load below
    continuous_over_static=3,  # tokens a second, our engine, same memory, same requests
    longest_gap_whole_over_chunked=5,  # longest pause of a decoding request, our engine
    longest_gap_whole_over_chunked_vllm=5,  # the same in vLLM
    percent_ttft_price_of_chunks=5,  # how much later the long prompt's first token comes, our engine
    percent_marginal_cost_of_decodes=30,  # decodes that ride on a chunk, of what they cost alone
    percent_error_of_cost_model=10,  # median error of predicted step times on loads it never saw
)

# %% [markdown]
# ## The idea
#
# A request is a list of tokens that grows. Some of its tokens have their keys and values in the pool; $c$ says how many.
# With a prompt of $p$ tokens and $o$ tokens generated so far, a request has
#
# $$\text{left} = p + o - c$$
#
# tokens to compute before the next one can be sampled. While it decodes, one is left. After it arrives, $p$ are left.
# After a preemption, $p + o$. So there are no two kinds of requests, and no phases: there is only *how many of its
# tokens run in this step*. A step is a list of pairs (request, number of tokens), and a scheduling policy is a rule that
# writes such a list.
#
# Four rules made history:
#
# | rule | a step holds | who waits |
# | --- | --- | --- |
# | **static** | one batch until its longest row is done | every short row, and the whole queue |
# | **Orca** | one token of everybody, and the whole prompts of those who just came | decodes, during somebody else's prompt |
# | **prefill first** | only prompts if there are any, otherwise only decodes | decodes, through as many prompts as arrive |
# | **chunked** | one token of everybody, then prompt pieces up to a token budget | the prompt, a little |
#
# A step costs about $a + b \cdot n$ seconds for $n$ tokens. The weights are read once, whatever $n$ is: that is $a$, and
# sharing it is why batching pays. A long prompt makes $n$ large, and everybody in the step gets their token only when
# the step ends: that is why it hurts. A **token budget** bounds $n$, so it bounds the pause.

# %% [markdown]
# ## From scratch
#
# ### A request

# %% tags=["algorithm"]
import time
from collections import deque
from dataclasses import dataclass, field


@dataclass(eq=False)
class Sequence:
    """One request: its tokens, and how many of them have keys and values in the pool."""

    seq_id: str
    prompt_ids: list
    max_tokens: int
    output_ids: list = field(default_factory=list)
    n_computed: int = 0

    @property
    def n_tokens(self):
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def n_left(self):
        """Tokens to compute before the next one can be sampled: 1 while decoding."""
        return len(self.prompt_ids) + len(self.output_ids) - self.n_computed

    @property
    def is_finished(self):
        return len(self.output_ids) == self.max_tokens

    def token_ids(self):
        return [*self.prompt_ids, *self.output_ids]


# %% [markdown]
# ### A scheduler has three verbs
#
# It *admits* from the queue, it lets running requests *decode*, and it *continues prefills* that were begun. Each verb
# returns its part of the step. When the pool is empty, the newest request leaves and waits at the head of the queue;
# its tokens will be read again (preemption by recomputation, notebook 02).


# %% tags=["algorithm"]
class SchedulerState:
    """Who waits, who runs, and in which blocks. First come, first served: both lists stay in order of arrival."""

    def __init__(self, manager, policy, max_num_seqs=8, max_num_batched_tokens=None):
        self.manager, self.policy = manager, policy
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting, self.running = deque(), []
        self.n_preempted, self.has_preempted = 0, False

    def add(self, seq):
        """Put a request at the end of the queue. One that could never fit would block it for ever: it is refused."""
        from helpers.errors import EngineError

        needed = self.manager.blocks_for(len(seq.prompt_ids) + seq.max_tokens)
        if needed > self.manager.n_blocks:
            raise EngineError(
                f"Request {seq.seq_id!r} needs {needed} blocks and the pool has {self.manager.n_blocks}.",
                "Shorten it, or start with a larger pool.",
            )
        self.waiting.append(seq)

    def preempt(self):
        """Take the newest running request out of the pool; unless it was only padding, it goes to the head of the queue."""
        victim = self.running.pop()
        self.manager.free(victim.seq_id)
        if not victim.is_finished:
            victim.n_computed = 0
            self.waiting.appendleft(victim)
            self.n_preempted += 1
            self.has_preempted = True
        return victim

    def make_room(self, seq):
        """A slot for the newest token of `seq`, preempting others if need be. False where `seq` itself had to go."""
        from helpers.paged_kv import OutOfBlocks

        while self.manager.n_tokens(seq.seq_id) < seq.n_tokens:
            try:
                self.manager.append(seq.seq_id, seq.output_ids[-1:])
            except OutOfBlocks:
                if self.preempt() is seq:
                    return False
        return True


# %% tags=["algorithm"]
class SchedulerVerbs(SchedulerState):
    """The three parts that a step can have; each returns pairs (sequence, tokens to run)."""

    def decode(self):
        """One token of each request that has one left, oldest first."""
        feeds, index = [], 0
        while index < len(self.running):
            seq = self.running[index]
            if seq.n_left == 1 and self.make_room(seq):
                feeds.append((seq, 1))
            index += 1
        return feeds

    def continue_prefills(self, budget):
        """The next piece of prompts that were begun, oldest first, `budget` tokens altogether."""
        feeds = []
        for seq in self.running:
            if seq.n_left > 1 and budget > 0:
                feeds.append((seq, min(seq.n_left, budget)))
                budget -= feeds[-1][1]
        return feeds

    def admit(self, budget=float("inf"), chunk=False):
        """New requests while blocks, rows and budget last: whole prompts, or the first piece of the last one."""
        from helpers.paged_kv import OutOfBlocks

        feeds = []
        while self.waiting and len(self.running) < self.max_num_seqs and budget > 0 and not self.has_preempted:
            seq = self.waiting[0]
            if feeds and not chunk and seq.n_tokens > budget:
                break
            try:
                seq.n_computed = self.manager.allocate(seq.seq_id, seq.token_ids())
            except OutOfBlocks:
                break
            self.running.append(self.waiting.popleft())
            feeds.append((seq, min(seq.n_left, budget) if chunk else seq.n_left))
            budget -= feeds[-1][1]
        return feeds


# %% [markdown]
# Two details keep it honest. A step that had to preempt admits nobody, or it would hand the freed blocks to a newcomer.
# And `allocate` says how many leading tokens are cached already, so that a shared prefix is not computed again.
#
# ### Four rules


# %% tags=["algorithm"]
def plan_static(scheduler):
    """A new batch only when the old one is gone. Rows that are finished run on as padding."""
    return scheduler.decode() if scheduler.running else scheduler.admit()


def plan_orca(scheduler):
    """Everybody's next token, and the whole prompts of those who just came."""
    return scheduler.decode() + scheduler.admit()


def plan_prefill_first(scheduler):
    """Prompts alone, if there are any to admit; otherwise decodes alone."""
    return scheduler.admit(scheduler.max_num_batched_tokens or float("inf")) or scheduler.decode()


def plan_chunked(scheduler):
    """Everybody's next token first. What is left of the budget goes to pieces of prompts."""
    feeds = scheduler.decode()
    feeds += scheduler.continue_prefills(scheduler.max_num_batched_tokens - len(feeds))
    return feeds + scheduler.admit(scheduler.max_num_batched_tokens - sum(n for _, n in feeds), chunk=True)


POLICIES = {
    "static": plan_static,
    "orca": plan_orca,
    "prefill first": plan_prefill_first,
    "chunked": plan_chunked,
}


# %% [markdown]
# The whole difference between ten years of serving systems is in those few lines. The rest is bookkeeping: check the
# plan, and book what came of it.


# %% tags=["algorithm"]
class Scheduler(SchedulerVerbs):
    """Plans steps by one of the POLICIES, and books them."""

    def plan(self):
        """The next step, as pairs (sequence, tokens to run)."""
        self.has_preempted = False
        feeds = POLICIES[self.policy](self)
        assert feeds or not (self.running or self.waiting), "requests are left and the step is empty"
        assert all(1 <= n <= seq.n_left for seq, n in feeds), "a feed has no token, or more than are left"
        assert len(self.running) <= self.max_num_seqs
        if self.policy == "chunked":
            assert sum(n for _, n in feeds) <= self.max_num_batched_tokens, "the step exceeds its token budget"
        return feeds

    def complete(self, feeds, tokens):
        """Book a step whose feeds ended in these sampled tokens; returns the sequences that got one.

        The sample after a piece of a prompt that is not its last is thrown away: it predicts a token that is known.
        """
        emitted = []
        for (seq, n), token in zip(feeds, tokens, strict=True):
            if seq.is_finished:  # a padding row
                continue
            seq.n_computed += n
            self.manager.commit(seq.seq_id, seq.n_computed)
            if seq.n_left == 0:
                seq.output_ids.append(token)
                emitted.append(seq)
        finished = [seq for seq in self.running if seq.is_finished]
        if finished and (self.policy != "static" or len(finished) == len(self.running)):
            for seq in finished:
                self.manager.free(seq.seq_id)
            self.running = [seq for seq in self.running if not seq.is_finished]
        return emitted


# %% [markdown]
# ### Something that executes a plan
#
# The scheduler knows no tensors, so what carries its plans out can be exchanged. Here it is the real model over the
# paged pool of notebook 02. Later it will be a formula.


# %% tags=["algorithm"]
class ModelExecutor:
    """Runs a step on a real model; returns the sampled (greedy) tokens and the seconds it took."""

    is_simulated = False

    def __init__(self, paged):
        self.paged = paged

    def execute(self, feeds):
        from helpers.paged_kv import Feed

        started = time.perf_counter()
        inputs = [Feed(seq.seq_id, c := seq.n_computed, seq.token_ids()[c : c + n]) for seq, n in feeds]
        tokens = self.paged.step(inputs).argmax(-1).tolist()
        return tokens, time.perf_counter() - started


# %% [markdown]
# And a loop around both. Its clock advances by what each step took, planning included, and jumps over time in which
# nobody is there. So it does not care whether the seconds were measured or computed.


# %% tags=["algorithm"]
@dataclass
class Step:
    """What ran, when, and for how long. `feeds` holds (seq_id, position of the first token, tokens, whether padding)."""

    start: float
    seconds: float
    planning: float
    feeds: list


def serve(scheduler, executor, workload):
    """Run a workload; returns {request id: (scheduled, [time of each token], output ids)} and the steps."""
    pending, streams, steps, now = deque(sorted(workload.requests, key=lambda r: r.arrival)), {}, [], 0.0
    while pending or scheduler.waiting or scheduler.running:
        n_inside = len(scheduler.waiting) + len(scheduler.running)
        if workload.kind == "open" and not n_inside and pending[0].arrival > now:
            now = pending[0].arrival
        while pending and (pending[0].arrival <= now if workload.kind == "open" else n_inside < workload.concurrency):
            request, n_inside = pending.popleft(), n_inside + 1
            seq = Sequence(request.request_id, request.prompt_ids, request.max_tokens)
            streams[seq.seq_id] = (request.arrival if workload.kind == "open" else now, [], seq.output_ids)
            scheduler.add(seq)
        began = time.perf_counter()
        feeds = scheduler.plan()
        planning = time.perf_counter() - began
        ran = [(seq.seq_id, seq.n_computed, n, seq.is_finished) for seq, n in feeds]
        tokens, seconds = executor.execute(feeds)
        steps.append(Step(now, seconds, planning, ran))
        now += seconds if executor.is_simulated else seconds + planning
        for seq in scheduler.complete(feeds, tokens):
            streams[seq.seq_id][1].append(now)
    return streams, steps


# %% [markdown]
# From here on the one metrics core of the course takes over: token times become `StreamTrace`s, traces become a
# `RunRecord`, and every number below is computed from those.

# %%
from helpers.paged_kv import BlockManager, Feed, PagedKVCache, PagedModel

block_size = 32 if device == "cpu" else 16
WEIGHTS = sum(p.numel() * p.element_size() for p in model.parameters())


def record_of(workload, streams, engine, is_simulated, **settings):
    """The run as a record; prefix hits are not counted here."""
    traces = []
    for request in workload.requests:
        scheduled, times, output_ids = streams[request.request_id]
        chunks = [Chunk(time=t, n_tokens=1) for t in times]
        counts = dict(prompt_tokens=len(request.prompt_ids), completion_tokens=len(times), token_source="ids")
        trace = dict(request_id=request.request_id, scheduled=scheduled, sent=scheduled, chunks=chunks, **counts)
        traces.append(StreamTrace(**trace, output_ids=list(output_ids), finish_reason="length"))
    info = EngineInfo(
        engine=engine,
        version="this notebook",
        model=run.profile.model,
        dtype=dtype,
        device=device,
        max_model_len=max_len,
        settings=settings,
        provenance="simulated" if is_simulated else "measured",
    )
    return RunRecord(engine=info, workload=workload, traces=traces, started=0.0)


# %%
def run_ours(workload, policy, n_slots=None, *, prefix_caching=False, **limits):
    """A workload on the real model under a policy; returns its record and its steps."""
    n_slots = n_slots or N_SLOTS * max_len // 2
    manager = BlockManager(n_slots // block_size, block_size, enable_prefix_caching=prefix_caching)
    paged = PagedModel(model, PagedKVCache.for_model(model, manager.n_blocks, block_size), manager)
    scheduler = Scheduler(manager, policy, **{"max_num_seqs": N_SLOTS, **limits})
    streams, steps = serve(scheduler, ModelExecutor(paged), workload)
    manager.check()
    assert manager.n_used == 0, "a block leaked"
    record = record_of(workload, streams, "scheduler of this notebook", False, policy=policy, **limits)
    record.memory = MemoryReport(weights=WEIGHTS, kv_reserved=paged.cache.n_bytes)
    record.counters = {"preemptions": scheduler.n_preempted, "tokens run": paged.n_tokens_run}
    return record, steps


# %% [markdown]
# ### Is it right?
#
# A scheduler must not change what is said. So: each request alone, then all of them under each rule, in a pool that is
# roomy and in one that is so small that requests are preempted. Prompts of different lengths, arrivals spread out. In
# fp32 every token must be the same.

# %%
CHUNK = 128 if device == "cpu" else 512
tokens_in, tokens_out = [29, 60, 30, 12], [6, 5, 6, 4]
mixed = Workload(
    name="a few of everything",
    kind="open",
    requests=tuple(
        Request(request_id=f"r{i}", prompt_ids=prompt_of(i, p), max_tokens=o, arrival=0.02 * i)
        for i, (p, o) in enumerate(zip(tokens_in, tokens_out, strict=True))
    ),
)
one_by_one, _ = run_ours(mixed, "orca", max_num_seqs=1)
alone = [trace.output_ids for trace in one_by_one.traces]
LIMITS = {"static": {}, "orca": {}, "prefill first": {"max_num_batched_tokens": 64}}
LIMITS["chunked"] = {"max_num_batched_tokens": 32}

# %%
verdicts = []
for policy, limits in LIMITS.items():
    for pool, n_slots in (("roomy", 2048), ("tight", 4 * block_size)):
        record, steps = run_ours(mixed, policy, n_slots, **limits)
        same = quality.greedy_agreement(alone, [t.output_ids for t in record.traces], "each request alone").value
        assert same == 1.0 or dtype != "float32", (policy, pool, same)
        row = {"policy": policy, "pool": pool, "steps": len(steps), "largest step": max(sum(n for _, _, n, _ in s.feeds) for s in steps)}
        verdicts.append({**row, "preemptions": int(record.counters["preemptions"]), "same as alone": f"{same:.0%}"})
pd.DataFrame(verdicts)
