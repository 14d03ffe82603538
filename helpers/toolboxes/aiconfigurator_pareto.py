"""Runs inside the toolbox ``cluster``: NVIDIA AIConfigurator's estimates from kernel times that were measured on real GPUs.

Input: ``model`` (a Hugging Face name that it knows), ``backend``, ``frontiers`` (each with ``name``, ``system``, ``gpus``,
``isl``, ``osl``, ``ttft_ms``, ``tpot_ms``) and ``steps`` (each with ``system``, ``tp``, ``prefill`` (tokens of lone prompts)
and ``decode`` (rows and tokens of context of each)). Nothing is fetched: the tables are inside the package.

Output: ``versions``; ``frontiers``: for aggregated and disaggregated serving the best tokens/s/GPU within the limits, how it
is built, and the frontier; ``steps``: seconds of each prefill and decode step. A search that finds nothing leaves its error.
"""

import contextlib
import importlib.metadata
import io
import json
import logging
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

BUILT = {
    "agg": ("tp", "bs", "ttft", "tpot", "num_total_gpus"),
    "disagg": ("(p)workers", "(p)tp", "(p)bs", "(d)workers", "(d)tp", "(d)bs", "ttft", "tpot", "num_total_gpus"),
}


def frontier(asked: dict, model: str, backend: str) -> dict:
    """One comparison of aggregated and disaggregated serving."""
    from aiconfigurator.cli.api import cli_default

    answer: dict = {**asked, "error": ""}
    try:
        found = cli_default(
            model,
            asked["gpus"],
            asked["system"],
            backend=backend,
            isl=asked["isl"],
            osl=asked["osl"],
            ttft=asked["ttft_ms"],
            tpot=asked["tpot_ms"],
        )
    except Exception as error:
        return {**answer, "error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    for mode, columns in BUILT.items():
        best, front = found.best_configs.get(mode), found.pareto_fronts.get(mode)
        answer[mode] = {
            "tokens/s/GPU": float(found.best_throughputs.get(mode, 0.0)),
            "built": {} if best is None or best.empty else {c: float(best.iloc[0][c]) for c in columns},
            "frontier": []
            if front is None or front.empty
            else front[["tokens/s/user", "tokens/s/gpu", "ttft", "tpot"]].astype(float).round(3).to_numpy().tolist(),
        }
    return answer


def steps(asked: dict, model: str, backend: str) -> dict:
    """Seconds of lone prefills and of decode steps on one system."""
    from aiconfigurator.cli.api import cli_estimate

    def estimate(mode: str, isl: int, rows: int) -> float:
        settings = {"isl": isl, "osl": 2, "batch_size": rows, "tp_size": asked["tp"]}
        found = cli_estimate(model, asked["system"], mode=mode, backend_name=backend, **settings)
        return float(found.ttft if mode == "static_ctx" else found.tpot) / 1e3

    return {
        "system": asked["system"],
        "tp": asked["tp"],
        "prefill": [[n, estimate("static_ctx", n, 1)] for n in asked["prefill"]],
        "decode": [[rows, context, estimate("static_gen", context, rows)] for rows, context in asked["decode"]],
    }


def main(arguments: dict) -> dict:
    """All step times, then all frontiers. The package's own tables and warnings on stdout are dropped."""
    logging.disable(logging.WARNING)
    model, backend = arguments["model"], arguments["backend"]
    with contextlib.redirect_stdout(io.StringIO()):
        answer = {
            "steps": [steps(asked, model, backend) for asked in arguments.get("steps", [])],
            "frontiers": [frontier(asked, model, backend) for asked in arguments.get("frontiers", [])],
        }
    versions = {name: importlib.metadata.version(name) for name in ("aiconfigurator", "aiconfigurator-core")}
    return {"versions": versions, "model": model, "backend": backend, **answer}


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as given:
        output = main(json.load(given))
    with open(sys.argv[2], "w", encoding="utf-8") as result_file:
        json.dump(output, result_file)
