"""``gradwire bench faults``: accidents drawn from a seed, carried out and judged."""
