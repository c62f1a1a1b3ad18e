"""All tables and figures of a results folder as one HTML file, `report.html`, that needs nothing
else. The shipped ones stand beside those of one's own runs.

python -m harness.report --results-dir outputs
"""

from harness.report.page import write_report

__all__ = ["write_report"]
