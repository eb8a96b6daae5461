"""One rank for real: CaSync's task manager, the process groups, and the hooks into a model.

`lanes` the two queues and their dependency graph; `wire` verbs on torch.distributed; `engine`
drives messages; `pulse` tells which rank died; `messages`, `fused` and `planned` say which
gradients travel together; `overlap`, with `pending`, `gates` and `stepping`, lets the next forward
pass begin before all means are there; `membership` and `fingerprint` make ranks agree before they
connect; `attach`, `settings` and `handle` are the part that a user sees. May import all rows above
it: nothing of report or cli.

Each of these knows those below it and none above: `handle`, which the user holds; `hooks` (`ddp`
under DDP), which hands in gradients and ends backward passes; `overlap`, which leaves a step open
until the next one; `arrivals`, the means on their way; `progress`, which opens and ends steps;
`synchroniser`, the messages of one step; `engine`.
"""
