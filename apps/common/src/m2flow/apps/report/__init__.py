"""One self-contained page about a run: what it learned, where the time went, what it said."""

from m2flow.apps.report.data import RunData, load_run
from m2flow.apps.report.page import render_page, write_report

__all__ = ["RunData", "load_run", "render_page", "write_report"]
