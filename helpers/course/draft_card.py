"""The bundled draft's model card, written from its training log, so that no figure in it can go stale."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from helpers.course.draft_data import TOP_K
from helpers.course.draft_training import TrainingLog
from helpers.models import DRAFT, catalogue_entry

CARD = """\
# smollm2-draft: a draft model for SmolLM2-135M-Instruct

A Llama of {n_layers} layers that proposes tokens for the course's bundled model in speculative decoding. It
has the target's tokenizer, width and (tied) embeddings; the embeddings are borrowed from the target and not
stored, so `draft.safetensors` holds only {own:.1f} million parameters in bf16. Put together
(`helpers.draft.assemble`, done on first use) it is an ordinary checkpoint of {whole:.1f} million parameters
for Transformers and vLLM (`method: draft_model`).

- **Made for**: `SmolLM2-135M-Instruct` as this course bundles it. Apache-2.0, as the target.
- **Not made for** anything else. On its own it is a poor language model. Its mistakes cost time, never a
  word: the target checks every token.

## How it was made

`python3 -m helpers train-draft` makes it anew: seeded, and it goes on where it was stopped. It starts from
the target's layers {layers}, with the embeddings frozen, and learns the target's next-token distribution
(cross entropy over the {top_k} likeliest tokens) on the target's own outputs: answers to {chat_prompts:,}
prompts made from the templates in `data/draft_prompts.json`, and continuations of {prose_passages:,} passages
of *Northanger Abbey*. Every other answer is greedy, the others are drawn at temperature {temperature}.
{n_answer_tokens:,} answer tokens, {epochs} passes over them, {rows_per_step} texts a step, AdamW, peak
learning rate {learning_rate}.

It took {generation_minutes:.0f} minutes for the answers and {training_minutes:.0f} for the training on two
CPU cores ({dtype} products).

## What it reached, on text that it never saw

Greedy decoding, drafts of {gamma} tokens. A position counts as tried where all before it were accepted, so
each column is the chance that this token is right given that the ones before were. Chat: the 32 prompts of
`data/chat_prompts.jsonl`; prose: {held_out_passages} passages of *Persuasion*; {held_out_tokens} tokens after
each. All of it is new to the draft, but of the kinds it was trained on: chat prompts with the same
sentence patterns, another novel by the same author. On foreign text expect less.

| held out | {heads} | drafts |
| --- | {rules} | --- |
{rows}

Share of held-out tokens that the draft guesses from the true context, as training went on:

| step | loss, nats | chat | prose |
| --- | --- | --- | --- |
{curve}

## What else was tried

{tried}
"""

TRIED = """\
- *Layers cut out, nothing trained*: 2 to 4 tokens in a hundred are accepted. A draft must be trained.
- *Four layers (0, 1, 28, 29), 1,200 chat prompts and 330 passages of prose, 167 thousand answer tokens, four
  passes, 1,992 steps of 4 texts*: chat 0.33, 0.36, 0.40, 0.49 by position, prose 0.59, 0.60, 0.73, 0.80.
  Agreement on chat stood still from step 1,100 on: it had learnt its prompts by heart. More prompts with
  shorter answers, less prose and a fifth layer are the answer to that.
"""


def model_card(log: TrainingLog, weights: Path) -> str:
    """The card's Markdown.

    Parameters
    ----------
    weights : the safetensors file with the tensors that the draft stores.
    """
    own = sum(value.numel() for value in load_file(weights).values())
    recipe = log.recipe
    rows = "\n".join(
        f"| {kind} | "
        + " | ".join(f"{rate:.3f}" for rate in found.per_position)
        + f" | {found.attempts_per_position[0]:,} |"
        for kind, found in log.acceptance.items()
    )
    losses = dict(log.loss)
    points = [point for i, point in enumerate(log.agreement) if i % 3 == 2 or point is log.agreement[-1]]
    curve = "\n".join(f"| {step:,} | {losses[step]:.3f} | {chat:.3f} | {prose:.3f} |" for step, chat, prose in points)
    return CARD.format(
        **recipe.model_dump(exclude={"layers"}),
        layers=", ".join(map(str, recipe.layers)),
        n_layers=len(recipe.layers),
        own=own / 1e6,
        whole=catalogue_entry(DRAFT).parameters / 1e6,
        top_k=TOP_K,
        n_answer_tokens=log.n_answer_tokens,
        generation_minutes=log.generation_seconds / 60,
        training_minutes=log.training_seconds / 60,
        dtype=log.dtype,
        heads=" | ".join(f"position {i + 1}" for i in range(recipe.gamma)),
        rules=" | ".join(["---"] * recipe.gamma),
        rows=rows,
        curve=curve,
        tried=TRIED.rstrip(),
    )
