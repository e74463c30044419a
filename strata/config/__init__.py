"""Settings: one table (settings.py), four origins, one frozen object.

``load(argv, environ)`` is the way in for a program; a host program that embeds the server builds ``Settings(...)`` itself.
Nothing else in Strata reads the environment or the command line.
"""

from strata.config.load import Loaded, check, load
from strata.config.settings import TABLE, Settings
from strata.config.show import help_text, markdown, printed

__all__ = ["TABLE", "Loaded", "Settings", "check", "help_text", "load", "markdown", "printed"]
