"""One GPU against the cost model, in under 8 minutes: what was predicted beside what was measured.

`python -m benchmarks.device_check [--out FOLDER]` on a machine with a GPU; `--dry` goes the same way on a CPU, small.
"""
