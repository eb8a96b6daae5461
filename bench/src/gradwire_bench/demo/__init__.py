"""The demo: one model trained several ways on shaped hosts, and a report."""
