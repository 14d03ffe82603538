"""The bundled draft: put together from its own layers and the target's embeddings, and refused where its tokens are others."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from helpers import draft, models
from helpers.corpora import data_file
from helpers.errors import ModelError


@pytest.fixture(scope="module")
def tokenizer(bundled_model):
    return models.load_tokenizer(str(bundled_model))


def doctored(tokenizer, change) -> PreTrainedTokenizerFast:
    """A copy of a tokenizer whose JSON `change` has edited."""
    from tokenizers import Tokenizer

    text = json.loads(tokenizer.backend_tokenizer.to_str())
    change(text)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(text)), eos_token=tokenizer.eos_token)


def test_the_draft_is_small_and_stores_no_embeddings():
    path = data_file(draft.WEIGHTS)
    own = load_file(path)
    assert path.stat().st_size <= 40e6
    assert draft.BORROWED not in own and "lm_head.weight" not in own
    assert all(value.dtype == torch.bfloat16 for value in own.values())


def test_the_draft_borrows_the_targets_embeddings_and_config(bundled_model):
    folder = models.bundled_draft()
    theirs = load_file(bundled_model / "model.safetensors")[draft.BORROWED]
    assert torch.equal(load_file(folder / "model.safetensors")[draft.BORROWED], theirs)
    ours, target = models.load_config(models.DRAFT), models.load_config(str(bundled_model))
    assert ours.num_hidden_layers == 5 and target.num_hidden_layers == 30
    for name in ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "rope_parameters"):
        assert getattr(ours, name) == getattr(target, name), name
    model = models.load_model(models.DRAFT)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    parameters = sum(value.numel() for value in model.parameters())
    assert parameters == models.catalogue_entry(models.DRAFT).parameters


def test_the_draft_is_put_together_once_and_again_when_damaged(tmp_path, monkeypatch, bundled_model, capsys):
    monkeypatch.setenv("PAPERS_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_verified", set())
    monkeypatch.setattr(models, "bundled_model", lambda: bundled_model)
    folder = models.bundled_draft()
    weights = folder / "model.safetensors"
    sound = weights.read_bytes()
    weights.write_bytes(sound[:-1] + bytes([sound[-1] ^ 0xFF]))
    monkeypatch.setattr(models, "_verified", set())
    assert models.bundled_draft() == folder and weights.read_bytes() == sound
    assert "damaged model.safetensors" in capsys.readouterr().err


def test_a_target_of_another_width_is_refused(tmp_path, bundled_model):
    save_file({draft.BORROWED: torch.zeros(8, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"\[49152, 576\]; the target in .* has \[8, 4\]"):
        draft.assemble(tmp_path, tmp_path / "out")


# -- whose tokens? -------------------------------------------------------------------------------------------------------
def test_the_bundled_pair_is_accepted():
    models.check_draft(models.BUNDLED, models.DRAFT)


def swap_two(text):
    vocab = text["model"]["vocab"]
    a, b = "Ġthe", "Ġof"
    vocab[a], vocab[b] = vocab[b], vocab[a]


def drop_a_merge(text):
    merges = text["model"]["merges"]
    merges.remove(next(pair for pair in merges if "".join(pair) == "Ġdon"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swap_two, r"differ in 2 tokens, the first with id \d+: 'Ġ(the|of)' and 'Ġ(of|the)'"),
        (drop_a_merge, "cut the same text differently"),
    ],
)
def test_other_tokens_are_refused_by_content_with_both_models_named(tokenizer, change, said):
    other = doctored(tokenizer, change)
    with pytest.raises(ModelError, match=said) as caught:
        models.check_same_tokens(tokenizer, other, "big", "small")
    assert "'small' cannot draft for 'big'" in str(caught.value) and "same tokenizer" in caught.value.remedy


def test_another_end_token_is_refused(tokenizer):
    other = doctored(tokenizer, lambda text: None)
    models.check_same_tokens(tokenizer, other, "big", "small")
    other.eos_token = "<|im_start|>"
    with pytest.raises(ModelError, match="end tokens differ"):
        models.check_same_tokens(tokenizer, other, "big", "small")
