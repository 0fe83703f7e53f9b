"""Draws what the planner computed: tables, plots and timelines."""
