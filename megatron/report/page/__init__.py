"""report.html: one page about one run or several, which opens anywhere without a network."""

from .document import write_report

__all__ = ["write_report"]
