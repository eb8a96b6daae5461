"""ZEN (OSDI 2025): ``page`` lists its tables and figures."""
