"""Lost ranks and damaged replicas: noticed, named, and survived.

``pulse``, ``roll_call`` and ``blame`` notice and name; ``shrink`` goes on without a lost rank;
``integrity`` and ``guard`` compare replicas. ``store_check`` finds a store that ranks do not
share. The step calls it through hooks of its own. It knows
ranks and steps, and nothing of what a gradient means.

How a lost rank is noticed:

1. Every rank counts up a number in the job's rendezvous store. A rank whose number stands still is
   gone (`pulse`).
2. When a step fails, ranks also ask each other directly (`roll_call`). A dead process, a stopped
   one and a host that nobody reaches look different there. So a parted network is one failure.
3. The first rank that notices writes an alarm. It counts, as later alarms follow from it.
4. All survivors raise ``RankFailed`` with the rank and the step. They wait a second after they read
   the alarm, as the process that ends first may host the store.
5. Each rank writes its last 64 verbs to a file, and the error names the file (`wire`).

How ranks go on without it (``on_failure="shrink"``): a step counts on all survivors or on none.
Once a rank has all means of a step, it says so. ``backward()`` waits until all have said so
(`synchroniser`). If one rank has returned, all have their means. If one lacks a mean, none has
returned. Survivors meet in the store and take the smallest step that all could end (`shrink`). One
rank writes that decision, and a rank that is not in it ends. So there are never two groups that go
on. State is copied before each step, and put back where the step does not count. It cannot be asked
of a peer instead: residuals would be of different steps.
"""
