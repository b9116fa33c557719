"""Owns the settings under which hypothesis looks for counter-examples in every lane.

A lane judges the tree, not the draw or the machine: examples follow from the test alone, and slow is no
failure. Look further with `pytest --hypothesis-profile=default FILE`.
"""

import hypothesis

hypothesis.settings.load_profile("ci")
