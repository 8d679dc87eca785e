"""A reference replication of two papers on looped language models: the thin library under the notebooks."""

# Behaviour version of model, tasks and training. Raise it in the same commit as a change that moves any trained number;
# tests/test_behaviour.py fails when such a change leaves it alone. Code that only adds keeps it, and earlier runs stay valid.
BEHAVIOUR = 2
