"""Several hosts with slow links on one machine, and a launcher that runs one rank in
each.

Benchmarks and papers need four files: `hosts` (`Testbed`, `open_hosts`, `shaped_hosts`,
`loopback_hosts`, `available`), `launch` (`launch`, `failure_text`), `ranks`
(`run_ranks`, which starts every program of ranks) and `counters` (`own_counters`, which
the ranks call themselves). Below them `netns` makes namespaces and wires them up,
`_holder` is the small process that keeps them alive, and `tc` chooses the shaper's
figures. `wide_area` says how links differ from equal ones on one switch. Where hosts
are far, `forwarder` and `_forward` stand in the bridge's place; `checked` and `_probe`
measure such links. It knows hosts, links and programs, and no gradients; most of it
works without torch.
"""
