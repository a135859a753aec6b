"""A study's page: the verdict, then what carries it, section by section; rendered as HTML and as Markdown.

Names and texts come from recipes, question files and logs, so they are data: HTML escapes all of them, Markdown escapes
whatever it would read as markup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

from kinject.report.formatting import escape_markdown, format_name
from kinject.report.html import render_template
from kinject.report.pages import Plot
from kinject.report.study_blocks import Block, Bullets, Code, FigureBlock, Heading, StudyPage, TableBlock, Text, kind_of
from kinject.report.study_sections import Logs, make_sections
from kinject.report.study_verdict import render_verdict
from kinject.report.study_view import View, seeds_text

_FOOTER_VERSIONS = ("kinject", "torch", "transformers", "trl", "python")


def make_study_page(view: View, figures: Mapping[str, str], logs: Logs) -> StudyPage:
    """Return the page for a result; `figures` are (name, name of the curve or "") of what is drawn, `logs` what was read."""
    result = view.result
    n_arms, n_sets = len(result.arms), len(view.sets())
    counts = [(len(result.models), "base model"), (n_arms, "arm"), (n_sets, "question set")]
    parts = [f"{n:,} {word}{'' if n == 1 else 's'}" for n, word in counts]
    versions = ", ".join(f"{name} {result.versions[name]}" for name in _FOOTER_VERSIONS if name in result.versions)
    return StudyPage(
        title=format_name(result.title) or "Study",
        subtitle=f"kinject study: {', '.join(parts)}, {seeds_text(result.seeds)}",
        card=format_name(result.card),
        verdict=render_verdict(view),
        sections=make_sections(view, figures, logs),
        footer="Written by kinject" + (f" with {format_name(versions)}." if versions else "."),
    )


def render_study_html(page: StudyPage, plots: Mapping[str, Plot]) -> str:
    """Return the page as one HTML file: no script, nothing fetched, everything but the figures escaped."""
    from markupsafe import Markup

    drawn = {
        name: {size: Markup(svg) for size, svg in asdict(plot).items()}  # noqa: S704 - of our own making
        for name, plot in plots.items()
    }
    return render_template("study.html.j2", page=page, plots=drawn, kind_of=kind_of)


def render_study_markdown(page: StudyPage) -> str:
    """Return the page as Markdown, its figures by their file names."""
    lines = [f"# {escape_markdown(page.title)}", "", escape_markdown(page.subtitle), ""]
    lines += [escape_markdown(page.card), ""] if page.card else []
    for answered in page.verdict:
        lines += [f"## {answered.question}", "", escape_markdown(answered.lead), ""]
        lines += [
            f"- **{escape_markdown(claim.arm)}** on {escape_markdown(claim.question_set)}, *{claim.tag}*: "
            f"{escape_markdown(claim.text)}"
            for claim in answered.claims
        ]
        lines += [""] if answered.claims else []
    for section in page.sections:
        lines += [f"## {escape_markdown(section.title)}", ""]
        for block in section.blocks:
            lines += [*_markdown_block(block), ""]
    return "\n".join([*lines, escape_markdown(page.footer)]) + "\n"


def _markdown_block(block: Block) -> list[str]:
    render: Mapping[type, Callable[..., list[str]]] = {
        TableBlock: _markdown_table,
        FigureBlock: lambda own: [f"![{own.label}](figures/{own.name}.png)", "", escape_markdown(own.caption)],
        Heading: lambda own: [f"### {escape_markdown(own.text)}"],
        Text: lambda own: [escape_markdown(own.text)],
        Bullets: lambda own: [f"- {escape_markdown(item)}" for item in own.lines],
        Code: lambda own: [f"    {item}" for item in own.lines],
    }
    return render[type(block)](block)


def _markdown_table(block: TableBlock) -> list[str]:
    lines = []
    if block.title:
        subtitle = f" ({escape_markdown(block.subtitle)})" if block.subtitle else ""
        lines += [f"### {escape_markdown(block.title)}{subtitle}", ""]
    ruler = "|".join(["---", *["---" if block.wordy else "---:"] * (len(block.columns) - 1)])
    lines += [f"| {' | '.join(map(escape_markdown, block.columns))} |", f"|{ruler}|"]
    for row in block.lines:
        cells = []
        for cell in row.cells:
            text = escape_markdown(cell.text)
            text = f"**{text}**" if cell.tone and text else f"*{text}*" if row.kind and text else text
            cells.append(f"{text} ({escape_markdown(cell.below)})" if cell.below else text)
        lines.append(f"| {' | '.join(cells)} |")
    return lines
