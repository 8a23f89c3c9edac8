"""Measurements of this machine, for a checkout; not in the wheel. Run one as `python -m benchmarks.NAME` from its root.

training   whole training steps against each other, as `normlab bench` does
probes     what recording costs
clusters   what a second Ray worker gains
latency    from a key on a slider to the redrawn plot
timing     what they share
"""
