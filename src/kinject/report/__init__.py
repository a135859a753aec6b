"""Every page, table and figure: the reports of an evaluation, a study and a training run.

Importing this loads neither matplotlib nor jinja2 nor torch: they are imported where they are needed.
"""

from __future__ import annotations

from kinject.report.evaluation import read_report, redraw_report, write_report
from kinject.report.study_report import redraw_study
from kinject.report.training_log import training_logs
from kinject.report.training_page import write_training_report

__all__ = [
    "read_report",
    "redraw_report",
    "redraw_study",
    "training_logs",
    "write_report",
    "write_training_report",
]
