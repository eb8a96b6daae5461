"""SSFusion (ICDE 2026): ``page`` lists its tables and figures."""
