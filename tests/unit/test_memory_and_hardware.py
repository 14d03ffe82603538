"""Memory is measured, limits hold, and capabilities are decided by hardware, never by an import."""

from __future__ import annotations

import gc

import pytest
import torch

from helpers import hardware, memory, profile
from helpers.errors import UnknownNameError

MIB = 2**20


def fake(*gpus: tuple[str, int, tuple[int, int]], system: str = "Linux") -> hardware.Hardware:
    return hardware.describe().model_copy(
        update={
            "system": system,
            "gpus": tuple(
                hardware.Gpu(name=name, memory_bytes=gib * 2**30, compute_capability=sm) for name, gib, sm in gpus
            ),
        }
    )


def test_the_peak_of_a_block_is_found_although_it_is_freed_before_the_end():
    with memory.measure_peak() as peak:
        block = torch.ones(64 * MIB // 4)
        del block
        gc.collect()
    assert 60 * MIB <= peak.grown <= 96 * MIB


def test_tensor_bytes_count_elements_and_storage_bytes_count_what_is_held():
    base = torch.zeros(1000, dtype=torch.float32)
    views = [base[:10], base[10:20]]
    assert memory.tensor_bytes(views) == 80
    assert memory.storage_bytes(views) == 4000


def test_a_memory_limit_is_met_and_its_boundary_told():
    code = "import ctypes\nblock = bytearray(arguments['mib'] * 2**20)\nresult = len(block)"
    assert memory.run_limited(code, 256 * MIB, mib=64).outcome == "ok"
    assert memory.run_limited(code, 256 * MIB, mib=512).outcome == "out of memory"


def test_a_failure_under_a_limit_is_not_called_out_of_memory():
    run = memory.run_limited("raise RuntimeError('wrong shape')", 256 * MIB)
    assert run.outcome == "failed" and "wrong shape" in run.detail


def test_a_limited_child_that_exits_is_reported_with_its_words():
    run = memory.run_limited("raise SystemExit('no such file')", 256 * MIB)
    assert run.outcome == "failed" and "no such file" in run.detail


@pytest.mark.parametrize(
    ("gpus", "dtype"),
    [
        ([("T4", 15, (7, 5))], "float16"),
        ([("A10G", 24, (8, 6))], "bfloat16"),
        ([("L4", 24, (8, 9))], "bfloat16"),
        ([("H100", 80, (9, 0))], "bfloat16"),
    ],
)
def test_dtype_follows_compute_capability(gpus, dtype):
    assert hardware.pick_dtype(fake(*gpus))[0] == dtype


def test_a_t4_has_no_bf16_no_fp8_and_no_flash_attention_2_and_says_why():
    can = fake(("T4", 15, (7, 5))).capabilities
    for name in ("bf16", "fp8", "flash_attention_2"):
        assert not can[name].available and "sm75" in can[name].reason
    assert can["fp16"].available and can["cuda_graphs"].available


def test_without_a_gpu_what_needs_one_is_refused_with_a_reason():
    can = fake().capabilities
    for name in ("fp16", "fp8", "flash_attention_2", "cuda_graphs", "offloaded_cache"):
        assert not can[name].available and "no NVIDIA GPU" in can[name].reason


def test_vllm_needs_linux():
    capability = fake(system="Darwin").capabilities["vllm"]
    assert not capability.available and "Linux" in capability.reason


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([], "smoke"),
        ([("GTX 1050", 4, (6, 1))], "smoke"),
        ([("T4", 15, (7, 5))], "colab"),
        ([("RTX 3090", 24, (8, 6))], "lab"),
        ([("T4", 15, (7, 5)), ("T4", 15, (7, 5))], "colab"),
        ([("H100", 80, (9, 0))], "lab"),
    ],
)
def test_auto_picks_a_profile_by_memory_and_capability(gpus, expected):
    chosen, reason = profile.resolve("auto", fake(*gpus))
    assert chosen.name == expected and reason


def test_an_unknown_profile_is_refused_with_the_known_ones():
    with pytest.raises(UnknownNameError, match=r"(?s)no profile 'smoek'.*Did you mean 'smoke'"):
        profile.resolve("smoek")


def test_profiles_name_models_of_the_catalogue():
    from helpers.models import CATALOGUE

    for one in profile.PROFILES.values():
        assert one.model in CATALOGUE and one.small_model in CATALOGUE
        assert max(one.contexts) <= one.max_model_len


def test_a_roofline_has_a_ridge_where_both_ceilings_meet():
    roof = hardware.Roofline(device="x", dtype="float32", bytes_per_second=10.0, flops_per_second=100.0)
    assert roof.ridge == 10.0
    assert roof.attainable(5.0) == 50.0 and roof.attainable(20.0) == 100.0
    assert roof.attainable(roof.ridge) == 100.0


def test_the_description_names_no_person_host_or_folder():
    import getpass
    import socket

    text = hardware.describe().model_dump_json()
    assert socket.gethostname() not in text and f"/{getpass.getuser()}/" not in text


def test_a_changed_package_asks_for_a_restart(monkeypatch):
    monkeypatch.setattr(hardware, "package_version", lambda name: "0.0.1" if name == "torch" else None)
    assert hardware.restart_needed() == [f"torch {torch.__version__} is loaded, 0.0.1 is installed"]
