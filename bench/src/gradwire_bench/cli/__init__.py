"""Commands of gradwire-bench: ``demo.py`` is ``gradwire demo``."""
