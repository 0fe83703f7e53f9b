"""Gradient synchronisation as the plan says: the algorithm of an axis, its groups, its order on the wire."""
