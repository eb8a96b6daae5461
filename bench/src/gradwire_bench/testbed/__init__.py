"""Several hosts with slow links on one machine, and a launcher that runs one rank in each.

The rest of gradwire and its users need four files: `hosts` (`Testbed`, `open_hosts`,
`shaped_hosts`, `loopback_hosts`, `available`), `launch` (`launch`, `failure_text`), `ranks`
(`run_ranks`, by which all of gradwire's own rank programs are started) and `counters`
(`own_counters`, which the ranks call themselves). Below them: `netns` makes the namespaces and
wires them up, `_holder` is the small process that keeps them alive, `tc` chooses the shaper's
figures. Imports `errors` and `units` only; all but `ranks` works without torch.
"""
