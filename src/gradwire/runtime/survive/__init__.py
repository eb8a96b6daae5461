"""Survivors: a run goes on without a lost rank, and takes newcomers in.

A step counts on all survivors or on none (``on_failure="shrink"``). Once a rank has all
means of a step, it says so. ``backward()`` waits until all have said so
(``Synchroniser``). If one rank has returned, all have their means. If one lacks a mean,
none has returned. Survivors meet in the store and take the smallest step that all could
end (`shrink`). One rank writes that decision, and a rank that is not in it ends. So
there are never two groups that go on. State is copied before each step, and put back
where the step does not count. It cannot be asked of a peer instead: residuals would be
of different steps.

Ranks that go on connect anew (`going_on`), a host of several ranks whole. A newcomer
joins a run between two steps (`rejoin`). ``groups`` opens the process groups of ranks
that go on.
"""
