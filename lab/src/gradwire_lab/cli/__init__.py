"""Commands of the lab: ``compll.py`` is ``gradwire compll``."""
