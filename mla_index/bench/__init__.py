"""How fast the operations are: workloads, measurements, records, tables and plots.

A library without printing; `mla-index bench` is its face. Start at `run.run`. What was measured is
rows of a record (`record`), and everything shown to people is made from records: the answers to the
targets (`asked`), the tables of README and documentation (`pages`), the plots (`plot`).
"""
