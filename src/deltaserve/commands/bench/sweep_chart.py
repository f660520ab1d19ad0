"""The chart of a sweep, as a PNG. Needs matplotlib, the extra `plot`."""

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deltaserve.commands.bench.sweep import Sweep, SweepPoint
from deltaserve.commands.load.reuse import MeanWaits
from deltaserve.core.errors import ConfigError
from deltaserve.core.files.result_file import check_place

_LIBRARY = "matplotlib"
_PANEL_INCHES = (5.5, 4.5)
_DPI = 120


def require_chart(path: Path) -> None:
    """Check that a chart can be drawn there, before anything is measured for it. Raises ConfigError."""
    if importlib.util.find_spec(_LIBRARY) is None:
        raise ConfigError(f"--sweep-png needs {_LIBRARY}: pip install {_LIBRARY} (the extra `plot`)")
    if path.suffix != ".png":
        raise ConfigError(f"--sweep-png {path}: the name must end in .png")
    check_place(path, "--sweep-png")


def draw_sweep(path: Path, title: str, sweep: Sweep, points: Sequence[SweepPoint]) -> None:
    """Requests per second, and time to first token, over the time between tokens (points without that are left out);
    where the server tells it, also what it did with the prompts at each strength."""
    has_reuse = any(point.summary.reuse is not None for point in points)
    num_panels, (width, height) = 3 if has_reuse else 2, _PANEL_INCHES
    library = importlib.import_module(f"{_LIBRARY}.figure")
    figure: Any = library.Figure(figsize=(num_panels * width, height), layout="constrained")
    figure.suptitle(title, fontsize="small", wrap=True)
    rate, ttft, *more = figure.subplots(1, num_panels)
    told = [(point, itl) for point in points if (itl := point.latency_ms("itl", "p50")) is not None]
    itls = [itl for _, itl in told]
    rate.plot(itls, [point.summary.requests_per_s for point, _ in told], marker="o")
    rate.set_ylabel("requests/s")
    for quantile, line in (("p50", "-"), ("p95", "--")):
        values = [point.latency_ms("ttft", quantile) for point, _ in told]
        ttft.plot(itls, values, line, marker="o", label=f"TTFT {quantile}")
    ttft.set_ylabel("time to first token, ms")
    ttft.set_yscale("log")
    ttft.legend()
    for point, itl in told:
        rate.annotate(f" {point.value:g}", (itl, point.summary.requests_per_s))
        ttft.annotate(f" {point.value:g}", (itl, point.latency_ms("ttft", "p50")))
    for axes in (rate, ttft):
        axes.set_xlabel(f"time between tokens p50, ms (points: {sweep.kind.value})")
        axes.grid(alpha=0.3)
    for axes in more:
        _draw_reuse(axes, sweep, points)
    figure.savefig(path, dpi=_DPI)


def _draw_reuse(axes: Any, sweep: Sweep, points: Sequence[SweepPoint]) -> None:
    told = [(point.value, reuse) for point in points if (reuse := point.summary.reuse) is not None]
    values = [value for value, _ in told]
    axes.plot(
        values, [100 * reuse.share_by_decode for _, reuse in told], marker="o", label="prompts computed by decode"
    )
    axes.plot(values, [100 * reuse.share_computed for _, reuse in told], marker="s", label="prompt tokens computed")
    axes.plot(values, [100 * reuse.share_loaded for _, reuse in told], marker="^", label="prompt tokens from files")
    axes.plot(values, [100 * reuse.share_pulled for _, reuse in told], marker="v", label="prompt tokens pulled")
    axes.set_ylim(-5, 105)
    axes.set_ylabel("%")
    axes.set_xlabel(sweep.kind.heading)
    axes.grid(alpha=0.3)
    weighed = [(value, waits) for value, reuse in told if (waits := reuse.waits) is not None]
    lines = [*axes.get_lines(), *(_draw_waits(axes.twinx(), weighed) if weighed else ())]
    axes.legend(handles=lines, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize="small")


def _draw_waits(axes: Any, weighed: Sequence[tuple[float, MeanWaits]]) -> list[Any]:
    """What the rule compared at each strength, on an axis of its own; the lines that show it."""
    values = [value for value, _ in weighed]
    by_decode, by_prefill = zip(*((waits.local_len, waits.prefill_len) for _, waits in weighed), strict=True)
    axes.plot(values, by_decode, ":", color="tab:purple", label="mean wait, by decode")
    axes.plot(values, by_prefill, "--", color="tab:brown", label="mean wait, by prefill")
    axes.set_ylabel("tokens")
    return [*axes.get_lines()]
