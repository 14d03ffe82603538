"""Profiles: how large an experiment is on which kind of machine. A profile names models and sizes, never code paths."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from helpers.errors import EnvironmentSetupError, UnknownNameError, suggest
from helpers.hardware import DtypeName, Hardware, describe, pick_dtype


class Profile(BaseModel):
    """Sizes for one kind of machine. Lengths are tokens, times seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    for_whom: str
    model: str
    """The catalogue name of the model under study; see `helpers.models`."""
    small_model: str
    """A smaller model with the same tokenizer, to draft for `model`."""
    device: str
    dtype: DtypeName | None
    """None lets `helpers.hardware.pick_dtype` choose."""
    max_model_len: int
    contexts: tuple[int, ...]
    """Context lengths of a sweep."""
    batches: tuple[int, ...]
    """Batch sizes of a sweep."""
    max_tokens: int
    """Output tokens of a typical request."""
    n_requests: int
    """Requests of a serving run."""
    repeats: int
    """Repetitions of a timed measurement."""
    quality_tokens: int
    """Tokens over which perplexity is taken."""
    quality_window: int
    """Tokens of one perplexity window."""
    notebook_seconds: int
    """Budget of one notebook; see `seconds_for`."""
    notebook_bytes: int
    """Budget of one notebook's peak memory, all its processes together."""

    def seconds_for(self, notebook: str) -> int:
        """The time budget of a notebook, seconds: twice the usual for those that start several real servers."""
        return self.notebook_seconds * (2 if notebook[:2] in LONG_NOTEBOOKS else 1)

    def resolved_dtype(self, hardware: Hardware | None = None) -> tuple[DtypeName, str]:
        """The dtype and the reason for it."""
        if self.dtype is not None:
            return self.dtype, f"the profile {self.name} asks for it"
        return pick_dtype(hardware)


LONG_NOTEBOOKS = ("03", "10", "13", "14")

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            name="smoke",
            for_whom="two CPU cores and 4 GB, offline: a laptop, or continuous integration",
            model="smollm2-135m-instruct",
            small_model="smollm2-draft",
            device="cpu",
            dtype=None,
            max_model_len=1024,
            contexts=(64, 128, 256, 512),
            batches=(1, 2, 4, 8),
            max_tokens=32,
            n_requests=24,
            repeats=5,
            quality_tokens=2048,
            quality_window=512,
            notebook_seconds=120,
            notebook_bytes=3 * 2**30,
        ),
        Profile(
            name="colab",
            for_whom="one GPU of 15 GB without bf16, such as a T4 on Colab or Kaggle",
            model="qwen2.5-1.5b-instruct",
            small_model="qwen2.5-0.5b-instruct",
            device="cuda",
            dtype="float16",
            max_model_len=4096,
            contexts=(256, 512, 1024, 2048, 4096),
            batches=(1, 2, 4, 8, 16),
            max_tokens=128,
            n_requests=128,
            repeats=9,
            quality_tokens=16384,
            quality_window=1024,
            notebook_seconds=900,
            notebook_bytes=12 * 2**30,
        ),
        Profile(
            name="lab",
            for_whom="one GPU of 24 GB or more with bf16",
            model="qwen2.5-7b-instruct",
            small_model="qwen2.5-0.5b-instruct",
            device="cuda",
            dtype="bfloat16",
            max_model_len=8192,
            contexts=(512, 1024, 2048, 4096, 8192),
            batches=(1, 4, 16, 64),
            max_tokens=256,
            n_requests=512,
            repeats=9,
            quality_tokens=65536,
            quality_window=2048,
            notebook_seconds=1800,
            notebook_bytes=48 * 2**30,
        ),
    )
}


def check_possible(profile: Profile, hardware: Hardware | None = None) -> None:
    """Raise `EnvironmentSetupError` where `profile` wants a GPU and there is none."""
    if profile.device == "cuda" and not (hardware or describe()).gpus:
        raise EnvironmentSetupError(
            f"The profile {profile.name} needs an NVIDIA GPU, and none was found.",
            "Take the profile smoke, or auto; python3 -m helpers doctor says what this machine can do.",
        )


def resolve(name: str = "auto", hardware: Hardware | None = None) -> tuple[Profile, str]:
    """The profile called `name` and the reason; ``auto`` picks by GPU memory and compute capability.

    Raises
    ------
    UnknownNameError : there is no such profile.
    """
    if name != "auto":
        if name not in PROFILES:
            raise UnknownNameError(f"There is no profile {name!r}.", suggest(name, ["auto", *PROFILES]))
        return PROFILES[name], "asked for by name"
    hardware = hardware or describe()
    if not hardware.gpus:
        return PROFILES["smoke"], "no NVIDIA GPU was found"
    best = max(hardware.gpus, key=lambda gpu: gpu.memory_bytes)
    gib, sm = best.memory_bytes / 2**30, best.compute_capability
    if gib >= 22 and sm >= (8, 0):
        return PROFILES["lab"], f"{best.name}: {gib:.0f} GiB, sm{sm[0]}{sm[1]}"
    if gib >= 13 and sm >= (7, 0):
        return PROFILES["colab"], f"{best.name}: {gib:.0f} GiB, sm{sm[0]}{sm[1]}"
    return PROFILES["smoke"], f"{best.name} has {gib:.0f} GiB (sm{sm[0]}{sm[1]}); the GPU profiles need 13 GiB and sm70"
