"""The report: an evaluation as one HTML file that opens anywhere, offline."""

from kedge.evaluation.report.page import write_report

__all__ = ["write_report"]
