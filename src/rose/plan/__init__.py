"""Discrete-event simulator and capacity planner, on the policies of the live system."""
