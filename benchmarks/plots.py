"""Draws the plots that the site shows from the tables in results/: python benchmarks/plots.py, or `make plots`.

Each plot is a function that returns a caption, with machine, version and date, and a figure of matplotlib's. A ratio is
the median over rounds; whiskers and bands are the quartiles, where the table has them. The files take the colours of the
system, light or dark.
"""

from __future__ import annotations

import csv
import io
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib import pyplot

matplotlib.use("svg")

__all__ = ["COLOURS", "PLOTS", "svg"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FOLDER = ROOT / "build" / "plots"
COLOURS = ("#3f7fbf", "#d9822b", "#3a9a6b", "#c0504d", "#8064a2", "#7f7f7f", "#b8860b", "#2a9fb0")
DECOMPOSITIONS = {
    "lu": "LU",
    "svd": "SVD",
    "eigh": "eigenvalues",
    "cholesky": "Cholesky",
    "qr": "QR",
    "det": "determinant",
    "inv": "inverse",
    "solve": "solve",
}
FASTER = "times as fast as PyTorch"
STYLE = "<style>svg{color:#222}text{fill:currentColor}@media(prefers-color-scheme:dark){svg{color:#ddd}}</style>"


class Ratio(NamedTuple):
    """The speedup and its quartiles over rounds; the ratio itself where no quartiles were saved."""

    middle: float
    low: float
    high: float


class Results(NamedTuple):
    """A table of results/: its heading and its rows."""

    about: str
    rows: list[dict[str, str]]


Series = Mapping[str, Sequence[Ratio | None]]
Plot = tuple[str, Any]


def results(name: str) -> Results:
    """The first line of a table is ``# title; cpu C, cores N, ..., date D``."""
    lines = (RESULTS / f"{name}.csv").read_text().splitlines()
    title, _, machine = lines[0].removeprefix("# ").rpartition("; ")
    said = dict(part.split(" ", 1) for part in machine.split(", "))
    if "date" not in said:
        said["date"] = _last_change(RESULTS / f"{name}.csv")
    about = f"{title}. {said['cpu']}, {said['cores']} cores, torch {said['torch']}, {said['system']}, {said['date']}."
    rows = list(csv.DictReader(lines[1:]))
    quartiles = "quartiles" if said.get("runs", "1") == "1" else f"the widest quartiles of {said['runs']} runs"
    return Results(about + f" Whiskers: {quartiles}." * any("quartiles" in column for column in rows[0]), rows)


def _last_change(path: Path) -> str:
    command = ["git", "log", "-1", "--format=%cs", "--", str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "date not kept"


def ratio(row: Mapping[str, str], column: str) -> Ratio | None:
    """The values of the columns ``<column> ratio`` and ``<column> quartiles``."""
    if not (middle := row.get(f"{column} ratio")):
        return None
    low, _, high = (row.get(f"{column} quartiles") or f"{middle} to {middle}").partition(" to ")
    return Ratio(float(middle), float(low), float(high))


def inverse(text: str | None, spread: str = "") -> Ratio | None:
    """For a table of fractions of PyTorch's time or memory."""
    if not text:
        return None
    low, _, high = (spread or f"{text} to {text}").partition(" to ")
    return Ratio(1 / float(text), 1 / float(high), 1 / float(low))


# -- the two kinds of plots -------------------------------------------------------------------------------------------


def over_n(contender: str, operators: Sequence[str]) -> Plot:
    """Decompositions over the order of the matrix: a panel for each, a line for each dtype."""
    about, table = results("linalg")
    rows = {r["operator"]: r for r in table if (r["contender"], r["batch"]) == (contender, "16 MB")}
    count = len(operators)
    columns = min(4, count)
    shape = (-(-count // columns), columns)
    canvas, panels = pyplot.subplots(
        *shape, figsize=(8.5, 0.4 + 2.1 * shape[0]), sharex=True, sharey=True, squeeze=False
    )
    canvas.set_layout_engine("constrained")
    for panel, operator in zip(panels.flat, operators):
        for dtype, colour in zip(("float32", "float64"), COLOURS):
            points = _by_order(rows[operator], dtype)
            orders = [*points]
            panel.plot(orders, [points[n].middle for n in orders], "o-", markersize=2.5, label=dtype, color=colour)
            low, high = [points[n].low for n in orders], [points[n].high for n in orders]
            panel.fill_between(orders, low, high, color=colour, alpha=0.3, linewidth=0)
        panel.axhline(1, linewidth=0.8, color="black")
        panel.set(xscale="log", yscale="log")
        panel.set_title(DECOMPOSITIONS[operator], fontsize=10)
        panel.set_xticks([2, 8, 32, 128, 500, 2000], [2, 8, 32, 128, 500, 2000], fontsize=7)
        panel.set_yticks([0.5, 1, 2, 5, 10, 20, 50], [0.5, 1, 2, 5, 10, 20, 50], fontsize=8)
        panel.minorticks_off()
    for panel in panels[-1]:
        panel.set_xlabel("order n", fontsize=8)
    for panel in panels[:, 0]:
        panel.set_ylabel(FASTER, fontsize=8)
    panels[0, -1].legend(frameon=False, fontsize=8)
    return about.replace("Whiskers", "Bands"), canvas


def _by_order(row: Mapping[str, str], dtype: str) -> dict[int, Ratio]:
    columns = (re.fullmatch(rf"{dtype} (\d+)x\1 ratio", name) for name in row)
    found = {int(column[1]): ratio(row, column[0].removesuffix(" ratio")) for column in columns if column}
    return {n: value for n, value in found.items() if value}


def bars(about: str, labels: Sequence[str], series: Series, axis_label: str = FASTER) -> Plot:
    """Horizontal bars from 1, on a logarithmic scale, a colour for each series; what is None takes no room."""
    count = len(series)
    size = (8.5, 0.9 + 0.22 * count * len(labels) + 0.1 * len(labels))
    canvas, axis = pyplot.subplots(figsize=size, layout="constrained")
    height = 0.8 / count
    present = [[k for k, found in enumerate(series.values()) if found[i]] for i in range(len(labels))]
    for k, ((label, found), colour) in enumerate(zip(series.items(), COLOURS)):
        drawn = [(i + (p.index(k) - (len(p) - 1) / 2) * height, found[i]) for i, p in enumerate(present) if k in p]
        axis.barh(
            [p for p, _ in drawn], [r.middle - 1 for _, r in drawn], height * 0.9, left=1, label=label, color=colour
        )
        for place, (middle, low, high) in drawn:
            axis.plot([low, high], [place, place], color="black", linewidth=1)
            beyond = middle >= 1
            axis.annotate(
                f"{middle:.3g}" if middle < 1000 else f"{middle:.0f}",
                (high if beyond else low, place),
                xytext=(4 if beyond else -4, 0),
                textcoords="offset points",
                ha="left" if beyond else "right",
                va="center",
                fontsize=8,
            )
    axis.axvline(1, linewidth=0.8, color="black")
    axis.set_xscale("log")
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    shown = [r for found in series.values() for r in found if r]
    left, right = min(0.8, *(0.75 * r.low for r in shown)), max(1.5, *(1.6 * r.high for r in shown))
    axis.set_xlim(left, right)
    ticks = [t for t in (0.25, 0.5, 1, 2, 5, 10, 50, 100, 1000) if left < t < right]
    axis.set_xticks(ticks, ticks)
    axis.minorticks_off()
    axis.set_xlabel(axis_label)
    axis.spines[["top", "right"]].set_visible(False)
    if count > 1:
        axis.legend(frameon=False, fontsize=8)
    return about, canvas


# -- one function for each table --------------------------------------------------------------------------------------


def norm() -> Plot:
    about, rows = results("norm")
    large = [(r["dtype"], r["p"], ratio(r, "1 threads ours")) for r in rows if r["elements"] == "10000000"]
    found = {(dtype, p): value for dtype, p, value in large if value}
    orders = sorted({p for _, p in found}, key=float)
    series = {dtype: [found.get((dtype, p)) for p in orders] for dtype in ("float32", "float64", "bfloat16")}
    return bars(about, [_order(p) for p in orders], series)


def _order(p: str) -> str:
    return f"p = {p.removesuffix('.0')}"


def distance() -> Plot:
    about, rows = results("distance")
    orders = sorted({r["p"] for r in rows if r["operator"] == "cdist"}, key=float)
    found = {(r["shapes"], r["p"]): ratio(r, "1 threads ours") for r in rows if r["operator"] == "cdist"}
    shapes = {f"{n} points, dimension {d}": f"{n}x{d}, {n}x{d}" for n, d in ((1000, 3), (1000, 16), (200, 512))}
    return bars(about, [_order(p) for p in orders], {k: [found[s, p] for p in orders] for k, s in shapes.items()})


def forward() -> Plot:
    about, rows = results("forward")
    series = {
        "time": [inverse(r["time"], r.get("time quartiles", "")) for r in rows],
        "memory": [inverse(r["memory"]) for r in rows],
    }
    labels = [r["problem"].replace(", batch", ",\nbatch") for r in rows]
    return bars(about, labels, series, "PyTorch's time or memory, divided by ours")


def attention() -> Plot:
    about, rows = results("attention")
    rows = [r for r in rows if r["dtype"] == "float32" and r["causal"] == "False"]
    series = {
        "time": [ratio(r, "1 threads ours") for r in rows],
        "memory": [inverse(f"{float(r['ours MB']) / float(r['math MB'])}") for r in rows],
    }
    labels = [f"{r['derivative'].partition(',')[0]}, {r['shape']}" for r in rows]
    return bars(about, labels, series, "PyTorch's time or memory, divided by ours")


def nested() -> Plot:
    about, rows = results("nested")
    rows = [r for r in rows if (r["batch"], r["width"]) == ("64 of 16 to 256", "32")]
    rows = [r for r in rows if r["operator"] != "sum, ragged dim"]  # which PyTorch's own nested tensors do not have
    layouts = ("strided", "jagged")
    series = {f"beside {x}": [ratio(r, f"1 threads both ours to stock {x}") for r in rows] for x in layouts}
    return bars(about, [r["operator"] for r in rows], series)


def nested_override() -> Plot:
    about, rows = results("nested_override")
    rows = [r for r in rows if (r["batch"], r["width"]) == ("64 of 16 to 256", "64")]
    series = {x: [ratio(r, f"1 threads {x} override") for r in rows] for x in ("strided", "jagged")}
    return bars(about, [r["operator"] for r in rows], series)


def models() -> Plot:
    about, rows = results("models")
    contenders = {"override()": "ours", 'override("*")': "ours, *", "strong_zero=True": "ours, strong_zero"}
    series = {label: [ratio(r, f"1 threads {c}") for r in rows] for label, c in contenders.items()}
    return bars(about, [f"{r['model']},\n{r['size']}" for r in rows], series)


def overhead() -> Plot:
    about, rows = results("overhead")
    return bars(about, [r["what"] for r in rows], {"ours": [ratio(r, "1 threads ours") for r in rows]})


PLOTS: dict[str, Callable[[], Plot]] = {
    "linalg_backward": lambda: over_n("backward ours", list(DECOMPOSITIONS)),
    "linalg_both": lambda: over_n("forward + backward ours, forward=True", ["lu", "svd", "eigh"]),
    "norm": norm,
    "distance": distance,
    "forward": forward,
    "attention": attention,
    "nested": nested,
    "nested_override": nested_override,
    "models": models,
    "overhead": overhead,
}


def svg(canvas: Any, name: str) -> str:
    """A figure as an element whose lines and letters have the colour of the text around it."""
    target = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        canvas.savefig(target, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    pyplot.close(canvas)
    text = target.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text)  # as wide as the page
    text = text.replace("fill: #ffffff", "fill: none")  # behind a legend
    for colour in ("#000000", "#cccccc"):
        text = text.replace(colour, "currentColor")
    for before in ('id="', 'xlink:href="#', "url(#"):  # a page may have several figures
        text = text.replace(before, f"{before}{name}-")
    return text


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, plot in PLOTS.items():
        about, canvas = plot()
        canvas.get_layout_engine().set(rect=(0, 0.05, 1, 0.95))
        canvas.text(0.5, 0.005, about, ha="center", fontsize=7)
        text = svg(canvas, name).replace("<defs>", f"{STYLE}<defs>", 1)
        (FOLDER / f"{name}.svg").write_text(text)
        print(f"{name}.svg: {about}")
    print(f"written to {FOLDER.relative_to(ROOT)}/")


if __name__ == "__main__":
    main()
