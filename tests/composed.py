"""Settings as the runs of a sweep get them: what Hydra reads for the same choices of groups, it reads once."""

from harness.run.compose import Composer, load

__all__ = ["composed", "load"]

composed = Composer()
"""As `compose.compose`, in a copy that may be changed."""
