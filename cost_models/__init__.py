"""What would it cost? Pure functions of frozen data: no torch, no solver, no clock."""
