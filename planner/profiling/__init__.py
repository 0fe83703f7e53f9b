"""Torch and clocks: what this machine takes for the operations and the links of a run. Loads nothing by itself."""
