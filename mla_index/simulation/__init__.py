"""A serving day in miniature: traces, paged caches, selections and sparse attention in torch.

What the demo, the benchmark and the examples share. Nothing here prints, and nothing here is fast:
it is the plain torch around the operations, small enough to read. Start at `run.simulate`.
"""
