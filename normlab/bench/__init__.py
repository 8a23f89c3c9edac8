"""What things cost on this machine; for quiet machines only.

training   whole training steps against each other: `normlab bench`
probes     what recording costs: `python -m normlab.bench.probes`
clusters   what a second Ray worker gains: `python -m normlab.bench.clusters`
latency    from a key on a slider to the redrawn plot: `python -m normlab.bench.latency`
browser    the browser that latency is measured in
"""
