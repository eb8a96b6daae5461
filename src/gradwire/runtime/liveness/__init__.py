"""Liveness: lost ranks are noticed and named.

1. Every rank counts up a number in the job's rendezvous store. A rank whose number
   stands still is gone (`pulse`).
2. When a step fails, ranks also ask each other directly (`roll_call`). A dead process,
   a stopped process and a host that nobody reaches look different there. So a parted
   network is one failure.
3. The first rank that notices writes an alarm. It counts, as later alarms follow from
   it (`blame`).
4. All survivors raise ``RankFailed`` with the rank and the step. They wait a second
   after they read the alarm, as the process that ends first may host the store. Ranks
   that go on without the lost rank do not wait.
5. Each rank writes its last 64 verbs to a file, and the error names the file.

If a run goes on without lost ranks, those that live agree on its next **epoch**: who
takes part from then on (`epochs`). Newcomers come in by an epoch, too.

``membership`` names the ranks and their store, ``forks`` notices a forked process, and
``sweeping`` gives back store keys and memory of an attach. The engine calls this room.
It knows ranks and steps, and nothing about gradients.
"""
