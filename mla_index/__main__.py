"""`python -m mla_index` is `mla-index`."""

from mla_index.cli import main

main()
