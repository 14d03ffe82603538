"""Training of the bundled draft by distillation: ``python3 -m helpers train-draft``.

A Llama of five layers starts from five of the target's own layers, keeps the target's embeddings and output head frozen, and
learns the target's next-token distribution on the target's own answers (sequence-level data, word-level loss: Kim and Rush,
EMNLP 2016; the target's outputs as data for a draft: Zhou et al., *DistillSpec*, ICLR 2024). Every stage is seeded and can be
stopped and started again. What is measured is what a draft is for: how many of its guesses the target accepts.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict
from tqdm.auto import tqdm

from helpers import draft, models
from helpers.acceptance import Acceptance
from helpers.corpora import chat_ids, chat_prompts, registry
from helpers.course.draft_data import PROMPTS, Row, answer, generate, load_rows, prompt_rows, prose_windows, save_rows
from helpers.errors import RecordError
from helpers.files import write_text
from helpers.hardware import pick_batch_dtype
from helpers.kv_adapter import n_cached_tokens, new_cache, truncate
from helpers.packed_linear import pack_linears


class Recipe(BaseModel):
    """Everything that decides the result. Lengths are tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: tuple[int, ...] = (0, 1, 2, 28, 29)
    """The target's layers that the draft starts from."""
    chat_prompts: int = 6000
    prose_passages: int = 480
    prose_tokens: int = 48
    answer_tokens: int = 56
    temperature: float = 0.8
    generation_batch: int = 120
    epochs: int = 4
    rows_per_step: int = 8
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    warmup_steps: int = 100
    clip: float = 1.0
    held_out_tokens: int = 64
    """Greedy answer to each held-out prompt over which acceptance is measured."""
    held_out_passages: int = 32
    gamma: int = 4
    """Tokens drafted at a time where acceptance is measured."""
    seed: int = 0


class DraftRound(NamedTuple):
    """One target pass of a walk along a known answer: tokens drafted, and how many of them were right."""

    drafted: int
    accepted: int


class TrainingLog(BaseModel):
    """What a training run was and what it reached."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: Recipe
    dtype: str
    n_rows: int
    n_answer_tokens: int
    generation_seconds: float
    training_seconds: float
    loss: tuple[tuple[int, float], ...]
    """(step, mean cross entropy against the target's distribution over the steps since the last point), nats a token."""
    agreement: tuple[tuple[int, float, float], ...]
    """(step, share of held-out greedy tokens that the draft guesses from the true context: chat, prose)."""
    acceptance: dict[str, Acceptance]
    """Held-out greedy acceptance of the exported weights, for ``chat`` and ``prose``."""


# -- held out ------------------------------------------------------------------------------------------------------------
def held_out(target: Any, tokenizer: Any, recipe: Recipe, folder: Path) -> dict[str, list[Row]]:
    """The target's greedy answers to the 32 chat prompts and continuations of evaluation prose; kept in `folder`."""
    prompts = {
        "chat": [chat_ids(tokenizer, prompt.text) for prompt in chat_prompts()],
        "prose": prose_windows(tokenizer, "evaluation", recipe.held_out_passages, recipe.prose_tokens),
    }
    rows = {}
    for kind, texts in prompts.items():
        path = folder / f"held_out_{kind}.safetensors"
        if not path.exists():
            generator = torch.Generator().manual_seed(recipe.seed)
            greedy = torch.zeros(len(texts))
            save_rows(answer(target, texts, recipe.held_out_tokens, tokenizer.eos_token_id, greedy, generator), path)
        rows[kind] = load_rows(path)
    return rows


@torch.inference_mode()
def agreement(model: Any, rows: list[Row]) -> float:
    """Share of the answers' tokens that are the model's most likely token after the true context."""
    hits = total = 0
    for row in rows:
        logits = model(row.ids[None, :-1]).logits[0, row.start - 1 :]
        hits += int((logits.argmax(-1) == row.ids[row.start :]).sum())
        total += len(row.ids) - row.start
    return hits / total


@torch.inference_mode()
def greedy_acceptance(model: Any, rows: list[Row], gamma: int) -> Acceptance:
    """Walk each greedy answer as speculative decoding would: draft `gamma` tokens, keep those that match, add the next, go on.

    The target is not needed: with greedy decoding its answer is known. An answer's last token is always the
    target's own, so drafts near the end are shorter.
    """
    rounds = []
    for row in rows:
        ids, at = row.ids.tolist(), row.start
        cache = new_cache("dynamic", model.config)
        while at < len(ids):
            fed, n, limit = ids[n_cached_tokens(cache) : at], 0, min(gamma, len(ids) - at - 1)
            while n < limit:
                logits = model(torch.tensor([fed]), past_key_values=cache, logits_to_keep=1).logits[0, -1]
                guess = int(logits.argmax())
                if guess != ids[at + n]:
                    break
                fed, n = [guess], n + 1
            rounds.append(DraftRound(limit, n))
            at += n + 1
            truncate(cache, at - 1)
    return Acceptance.from_rounds(rounds)


# -- the draft -----------------------------------------------------------------------------------------------------------
def new_draft(target: Any, layers: tuple[int, ...]) -> Any:
    """A float32 model with copies of the named layers of `target` and its last norm; its embeddings are the target's own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**draft.draft_config(target.config.to_dict(), len(layers)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    for mine, theirs in enumerate(layers):
        model.model.layers[mine].load_state_dict(target.model.layers[theirs].state_dict())
    model.model.norm.load_state_dict(target.model.norm.state_dict())
    model.model.embed_tokens.weight = target.model.embed_tokens.weight
    model.tie_weights()
    model.model.embed_tokens.weight.requires_grad_(False)
    return model


def own_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The tensors that are the draft's own: all but the borrowed embeddings, which are its output head too."""
    return {name: value for name, value in model.state_dict().items() if name not in (draft.BORROWED, "lm_head.weight")}


def distillation_loss(model: Any, rows: list[Row], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Mean over answer tokens of ``-sum_k p_k log q_k``, and the number of tokens.

    The sum is over the target's `TOP_K` likeliest tokens, whose mass may be a little below one.
    """
    width = max(len(row.ids) for row in rows) - 1
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    where_row, where_token = [], []
    for i, row in enumerate(rows):
        ids[i, : len(row.ids) - 1] = row.ids[:-1]
        span = torch.arange(row.start - 1, len(row.ids) - 1)
        where_row.append(torch.full_like(span, i))
        where_token.append(span)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        hidden = model.model(ids).last_hidden_state[torch.cat(where_row), torch.cat(where_token)]
        logits = model.lm_head(hidden)
    logq = logits.float().log_softmax(-1)
    top_ids = torch.cat([row.top_ids for row in rows])
    probs = torch.cat([row.top_logp for row in rows]).exp()
    return -(probs * logq.gather(1, top_ids)).sum(-1).mean(), len(top_ids)


def learning_rate(step: int, n_steps: int, recipe: Recipe) -> float:
    """Linear warm-up, then half a cosine down to zero."""
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, n_steps - recipe.warmup_steps)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def batches(rows: list[Row], epoch: int, recipe: Recipe) -> list[list[int]]:
    """The row numbers of each step of one epoch: shuffled, then sorted by length within blocks, so that little is padding."""
    generator = torch.Generator().manual_seed(recipe.seed * 1009 + epoch)
    order = torch.randperm(len(rows), generator=generator).tolist()
    size, block = recipe.rows_per_step, 16 * recipe.rows_per_step
    steps = []
    for first in range(0, len(order), block):
        near = sorted(order[first : first + block], key=lambda i: len(rows[i].ids))
        steps += [near[i : i + size] for i in range(0, len(near), size)]
    shuffled = torch.randperm(len(steps), generator=generator).tolist()
    return [steps[i] for i in shuffled]


def train(
    model: Any, rows: list[Row], recipe: Recipe, folder: Path, dtype: torch.dtype, measure: Any, every: int = 200
) -> dict[str, Any]:
    """Train `model` in place; the state is kept in `folder` every `every` steps, and a stopped run goes on from there.

    `measure()` gives (chat, prose) agreement. Returns the curves and the seconds that training took.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in weights if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in weights if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))
    plan = [batch for epoch in range(recipe.epochs) for batch in batches(rows, epoch, recipe)]
    state: dict[str, Any] = {"step": 0, "loss": [], "agreement": [], "seconds": 0.0}
    path = folder / "training.pt"
    if path.exists():
        held = torch.load(path, weights_only=True)
        if held["recipe"] != recipe.model_dump_json():
            raise RecordError(f"{path} is of another recipe.", "Give another --work folder, or delete that one.")
        model.load_state_dict(held["model"], strict=False)
        optimizer.load_state_dict(held["optimizer"])
        state = held["state"]
    started, before = time.monotonic(), state["seconds"]
    total = tokens = 0.0
    model.train()
    bar = tqdm(total=len(plan), initial=state["step"], desc="distillation", unit="step")
    for step in range(state["step"], len(plan)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, len(plan), recipe)
        loss, n = distillation_loss(model, [rows[i] for i in plan[step]], dtype)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, recipe.clip)
        optimizer.step()
        total, tokens = total + float(loss) * n, tokens + n
        bar.update()
        if (step + 1) % every == 0 or step + 1 == len(plan):
            state["step"] = step + 1
            state["loss"].append((step + 1, total / tokens))
            total = tokens = 0.0
            model.eval()
            state["agreement"].append((step + 1, *measure()))
            model.train()
            state["seconds"] = before + time.monotonic() - started
            bar.set_postfix_str(
                f"loss {state['loss'][-1][1]:.3f}, held out "
                + ", ".join(f"{x:.3f}" for x in state["agreement"][-1][1:])
            )
            part = path.with_suffix(".part")
            torch.save(
                {
                    "recipe": recipe.model_dump_json(),
                    "model": own_tensors(model),
                    "optimizer": optimizer.state_dict(),
                    "state": state,
                },
                part,
            )
            part.replace(path)
    bar.close()
    model.eval()
    return state


# -- the whole -----------------------------------------------------------------------------------------------------------
def train_draft(work: Path, out: Path, recipe: Recipe | None = None) -> TrainingLog:
    """Generate, train, measure, and write ``draft.safetensors``, ``config.json`` and ``training_log.json`` into `out`.

    Parameters
    ----------
    work : folder of the state between runs. The same call goes on where an earlier one was stopped.

    Raises
    ------
    RecordError : `work` holds the state of another recipe.
    """
    from safetensors.torch import save_file

    recipe = recipe or Recipe()
    work.mkdir(parents=True, exist_ok=True)
    note = work / "recipe.json"
    origin = json.dumps({"recipe": recipe.model_dump(), "prompts": registry()[PROMPTS]})
    if note.exists() and note.read_text(encoding="utf-8") != origin:
        raise RecordError(
            f"{work} holds the state of another recipe, or of other prompts.",
            "Give another --work folder, or delete it.",
        )
    write_text(note, origin)
    dtype, reason = pick_batch_dtype()
    print(f"Batches run in {dtype}: {reason}.", flush=True)

    tokenizer = models.load_tokenizer(models.BUNDLED)
    target = pack_linears(models.load_model(models.BUNDLED, dtype=dtype), recipe.generation_batch)
    prompts = prompt_rows(tokenizer, recipe.chat_prompts, recipe.prose_passages, recipe.prose_tokens, recipe.seed)
    clock = work / "generation_seconds.txt"
    began, before = time.monotonic(), float(clock.read_text()) if clock.exists() else 0.0
    try:
        rows = generate(
            target,
            prompts,
            work / "answers",
            n_tokens=recipe.answer_tokens,
            batch=recipe.generation_batch,
            temperature=recipe.temperature,
            eos=tokenizer.eos_token_id,
            seed=recipe.seed,
        )
    finally:
        write_text(clock, str(before + time.monotonic() - began))
    target = models.load_model(models.BUNDLED)
    known = held_out(target, tokenizer, recipe, work)
    torch.manual_seed(recipe.seed)
    model = new_draft(target, recipe.layers)

    def measure() -> tuple[float, float]:
        return agreement(model, known["chat"]), agreement(model, known["prose"])

    state = train(model, rows, recipe, work, getattr(torch, dtype), measure)
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in own_tensors(model).items()}
    save_file(tensors, out / "draft.safetensors", metadata={"format": "pt"})
    text = (models.bundled_model() / "config.json").read_text(encoding="utf-8")
    write_text(
        out / "config.json", json.dumps(draft.draft_config(json.loads(text), len(recipe.layers)), indent=2) + "\n"
    )
    model.load_state_dict({name: value.float() for name, value in tensors.items()}, strict=False)
    log = TrainingLog(
        recipe=recipe,
        dtype=dtype,
        n_rows=len(rows),
        n_answer_tokens=sum(len(row.ids) - row.start for row in rows),
        generation_seconds=round(float(clock.read_text()), 1),
        training_seconds=round(state["seconds"], 1),
        loss=tuple((step, round(value, 4)) for step, value in state["loss"]),
        agreement=tuple((step, round(chat, 4), round(prose, 4)) for step, chat, prose in state["agreement"]),
        acceptance={kind: greedy_acceptance(model, held, recipe.gamma) for kind, held in known.items()},
    )
    write_text(out / "training_log.json", log.model_dump_json(indent=1) + "\n")
    return log
