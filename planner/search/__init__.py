"""The search: cells, their prices and bounds, the best plan of each, and the proof that no other is better."""
