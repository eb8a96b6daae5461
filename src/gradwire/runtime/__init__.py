"""One rank for real: CaSync's task manager, the process groups, and the hooks into a model.

`lanes` the two queues and their dependency graph; `wire` verbs on torch.distributed; `engine`
drives messages; `pulse` tells which rank died; `messages` which gradients travel together; `attach`
and `handle` what a user sees. May import all rows above it: nothing of report or cli.
"""
