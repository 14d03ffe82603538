"""Drawing: one style, and functions that take saved records only. Every figure is stamped with what it was measured on.

`save` writes a figure as SVG beside the JSON of the numbers that it shows, so that a figure can be drawn again.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from helpers.files import write_text
from helpers.hardware import Roofline
from helpers.trace import StreamTrace

PALETTE = sns.color_palette("colorblind")
WIDTH = 7.0


def use_style() -> None:
    """Set the course's style; called once by `helpers.start`."""
    sns.set_theme(context="notebook", style="whitegrid", palette="colorblind", font_scale=0.9)
    mpl.rcParams.update(
        {
            "figure.figsize": (WIDTH, 3.6),
            "figure.dpi": 110,
            "savefig.bbox": "tight",
            "axes.titlesize": "medium",
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "svg.hashsalt": "papers-that-run",
            "svg.fonttype": "none",
        }
    )


def stamp(figure: Figure, text: str) -> None:
    """Write what a figure was measured on, small, under it."""
    bottom = figure.get_tightbbox().y0 / figure.get_figheight()  # labels and legends may hang below the figure
    figure.text(0.005, min(0.0, bottom) - 0.015, text, fontsize=6.5, color="0.45", ha="left", va="top")


def save(figure: Figure, data: Mapping[str, Any], folder: Path, name: str, stamp_text: str) -> Path:
    """Stamp a figure, write ``name.svg`` and ``name.json`` into `folder`, and return the SVG's path."""
    stamp(figure, stamp_text)
    picture = io.StringIO()
    figure.savefig(picture, format="svg", metadata={"Date": None, "Creator": "papers-that-run"})
    path = folder / f"{name}.svg"
    write_text(path, picture.getvalue())
    body = {"stamp": stamp_text, **data}
    write_text(folder / f"{name}.json", json.dumps(body, indent=1, sort_keys=True) + "\n")
    return path


def plain_log(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers at 1, 2 and 5 of each decade, and nothing between."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def lines(
    frame: pd.DataFrame,
    *,
    x: str,
    y: str,
    hue: str | None = None,
    title: str,
    xlabel: str,
    ylabel: str,
    log_x: bool = False,
    log_y: bool = False,
    band: tuple[str, str] | None = None,
) -> Figure:
    """One line for each value of `hue`, marked at the measured points; `band` names the interval's two columns."""
    figure, axes = plt.subplots()
    groups = frame.groupby(hue, sort=False) if hue else [("", frame)]
    for index, (label, part) in enumerate(groups):
        color = PALETTE[index % len(PALETTE)]
        axes.plot(part[x], part[y], "o-", color=color, label=str(label) or None, markersize=4)
        if band:
            axes.fill_between(part[x], part[band[0]], part[band[1]], color=color, alpha=0.2, linewidth=0)
    if log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(mpl.ticker.ScalarFormatter())
        axes.set_xticks(sorted(frame[x].unique()))
        axes.minorticks_off()
    if log_y:
        axes.set_yscale("log")
        plain_log(axes.yaxis)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    if hue:
        axes.legend(title=None)
    return figure


def points_and_rule(
    frame: pd.DataFrame,
    *,
    x: str,
    measured: str,
    rule: str,
    hue: str,
    title: str,
    xlabel: str,
    ylabel: str,
    limit: float | None = None,
    limit_label: str = "",
) -> Figure:
    """Measured values as dots and what a rule says of them as a line, in one colour for each value of `hue`.

    Both axes are logarithmic with plain numbers; x in powers of two. Each line bears its name at its right end, and `limit`
    draws a ceiling with a name of its own.
    """
    figure, axes = plt.subplots(figsize=(WIDTH, 4.2))
    ends: list[tuple[float, str, Any]] = []
    for index, (label, part) in enumerate(frame.groupby(hue, sort=False)):
        color = PALETTE[index % len(PALETTE)]
        axes.plot(part[x], part[rule], "-", color=color, linewidth=1.2)
        axes.plot(part[x], part[measured], "o", color=color, markersize=5)
        ends.append((float(part[rule].iloc[-1]), str(label), color))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(mpl.ticker.ScalarFormatter())
    axes.set_xticks(sorted(frame[x].unique()))
    axes.minorticks_off()
    plain_log(axes.yaxis)
    if limit is not None:
        axes.axhline(limit, color="0.2", linestyle="--", linewidth=1)
        axes.annotate(
            limit_label,
            (0.01, limit),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            color="0.2",
            fontsize=8,
        )
    # Names beside the lines' ends, moved upwards where two would touch.
    lowest = -math.inf
    scale = axes.bbox.height / math.log(axes.get_ylim()[1] / axes.get_ylim()[0]) * 72 / figure.dpi
    for value, label, color in sorted(ends):
        height = max(math.log(value) * scale, lowest)
        lowest = height + 12
        axes.annotate(
            label,
            (1.0, value),
            xycoords=("axes fraction", "data"),
            xytext=(6, height - math.log(value) * scale),
            textcoords="offset points",
            color=color,
            fontsize=9,
            va="center",
        )
    axes.legend(
        handles=[
            mpl.lines.Line2D([], [], color="0.3", marker="o", linestyle="", markersize=5, label="measured"),
            mpl.lines.Line2D([], [], color="0.3", linewidth=1.2, label="rule"),
        ],
        loc="upper left",
        bbox_to_anchor=(1.0, 0.12),
    )
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    return figure


def bars(
    frame: pd.DataFrame,
    *,
    x: str,
    y: str,
    hue: str | None = None,
    title: str,
    xlabel: str,
    ylabel: str,
    fmt: str = "%.4g",
) -> Figure:
    """Bars with their values written on them."""
    figure, axes = plt.subplots()
    sns.barplot(frame, x=x, y=y, hue=hue, ax=axes, errorbar=None)
    for container in axes.containers:
        axes.bar_label(container, fmt=fmt, fontsize=8, padding=2)  # type: ignore[arg-type]
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.margins(y=0.15)
    return figure


def stacked(
    frame: pd.DataFrame, *, title: str, xlabel: str, ylabel: str, limit: float | None = None, limit_label: str = ""
) -> Figure:
    """Stacked bars: the frame's index on x, one colour for each column; `limit` draws a ceiling."""
    figure, axes = plt.subplots()
    frame.plot.bar(stacked=True, ax=axes, width=0.7, color=PALETTE[: frame.shape[1]], rot=0)
    if limit is not None:
        axes.axhline(limit, color="0.2", linestyle="--", linewidth=1)
        axes.annotate(limit_label, (0.01, limit), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def roofline(roof: Roofline, points: pd.DataFrame, *, title: str) -> Figure:
    """The measured roof, and points with columns ``label``, ``intensity`` (FLOP/byte) and ``flops`` (FLOP/s)."""
    figure, axes = plt.subplots()
    low = min(0.25, float(points["intensity"].min()) / 2)
    high = max(4 * roof.ridge, float(points["intensity"].max()) * 2)
    grid = [low * (high / low) ** (i / 200) for i in range(201)]
    axes.plot(grid, [roof.attainable(i) / 1e9 for i in grid], color="0.25", label="measured roof")
    axes.axvline(roof.ridge, color="0.6", linestyle=":", linewidth=1)
    axes.annotate(
        f"ridge: {roof.ridge:.1f} FLOP/byte",
        (roof.ridge, roof.flops_per_second / 1e9),
        xytext=(4, 4),
        textcoords="offset points",
        fontsize=8,
        color="0.4",
    )
    rows = zip(points["label"], points["intensity"], points["flops"], strict=True)
    for index, (label, intensity, flops) in enumerate(rows):
        color = PALETTE[index % len(PALETTE)]
        axes.scatter(intensity, flops / 1e9, s=45, color=color, zorder=3, label=str(label))
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain_log(axes.xaxis)
    plain_log(axes.yaxis)
    axes.set(title=title, xlabel="arithmetic intensity (FLOP per byte moved)", ylabel="GFLOP/s")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def gantt(frame: pd.DataFrame, *, title: str, xlabel: str) -> Figure:
    """Bars over time: columns ``row`` (one line of the figure for each value), ``unit`` (a colour), ``start`` and ``stop``."""
    names, units = list(dict.fromkeys(frame["row"])), list(dict.fromkeys(frame["unit"]))
    figure, axes = plt.subplots(figsize=(WIDTH, 1.1 + 0.42 * len(names)))
    for index, unit in enumerate(units):
        part = frame[frame["unit"] == unit]
        places = [names.index(row) for row in part["row"]]
        widths = part["stop"] - part["start"]
        axes.barh(places, widths, left=part["start"], height=0.6, color=PALETTE[index], edgecolor="white", label=unit)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(title=title, xlabel=xlabel, ylabel="")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def request_timeline(traces: Sequence[StreamTrace], *, title: str, labels: Sequence[str] | None = None) -> Figure:
    """Each request as a row: waiting from schedule to sending, then to the first token, then its chunks as ticks."""
    figure, axes = plt.subplots(figsize=(WIDTH, 0.9 + 0.42 * len(traces)))
    zero = min(trace.scheduled for trace in traces)
    for row, trace in enumerate(traces):
        _timeline_row(axes, trace, row, zero)
    axes.set_yticks(range(len(traces)), list(labels or [trace.request_id for trace in traces]))
    axes.invert_yaxis()
    axes.set(title=title, xlabel="seconds since the first request was due", ylabel="")
    axes.grid(axis="y", visible=False)
    handles = [
        mpl.patches.Patch(color="0.75", label="due, not yet sent"),
        mpl.patches.Patch(color=PALETTE[1], label="sent, no token yet"),
        mpl.patches.Patch(color=PALETTE[0], alpha=0.35, label="decoding; a tick is a chunk"),
    ]
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.55 / (0.9 + 0.42 * len(traces)) - 0.12), ncols=3
    )
    return figure


def _timeline_row(axes: Axes, trace: StreamTrace, row: int, zero: float) -> None:
    start, sent = trace.scheduled - zero, trace.sent - zero
    axes.barh(row, sent - start, left=start, height=0.5, color="0.75")
    if trace.first is None or trace.last is None:
        axes.scatter(sent, row, marker="x", color="crimson", zorder=3)
        return
    axes.barh(row, trace.first - trace.sent, left=sent, height=0.5, color=PALETTE[1])
    axes.barh(row, trace.last - trace.first, left=trace.first - zero, height=0.5, color=PALETTE[0], alpha=0.35)
    axes.vlines([c.time - zero for c in trace.token_chunks], row - 0.25, row + 0.25, color=PALETTE[0], linewidth=0.8)


def panels(
    frame: pd.DataFrame,
    *,
    x: str,
    ys: Mapping[str, str],
    hue: str,
    title: str,
    xlabel: str,
    log_x: bool = False,
    log_y: bool = False,
) -> Figure:
    """Panels side by side over one x axis: `ys` maps a column to its panel's y label; one line for each value of `hue`."""
    figure, all_axes = plt.subplots(1, len(ys), figsize=(WIDTH, 3.4), squeeze=False)
    figure.subplots_adjust(top=0.8, wspace=0.3 if len(ys) < 3 else 0.45)
    for axes, (column, label) in zip(all_axes[0], ys.items(), strict=True):
        for index, (name, part) in enumerate(frame.groupby(hue, sort=False)):
            axes.plot(part[x], part[column], "o-", color=PALETTE[index % len(PALETTE)], label=str(name), markersize=4)
        if log_x:
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(frame[x].unique()), [f"{value:g}" for value in sorted(frame[x].unique())])
            axes.minorticks_off()
        if log_y:
            axes.set_yscale("log")
            plain_log(axes.yaxis)
        else:
            axes.set_ylim(bottom=0)
        axes.set(xlabel=xlabel, ylabel=label)
    handles, labels = all_axes[0][0].get_legend_handles_labels()
    _headline(figure, title, handles, labels)
    return figure


def _headline(figure: Figure, title: str, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A title over all panels, and under it one legend for all of them."""
    inch = 1 / figure.get_figheight()
    left = figure.subplotpars.left
    figure.suptitle(title, x=left, y=1 - 0.06 * inch, ha="left", va="top", fontsize="medium", fontweight="bold")
    corner = (left - 0.01, 1 - 0.28 * inch)
    figure.legend(handles, labels, loc="upper left", ncols=len(labels), bbox_to_anchor=corner, borderaxespad=0.0)


def step_chart(
    frames: Mapping[str, pd.DataFrame], *, title: str, xlabel: str, order: Sequence[str], stripes: bool = True
) -> Figure:
    """What each request did in each step, one panel for each entry of `frames`, on one time axis.

    A frame has columns ``row`` (the request), ``start`` and ``length`` (seconds) and ``kind`` (one of `order`, which fixes
    the colours). `stripes` draws each step's beginning as a thin line.
    """
    heights = [max(9, frame["row"].nunique()) for frame in frames.values()]
    height = 1.4 + 0.1 * sum(heights)
    figure, all_axes = plt.subplots(
        len(frames), 1, figsize=(WIDTH, height), squeeze=False, sharex=True, height_ratios=heights
    )
    figure.subplots_adjust(top=1 - 0.65 / height, bottom=0.5 / height, hspace=0.1)
    colors = {kind: PALETTE[index] for index, kind in enumerate(order)}
    for axes, (name, frame) in zip(all_axes[:, 0], frames.items(), strict=True):
        rows = {row: index for index, row in enumerate(dict.fromkeys(frame["row"]))}
        axes.barh(
            frame["row"].map(rows), frame["length"], left=frame["start"], height=0.8, color=frame["kind"].map(colors),
            linewidth=0,
        )  # fmt: skip
        if stripes:
            axes.vlines(frame["start"].unique(), -0.5, len(rows) - 0.5, color="white", linewidth=0.4)
        axes.set_yticks([])
        axes.set(ylabel=name, ylim=(len(rows) - 0.4, -0.6))
        axes.grid(visible=False)
    all_axes[-1, 0].set(xlabel=xlabel)
    _headline(figure, title, [mpl.patches.Patch(color=colors[kind]) for kind in order], order)
    return figure


def predictions(frame: pd.DataFrame, *, title: str) -> Figure:
    """Predicted against measured as ratios: columns ``name``, ``predicted``, ``measured``. One is a perfect guess."""
    figure, axes = plt.subplots(figsize=(WIDTH, 0.9 + 0.38 * len(frame)))
    ratio = frame["predicted"] / frame["measured"]
    axes.axvline(1.0, color="0.3", linewidth=1)
    axes.scatter(ratio, range(len(frame)), s=40, color=PALETTE[0], zorder=3)
    axes.set_yticks(range(len(frame)), frame["name"])
    axes.set_xscale("log")
    plain_log(axes.xaxis)
    axes.invert_yaxis()
    axes.set(title=title, xlabel="predicted / measured", ylabel="")
    return figure


def heatmaps(
    frame: pd.DataFrame,
    *,
    x: str,
    y: str,
    value: str,
    column: str,
    row: str,
    title: str,
    xlabel: str,
    ylabel: str,
    label: str,
    limit: float | None = None,
    points: pd.DataFrame | None = None,
) -> Figure:
    """A grid of heat maps with the value in each cell: one panel for each pair of values of `column` and `row`.

    With `limit`, colours part there (red below, blue above), cells below it are hatched, and a line runs along their border.
    `points`, with the columns `x`, `y`, `column`, `row` and ``measured``, writes what was measured under a cell's value, in
    brackets. `label` names the value beside the colour bar.
    """
    values = {key: list(dict.fromkeys(frame[key])) for key in (x, y, column, row)}
    n_rows, n_columns = len(values[row]), len(values[column])
    height = 1.3 + n_rows * (0.35 + 0.27 * len(values[y]))
    width = max(WIDTH, 1.2 + n_columns * (0.3 + 0.4 * len(values[x])))
    figure, all_axes = plt.subplots(
        n_rows, n_columns, figsize=(width, height), squeeze=False, sharex=True, sharey=True, layout="constrained"
    )
    numbers = frame[value].to_numpy(dtype=float)
    low, high = float(numbers.min()), float(numbers.max())
    norm: mpl.colors.Normalize = mpl.colors.Normalize(low, high)
    if limit is not None:
        reach = max(high / limit, limit / low)
        norm = mpl.colors.LogNorm(limit / reach, limit * reach)
    colours = mpl.colormaps["RdBu" if limit is not None else "Blues"]
    for (at_row, at_column), axes in zip(
        ((r, c) for r in values[row] for c in values[column]), all_axes.flat, strict=True
    ):
        panel = frame[(frame[row] == at_row) & (frame[column] == at_column)]
        grid = panel.pivot(index=y, columns=x, values=value).loc[values[y], values[x]].to_numpy(dtype=float)
        measured = {}
        if points is not None:
            chosen = points[(points[row] == at_row) & (points[column] == at_column)]
            measured = {
                (values[x].index(a), values[y].index(b)): m for a, b, m in chosen[[x, y, "measured"]].to_numpy()
            }
        _heatmap(axes, grid, colours, norm, limit, measured)
        axes.set_xticks(range(len(values[x])), values[x])
        axes.set_yticks(range(len(values[y])), values[y])
        if at_row == values[row][0]:
            axes.set_title(str(at_column), fontsize=9)
        if at_column == values[column][-1]:
            axes.annotate(
                str(at_row),
                (1.03, 0.5),
                xycoords="axes fraction",
                rotation=270,
                va="center",
                fontsize=9,
                fontweight="bold",
            )
    figure.supxlabel(xlabel, fontsize=9)
    figure.supylabel(ylabel, fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize="medium", fontweight="bold")
    bar = figure.colorbar(mpl.cm.ScalarMappable(norm, colours), ax=all_axes, shrink=0.6, aspect=30, pad=0.05)
    bar.set_label(label, fontsize=8)
    if limit is not None:
        ticks = [t for t in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0) if norm.vmin <= t <= norm.vmax]  # type: ignore[operator]
        bar.set_ticks(ticks, labels=[f"{t:g}" for t in ticks])
        bar.minorticks_off()
    return figure


def _heatmap(
    axes: Axes,
    grid: Any,
    colours: mpl.colors.Colormap,
    norm: mpl.colors.Normalize,
    limit: float | None,
    measured: Mapping[tuple[int, int], float],
) -> None:
    """One panel of `heatmaps`; `grid` has shape ``[y, x]``, `measured` goes by (x, y)."""
    axes.imshow(grid, cmap=colours, norm=norm, aspect="auto")
    axes.grid(visible=False)
    n_y, n_x = grid.shape
    below, border = [], []
    for j, i in np.ndindex(n_y, n_x):
        number = float(grid[j, i])
        ink = "white" if sum(colours(norm(number))[:3]) < 1.5 else "0.15"
        text = f"{number:.0f}" if number >= 10 else f"{number:.2f}"
        known = measured.get((i, j))
        axes.text(
            i, j - (0.18 if known else 0), text, ha="center", va="center", fontsize=6.5, color=ink, family="DejaVu Sans"
        )
        if known:
            text = f"({known:.2f})"
            axes.text(i, j + 0.24, text, ha="center", va="center", fontsize=5.5, color=ink, fontweight="bold")
        if limit is None or number >= limit:
            continue
        left, right, top, bottom = i - 0.5, i + 0.5, j - 0.5, j + 0.5
        below.append([(left, top), (right, top), (right, bottom), (left, bottom), (left, top)])
        for other_j, other_i, line in (
            (j, i - 1, [(left, top), (left, bottom)]),
            (j, i + 1, [(right, top), (right, bottom)]),
            (j - 1, i, [(left, top), (right, top)]),
            (j + 1, i, [(left, bottom), (right, bottom)]),
        ):
            if 0 <= other_j < n_y and 0 <= other_i < n_x and grid[other_j, other_i] >= limit:
                border.append(line)
    if below:  # one path for all cells keeps the file small
        path = mpl.path.Path.make_compound_path(*(mpl.path.Path(corners, closed=True) for corners in below))
        axes.add_patch(mpl.patches.PathPatch(path, fill=False, hatch="///", edgecolor="0.78", linewidth=0))
    axes.add_collection(mpl.collections.LineCollection(border, colors="black", linewidths=1.6))
