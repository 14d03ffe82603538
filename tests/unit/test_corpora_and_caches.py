"""Data is what was registered; Transformers' caches hold the bytes that the formula says."""

from __future__ import annotations

import pytest
import torch

from helpers import corpora, kv_adapter
from helpers.errors import DataError, EngineError, UnknownNameError
from helpers.models import kv_bytes, load_tokenizer
from helpers.paths import DATA


def test_every_data_file_is_registered_and_described():
    files = {path.relative_to(DATA).as_posix() for path in DATA.rglob("*") if path.is_file()}
    names = files - {"README.md", "registry.txt"}
    assert names == set(corpora.registry())
    readme = (DATA / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in names)


def test_an_altered_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "registry.txt").write_text((DATA / "registry.txt").read_text())
    (tmp_path / "chat_prompts.jsonl").write_text("{}\n")
    monkeypatch.setattr(corpora, "DATA", tmp_path)
    with pytest.raises(DataError, match="sha256 differs"):
        corpora.data_file("chat_prompts.jsonl")
    with pytest.raises(DataError, match="is missing"):
        corpora.data_file("prose_evaluation.txt")
    with pytest.raises(DataError, match=r"not in data/registry.txt"):
        corpora.data_file("other.txt")


def test_prose_has_over_a_hundred_thousand_tokens_and_splits_do_not_overlap(bundled_model):
    tokenizer = load_tokenizer(str(bundled_model))
    counts = {split: len(corpora.prose_ids(tokenizer, split)) for split in ("calibration", "evaluation")}
    assert sum(counts.values()) >= 200_000 and min(counts.values()) >= 90_000
    sentences = {split: set(corpora.prose(split).split("\n\n")) for split in counts}
    long_ones = {s for s in sentences["calibration"] & sentences["evaluation"] if len(s) > 60}
    assert not long_ones


def test_prose_ids_are_a_prefix_and_too_many_are_refused(bundled_model):
    tokenizer = load_tokenizer(str(bundled_model))
    short, longer = (corpora.prose_ids(tokenizer, "evaluation", n) for n in (100, 1000))
    assert short.tolist() == longer[:100].tolist()
    with pytest.raises(DataError, match="were asked for"):
        corpora.prose_ids(tokenizer, "evaluation", 10**7)


def test_chat_prompts_are_distinct_and_templated(bundled_model):
    prompts = corpora.chat_prompts()
    assert len(prompts) == 32 and len({p.id for p in prompts}) == 32 and len({p.kind for p in prompts}) == 8
    tokenizer = load_tokenizer(str(bundled_model))
    text = tokenizer.decode(corpora.chat_ids(tokenizer, prompts[0].text))
    assert prompts[0].text in text and text.rstrip().endswith("assistant")


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_needle_stands_where_it_was_hidden(depth):
    item = corpora.needle(2000, depth, seed=3)
    place = item.context.index(item.answer) / len(item.context)
    assert abs(place - depth) < 0.05 and item.context.count("garden gate") == 1


def test_cache_bytes_equal_the_formula(bundled_model):
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        vocab_size=100,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 100, (2, 17))
    for kind in ("dynamic", "static"):
        cache = kv_adapter.new_cache(kind, config, max_cache_len=17)
        with torch.inference_mode():
            model(ids, past_key_values=cache)
        assert kv_adapter.cache_bytes(cache) == kv_bytes(config, 17, 2, "float32")
        assert kv_adapter.n_cached_tokens(cache) == 17


def test_a_static_cache_reserves_what_it_may_need_at_once():
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=100,
    )
    cache = kv_adapter.new_cache("static", config, max_cache_len=128)
    with torch.inference_mode():
        AutoModelForCausalLM.from_config(config).eval()(torch.randint(0, 100, (1, 5)), past_key_values=cache)
    assert kv_adapter.cache_bytes(cache) == kv_bytes(config, 128, 1, "float32")


def test_truncating_forgets_exactly_the_newest_tokens(bundled_model):
    from helpers.models import load_model

    model = load_model(str(bundled_model))
    ids = torch.arange(100, 112)[None]
    cache = kv_adapter.new_cache("dynamic", model.config)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        kv_adapter.truncate(cache, 6)
        again = model(ids[:, 6:], past_key_values=cache).logits[0, -1]
        fresh = model(ids).logits[0, -1]
    assert torch.allclose(again, fresh, atol=1e-4)


def test_what_a_machine_cannot_do_is_refused_with_the_reason():
    if kv_adapter.refusal("offloaded") is None:
        pytest.skip("this machine has a GPU")
    with pytest.raises(EngineError, match="offloaded cache is not usable here"):
        kv_adapter.new_cache("offloaded", None)
    with pytest.raises(UnknownNameError, match="Did you mean 'static'"):
        kv_adapter.refusal("statik")
    with pytest.raises(EngineError, match="max_cache_len"):
        kv_adapter.new_cache("static", None)
