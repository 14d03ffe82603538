"""Training a draft: prompts that are never the held-out ones, answers, the loss, acceptance, going on after a stop."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers import draft
from helpers.corpora import chat_prompts, data_file
from helpers.course import draft_data, draft_training
from helpers.course.draft_card import model_card
from helpers.course.draft_data import Row
from helpers.course.draft_training import Recipe, TrainingLog
from helpers.errors import DataError, RecordError

EOS = 1
RECIPE = Recipe(layers=(0, 2), epochs=2, rows_per_step=2, warmup_steps=2, learning_rate=3e-3)


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.3,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config).eval()


def prompts(n: int = 6) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(2, 64, (3 + i,), generator=generator).tolist() for i in range(n)]


def answers(target, n: int = 6, n_tokens: int = 10, temperature: float = 0.0) -> list[Row]:
    generator = torch.Generator().manual_seed(5)
    return draft_data.answer(target, prompts(n), n_tokens, EOS, torch.full((n,), temperature), generator)


# -- prompts -------------------------------------------------------------------------------------------------------------
def test_slots_are_filled_in_every_way_and_once():
    groups = [
        {"templates": ["{a} and {b}", "only {a}"], "slots": {"a": ["x", "y"], "b": ["1", "2"]}},
        {"templates": ["only {c}"], "slots": {"c": ["x"]}},
    ]
    expected = ["x and 1", "x and 2", "y and 1", "y and 2", "only x", "only y"]
    assert draft_data.expand(groups) == expected


def test_training_prompts_are_many_different_seeded_and_never_the_held_out_ones():
    chosen = draft_training.Recipe().chat_prompts
    texts = draft_data.training_prompts(chosen, seed=0)
    assert len(texts) == len(set(texts)) == chosen
    assert not set(texts) & {prompt.text for prompt in chat_prompts()}
    assert texts == draft_data.training_prompts(chosen, seed=0) != draft_data.training_prompts(chosen, seed=1)


def test_no_training_prompt_is_a_held_out_one_in_other_dress():
    def words(text: str) -> frozenset[str]:
        return frozenset("".join(c if c.isalnum() else " " for c in text.lower()).split())

    kinds = json.loads(data_file(draft_data.PROMPTS).read_text(encoding="utf-8"))["kinds"]
    held_out = [words(prompt.text) for prompt in chat_prompts()]
    for text in (text for groups in kinds.values() for text in draft_data.expand(groups)):
        mine = words(text)
        assert all(len(mine & other) / len(mine | other) < 0.7 for other in held_out), text


def test_too_many_prompts_are_refused():
    with pytest.raises(DataError, match="1000000 were asked for"):
        draft_data.training_prompts(1_000_000, seed=0)


# -- answers -------------------------------------------------------------------------------------------------------------
def test_a_row_of_a_padded_batch_is_what_it_would_be_alone(target):
    for row, prompt in zip(answers(target), prompts(), strict=True):
        ids = list(prompt)
        for i in range(len(row.ids) - len(prompt)):
            logp = target(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            assert int(logp.argmax()) == int(row.ids[len(prompt) + i])
            assert torch.allclose(row.top_logp[i], logp.topk(draft_data.TOP_K).values, atol=1e-4)
            ids.append(int(logp.argmax()))
        assert row.start == len(prompt) and row.ids[: row.start].tolist() == prompt


def test_an_answer_ends_with_the_first_end_token_or_at_the_limit(target):
    rows = answers(target, n_tokens=40, temperature=3.0)
    assert len({len(row.ids) - row.start for row in rows}) > 1
    for row in rows:
        said = row.ids[row.start :].tolist()
        assert EOS not in said[:-1] and (said[-1] == EOS or len(said) == 40)


def test_rows_survive_being_written(target, tmp_path):
    rows = answers(target)
    draft_data.save_rows(rows, tmp_path / "rows.safetensors")
    for row, again in zip(rows, draft_data.load_rows(tmp_path / "rows.safetensors"), strict=True):
        assert torch.equal(row.ids, again.ids) and row.start == again.start and torch.equal(row.top_ids, again.top_ids)
        assert torch.allclose(row.top_logp, again.top_logp, rtol=1e-3, atol=1e-3)


def test_a_stopped_generation_goes_on_with_the_missing_batches_only(target, tmp_path, monkeypatch):
    options = {"n_tokens": 5, "batch": 2, "temperature": 1.0, "eos": EOS, "seed": 0}
    rows = draft_data.generate(target, prompts(), tmp_path, **options)
    (tmp_path / "answers_0001.safetensors").unlink()
    calls = []
    real = draft_data.answer
    monkeypatch.setattr(draft_data, "answer", lambda *given: calls.append(1) or real(*given))
    again = draft_data.generate(target, prompts(), tmp_path, **options)
    assert len(calls) == 1
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(rows, again, strict=True))


# -- acceptance ----------------------------------------------------------------------------------------------------------
def positions_by_definition(model, rows: list[Row], gamma: int) -> tuple[list[int], list[int]]:
    """Reference: no cache, every guess from the whole context."""
    tried, accepted = [0] * gamma, [0] * gamma
    for row in rows:
        ids, at = row.ids.tolist(), row.start
        while at < len(ids):
            drafted = list(ids[:at])
            limit = min(gamma, len(ids) - at - 1)
            for _ in range(limit):
                drafted.append(int(model(torch.tensor([drafted])).logits[0, -1].argmax()))
            n = 0
            while n < limit:
                tried[n] += 1
                if drafted[at + n] != ids[at + n]:
                    break
                accepted[n] += 1
                n += 1
            at += n + 1
    return tried, accepted


def test_the_target_accepts_itself_everywhere(target):
    found = draft_training.greedy_acceptance(target, answers(target), gamma=3)
    assert found.attempts_per_position == found.accepted_per_position and set(found.per_position) == {1.0}


@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_acceptance_is_counted_as_speculative_decoding_counts_it(target, gamma):
    other = draft_training.new_draft(target, (0, 2)).eval()
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.mul_(1.2)
    rows = answers(target, n_tokens=30)
    found = draft_training.greedy_acceptance(other, rows, gamma)
    by_position = (list(found.attempts_per_position), list(found.accepted_per_position))
    assert by_position == positions_by_definition(other, rows, gamma)
    assert found.accepted > 0 and found.attempts_per_position != found.accepted_per_position


# -- training ------------------------------------------------------------------------------------------------------------
def test_a_new_draft_starts_from_the_named_layers_and_borrows_the_embeddings(target):
    model = draft_training.new_draft(target, (0, 2))
    assert model.config.num_hidden_layers == 2 and model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.embed_tokens.weight.data_ptr() == target.model.embed_tokens.weight.data_ptr()
    theirs = target.model.layers[2].state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in model.model.layers[1].state_dict().items())
    assert draft.BORROWED not in draft_training.own_tensors(model)


def test_the_loss_is_the_cross_entropy_against_the_targets_distribution(target):
    model = draft_training.new_draft(target, (0, 2))
    rows = answers(target, temperature=1.0)
    loss, n = draft_training.distillation_loss(model, rows, torch.float32)
    terms = []
    for row in rows:
        logq = model(row.ids[None, :-1]).logits[0].log_softmax(-1)
        for i in range(len(row.ids) - row.start):
            q = logq[row.start - 1 + i]
            terms += [-sum(math.exp(p) * float(q[k]) for k, p in zip(row.top_ids[i], row.top_logp[i], strict=True))]
    assert n == len(terms) and float(loss) == pytest.approx(sum(terms) / n, rel=1e-4)


def test_the_embeddings_stay_as_they_are(target):
    model = draft_training.new_draft(target, (0, 2))
    draft_training.distillation_loss(model, answers(target), torch.float32)[0].backward()
    assert model.model.embed_tokens.weight.grad is None
    assert all(p.grad is not None for p in model.model.layers.parameters())


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_holds_every_row_once(target, epoch):
    rows = answers(target)
    steps = draft_training.batches(rows, epoch, RECIPE)
    assert sorted(i for step in steps for i in step) == list(range(len(rows)))
    assert steps == draft_training.batches(rows, epoch, RECIPE) and max(map(len, steps)) <= RECIPE.rows_per_step


def test_the_learning_rate_rises_then_falls_to_zero():
    rates = [draft_training.learning_rate(step, 40, RECIPE) for step in range(41)]
    assert max(rates) == rates[RECIPE.warmup_steps] == RECIPE.learning_rate and rates[0] == RECIPE.learning_rate / 2
    assert all(a > b for a, b in pairwise(rates[RECIPE.warmup_steps :])) and rates[40] == pytest.approx(0, abs=1e-12)


def test_training_learns_and_a_stopped_run_ends_where_a_whole_one_does(target, tmp_path):
    rows = answers(target, n_tokens=12, temperature=1.0)

    def run(folder, stop_after=None):
        model = draft_training.new_draft(target, (0, 2))
        calls = []

        def measure():
            calls.append(1)
            if stop_after is not None and len(calls) > stop_after:
                raise KeyboardInterrupt
            return 0.0, 0.0

        folder.mkdir(exist_ok=True)
        state = draft_training.train(model, rows, RECIPE, folder, torch.float32, measure, every=2)
        return model, state

    whole, state = run(tmp_path / "whole")
    assert state["step"] == 6 and state["loss"][-1][1] < state["loss"][0][1]
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", stop_after=1)
    resumed, again = run(tmp_path / "stopped")
    assert dict(again["loss"]) == pytest.approx(dict(state["loss"]))
    for name, value in whole.state_dict().items():
        assert torch.allclose(value, resumed.state_dict()[name], atol=1e-6), name


def test_the_state_of_another_recipe_is_refused(tmp_path):
    (tmp_path / "recipe.json").write_text(Recipe(seed=7).model_dump_json())
    with pytest.raises(RecordError, match="another recipe") as caught:
        draft_training.train_draft(tmp_path, tmp_path / "out")
    assert "--work" in caught.value.remedy


# -- what is shipped -----------------------------------------------------------------------------------------------------
def test_the_shipped_draft_was_trained_by_this_recipe_and_is_accepted_on_text_it_never_saw():
    log = TrainingLog.model_validate_json(data_file("draft/training_log.json").read_text(encoding="utf-8"))
    assert log.recipe == Recipe()
    assert log.generation_seconds + log.training_seconds <= 90 * 60
    assert set(log.acceptance) == {"chat", "prose"}
    for kind, found in log.acceptance.items():
        assert len(found.per_position) == Recipe().gamma and found.attempts_per_position[0] >= 200, kind
        assert min(found.per_position) >= 0.4, (kind, found.per_position)


def test_the_model_card_says_what_the_log_says():
    log = TrainingLog.model_validate_json(data_file("draft/training_log.json").read_text(encoding="utf-8"))
    assert data_file("draft/README.md").read_text(encoding="utf-8") == model_card(log, data_file(draft.WEIGHTS))
