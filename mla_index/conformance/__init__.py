"""The conformance suite: what a backend must do, checked bit for bit. Shipped for third parties.

Run it from anywhere, on any backend that is registered or installed::

    pytest --pyargs mla_index.conformance --mla-backend mybackend --mla-device cuda

or from Python with `mla_index.conformance.run.run_suite`. Needs pytest; hypothesis for the
generated inputs.
"""
