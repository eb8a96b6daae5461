"""gradwire-bench: the demo, the benchmarks on shaped hosts, and fault campaigns.

``testbed/`` makes hosts and starts ranks, ``workloads/`` has models and data, ``cli/``
the commands. The other rooms each measure one subject, with the programs of their ranks
(``*_rank.py``). It imports gradwire and gradwire-lab; neither imports it.
"""
