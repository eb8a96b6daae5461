"""Fuzzers of what comes from outside: payloads, what ranks exchange, programs that
people write.

``make fuzz`` runs them for ten minutes, under AddressSanitizer, and prints how many
inputs were tried and what was found. An input follows from its target, a seed and its
number, so the command beside a finding makes it again. Whatever comes may be refused by
an error of gradwire's, or taken; any other error, a write or a read outside of a tensor
and an input that never ends are findings.
"""
