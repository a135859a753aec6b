"""Every page, table and figure: the reports of an evaluation, a study, a training and an augmentation.

Importing this loads neither matplotlib nor jinja2 nor torch: they are imported where they are needed.
"""

from __future__ import annotations

from kinject.report.augment import write_augment_report
from kinject.report.documents import write_documents_report
from kinject.report.files import read_report, redraw_report, write_report
from kinject.report.summary import render_card_tables, render_summary
from kinject.report.training import write_training_report

__all__ = [
    "read_report",
    "redraw_report",
    "render_card_tables",
    "render_summary",
    "write_augment_report",
    "write_documents_report",
    "write_report",
    "write_training_report",
]
