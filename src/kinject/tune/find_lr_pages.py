"""The range test drawn."""

from __future__ import annotations

from kinject.report.figures import LEARNING, MUTED, OTHER, RETENTION, RULE, panels, render_png, style
from kinject.tune.find_lr import Found


def draw(found: Found) -> bytes:
    """Return a PNG: the loss over the rate, raw and smoothed, with the rates that matter marked by line and word."""
    with style():
        figure, (panel,), _ = panels(1, 1, 3.4)
        figure.set_size_inches(7.2, 4.2)
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter(lambda rate, _: f"{rate:.0e}".replace("e-0", "e-").replace("e+00", ""))
        panel.plot(found.rates, found.losses, color=OTHER, linewidth=1, label="loss of each batch")
        panel.plot(found.rates[: len(found.smoothed)], found.smoothed, color=LEARNING, linewidth=2, label="smoothed")
        marks = (("suggested", found.suggestion, RETENTION, "-"), ("steepest", found.steepest, MUTED, ":"),
                 ("least loss", found.lowest, MUTED, "--"))  # fmt: skip
        for name, rate, colour, line in marks:
            if rate is not None:
                panel.axvline(rate, color=colour, linestyle=line, linewidth=1.5, label=f"{name} {rate:.2g}")
        if found.smoothed:
            low, high = min(found.smoothed), max(found.smoothed)
            panel.set_ylim(low - 0.1 * (high - low) - 1e-3, high + 0.25 * (high - low) + 1e-3)
        panel.grid(axis="y", color=RULE, linewidth=0.6)
        panel.set_xlabel("learning rate")
        panel.set_ylabel("loss")
        panel.legend(loc="best")
        return render_png(figure)
