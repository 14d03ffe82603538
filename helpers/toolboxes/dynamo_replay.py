"""Runs inside the toolbox ``cluster``: NVIDIA Dynamo's offline replay of a serving cluster, on traces that we write for it.

Input: ``runs``, each with ``name``, ``engine`` (settings of the mock engine), ``workers`` or ``prefill`` and ``decode``, and
optionally ``router`` (``round_robin`` or ``kv_router``), ``ttft_ms`` and ``itl_ms`` (an SLA), ``each`` (whether to return
every request of a trace). What is asked for stands in ``requests`` (a trace: arrival in seconds, prompt tokens, output
tokens, number of the prefix group or null, tokens of that prefix) or in ``poisson`` (``n``, ``rate``, ``prompt``,
``output``, ``seed``, and optionally ``shared`` and ``groups``: the share of a prompt that a prefix group has in common, and
how many groups there are). ``step_times``, if given, holds the arrays of a profile: ``prefill_isl``, ``prefill_ttft_ms``,
``decode_active_kv_tokens``, ``decode_context_length``, ``decode_itl`` (tokens and milliseconds). Without it the engine's
built-in polynomials are used.

Output: ``versions``, and for each run its ``report`` (Dynamo's own numbers) and, if asked for, ``each``: a row for every
request in order of arrival, its ``columns`` beside it (milliseconds).
"""

import importlib.metadata
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DYN_LOG", "error")

TRACE_BLOCK = 64
OWN = ("processed_", "wall_time")  # the replay's own speed on this machine, another at every run


def write_trace(requests: list, path: Path) -> None:
    """Write the trace in Mooncake's format. A prefix's block ids depend on its group alone; all other blocks are unique."""
    lines, fresh = [], 1_000_000_000
    for arrival, n_prompt, n_output, group, n_prefix in requests:
        n_blocks = math.ceil(n_prompt / TRACE_BLOCK)
        shared = 0 if group is None else min(n_prefix // TRACE_BLOCK, n_blocks)
        ids = [100_000 * ((group or 0) + 1) + i for i in range(shared)] + list(range(fresh, fresh + n_blocks - shared))
        fresh += n_blocks - shared
        row = {"timestamp": 1e3 * arrival, "input_length": n_prompt, "output_length": n_output, "hash_ids": ids}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def replay(run: dict, profile: Path | None, folder: Path) -> dict:
    """One run."""
    from dynamo._core import MockEngineArgs
    from dynamo.replay.api import run_synthetic_trace_replay, run_trace_replay

    def engine(**more: object) -> Any:
        settings = {"block_size": TRACE_BLOCK, **run["engine"], **more}
        if profile is not None:
            settings["planner_profile_data"] = str(profile)
        return MockEngineArgs.from_json(json.dumps(settings))

    options: dict = {"router_mode": run.get("router", "round_robin")}
    if "workers" in run:
        options |= {"extra_engine_args": engine(), "num_workers": run["workers"]}
    else:
        options |= {"prefill_engine_args": engine(worker_type="prefill"), "num_prefill_workers": run["prefill"]}
        options |= {"decode_engine_args": engine(worker_type="decode"), "num_decode_workers": run["decode"]}
    for key in ("ttft_ms", "itl_ms"):
        if key in run:
            options[f"sla_{key}"] = run[key]
    trace, each = folder / "trace.jsonl", folder / "each.jsonl"
    if poisson := run.get("poisson"):
        options |= {"request_rate": poisson["rate"], "arrival_seed": poisson["seed"]}
        options |= {"shared_prefix_ratio": poisson.get("shared", 0.0), "num_prefix_groups": poisson.get("groups", 0)}
        report = run_synthetic_trace_replay(poisson["prompt"], poisson["output"], poisson["n"], **options)
    else:
        write_trace(run["requests"], trace)
        report = run_trace_replay(trace, trace_block_size=TRACE_BLOCK, report_jsonl_path=str(each), **options)
    answer = {
        "name": run["name"],
        "report": {k: v for k, v in report.items() if isinstance(v, int | float) and not k.startswith(OWN)},
    }
    if run.get("each"):
        rows = [json.loads(line) for line in each.read_text(encoding="utf-8").splitlines()]
        rows.sort(key=lambda row: row["arrival_time_ms"])
        keys = ("ttft_ms", "itl_ms")
        answer["each"] = [[round(row[key], 4) for key in keys] for row in rows]
        answer["columns"] = list(keys)
    return answer


def main(arguments: dict) -> dict:
    """Replay each run."""
    with tempfile.TemporaryDirectory() as name:
        folder, profile = Path(name), None
        if arguments.get("step_times"):
            import numpy as np

            profile = folder / "profile.npz"
            arrays: dict[str, Any] = {k: np.array(v, dtype=np.float64) for k, v in arguments["step_times"].items()}
            np.savez(profile, **arrays)
        runs = [replay(run, profile, folder) for run in arguments["runs"]]
    versions = {name: importlib.metadata.version(name) for name in ("ai-dynamo", "ai-dynamo-runtime")}
    return {"versions": versions, "runs": runs}


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as given:
        output = main(json.load(given))
    with open(sys.argv[2], "w", encoding="utf-8") as result_file:
        json.dump(output, result_file)
