"""What lm-eval warns of while it makes prompts and scores: kept, a line each, for whoever shows it.

It warns by logging, from within calls whose stderr is hidden for the sake of progress bars.
"""

import logging

ON_PURPOSE = (
    "is defined, but",  # a metric's default aggregation, or direction
    "using preconfigured rule",  # for the split of examples
    "Custom kwargs can be passed",
    "No `until` specified",
    "No `generation_kwargs` specified",
    "but not using `output_type: generate_until`",
)
"""Parts of warnings of defaults that are lm-eval's, and wanted."""
SHOWN = 300
"""Characters of a warning; one quotes a whole row."""


class Complaints(logging.Handler):
    """The warnings of the logger `lm_eval`, each once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: dict[str, bool] = {}

    def emit(self, record: logging.LogRecord) -> None:
        line = " ".join(record.getMessage().split())
        if not any(part in line for part in ON_PURPOSE):
            self._lines.setdefault(f"lm-eval: {line[:SHOWN]}", False)

    def take(self) -> list[str]:
        """Those that were not taken before."""
        new = [line for line, taken in self._lines.items() if not taken]
        self._lines |= dict.fromkeys(new, True)
        return new


COMPLAINTS = Complaints()
logger = logging.getLogger("lm_eval")
logger.addHandler(COMPLAINTS)
logger.propagate = False
