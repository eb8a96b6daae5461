"""Pictures and pages that only the benchmarks and the papers draw."""
