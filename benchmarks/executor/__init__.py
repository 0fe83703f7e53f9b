"""What the executor costs beside hand-written torch, what measuring costs, and what its collectives gain on shaped links."""
