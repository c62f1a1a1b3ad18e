"""All tables and figures of a results folder as one HTML file, `results/report.html`, that needs
nothing else.

python -m harness.report --results-dir results
python -m harness.report --results-dir results.zip
"""

from harness.report.page import write_report

__all__ = ["write_report"]
