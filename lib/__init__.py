"""A reference replication of two papers on looped language models: the thin library under the notebooks."""

import sys

# Where this package is installed, jsonschema (which altair and nbformat bring) has it build a grammar, 2.6 s in every process,
# to check addresses that are not in English letters; nothing here has one.
sys.modules.setdefault("rfc3987_syntax", None)

# Behaviour version of model, tasks and training. Raise it in the same commit as a change that moves any trained number;
# tests/test_behaviour.py fails when such a change leaves it alone. Code that only adds keeps it, and earlier runs stay valid.
BEHAVIOUR = 2
