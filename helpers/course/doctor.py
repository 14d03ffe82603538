"""What this machine can and cannot do, and why: the first thing to read when a notebook says "not run here"."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from helpers import hardware, models, profile, toolbox
from helpers.course.build import discover
from helpers.paths import NOTEBOOKS, cache_dir

GIB = 2**30
MIN_MEMORY = 3 * GIB
MIN_DISK = 2 * GIB


@dataclass(frozen=True)
class Line:
    """One line of the report. `good` is None for a plain fact."""

    what: str
    good: bool | None
    text: str


def machine_lines(found: hardware.Hardware) -> list[Line]:
    """Python, processor, memory, disk, GPUs."""
    supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    memory, disk = found.memory_bytes / GIB, found.disk_free_bytes / GIB
    lines = [
        Line("Python", supported, f"{platform.python_version()} ({sys.prefix})"),
        Line("system", None, f"{found.system} on {found.machine}"),
        Line("processor", None, f"{found.cpu}, {found.cores} usable cores"),
        Line("memory", found.memory_bytes >= MIN_MEMORY, f"{memory:.1f} GiB; a smoke notebook may take 3 GiB"),
        Line("free disk", found.disk_free_bytes >= MIN_DISK, f"{disk:.0f} GiB"),
    ]
    for gpu in found.gpus:
        major, minor = gpu.compute_capability
        lines.append(
            Line("GPU", True, f"{gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB, sm{major}{minor}, {found.driver}")
        )
    if not found.gpus:
        lines.append(Line("GPU", None, "no NVIDIA GPU was found"))
    dtype, reason = hardware.pick_dtype(found)
    lines.append(Line("dtype", None, f"{dtype}: {reason}"))
    return lines


def capability_lines(found: hardware.Hardware) -> list[Line]:
    """What the hardware and the installed engines allow."""
    return [Line(name, can.available, can.reason) for name, can in found.capabilities.items()]


def material_lines() -> list[Line]:
    """The bundled model, the cache folder, the toolboxes."""
    converted = cache_dir() / models.BUNDLED / "hf-bf16"
    if not converted.exists():
        model = Line("bundled model", False, "not fetched yet; bring it with: python3 -m helpers model")
    elif damaged := models.damaged_files(converted):
        model = Line("bundled model", False, f"damaged ({', '.join(damaged)}); mend it with: python3 -m helpers model")
    else:
        model = Line("bundled model", True, "verified; notebooks of the smoke profile need no network")
    place = _existing(cache_dir())
    writable = os.access(place, os.W_OK)
    lines = [model, Line("model cache", writable, f"{cache_dir()} ({'writable' if writable else 'not writable'})")]
    for name in toolbox.names():
        state = toolbox.status(name)
        text = "installed" if state.installed else f"missing; bring it with: {state.remedy}"
        lines.append(Line(f"toolbox {name}", state.installed, f"{text} ({state.purpose})"))
    return lines


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def profile_lines(found: hardware.Hardware, folder: Path = NOTEBOOKS) -> list[Line]:
    """The profile that ``auto`` picks, what the others lack, and the notebooks that would run."""
    picked, reason = profile.resolve("auto", found)
    lines = [Line("profile auto", True, f"{picked.name}: {reason}")]
    for candidate in profile.PROFILES.values():
        short = _what_lacks(candidate, found)
        text = f"{candidate.for_whom}; model {candidate.model}"
        lines.append(Line(f"profile {candidate.name}", not short, f"{text}{'; ' + short if short else ''}"))
    names = [entry.name for entry in discover(folder)]
    text = f"in {picked.name}: {', '.join(names)}" if names else f"none in {folder}"
    lines.append(Line("notebooks", bool(names), text))
    return lines


def _what_lacks(candidate: profile.Profile, found: hardware.Hardware) -> str:
    """Why a profile cannot run here; empty where it can."""
    if candidate.device == "cuda" and not found.gpus:
        return "needs an NVIDIA GPU"
    if candidate.dtype == "bfloat16" and not found.capabilities["bf16"].available:
        return found.capabilities["bf16"].reason
    have = max((gpu.memory_bytes for gpu in found.gpus), default=found.memory_bytes)
    # A profile's model in 16 bits must fit with room for its cache.
    need = 2 * models.catalogue_entry(candidate.model).parameters * 1.2
    return "" if have >= need else f"its model needs {need / GIB:.0f} GiB, there are {have / GIB:.0f}"


def show(console: Console) -> None:
    """Print the whole report."""
    found = hardware.describe()
    groups = {
        "This machine": machine_lines(found),
        "What it can do": capability_lines(found),
        "What is here": material_lines(),
        "What runs": profile_lines(found),
    }
    marks = {True: "[green]yes[/]", False: "[yellow]no[/]", None: ""}
    for title, lines in groups.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for line in lines:
            table.add_row(line.what, marks[line.good], line.text.replace("[", "\\["))
        console.print(table, "")
    for text in hardware.restart_needed():
        console.print(f"Restart Python: {text}.")
